"""Configurations of DeepSpeed, beside plain torch with the same settings; errors name the key."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.functional import mse_loss

import faststep
from faststep import optim, zero
from faststep.grads.owners import offloading
from faststep.zero.deepspeed import lines_for
from faststep.zero.deepspeed.schedulers import WarmupDecayLR, WarmupLR
from ranks import on_ranks

USUAL: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 10,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.99], "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 4},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
}
NAMED = ("steps_per_print",)


def usual(**changes: Any) -> dict[str, Any]:
    """The usual example, in which None takes a key away."""
    merged = {**USUAL, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 16, generator=made)
    return x, 3 * x[:, :4]


def trained(config: Any, rank: int, steps: int, optimizer: Any = None) -> list[float]:
    """The losses of the loop in the docstring."""
    model = net()
    optimizer = optimizer and optimizer(model.parameters())
    optimizer = zero.from_deepspeed_config(model, optimizer, config)
    loop = optimizer.loop
    accum = faststep.accumulate(optimizer, loop.accumulation_steps)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(steps):
        x, y = (part.to(dtype) for part in batch(step, rank))
        with accum:
            loss = mse_loss(model(x).float(), y.float())
            accum.backward(loop.scaler.scale(loss))
        losses.append(loss.item())
        if accum.ready:
            loop.scaler.step(optimizer)
            loop.scaler.update()
            if loop.scheduler is not None:
                loop.scheduler.step()
            optimizer.zero_grad()
    return losses


def by_torch(rank: int, world: int, steps: int, rates: list[float]) -> list[float]:
    """One process that has the gradients of all ranks: clipping at 1, two micro-batches a step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    losses = []
    for step in range(steps):
        for other in range(world):
            x, y = batch(step, other)
            loss = mse_loss(model(x), y)
            (loss / (2 * world)).backward()
            if other == rank:
                losses.append(loss.item())
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = rates[step // 2]
            optimizer.step()
            optimizer.zero_grad()
    return losses


RATES = [3e-3 * min(1.0, math.log(step or 1) / math.log(4)) for step in range(9)]


@on_ranks(2)
def test_losses_are_those_of_torch(rank: int, world: int) -> None:
    for stage in (1, 2):
        config = usual(fp16=None, zero_optimization={"stage": stage})
        found = trained(config, rank, 12)
        assert found == pytest.approx(by_torch(rank, world, 12, RATES), rel=1e-5)


@on_ranks(2)
def test_the_usual_example_trains_on_ranks(rank: int, world: int) -> None:
    found = trained(usual(), rank, 120)
    assert sum(found[-6:]) < 0.5 * sum(found[:6])
    whole = by_torch(rank, world, 120, [*RATES, *[3e-3] * 60])
    assert found == pytest.approx(whole, rel=0.01)


def test_one_process_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(usual(fp16=None)))
    assert trained(path, 0, 12) == pytest.approx(by_torch(0, 1, 12, RATES), rel=1e-5)


def test_an_optimizer_of_the_script() -> None:
    def make(params: Any) -> Any:
        return torch.optim.AdamW(params, betas=(0.9, 0.99), weight_decay=0.0)

    found = trained(usual(fp16=None), 0, 12, make)
    assert found == pytest.approx(by_torch(0, 1, 12, RATES), rel=1e-5)


def made(config: Any, model: nn.Module | None = None, **options: Any) -> Any:
    return zero.from_deepspeed_config(model or net(), None, config, **options)


def test_what_is_set() -> None:
    model = net()
    optimizer = made(usual(), model)
    assert isinstance(optimizer, zero.ShardedOptimizer)
    assert optimizer.not_honoured == NAMED
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    assert optimizer.max_grad_norm == 1.0
    loop = optimizer.loop
    assert (loop.accumulation_steps, loop.micro_batch_size) == (2, None)
    assert isinstance(loop.scheduler, WarmupLR)
    scaler = loop.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (1024, 1000)
    assert (scaler._min_scale, scaler._hysteresis) == (1.0, 2)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"], group["lr"]) == ((0.9, 0.99), 0.0, 0.0)


def test_sections_that_are_off_or_missing() -> None:
    config = {
        "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": 1, "offload_param": {"device": "none"}},
    }
    model = net()
    optimizer = made(config, model)
    assert optimizer.not_honoured == ()
    assert optimizer.loop[::3] == (1, None)
    assert not optimizer.loop.scaler.is_enabled()
    assert next(model.parameters()).dtype is torch.float32
    assert optimizer.max_grad_norm is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "overlap_com"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": False}}, "overlap_comm"),
        (
            {"zero_optimization": {"reduce_bucket_size": 1e6, "allgather_bucket_size": 2e6}},
            "allgather_bucket_size",
        ),
    ],
)
def test_nothing_is_ignored_silently(changes: dict[str, Any], named: str) -> None:
    found = made(usual(**changes)).not_honoured
    assert found == ("steps_per_print", f"zero_optimization.{named}")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast"),
        ({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 2}}, "fp16.hysteresis"),
        ({"fp16": {"enabled": "auto"}}, "fp16"),
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"fp16": None, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
         "bf16.bf16_optimizer_states"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}}, "scheduler"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing"),
    ],
)  # fmt: skip
def test_other_keys_without_an_effect(changes: dict[str, Any], named: str) -> None:
    found = made(usual(zero_optimization={"stage": 2}, **changes)).not_honoured
    assert set(found) == {"steps_per_print", named}


def test_precision() -> None:
    for more, masters in (
        ({}, True),
        ({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, False),
    ):
        model = net()
        optimizer = made(usual(fp16=None, bf16={"enabled": True, **more}), model)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        assert optimizer._owned._keeps_masters is masters
        assert not optimizer.loop.scaler.is_enabled()
    fixed = made(usual(fp16={"enabled": True, "loss_scale": 8})).loop.scaler
    assert (fixed.get_scale(), fixed._min_scale, fixed._max_scale) == (8, 8, 8)


@pytest.mark.parametrize(
    ("kind", "params", "expected", "decay"),
    [
        ("Adam", {}, optim.AdamW, 0.0),
        ("Adam", {"adam_w_mode": False, "bias_correction": True}, optim.Adam, 0.0),
        ("AdamW", {"torch_adam": True}, optim.AdamW, 0.01),
        ("lion", {"weight_decay": 0.1}, optim.Lion, 0.1),
        ("RMSprop", {"lr": 0.01}, optim.RMSprop, 0),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], expected: type, decay: float) -> None:
    optimizer = made(usual(optimizer={"type": kind, "params": params}, scheduler=None))
    assert isinstance(optimizer._owned, expected)
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["lr"]) == (decay, params.get("lr", 1e-3))


def test_values_of_the_trainer() -> None:
    """Those that faststep chooses itself, or the script has, may be "auto"."""
    zero_options = {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": "auto"}
    optimizer = made(
        usual(zero_optimization=zero_options, gradient_accumulation_steps="auto", fp16=None)
    )
    named = ("steps_per_print", "zero_optimization.stage3_max_live_parameters")
    assert optimizer.not_honoured == named
    assert optimizer.loop[:2] == (1, None)
    with pytest.raises(ValueError, match=r'optimizer\.params\.lr is "auto", which only'):
        made(usual(optimizer={"type": "AdamW", "params": {"lr": "auto"}}))
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    with pytest.raises(ValueError, match=r'scheduler\.params\.warmup_num_steps is "auto"'):
        made(usual(scheduler=scheduler))


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "found"),
    [(24, 4, None, (6, 4)), (24, None, 3, (3, 8)), (None, 5, 2, (2, 5)), (8, None, None, (1, 8))],
)
def test_batches(whole: Any, micro: Any, steps: Any, found: tuple[int, int]) -> None:
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    assert made(usual(train_batch_size=whole, **sizes)).loop[:2] == found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage must be an integer"),
        ({"zero_optimization": True}, "zero_optimization must be an object, not True"),
        (
            {"zero_optimization": {"reduce_bucket_size": -1}},
            "reduce_bucket_size must be a positive",
        ),
        ({"fp16": {"enabled": "true"}}, "fp16.enabled must be true or false, not 'true'"),
        ({"bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled exclude each other"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}}, "min_loss"),
        ({"gradient_clipping": -1}, "gradient_clipping must not be negative"),
        ({"gradient_clipping": "1"}, "gradient_clipping must be a number, not '1'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"train_batch_size": 7}, "train_batch_size is 7, and not"),
        ({"optimizer": None}, "optimizer is missing, and the script passes no optimizer"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is 'OneBitAdam', which"),
        ({"optimizer": {"type": "AdamW", "params": {"lrs": 1}}}, "optimizer.params.lrs is no"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.params do not fit"),
        ({"optimizer": {"type": "SGD", "params": []}}, "optimizer.params must be an object"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "scheduler.params do not fit"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "x"}}}, "warmup_type must"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "warmup_num_st"),
    ],
)
def test_errors_have_the_file_and_the_key(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps(usual(**changes)))
    model = net()
    with pytest.raises(ValueError, match=r"my\.json: ") as caught:
        made(path, model)
    assert problem in str(caught.value)
    assert next(model.parameters()).dtype is torch.float32


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", r"bad\.json is no JSON: .* line 1"),
        ("[]", r"bad\.json must have an object"),
        ('{"fp16": {"a": 1, "a": 2}}', r"bad\.json: a is there twice"),
    ],
)
def test_files_that_are_no_configuration(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        made(path)
    with pytest.raises(FileNotFoundError):
        made(tmp_path / "none.json")


def _rates(kind: Any, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = kind(optimizer, **options)
    found = []
    for _ in range(9):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules() -> None:
    """Beside the formulas in DeepSpeed's documentation."""
    linear = {"warmup_num_steps": 4, "warmup_type": "linear"}
    found = _rates(WarmupLR, warmup_min_lr=0.1, warmup_max_lr=0.9, **linear)
    assert found == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9])
    found = _rates(WarmupLR, warmup_num_steps=4)
    logs = [0.5 * math.log(step) / math.log(4) for step in (1, 1, 2, 3, 4)]
    assert found == pytest.approx([*logs, *[0.5] * 4])
    found = _rates(WarmupDecayLR, total_num_steps=6, warmup_max_lr=1.0, **linear)
    assert found == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 0.5, 0, 0])


def test_the_lines_to_write_instead() -> None:
    lines = lines_for(USUAL)
    assert lines[-1:] == [f"# not honoured: {name}" for name in NAMED]
    names: dict[str, Any] = {"faststep": faststep, "torch": torch, "model": net()}
    names["params"] = names["model"].parameters()
    exec("\n".join(lines).replace('"cuda"', '"cpu"'), names)
    theirs = made(USUAL)
    optimizer, scaler, scheduler = (names[n] for n in ("optimizer", "scaler", "scheduler"))
    assert scaler.state_dict() == theirs.loop.scaler.state_dict()
    assert scheduler.state_dict() == theirs.loop.scheduler.state_dict()
    assert optimizer.max_grad_norm == theirs.max_grad_norm
    assert names["accum"].steps == 2
    options = [{**o.param_groups[0], "params": 0} for o in (optimizer, theirs)]
    assert options[0] == options[1]
    auto = {**USUAL, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    assert "lr=..." in lines_for(auto)[1]


OFFLOADS: list[tuple[dict[str, Any], bool, tuple[str, ...]]] = [
    ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, True, ()),
    ({"stage": 1, "cpu_offload": True}, True, ()),
    ({"stage": 2, "cpu_offload": False}, False, ("cpu_offload",)),
    ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}, True, ()),
    ({"offload_optimizer": {"device": "cpu"}}, False, ("offload_optimizer",)),
    ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, False, ("offload_optimizer",)),
    (
        {
            "stage": 2,
            "offload_optimizer": {
                "device": "cpu",
                "ratio": 0.3,
                "pin_memory": False,
                "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {"device": "cpu"},
        },
        True,
        ("offload_optimizer.ratio", "offload_optimizer.pin_memory", "offload_param"),
    ),
]


@pytest.mark.parametrize(("asked", "is_offloaded", "named"), OFFLOADS)
def test_offload(asked: dict[str, Any], is_offloaded: bool, named: tuple[str, ...]) -> None:
    config = usual(steps_per_print=None, zero_optimization=asked)
    optimizer = made(config)
    assert (optimizer._owned in offloading) == is_offloaded
    assert optimizer.not_honoured == tuple(f"zero_optimization.{key}" for key in named)
    says = any("offload='optimizer'" in line for line in lines_for(config))
    assert says == is_offloaded


@on_ranks(2)
def test_offload_on_ranks(rank: int, world: int) -> None:
    """Each rank has its part of the states in host memory; at stage 3 also its parameters."""
    asked = {"offload_optimizer": {"device": "cpu"}}
    for stage in (1, 2, 3):
        config = usual(fp16=None, zero_optimization={"stage": stage, **asked})
        optimizer = zero.from_deepspeed_config(net(), None, config)
        assert optimizer.not_honoured == ("steps_per_print",)
        assert optimizer._owned in offloading
        assert trained(config, rank, 6) == pytest.approx(by_torch(rank, world, 6, RATES), rel=1e-5)
    for more in ({"offload_param": {"device": "cpu"}}, {"cpu_offload_params": True}):
        config = usual(fp16=None, zero_optimization={"stage": 3, **asked, **more})
        model = net()
        optimizer = zero.from_deepspeed_config(model, None, config)
        assert optimizer.not_honoured == ("steps_per_print",)
        states = [
            module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
        ]
        groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
        assert groups
        assert all(isinstance(one.offload_policy, CPUOffloadPolicy) for one in groups)
        assert any("offload='params'" in line for line in lines_for(config))
        assert trained(config, rank, 6) == pytest.approx(by_torch(rank, world, 6, RATES), rel=1e-5)
