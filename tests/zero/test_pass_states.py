"""Every event in every state of the gradients: the table of docs/decisions/zero.md.

Gradients are small whole numbers, so sums and means are exact in any order.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from faststep import zero
from faststep.zero.hooks.gradients import State
from ranks import on_ranks

from .common import Given, check_error, error_of

SHAPES = [(300,), (20, 30), (7,), (2000,), (9, 9)]
ERROR = "a backward pass has failed"
N, C, R, F = State.IDLE, State.COLLECTING, State.REDUCED, State.FAILED
# The state that follows; an error where there is none.
TABLE: dict[str, dict[State, State | None]] = {
    "backward": {N: R, C: R, R: R, F: None},
    "backward in no_sync": {N: C, C: C, R: C, F: None},
    "backward fails": {N: F, C: F, R: F, F: None},
    "backward fails at its first gradient": {N: N, C: C, R: R, F: F},
    "backward fails in no_sync": {N: C, C: C, R: C, F: None},
    "step": {N: N, C: R, R: R, F: None},
    "clip": {N: N, C: R, R: R, F: None},
    "reduce": {N: N, C: R, R: R, F: None},
    "zero_grad": {N: N, C: N, R: N, F: N},
    "zero_grad to zero": {N: N, C: C, R: R, F: N},
    "zero_grad of the model": {N: N, C: C, R: R, F: F},
    "zero_grad of the model to zero": {N: N, C: C, R: R, F: F},
    "gradients set to None": {N: N, C: C, R: R, F: F},
}
WAYS: dict[State, list[list[str]]] = {
    N: [[], ["backward", "step", "zero_grad"], ["backward fails", "zero_grad"]],
    C: [["backward in no_sync"], ["backward", "backward in no_sync"]],
    R: [["backward"], ["backward in no_sync", "backward"], ["backward", "step"]],
    F: [
        ["backward fails"],
        ["backward", "backward fails"],
        ["backward in no_sync", "backward fails"],
    ],
}
DROPS = [event for event in TABLE if "zero" in event or "None" in event]


class _PlantedError(Exception):
    pass


class _Sharded:
    """A model on this rank, what a single process would have, and the events."""

    def __init__(self, rank: int, world: int, case: str, place: int) -> None:
        self.rank, self.world, self.place = rank, world, place
        self.model = Given(SHAPES, [torch.float32])
        self.params = list(self.model.parameters())
        with torch.no_grad():
            for param in self.params:
                param.zero_()
        self.called: nn.Module = self.model
        if case == "wrapped":
            self.called = DistributedDataParallel(self.model, find_unused_parameters=True)
        sgd = torch.optim.SGD(self.params, lr=1.0)
        self.optimizer = zero.shard(
            self.called, sgd, stage=1 if case == "stage 1" else 2, bucket_mb=0.003
        )
        self.values = [torch.zeros_like(param) for param in self.params]
        self.grads: list[Tensor | None] = [None] * len(SHAPES)
        self.number = 0

    @property
    def state(self) -> State:
        gradients = self.optimizer._engine.gradients  # type: ignore[union-attr]
        gradients.note_failure()
        return gradients._state

    def _given(self, rank: int) -> list[Tensor]:
        made = torch.Generator().manual_seed(10 * self.number + rank)
        return [torch.randint(-8, 8, p.shape, generator=made) * 4.0 for p in self.params]

    def _add_to_reference(self) -> None:
        for index, rows in enumerate(zip(*map(self._given, range(self.world)), strict=True)):
            mean = sum(rows) / self.world
            held = self.grads[index]
            self.grads[index] = mean if held is None else held + mean

    def _quiet(self) -> Any:
        return (self.optimizer if self.called is self.model else self.called).no_sync()

    def do(self, event: str) -> None:
        """What a script does on all ranks."""
        self.number += "backward" in event
        with self._quiet() if "no_sync" in event else contextlib.nullcontext():
            if "fails" in event:
                self._fail(4 if "first" in event else self.place)  # p4 is reached first
            elif "backward" in event:
                self.called(self._given(self.rank)).backward()
                self._add_to_reference()
        if event == "step":
            self.optimizer.step()
            for value, grad in zip(self.values, self.grads, strict=True):
                if grad is not None:
                    value -= grad
        elif event == "clip":
            self.optimizer.clip_grad_norm_(1e9)
        elif event == "reduce":
            self.optimizer.reduce()
        elif event in DROPS:
            self._drop(event)

    def _fail(self, place: int) -> None:
        def plant(_: Tensor) -> None:
            raise _PlantedError

        handle = self.params[place].register_hook(plant)
        try:
            with contextlib.suppress(_PlantedError):
                self.called(self._given(self.rank)).backward()
        finally:
            handle.remove()

    def _drop(self, event: str) -> None:
        whose = self.model if "model" in event else self.optimizer
        if event == "gradients set to None":
            for param in self.params:
                param.grad = None
        else:
            whose.zero_grad(set_to_none="to zero" not in event)  # type: ignore[attr-defined]
        for index, grad in enumerate(self.grads):
            self.grads[index] = None if "to zero" not in event or grad is None else grad * 0

    def check(self) -> list[int]:
        """The parameters that are not those of a single process."""
        pairs = enumerate(zip(self.params, self.values, strict=True))
        return [index for index, (param, value) in pairs if not torch.equal(param, value)]


CASES = ("stage 1", "stage 2", "wrapped")


def _cells(case: str) -> Iterator[tuple[State, list[str], str]]:
    """Each event in each state, by one of the ways to it, and by the others in the other cases."""
    for state, ways in WAYS.items():
        for number, event in enumerate(TABLE, CASES.index(case)):
            yield state, ways[number % len(ways)], event


@on_ranks(2, case=CASES)
def test_every_event_in_every_state(rank: int, world: int, case: str) -> None:
    wrong: list[str] = []
    for number, (state, way, event) in enumerate(_cells(case)):
        place = (3, 1, 0)[number % 3]
        name = f"{case}: {way} {event} at p{place}"
        one = _Sharded(rank, world, case, place)
        for before in way:
            one.do(before)
        if one.state is not state:
            wrong.append(f"{name}: begins in {one.state}")
        expected = TABLE[event][state]
        said = error_of(lambda o=one, e=event: o.do(e))  # type: ignore[misc]
        if said != "no error" if expected else ERROR not in said:
            wrong.append(f"{name}: {said}")
        if one.state is not (expected or F):
            wrong.append(f"{name}: ends in {one.state}")
        if event not in DROPS and (one.state is F or "fails" in event):
            one.do("zero_grad of the model")
        one.do("backward")
        one.do("step")
        if differ := one.check():
            wrong.append(f"{name}: differs in {differ}")
    assert not wrong, wrong


@on_ranks(2, case=CASES)
def test_one_rank_fails(rank: int, world: int, case: str) -> None:
    """One rank fails at each place, drops its gradients in each way, and all go on."""
    failed = f"a backward pass has failed on rank {1 - rank}, whose gradients"
    for place, drop, who in itertools.product((3, 1, 0), DROPS, (0, 1)):
        one = _Sharded(rank, world, case, place)
        one.do("backward")
        one.do("step")
        one.do("zero_grad")
        if rank == who:
            one.do("backward fails")
        else:
            one.number += 1
            check_error(one.called(one._given(rank)).backward, failed)
        one.do(drop)
        one.do("backward")
        one.do("step")
        assert one.check() == [], (place, drop, who)
