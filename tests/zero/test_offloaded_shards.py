"""shard(offload="optimizer"): the bits of the same shard() without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep import zero
from faststep.grads.owners import offloading
from offload.common import assert_same, bits
from ranks import on_ranks

from .common import Given, grads_for
from .common import optimizer_of as named_optimizer_of
from .test_few_bits import SETS, optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*and so not at all")

F32, BF16 = torch.float32, torch.bfloat16
# more than two tiles, a tile and one chunk, a chunk and one element, ...
SHAPES = [(300, 1000), (70,), (), (0, 4), (9, 16384), (16385,), (5, 4, 3, 3), (3,)]
TILE = 8 * 16384


class Run:
    """A model with a sharded optimizer, and what its steps leave behind."""

    def __init__(
        self,
        offload: Any,
        make: Callable[[nn.Module], Any],
        dtypes: list[torch.dtype],
        shapes: Any = SHAPES,
        **options: Any,
    ) -> None:
        self.model = Given(shapes, dtypes)
        self.optimizer = zero.shard(
            self.model, make(self.model), offload=offload, bucket_mb=0.1, **options
        )
        self.found: list[Any] = []
        self.answers: list[Any] = []
        self.copied: list[int] = []
        self.handle: Any = offloading.of(self.optimizer._owned)
        assert (self.handle is None) == (offload is None)
        if offload is not None:
            self._watch()

    def _watch(self) -> None:
        step, bring = self.handle.step, self.handle.bring

        def noted(request: Any) -> Any:
            self.answers.append(step(request))
            return self.answers[-1]

        def brought(place: Any, grad: Tensor) -> None:
            self.copied.append(len(self.answers))
            bring(place, grad)

        self.handle.step, self.handle.bring = noted, brought

    def note(self) -> None:
        self.optimizer.wait()
        self.found += bits(*self.model.parameters(), self.optimizer.last_grad_norm)
        self.found.append(self.optimizer.step_was_skipped)

    def end(self) -> list[Any]:
        assert None not in self.answers  # left to the step without offload
        return self.found + bits(
            self.optimizer.state_dict(), self.optimizer.state_dict(native=True)
        )


def step(run: Run, rank: int, seed: int, scale: float = 1.0) -> None:
    run.model(grads_for(run.model, seed, rank, scale=scale)).backward()
    run.optimizer.step()
    run.note()
    run.optimizer.zero_grad()


def plain(run: Run, rank: int) -> None:
    for seed in range(3):
        step(run, rank, seed)


def both(rank: int, loop: Callable[[Run, int], None], *args: Any, **options: Any) -> Run:
    """The loop leaves the same bits with offload and without."""
    runs = [Run(offload, *args, **options) for offload in (None, "optimizer")]
    for run in runs:
        loop(run, rank)
    assert_same(runs[1].end(), runs[0].end())
    return runs[1]


ADAMW = {
    "plain": [F32],
    "fp64": [torch.float64],
    "fp16 masters": [torch.float16],
    "mixed types": [F32, BF16],
}


@on_ranks(2, 3, name=SETS)
def test_few_bits(rank: int, world: int, name: str) -> None:
    stage = 1 if name in ("codes", "noise and halves", "clipped") else 2
    both(rank, plain, lambda m: optimizer_of(name, m), [SETS[name][0]], stage=stage)


def adamw(model: nn.Module, **options: Any) -> Any:
    return faststep.optim.AdamW(model.parameters(), lr=0.01, **options)


@on_ranks(2, 3, stage=[1, 2], gather=["step", "forward"])
def test_types(rank: int, world: int, stage: Any, gather: Any) -> None:
    for name, dtypes in ADAMW.items():
        wide = True if "masters" in name else None
        both(rank, plain, adamw, dtypes, stage=stage, gather=gather, master_weights=wide)


@on_ranks(2, name=["momentum", "Lion", "Adagrad", "ASGD", "NAdam", "SGD", "torch AdamW", "Rprop"])
def test_optimizers(rank: int, world: int, name: str) -> None:
    both(rank, plain, lambda model: named_optimizer_of(name, model.parameters()), [F32])


@on_ranks(2, gather=["step", "forward"])
def test_copies_begin_in_backward(rank: int, world: int, gather: Any) -> None:
    """In the last pass of a step, from the step on that has as many as the one before."""

    def loop(run: Run, rank: int) -> None:
        for seed in range(3):
            for micro in range(2):
                run.model(grads_for(run.model, seed, rank, micro)).backward()
                if run.handle is not None:
                    parts = len(list(run.handle._copies.places))
                    after.append(len(run.copied) - parts * len(run.answers))
                    all_parts.append(parts)
            run.optimizer.step()
            run.note()
            run.optimizer.zero_grad()

    after: list[int] = []
    all_parts: list[int] = []
    run = both(rank, loop, adamw, [F32], gather=gather)
    parts = all_parts[0]
    assert parts > 2
    assert after == [parts, 2 * parts, parts, 2 * parts, parts, 2 * parts], after
    assert len(run.copied) == 4 * parts


@on_ranks(2, 3, how=["no_sync", "accumulate", "clip", "clip by torch", "values", "set"])
def test_loops(rank: int, world: int, how: str) -> None:
    """Whatever a script does with gradients between backward and step."""

    def loop(run: Run, rank: int) -> None:
        model, optimizer = run.model, run.optimizer
        accum = faststep.accumulate(optimizer, 2)
        for seed in range(3):
            grads = [grads_for(model, seed, rank, micro) for micro in range(2)]
            if how == "accumulate":
                for some in grads:
                    with accum:
                        accum.backward(model(some))
            elif how == "no_sync":
                with optimizer.no_sync():
                    model(grads[0]).backward()
                model(grads[1]).backward()
            else:
                model(grads[0]).backward()
            params = [*model.parameters()]
            if how == "clip":
                run.found += bits(optimizer.clip_grad_norm_(0.5))
            elif how == "clip by torch":
                run.found += bits(nn.utils.clip_grad_norm_(params, 0.5))
            elif how == "values":
                nn.utils.clip_grad_value_(params, 0.1)
            elif how == "set":
                params[0].grad = torch.ones_like(params[0]) * seed
                params[4].grad = None
                params[5].grad.mul_(0.5)
            optimizer.step()
            run.note()
            optimizer.zero_grad(set_to_none=seed == 1)

    both(rank, loop, adamw, [F32], stage=world - 1)


@on_ranks(2, scaler=["torch", "faststep"], clips=[True, False], dtype=["fp32", "fp16"])
def test_scalers(rank: int, world: int, scaler: str, clips: bool, dtype: str) -> None:
    """An overflow on one rank skips the step on all; gradients are unscaled by the step."""
    kind: Any = torch.amp.GradScaler if scaler == "torch" else faststep.amp.GradScaler

    low = dtype == "fp16"

    def loop(run: Run, rank: int) -> None:
        scaler = kind("cpu", init_scale=8.0, growth_interval=2)
        for seed in range(5):
            grads = grads_for(run.model, seed, rank)
            if seed == 2 and rank == 1:
                grads[4].view(-1)[-1] = torch.inf
            scaler.scale(run.model(grads)).backward()
            if seed == 3 and not low:
                scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.note()
            run.found += bits([param.grad.clone() for param in run.model.parameters()])
            run.found.append(scaler.get_scale())
            run.optimizer.zero_grad()

    options = {"max_grad_norm": 1.0 if clips else None}
    run = both(
        rank,
        loop,
        lambda model: adamw(model, **options),
        [torch.float16 if low else F32],
        master_weights=low or None,
    )
    assert len(run.answers) == 4
