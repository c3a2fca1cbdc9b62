"""What a configuration of DeepSpeed asks for, in faststep's terms."""

from __future__ import annotations

from typing import Any, NamedTuple

from ... import optim
from .reader import AUTO, Reader
from .schedulers import SCHEDULERS

# Keys that faststep heeds if they have one of these values: it works so anyway.
_ANYWAY: dict[str, tuple[Any, ...]] = {
    "zero_optimization.overlap_comm": (True,),
    "zero_optimization.contiguous_gradients": (True,),
    "zero_optimization.reduce_scatter": (True,),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.offload_optimizer.device": ("none",),
    "zero_optimization.offload_param.device": ("none",),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (False,),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1,),
    "gradient_allreduce_op": ("mean",),
    "wall_clock_breakdown": (False,),
    "memory_breakdown": (False,),
    "dump_state": (False,),
    "fp16.auto_cast": (False,),
    "fp16.consecutive_hysteresis": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
}
# Beside the device "cpu". Memory is page-locked for a CUDA device, whatever is asked; `ratio` is
# the share of parameters that are updated on the host.
_OFFLOADED_ANYWAY: dict[str, tuple[Any, ...]] = {"pin_memory": (True,), "ratio": (1,)}
_OF_NVME = ("nvme_path", "buffer_count", "fast_init", "pipeline_read", "pipeline_write")
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Settings(NamedTuple):
    """The arguments of faststep's functions.

    Args:
        shard: arguments of `shard`.
        dtype: "float16" or "bfloat16", to which the model is cast; None leaves it.
        scaler: arguments of GradScaler; None for no scaling.
        kind, options: the optimizer's class and its arguments; None and {} without a section.
        scheduler, rates: the scheduler's class and its arguments.
        micro_batch, steps: samples of a rank's micro-batch, if they are known, and micro-batches.
        not_honoured: keys that have no effect.
    """

    shard: dict[str, Any]
    dtype: str | None
    scaler: dict[str, Any] | None
    kind: str | None
    options: dict[str, Any]
    scheduler: str | None
    rates: dict[str, Any]
    micro_batch: int | None
    steps: int
    not_honoured: tuple[str, ...]


def settings_of(
    config: Reader, itemsize: int, ranks: int | None, own: bool, strict: bool
) -> Settings:
    """Read all keys.

    Args:
        itemsize: bytes of an element of a parameter that is not cast.
        ranks: how many; None if that is not known.
        own: whether the script has an optimizer of its own, so that the section is not read.
        strict: raise ValueError for an "auto" that a constructor needs.
    """
    stage = config.take("zero_optimization.stage", 0, int)
    if stage not in (0, 1, 2, 3):
        raise config.error("zero_optimization.stage", f"must be 0, 1, 2 or 3, not {stage!r}")
    for key, same in _ANYWAY.items():
        if config.raw(key) is not None and config.raw(key) in same:
            config.mark(key.removesuffix(".device"))
    dtype, masters = _precision(config)
    scaler = _scaler(config) if dtype == "float16" else None
    kind, options = (None, {}) if own else _optimizer(config, strict)
    scheduler, rates = _scheduler(config, strict)
    limit = config.number("gradient_clipping", None)
    if limit is not None and limit < 0:
        raise config.error("gradient_clipping", f"must not be negative, but is {limit}")
    shard: dict[str, Any] = {"stage": stage or 1}
    if bucket := _bucket(config, stage):
        shard["bucket_mb"] = bucket * (2 if dtype else itemsize) / 2**20
    if limit:
        shard["max_grad_norm"] = limit
    if dtype:
        shard["master_weights"] = masters
    if offload := _offload(config, stage, ranks):
        shard["offload"] = offload
    batch = _batch(config, ranks)
    unread = config.unread()
    return Settings(shard, dtype, scaler, kind, options, scheduler, rates, *batch, unread)


def _offload(config: Reader, stage: int, ranks: int | None) -> str | None:
    """What lies in host memory: states, or at stage 3 parameters with their states.

    Without ZeRO DeepSpeed does not offload either. Its older names for the device are flags.
    """
    states = stage > 0 and _is_on_host(config, "offload_optimizer", "cpu_offload")
    if stage == 3 and ranks != 1 and _is_on_host(config, "offload_param", "cpu_offload_params"):
        return "params"
    return "optimizer" if states else None


def _is_on_host(config: Reader, name: str, flag: str) -> bool:
    """Whether a section asks for host memory; marks what is honoured then."""
    section, flag = f"zero_optimization.{name}", f"zero_optimization.{flag}"
    if not config.raw(section) and config.raw(flag) is True:
        config.mark(flag)
        return True
    if config.raw(f"{section}.device") != "cpu":
        return False
    config.mark(f"{section}.device")
    for key, same in _OFFLOADED_ANYWAY.items():
        if config.raw(f"{section}.{key}") in same:
            config.mark(f"{section}.{key}")
    for key in _OF_NVME:
        config.mark(f"{section}.{key}")
    return True


def _bucket(config: Reader, stage: int) -> int | None:
    keys = [f"zero_optimization.{name}" for name in _BUCKETS]
    sizes = [config.raw(key) for key in keys]
    for key, size in zip(keys, sizes, strict=True):
        if size == AUTO:
            config.mark(key)
        elif size is not None and (not isinstance(size, (int, float)) or size <= 0):
            raise config.error(key, f"must be a positive number, not {size!r}")
    if stage == 3:
        return None  # fully_shard has no buckets
    reduced: float | None = config.number(keys[0], None)
    if sizes[1] == sizes[0]:  # there is one size of buckets for both
        config.mark(keys[1])
    return None if reduced is None else int(reduced)


def _precision(config: Reader) -> tuple[str | None, bool]:
    """The type to which the model is cast, and whether there are masters."""
    wanted = [name for name in ("fp16", "bf16") if config.take(f"{name}.enabled", False, bool)]
    if len(wanted) == 2:
        raise config.error("fp16.enabled", "and bf16.enabled exclude each other")
    for name in ("fp16", "bf16"):
        if name not in wanted and config.raw(f"{name}.enabled") is False:
            config.mark(name)  # nothing in it has an effect
    if wanted != ["bf16"]:
        return ("float16", True) if wanted else (None, False)
    keys = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
    given = [config.raw(key) or False for key in keys]
    if given[0] == given[1]:  # fp32 states without masters would be something else
        for key in keys:
            config.take(key, False, bool)
    return "bfloat16", given != [True, True]


def _scaler(config: Reader) -> dict[str, Any]:
    fixed = config.number("fp16.loss_scale", 0)
    if fixed:
        scale = float(fixed)
        return {"init_scale": scale, "min_scale": scale, "max_scale": scale}
    found = {
        "init_scale": 2.0 ** config.number("fp16.initial_scale_power", 16),
        "growth_interval": config.take("fp16.loss_scale_window", 1000, int),
        "hysteresis": config.take("fp16.hysteresis", 2, int),
        "min_scale": float(config.number("fp16.min_loss_scale", 1)),
    }
    if found["init_scale"] < found["min_scale"]:
        raise config.error("fp16.min_loss_scale", "is above the first scale")
    return found


def _optimizer(config: Reader, strict: bool) -> tuple[str | None, dict[str, Any]]:
    given = config.take("optimizer.type", None, str)
    if given is None:
        return None, {}
    options = config.section("optimizer.params", strict)
    known = {name.lower(): name for name in optim.__all__}
    kind = known.get(given.lower())
    if kind is None:
        raise config.error(
            "optimizer.type",
            f"is {given!r}, which faststep does not have. It has {', '.join(known.values())}",
        )
    if kind in ("Adam", "AdamW"):
        decoupled = options.pop("adam_w_mode", True)
        kind = "AdamW" if kind == "AdamW" or decoupled else "Adam"
        is_torchs = options.pop("torch_adam", False)
        if not is_torchs:
            options.setdefault("weight_decay", 0.0)  # DeepSpeed's own default
    if kind in ("Adam", "AdamW", "Lion"):
        options.setdefault("lr", 1e-3)
    if options.get("bias_correction") is True:
        del options["bias_correction"]
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    return kind, options


def _scheduler(config: Reader, strict: bool) -> tuple[str | None, dict[str, Any]]:
    given = config.raw("scheduler.type")
    if given not in SCHEDULERS:
        return None, {}
    config.mark("scheduler.type")
    return given, config.section("scheduler.params", strict)


def _batch(config: Reader, ranks: int | None) -> tuple[int | None, int]:
    """Samples of a micro-batch, and micro-batches of a step."""
    for key in _BATCH:
        if config.raw(key) == AUTO:
            config.mark(key)  # the script's loader and loop have it
    whole, micro, steps = (config.take(key, None, int) for key in _BATCH)
    for key, value in zip(_BATCH, (whole, micro, steps), strict=True):
        if value is not None and value < 1:
            raise config.error(key, f"must be at least 1, not {value}")
    if ranks is None or whole is None:
        return micro, steps or 1
    if micro is None:
        micro = whole // (ranks * (steps or 1))
    steps = steps or whole // (ranks * micro or 1)
    if whole != micro * steps * ranks:
        raise config.error(
            "train_batch_size",
            f"is {whole}, and not train_micro_batch_size_per_gpu ({micro}) times "
            f"gradient_accumulation_steps ({steps}) times {ranks} ranks",
        )
    return micro, steps
