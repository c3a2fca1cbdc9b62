"""The same loader twice, torch's and ours, and what comes of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data

import faststep.data

# A sanitizer's allocator has its own mind about memory.
without_sanitizer = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="memory is counted"
)

Outcome = tuple[list[Any], list[Any]]  # batches, or errors; random states


def plain(value: Any) -> Any:
    """Something that == compares: containers with their types, tensors with form and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        bits = flat.view(torch.uint8).tolist() if flat.numel() else []
        return ("tensor", value.dtype, tuple(value.shape), value.stride(), type(value), bits)
    if isinstance(value, dict):
        return (type(value), [(key, plain(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [plain(item) for item in value])
    return value


def run(loader: Any, generators: list[torch.Generator], epochs: int, stop: int | None) -> Outcome:
    """All batches of some epochs, each perhaps broken off, and the generators' states between."""
    batches: list[Any] = []
    states: list[Any] = []
    for _ in range(epochs):
        iterator = iter(loader)
        states.append([g.get_state().tolist() for g in generators])
        number = 0
        while number != stop:
            try:
                batches.append(plain(next(iterator)))
            except StopIteration:
                break
            except Exception as error:
                batches.append((type(error), str(error)))
            number += 1
            states.append([g.get_state().tolist() for g in generators])
        states.append([g.get_state().tolist() for g in generators])
        del iterator
    return batches, states


def assert_same(
    make: Callable[[], tuple[Any, dict[str, Any]]],
    epochs: int = 2,
    stop: int | None = None,
    path: str = "arrays",
    workers: int = 0,
) -> list[Any]:
    """Both loaders give the same batches and leave the same random states after each of them.

    `make` returns a dataset and a DataLoader's arguments, new ones at each call.  With `workers`
    ours gets them; torch's, whose batches do not depend on them, gets none, and then the states
    between batches are not compared.
    """
    outcomes = []
    for library in (torch.utils.data, faststep.data):
        torch.default_generator.manual_seed(11)
        random.seed(11)
        dataset, options = make()
        ours = library is faststep.data
        if ours and workers:
            options["num_workers"] = workers
        loader = library.DataLoader(dataset, **options)
        if ours:
            assert loader.path == path, loader.explain()
        generators = [torch.default_generator]
        if options.get("generator") is not None:
            generators.append(options["generator"])
        outcomes.append(run(loader, generators, epochs, stop))
    (want, want_states), (got, got_states) = outcomes
    assert got == want
    if not workers:
        assert got_states == want_states
    else:
        assert got_states[-1] == want_states[-1]
    return got
