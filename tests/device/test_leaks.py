"""References and memory of what works on a CUDA device."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import faststep
from faststep import _C
from gpu.common import Twins
from leaks.test_leaks import ON_DEVICE, assert_no_growth, assert_references_stay, failing

from . import fake

pytestmark = pytest.mark.usefixtures("machine")


def calls_of(name: str) -> list[tuple[Callable[[], Any], list[Any]]]:
    """A good call, and bad ones."""
    tensors, scalar = [fake.claim(torch.ones(3)) for _ in range(3)], fake.claim(torch.ones(()))
    sums = fake.claim(torch.zeros(3, dtype=torch.float64))
    rest: dict[str, tuple[Any, ...]] = {
        "device_chunk_squares": (scalar, sums, scalar),
        "device_fold_squares": (scalar,),
        "device_accumulate": ([fake.claim(torch.ones(3)) for _ in range(3)], 0.5),
        "device_clamp": (1.0,),
        "device_clip": (1.0, scalar),
        "device_norm": (2.0, scalar),
        "device_unscale": (scalar, scalar, True),
    }
    function, arguments = getattr(_C, name), rest[name]
    if name == "device_fold_squares":
        elsewhere = fake.claim(torch.ones(()), 1)
        good = functools.partial(function, sums, scalar)
        bad = [(sums, elsewhere), (sums[:0], scalar), (scalar, scalar), (torch.ones(3), scalar)]
        failures = [(failing(function, *some), list(some)) for some in bad]
        return [(good, [sums, scalar]), *failures]
    elsewhere = fake.claim(torch.ones(()), 1)
    moved = tuple(elsewhere if a is scalar else a for a in arguments)
    cases = [
        (functools.partial(function, tensors, *arguments), [*tensors, tensors, scalar]),
        (failing(function, [*tensors, torch.ones(3)], *arguments), tensors),
        (failing(function, [], *arguments), [scalar]),
        (failing(function, tensors), tensors),
    ]
    if moved != arguments:
        cases.append((failing(function, tensors, *moved), [elsewhere]))
    return cases


@pytest.mark.parametrize("name", ON_DEVICE)
def test_function(name: str) -> None:
    cases = calls_of(name)
    for call, arguments in cases:
        assert_references_stay(call, arguments)
    assert_no_growth(*(call for call, _ in cases))


def test_arenas_that_are_locked() -> None:
    data = torch.ones(100)

    def once() -> None:
        arena = _C.Arena()
        arena.prepare_locks(0)
        held = arena.hold(arena.put(data.data_ptr(), 400), 400)
        locked = arena.locked(held.data_ptr(), 400)
        assert locked is not None
        assert torch.equal(locked, held)

    alive = fake.library().fake_cuda_alive
    alive.restype = fake.Living
    once()  # retains the context
    before = bytes(alive())
    assert_references_stay(once, [data])
    assert_no_growth(once)
    assert bytes(alive()) == before


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_steps(max_grad_norm: float | None) -> None:
    pair = Twins([torch.ones(3)] * 4, ["cuda:0", "cuda:1", "cpu", "cuda:0"])
    optimizer = faststep.optim.AdamW(pair.cuda, max_grad_norm=max_grad_norm)
    pair.set_grads([torch.ones(3)] * 4)
    optimizer.step()
    states = [value for p in pair.cuda for value in optimizer.state[p].values()]
    assert_references_stay(optimizer.step, [*pair.cuda, *states, *(p.grad for p in pair.cuda)])
    assert_no_growth(optimizer.step)


def test_plans_give_their_tables_back() -> None:
    """Device memory and pinned memory belong to the plan."""
    alive = fake.library().fake_cuda_alive
    alive.restype = fake.Living

    def once() -> None:
        pair = Twins([torch.ones(3)])
        pair.set_grads([torch.ones(3)])
        faststep.optim.AdamW(pair.cuda, max_grad_norm=1.0).step()

    once()
    before = bytes(alive())
    for _ in range(3):
        once()
    assert bytes(alive()) == before
