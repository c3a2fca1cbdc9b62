"""shard(stage=3, offload="optimizer"): the bits of the same shard() without it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from ranks import on_cases, on_ranks

from . import test_offloaded_shards as shards
from .common import Given, error_of, grads_for
from .common import optimizer_of as named_optimizer_of
from .test_few_bits import SETS, optimizer_of
from .test_offloaded_shards import BF16, F32, Run, adamw, plain, step

pytestmark = pytest.mark.filterwarnings("ignore:.*and so not at all", "ignore:.*gathered at once")

# Several tiles; rows that ranks cannot share evenly; parts without elements; blocks of codes.
SHAPES = [[(300, 1000), (70,), (3,), (1,)], [(9, 16384), (16385,)], [(5, 12), (270, 65), (2,)]]


class Stack(nn.Module):
    """Blocks that fully_shard gathers and reduces one by one."""

    def __init__(self, shapes: Any, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Given(some, dtypes) for some in shapes)

    def forward(self, grads: Sequence[Tensor | None]) -> Any:
        given = iter(grads)
        return sum(block([next(given) for _ in block.parameters()]) for block in self.blocks)


STAGE3: dict[str, Any] = {"stage": 3, "shapes": SHAPES, "kind": Stack}


def both(
    rank: int, loop: Callable[[Run, int], None], make: Any, dtypes: Any, **options: Any
) -> Run:
    return shards.both(rank, loop, make, dtypes, **{**STAGE3, **options})


@on_cases((2 + number % 2, name) for number, name in enumerate(SETS))
def test_few_bits(rank: int, world: int, name: str) -> None:
    both(rank, plain, lambda model: optimizer_of(name, model), [SETS[name][0]])


TYPES: list[tuple[torch.dtype, Any, float | None]] = [
    (F32, None, None),
    (F32, None, 0.5),
    (torch.float64, None, 0.5),
    (torch.float16, True, 0.5),
    (BF16, "fp32", None),
    (BF16, None, 0.5),
]


@on_cases((2 + 2 * (case % 2), case) for case in range(len(TYPES)))
def test_types(rank: int, world: int, case: int) -> None:
    dtype, masters, clip = TYPES[case]
    run = both(rank, plain, adamw, [dtype], master_weights=masters, max_grad_norm=clip)
    for state in run.optimizer.state.values():
        assert all(isinstance(value, Tensor) and value.is_cpu for value in state.values())


@on_ranks(2, name=["momentum", "Adagrad", "ASGD", "NAdam", "SGD", "torch AdamW"])
def test_optimizers(rank: int, world: int, name: str) -> None:
    both(rank, plain, lambda model: named_optimizer_of(name, model.parameters()), [F32])


LOOPS = ["passes", "no_sync", "accumulate", "accumulate in it", "clip", "clip by torch", "values"]


@on_ranks(2, how=[*LOOPS, "set", "one without"])
def test_loops(rank: int, world: int, how: str) -> None:
    """Whatever a script does with gradients between backward and step."""

    def loop(run: Run, rank: int) -> None:
        model, optimizer = run.model, run.optimizer
        inside = {"model": model} if how.endswith("in it") else {}
        accum = faststep.accumulate(optimizer, 2, **inside)
        for seed in range(4):
            grads: list[list[Any]] = [grads_for(model, seed, rank, micro) for micro in range(2)]
            if how == "one without":
                grads[0][seed], grads[0][5] = None, None
            if how.startswith("accumulate"):
                for some in grads:
                    with accum:
                        accum.backward(model(some))
            elif how == "no_sync":
                with optimizer.no_sync():
                    run.backward(grads[0])
                run.backward(grads[1])
            else:
                for some in grads[: 1 + (how == "passes")]:
                    run.backward(some)
            params: list[Any] = [*model.parameters()]
            if how == "clip":
                run.found += shards.bits(optimizer.clip_grad_norm_(0.5))
            elif how == "clip by torch":
                run.found += shards.bits(nn.utils.clip_grad_norm_(params, 0.5))
            elif how == "values":
                nn.utils.clip_grad_value_(params, 0.1)
            elif how == "set":
                params[0].grad = torch.ones_like(params[0]) * seed
                params[4].grad = None
                params[5].grad.mul_(0.5)
                params[6].grad.to_local().add_(1.0)
            optimizer.step()
            run.note()
            optimizer.zero_grad(set_to_none=seed == 1)

    clip = 0.5 if how in ("passes", "one without", "accumulate in it", "set") else None
    both(rank, loop, functools.partial(adamw, max_grad_norm=clip), [F32])


@on_ranks(2, scaler=["torch", "faststep"], clips=[True, False], dtype=["fp32", "fp16"])
def test_scalers(rank: int, world: int, scaler: str, clips: bool, dtype: str) -> None:
    """An overflow on one rank skips the step on all."""
    run = shards.check_scaler(rank, scaler, clips, dtype == "fp16", **STAGE3)
    assert len(run.answers) == 5


@on_ranks(2, name=["codes and halves", "noise", "clipped"])
def test_states_change_sides(rank: int, world: int, name: str) -> None:
    """Between runs with and without offload, by state dicts and through DCP."""
    shards.check_sides(rank, name, **STAGE3)


@on_ranks(2, 3)
def test_groups_that_change(rank: int, world: int) -> None:
    """Late, frozen and moved parameters, and values that a script writes."""

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
        run.optimizer.add_param_group({"params": [first], "lr": 0.1, "state_dtype": "fp32"})
        step(run, rank, 2)
        groups = run.optimizer.param_groups
        groups[1]["params"].append(groups[0]["params"].pop(3))
        with torch.no_grad():
            part: Any = params[4]
            part.to_local().fill_(1.0)
        step(run, rank, 3)
        run.model.load_state_dict({k: v * 2 for k, v in run.model.state_dict().items()})
        step(run, rank, 4)
        run.backward(grads_for(run.model, 9, rank))
        run.optimizer.zero_grad()  # of a batch that is left out
        step(run, rank, 5)

    both(rank, loop, make, [F32])


@on_ranks(2)
def test_errors_change_nothing(rank: int, world: int) -> None:
    """A step that cannot be made raises as without offload, and can be made again."""

    def loop(run: Run, rank: int) -> None:
        step(run, rank, 0)
        run.backward(grads_for(run.model, 1, rank))
        state = run.optimizer.state[run.optimizer.param_groups[0]["params"][1]]
        kept, state["exp_avg"] = state["exp_avg"], torch.ones(5)
        text = error_of(run.optimizer.step)
        assert text.endswith("nothing was updated"), text
        run.found.append(text)
        state["exp_avg"] = kept
        run.note()
        run.optimizer.step()
        run.note()
        run.optimizer.zero_grad()
        step(run, rank, 2)

    both(rank, loop, adamw, [F32])
