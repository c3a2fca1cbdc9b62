"""States in int8, remainders and stochastic rounding at each stage: the bits of one process."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import faststep
from faststep import zero
from faststep.optim.state_kinds import StateKinds
from ranks import on_ranks

from .checkpoints import load, remove, save, shared_folder
from .common import Given, grads_for
from .rounded import step_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*and so not at all")

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(300, 70), (70,), (270, 65), (0, 70), (17000,), (9, 8, 16, 5), (200, 30)]
CODES = {"state_dtype": "int8"}
HALVES = {"master_weights": "remainder16"}
NOISE = {"state_dtype": "bf16", "rounding": "stochastic", "rounding_seed": 7}
SETS: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "codes": (F32, "AdamW", CODES),
    "codes and halves": (BF16, "AdamW", {**CODES, **HALVES}),
    "momentum": (F32, "SGD", {**CODES, "momentum": 0.9}),
    "noise": (F32, "AdamW", NOISE),
    "noise and halves": (BF16, "AdamW", {**NOISE, **HALVES}),
    "halves": (BF16, "AdamW", {**HALVES, "max_grad_norm": 1.0}),
    "clipped": (F32, "AdamW", {**CODES, "max_grad_norm": 1.0}),
    "mixed": (BF16, "AdamW", HALVES),
}


def optimizer_of(name: str, model: nn.Module) -> Any:
    _, kind, options = SETS[name]
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:3], "lr": 0.02}, {"params": params[3:]}]
    if name == "mixed":
        groups[0]["state_dtype"] = {"exp_avg": "bf16", "exp_avg_sq": "int8"}
        groups[1].update(NOISE)
        del groups[1]["rounding_seed"]
    return getattr(faststep.optim, kind)(groups, lr=0.01, **options)


def step_alone(model: nn.Module, optimizer: Any, seed: int, world: int) -> None:
    step_whole(model, optimizer, [grads_for(model, seed, rank) for rank in range(world)])


def step_shards(model: Given, optimizer: Any, seed: int, rank: int) -> None:
    model(grads_for(model, seed, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(states: Any) -> Any:
    """As if they had been saved; deepcopy does not take DTensors."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def full(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.dtype is torch.int16:  # gloo does not send these
        return value.to(torch.int32).full_tensor().to(torch.int16)
    return value.full_tensor()


def unlike(one: Any, other: Any) -> list[str]:
    """What differs between two state dicts."""
    wrong = []
    for index, state in other["state"].items():
        mine = one["state"].get(index, {})
        if list(mine) != list(state):
            wrong.append(f"{index} has {list(mine)}, not {list(state)}")
            continue
        for key, value in state.items():
            found, wanted = full(mine[key]), full(value)
            if found.dtype != wanted.dtype or not torch.equal(found, wanted):
                wrong.append(f"{index} {key}")
    return wrong


def values_of(model: nn.Module) -> list[Tensor]:
    return [full(param.detach()).clone() for param in model.parameters()]


@on_ranks(2, 3)
def test_the_bits_of_one_process(rank: int, world: int) -> None:
    """At stages 1 and 2, also after a state dict has changed sides, or the number of ranks."""
    for name in SETS if world == 2 else ("codes", "noise and halves"):
        dtype, stage = SETS[name][0], 1 if name in ("momentum", "noise") else 2
        alone, model, later = (Given(SHAPES, [dtype]) for _ in range(3))
        plain = optimizer_of(name, alone)
        step_alone(alone, plain, 0, world)
        model.load_state_dict(alone.state_dict())
        begun = optimizer_of(name, model)
        begun.load_state_dict(copy.deepcopy(plain.state_dict(native=True)))
        sharded = zero.shard(model, begun, stage=stage, bucket_mb=0.1)
        for seed in range(1, 3):
            step_alone(alone, plain, seed, world)
            step_shards(model, sharded, seed, rank)
            assert all(map(torch.equal, values_of(model), values_of(alone))), (name, seed)
        saved = [sharded.state_dict(), sharded.state_dict(native=True)]
        assert not {"state_dtype", "rounding"} & saved[0]["param_groups"][1].keys()
        if rank == 0:
            assert not unlike(saved[0], plain.state_dict()), name
            assert not unlike(saved[1], plain.state_dict(native=True)), name
        dist.broadcast_object_list(saved)
        later.load_state_dict(alone.state_dict())
        other = zero.shard(later, optimizer_of(name, later), stage=3 - stage, bucket_mb=0.2)
        for optimizer in (plain, sharded, other):
            optimizer.load_state_dict(copy.deepcopy(saved["halves" in name]))
        step_alone(alone, plain, 9, world)
        for one, optimizer in ((model, sharded), (later, other)):
            step_shards(one, optimizer, 9, rank)
            assert all(map(torch.equal, values_of(one), values_of(alone))), name


@on_ranks(3)
def test_saved_by_torch_and_loaded_on_other_ranks(rank: int, world: int) -> None:
    """torch.distributed.checkpoint has float32, which other ranks round again."""
    groups = {2: dist.new_group([0, 1]), 3: None}
    path = shared_folder()
    for name in ("codes and halves", "noise"):
        states = {}
        for ranks, group in groups.items():
            if rank < ranks:
                model = Given(SHAPES, [SETS[name][0]])
                sharded = zero.shard(model, optimizer_of(name, model), process_group=group)
                step_shards(model, sharded, 0, 0)
                save(model, sharded, path / f"{name} {ranks}", process_group=group)
                sharded.consolidate_state_dict(to=1)
                states[ranks] = sharded.state_dict(), model.state_dict()
        dist.barrier()
        for ranks, group in groups.items():
            if rank < ranks:
                model = Given(SHAPES, [SETS[name][0]])
                model.load_state_dict(states[5 - ranks][1] if rank < 2 else states[3][1])
                sharded = zero.shard(model, optimizer_of(name, model), process_group=group, stage=1)
                load(model, sharded, path / f"{name} {5 - ranks}", process_group=group)
                sharded.consolidate_state_dict(to=1)
                if rank == 1:
                    again = optimizer_of(name, model)
                    again.load_state_dict(states[5 - ranks][0])
                    assert not unlike(sharded.state_dict(), again.state_dict())
    remove(path)


@on_ranks(2)
def test_accumulated_and_under_a_scaler(rank: int, world: int) -> None:
    """Two backward passes per step, of gradients that add up exactly; an overflow is skipped."""
    for name in ("codes and halves", "noise", "clipped"):
        alone, model = (Given(SHAPES, [SETS[name][0]]) for _ in range(2))
        plain, sharded = optimizer_of(name, alone), zero.shard(model, optimizer_of(name, model))
        scaler = faststep.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for seed in range(4):
            grads = [(grad * 8).round().clamp(-24, 24) / 8 for grad in grads_for(model, seed)]
            if seed != 2:
                step_whole(alone, plain, [[2 * grad for grad in grads]] * world)
            with sharded.no_sync():
                scaler.scale(model(grads)).backward()
            if seed == 2 and rank == 0:
                grads[0].view(-1)[-1] = torch.inf
            scaler.scale(model(grads)).backward()
            scaler.step(sharded)
            scaler.update()
            scaler._scale.fill_(4.0)
            sharded.zero_grad()
            assert sharded.step_was_skipped == (seed == 2)
            assert all(map(torch.equal, values_of(model), values_of(alone))), (name, seed)


_WHOLE = StateDictOptions(full_state_dict=True)
LIKE_RANKS = [(301, 70), (40, 65), (70,), (128 * 64,), (8001,), (200, 30), (90, 128)]
CODED = {2: {0, 3, 6}, 3: {0, 6}}  # the others begin inside of a block on some rank, or are small


def _alike(model: nn.Module, seed: int) -> list[Tensor]:
    """Gradients that all ranks have, whose mean is exact."""
    return [(grad * 8).round().clamp(-24, 24) * (3 / 8) for grad in grads_for(model, seed)]


@on_ranks(2, 3)
def test_stage_3(rank: int, world: int) -> None:
    """DTensors, whose parts are rows: those that end with blocks on all ranks are in codes."""
    for name in ("codes and halves", "noise and halves", "clipped", "mixed"):
        dtype, _, options = SETS[name]
        whole, model, wide = (Given(LIKE_RANKS, [dtype]) for _ in range(3))
        plain, other = optimizer_of(name, whole), optimizer_of(name, wide)
        begun = optimizer_of(name, model)
        other._kinds = StateKinds(F32)
        has_codes = "int8" in options.values()
        if world == 2:
            for one, optimizer in ((whole, plain), (model, begun)):
                step_shards(one, optimizer, 5, 0)
            other.load_state_dict(copy.deepcopy(plain.state_dict()))
            wide.load_state_dict(whole.state_dict())
        sharded = zero.shard(model, begun, stage=3)
        for seed in range(3):
            for one, optimizer in ((whole, plain), (model, sharded), (wide, other)):
                one(_alike(one, seed)).backward()
                optimizer.step()
                optimizer.zero_grad()
        coded = CODED[world] if has_codes else set(range(len(LIKE_RANKS)))
        values = values_of(model), values_of(whole), values_of(wide)
        for number, (mine, its, fp32) in enumerate(zip(*values, strict=True)):
            assert torch.equal(mine, its if number in coded else fp32), (name, number)
        for number, param in enumerate(model.parameters()):
            found = {v.dtype for v in sharded.state[param].values()} & {torch.int8, torch.uint8}
            in_codes = coded if has_codes else {0} if name == "mixed" else set()
            assert bool(found) == (number in in_codes), (name, number)
        same = get_optimizer_state_dict(model, sharded, options=_WHOLE)
        mine = {f"p{number}": number for number in range(len(LIKE_RANKS))}
        found = {"state": {mine[key]: state for key, state in same["state"].items()}}
        wrong = unlike(found, plain.state_dict())
        assert {int(text.split()[0]) for text in wrong} <= set(mine.values()) - coded, wrong
        again = optimizer_of(name, model)
        set_optimizer_state_dict(model, again, same, options=_WHOLE)
        native = sharded.state_dict(native=True)
        sharded.load_state_dict(copied(native))
        assert not unlike(sharded.state_dict(native=True), native)
        model(_alike(model, 7)).backward()
        sharded.step()


def test_an_fp16_parameter_beside_halves_is_refused() -> None:
    model = nn.Linear(3, 3).half()
    for options, asked in (({}, "remainder16"), ({"master_weights": True}, "remainder16")):
        optimizer = faststep.optim.AdamW(model.parameters(), **options)
        text = "shard\\(\\): parameter 'bias' is float16, and master_weights"
        with pytest.raises(ValueError, match=text):
            zero.shard(model, optimizer, master_weights=asked)  # type: ignore[arg-type]


def test_estimate_counts_them() -> None:
    """A byte and 1/32 for each element; two bytes for the other halves."""
    model = nn.Linear(128, 64)  # 8192 elements on one rank, 64 on the other
    made: list[Any] = [
        lambda ps, options=options: faststep.optim.AdamW(ps, **options)
        for options in ({"state_dtype": "fp32"}, CODES, HALVES)
    ]
    fp32, codes, _ = (zero.estimate(model, one, ranks=2, stage=2).stages[2] for one in made)
    assert fp32.states - codes.states == 2 * (8192 * 3 - 2 * 8192 // 64)
    low = zero.estimate(model.bfloat16(), made[2], ranks=2, stage=2).stages[2]
    assert low.states - fp32.states == 2 * 8192
