"""Every kind of dataset in torch's loader and in ours; see loader_shapes.py."""

from __future__ import annotations

import pytest

import loader_shapes
from contest import Ring
from figures import Figure


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", loader_shapes.SHAPES)
def test_loader_shapes(ring: Ring, name: str, workers: int) -> None:
    clock, cpu = loader_shapes.ratios(name, workers)
    who = f"loader, {name}, {workers} workers: torch's CPU time to ours ({clock:.2f}x by the clock)"
    ring.figures.append(Figure(who, "x", cpu, 0.95, at_least=True))
