"""Cross-entropy forward and backward, with freed memory kept on both sides."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from bench_rows import SMOKE
from contenders import OURS
from contest import Ring
from faststep import memory
from faststep.nn.functional import cross_entropy
from timing import Outcome
from workloads import Work

SHAPES = [(256, 1024)] if SMOKE else [(2048, 8192), (2048, 50257)]
ROUNDS = 1 if SMOKE else 15
FUNCTIONS = {OURS: cross_entropy, "torch": torch.nn.functional.cross_entropy}


@pytest.fixture(autouse=True)
def _memory_is_kept() -> Iterator[None]:
    memory.retain()
    yield
    memory.undo()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy(ring: Ring, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The function and a copy of the logits take turns; bf16 logits are under autocast."""
    logits, target = torch.randn(shape).to(dtype), torch.randint(shape[1], shape[:1])
    copied = torch.empty_like(logits)
    logits.requires_grad_()
    times: dict[str, list[float]] = {name: [] for name in (*FUNCTIONS, "copy_")}
    for round_ in range(ROUNDS + 1):
        for name in times:
            logits.grad = None
            start = time.perf_counter()
            if name in FUNCTIONS:
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
                    loss = FUNCTIONS[name](logits, target)
                loss.backward()
            else:
                copied.copy_(logits.detach())
            if round_:
                times[name].append(time.perf_counter() - start)
    label = f"{shape[0]} x {shape[1]}, {str(dtype).removeprefix('torch.')}"
    moved = {OURS: 2, "copy_": 2}  # of the logits: passes
    for name, passes in moved.items():
        rate = passes * logits.nbytes / min(times[name]) / 1e9
        print(f"cross-entropy, {label}, {name}: {rate:.1f} GB/s")
    times.pop("copy_")
    ring.note(
        Outcome(Work("cross-entropy", label, (shape,), dtype=dtype), times, order=tuple(times))
    )
