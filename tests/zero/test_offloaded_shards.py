"""shard(offload="optimizer"): the bits of the same shard() without it."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import faststep
from faststep import zero
from faststep.grads.owners import offloading
from offload.common import assert_same, bits
from ranks import on_cases, on_ranks

from .checkpoints import load, remove, save, shared_folder
from .common import HOST, Given, Place, check_error, error_of, grads_for
from .common import optimizer_of as named_optimizer_of
from .test_few_bits import SETS, copied, optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore:.*and so not at all")

F32, BF16 = torch.float32, torch.bfloat16
# more than two tiles, a tile and one chunk, a chunk and one element, ...
SHAPES = [(300, 1000), (70,), (), (0, 4), (9, 16384), (16385,), (5, 4, 3, 3), (3,)]
SMALL = [(300, 300), *SHAPES[1:4], *SHAPES[5:]]  # where states go and come as a whole
TILE = 8 * 16384


class Run:
    """A model with a sharded optimizer, and what its steps leave behind."""

    def __init__(
        self,
        offload: Any,
        make: Callable[[nn.Module], Any],
        dtypes: list[torch.dtype],
        shapes: Any = SHAPES,
        place: Place = HOST,
        beside_host: bool = False,
        kind: Any = Given,
        **options: Any,
    ) -> None:
        self.place, self.beside_host = place, beside_host
        self.model = place.moved(kind(shapes, dtypes))
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

    def backward(self, grads: list[Tensor], scaler: Any = None) -> None:
        if self.beside_host:  # CUDA adds bf16 gradients of ranks up in bf16
            grads = [_short(grad) if grad.dtype is BF16 else grad for grad in grads]
        loss = self.model(grads)
        self.place.backward(loss if scaler is None else scaler.scale(loss))

    def note(self) -> None:
        self.optimizer.wait()
        was_skipped = self.optimizer.step_was_skipped
        self.found += bits(*self.model.parameters(), was_skipped)
        if not (self.beside_host and was_skipped):  # which CUDA has measured
            self.found += bits(self.optimizer.last_grad_norm)

    def end(self) -> list[Any]:
        assert None not in self.answers  # left to the step without offload
        return self.found + bits(
            self.optimizer.state_dict(), self.optimizer.state_dict(native=True)
        )


def _short(grad: Tensor) -> Tensor:
    return (grad * 8).round().clamp(-24, 24) / 8


def step(run: Run, rank: int, seed: int, scale: float = 1.0) -> None:
    run.backward(grads_for(run.model, seed, rank, scale=scale))
    run.optimizer.step()
    run.note()
    run.optimizer.zero_grad()


def plain(run: Run, rank: int) -> None:
    for seed in range(3):
        step(run, rank, seed)


def both(
    rank: int,
    loop: Callable[[Run, int], None],
    *args: Any,
    place: Place = HOST,
    **options: Any,
) -> Run:
    """The loop leaves the same bits with offload and without, here and in host memory."""
    kinds = [(None, HOST), (None, place), ("optimizer", place)]
    runs = [Run(how, *args, place=where, **options) for how, where in dict.fromkeys(kinds)]
    for run in runs:
        loop(run, rank)
    *others, offloaded = [run.end() for run in runs]
    for other in others:
        assert_same(offloaded, other)
    return runs[-1]


ADAMW = {
    "plain": [F32],
    "fp64": [torch.float64],
    "fp16 masters": [torch.float16],
    "mixed types": [F32, BF16],
}


@on_cases((2 + number % 2, name) for number, name in enumerate(SETS))
def test_few_bits(rank: int, world: int, name: str) -> None:
    check_few_bits(rank, name)


def check_few_bits(rank: int, name: str, **options: Any) -> Run:
    stage = 1 if name in ("codes", "noise and halves", "clipped") else 2
    dtypes = [SETS[name][0]]
    return both(rank, plain, lambda m: optimizer_of(name, m), dtypes, stage=stage, **options)


def adamw(model: nn.Module, **options: Any) -> Any:
    return faststep.optim.AdamW(model.parameters(), lr=0.01, **options)


@on_ranks(2, 3, stage=[1, 2], gather=["step", "forward"])
def test_types(rank: int, world: int, stage: Any, gather: Any) -> None:
    """Two types of four, so that any three options occur together."""
    half = (world + stage + (gather == "step")) % 2
    for name, dtypes in [*ADAMW.items()][half::2]:
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
                run.backward(grads_for(run.model, seed, rank, micro))
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
    assert parts > 1
    assert after == [parts, 2 * parts, parts, 2 * parts, parts, 2 * parts], after
    assert len(run.copied) == 4 * parts


@on_ranks(2, 3, how=["no_sync", "accumulate", "clip", "clip by torch", "values", "set"])
def test_loops(rank: int, world: int, how: str) -> None:
    """Whatever a script does with gradients between backward and step."""
    check_loop(rank, how, stage=world - 1)


def check_loop(rank: int, how: str, **options: Any) -> None:
    def loop(run: Run, rank: int) -> None:
        model, optimizer = run.model, run.optimizer
        accum = faststep.accumulate(optimizer, 2)
        for seed in range(3):
            grads = [grads_for(model, seed, rank, micro) for micro in range(2)]
            if how == "accumulate":
                for some in grads:
                    with accum:
                        accum.backward(model(some).as_subclass(Tensor))
            elif how == "no_sync":
                with optimizer.no_sync():
                    run.backward(grads[0])
                run.backward(grads[1])
            else:
                run.backward(grads[0])
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

    both(rank, loop, adamw, [F32], **options)


@on_ranks(2, scaler=["torch", "faststep"], clips=[True, False], dtype=["fp32", "fp16"])
def test_scalers(rank: int, world: int, scaler: str, clips: bool, dtype: str) -> None:
    """An overflow on one rank skips the step on all; gradients are unscaled by the step."""
    run = check_scaler(rank, scaler, clips, dtype == "fp16")
    assert len(run.answers) == 4


def check_scaler(rank: int, scaler: str, clips: bool, low: bool, **options: Any) -> Run:
    kind: Any = torch.amp.GradScaler if scaler == "torch" else faststep.amp.GradScaler

    def loop(run: Run, rank: int) -> None:
        scaler = kind("cpu", init_scale=8.0, growth_interval=2)
        scaler._lazy_init_scale_growth_tracker(run.place.claimed(torch.ones(())).device)
        for seed in range(5):
            grads = grads_for(run.model, seed, rank)
            if seed == 2 and rank == 1:
                grads[4].view(-1)[-1] = torch.inf
            run.backward(grads, scaler)
            if seed == 3 and not low:
                scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.note()
            run.found += bits([param.grad.clone() for param in run.model.parameters()])
            run.found.append(scaler.get_scale())
            run.optimizer.zero_grad()

    make = functools.partial(adamw, max_grad_norm=1.0 if clips else None)
    dtype = torch.float16 if low else F32
    return both(rank, loop, make, [dtype], master_weights=low or None, **options)


@on_ranks(2, 3)
def test_states_change_sides(rank: int, world: int) -> None:
    """Between runs with and without offload, also at another number of ranks, and through DCP."""
    for name in ("codes and halves", "noise", "clipped"):
        check_sides(rank, name, stage=3 - min(world, 2))


def check_sides(rank: int, name: str, shapes: Any = SMALL, stage: Any = 2, **options: Any) -> None:
    first, second = (
        Run(how, lambda m: optimizer_of(name, m), [SETS[name][0]], shapes, stage=stage, **options)
        for how in ("optimizer", None)
    )
    for run in (first, second):
        step(run, rank, 0)
    given = [run.optimizer.state_dict(native="halves" in name) for run in (second, first)]
    states = [copied(state) for state in given]  # rooms of states are used again
    if stage != 3:  # where each rank has its own
        dist.broadcast_object_list(states)
    for run, state in zip((first, second), states, strict=True):
        run.optimizer.load_state_dict(state)
        step(run, rank, 1)
    assert_same(first.end(), second.end())
    path = shared_folder()
    for run, file in ((first, "a"), (second, "b")):
        save(run.model, run.optimizer, path / file)
    for run, file in ((first, "b"), (second, "a")):
        step(run, rank, 2)
        load(run.model, run.optimizer, path / file)
        step(run, rank, 3)
    assert_same(first.end(), second.end())
    remove(path)


@on_ranks(2, 3)
def test_groups_that_change(rank: int, world: int) -> None:
    """Late, frozen and moved parameters, values that a script writes, and new memory for them."""
    check_groups(rank)


def check_groups(rank: int, **options: Any) -> None:
    def make(model: nn.Module) -> Any:
        _, *params = model.parameters()
        params[-1].requires_grad_(False)
        return faststep.optim.AdamW(params, lr=0.01, state_dtype={"exp_avg": "bf16"})

    def loop(run: Run, rank: int) -> None:
        first, *params = run.model.parameters()
        step(run, rank, 0)
        with torch.no_grad():
            params[3].mul_(0.5)
        step(run, rank, 1)
        if run.beside_host:  # CUDA adds what is there last
            first.grad = None
        run.optimizer.add_param_group({"params": [first], "lr": 0.1, "state_dtype": "fp32"})
        params[-1].requires_grad_(True)
        step(run, rank, 2)
        groups = run.optimizer.param_groups
        groups[1]["params"].append(groups[0]["params"].pop(3))
        params[4].data = torch.ones_like(params[4])
        step(run, rank, 3)
        with torch.no_grad():
            params[4].add_(1.0)
            params[3].requires_grad_(False)
        run.model.load_state_dict({k: v * 2 for k, v in run.model.state_dict().items()})
        step(run, rank, 4)
        run.optimizer.zero_grad()
        run.backward(grads_for(run.model, 9, rank))
        run.optimizer.zero_grad()  # of a batch that is left out
        step(run, rank, 5)

    both(rank, loop, make, [F32], **options)


@on_ranks(2, 3)
def test_shapes_of_runs(rank: int, world: int) -> None:
    """A rank without rows, nothing to shard, a tied weight in DistributedDataParallel."""
    for shapes in ([(3,)], [(0, 3)], [(TILE + 1,), (2 * TILE,)], [(16384,)] * 3):
        both(rank, plain, adamw, [F32], shapes)
    found = []
    for offload in (None, "optimizer"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300))
        model[2].weight = model[0].weight
        wrapped = nn.parallel.DistributedDataParallel(model)
        options: Any = {"offload": offload, "gather": "forward", "max_grad_norm": 0.1}
        optimizer = zero.shard(wrapped, adamw(model), **options)
        with Join([wrapped, optimizer]):
            for seed in range(2 + rank):
                made = torch.Generator().manual_seed(10 * seed + rank)
                wrapped(torch.randn(4, 300, generator=made)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.wait()
        found.append(bits(*model.parameters(), optimizer.last_grad_norm, optimizer.state_dict()))
    assert_same(*found)


@on_ranks(4)
def test_replicas(rank: int, world: int) -> None:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = {"process_group": inside[rank // 2], "replicate_group": across[rank % 2]}
    both(rank, plain, functools.partial(adamw, max_grad_norm=0.5), [F32], **groups)


@on_ranks(2)
def test_errors_change_nothing(rank: int, world: int) -> None:
    """A step that cannot be made raises as without offload, and can be made again."""

    def loop(run: Run, rank: int) -> None:
        step(run, rank, 0)
        run.backward(grads_for(run.model, 1, rank))
        states = run.optimizer._owned.state
        broken = [state for values, state in states.items() if values.numel()][-1]
        kept, broken["exp_avg"] = broken["exp_avg"], torch.ones(5)
        text = error_of(run.optimizer.step)
        assert text.endswith("nothing was updated"), text
        run.found.append(text)
        broken["exp_avg"] = kept
        run.note()
        run.optimizer.step()
        run.note()
        run.optimizer.zero_grad()
        step(run, rank, 2)

    both(rank, loop, adamw, [F32])


@on_ranks(2)
def test_what_cannot_be_offloaded(rank: int, world: int) -> None:
    model = nn.Linear(8, 8)
    for stage, offload, text in (
        (2, "params", 'ValueError: offload="params" is for stage 3'),
        (1, "all", 'ValueError: offload must be None, "optimizer" or "params", not \'all\''),
    ):
        check_error(
            lambda s=stage, o=offload: zero.shard(model, adamw(model), stage=s, offload=o), text
        )
    assert all(type(param) is nn.Parameter for param in model.parameters())


ALONE: list[dict[str, Any]] = [
    {"gather": "forward", "max_grad_norm": 0.5},
    {"stage": 3},
    {"master_weights": "remainder16"},
]


@pytest.mark.parametrize("options", ALONE)
@pytest.mark.parametrize("scaled", [False, True])
def test_one_process(options: dict[str, Any], scaled: bool) -> None:
    """The bits of the same without offload, under torch's scaler too, with a scale that rounds."""

    def loop(run: Run, rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2, enabled=scaled)
        for seed in range(4):
            grads = grads_for(run.model, seed)
            if scaled and seed == 2:
                grads[0].view(-1)[-1] = torch.inf
            scaler.scale(run.model(grads)).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.note()
            run.found += bits([param.grad for param in run.model.parameters()])
            run.optimizer.zero_grad()
            if seed == 1:
                run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))

    dtype = BF16 if "master_weights" in options else F32
    run = both(0, loop, adamw, [dtype], **options)
    assert len(run.answers) == 4
