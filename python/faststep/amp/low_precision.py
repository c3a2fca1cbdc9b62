"""Weights that are kept in the precision to which autocast would cast them in every forward."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .._torch.fsdp import is_fsdp_shard
from ..grads.owners import accumulating, releasing
from ..grads.params import described
from ..optim.base import FusedOptimizer
from ..optim.masters import MASTER, StateFormats, begin_state, has_master, is_bf16

# Modules whose parameters all go into one operator of autocast's lower-precision list, of CPUs and
# of CUDA, and nowhere else. A subclass may do otherwise.
_CASTING = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# In evaluation these hand the weights of the modules inside to operators without autocast.
_BYPASSING = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_AFTER = "call low_precision_weights() first"


class _Weight(NamedTuple):
    name: str
    param: nn.Parameter
    group: dict[str, Any]  # of the optimizer
    modules: list[nn.Module]


def low_precision_weights(
    model: nn.Module, optimizer: Optimizer, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Keep the weights that autocast casts in lower precision, so that no forward casts them.

    The optimizer's step writes them, from fp32 masters. Losses and masters have the bits of
    training under autocast without this call. See docs/api/amp.md for what differs.

    Converted are weights and biases of `Linear`, `Conv1d` to `Conv3d` and `ConvTranspose1d` to
    `ConvTranspose3d` that are float32 and that the optimizer trains. All others stay as they are:
    those of subclasses, of modules with a parametrization or a `forward` of their own, in
    `MultiheadAttention` and `TransformerEncoderLayer`, frozen ones, and those that another module
    has too, such as a head tied to an embedding.

    Call it before DistributedDataParallel, `accumulate()` and `release_gradients()`, and after
    states were loaded from a run without it. The parameters stay the same objects. From here on
    these modules raise RuntimeError outside of autocast to `dtype`.

    Args:
        model: in fp32.
        optimizer: of faststep.optim. It keeps masters from here on: fp32, or remainders if it was
            made with `master_weights="remainder16"`, which rounds 8 of a million weights
            otherwise than autocast does.
        dtype: of autocast, torch.bfloat16 or torch.float16. Default: torch.bfloat16.

    Returns:
        The names of the converted parameters.

    Raises:
        TypeError: the model is DistributedDataParallel, the optimizer not faststep's or without
            masters, or a weight a tensor subclass.
        ValueError: another dtype, nothing to convert, a weight that is not made yet (lazy) or
            shares its memory, or a parameter of the optimizer that would need a master as well.
        RuntimeError: a weight has a gradient, or gradients are accumulated or released.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, not {dtype}")
    fused = _checked(model, optimizer, dtype)
    weights = _weights_of(model, fused)
    for weight in weights:
        _refuse(weight)
    _refuse_one_memory(model, weights)
    fused._keeps_masters = True
    fused._stepper = None  # it knows the parameters as they were
    first: dict[nn.Module, _Weight] = {}
    formats = StateFormats(fused)
    for weight in weights:
        _convert(fused, formats, weight, dtype)
        for module in weight.modules:
            first.setdefault(module, weight)
    for module, (name, param, *_) in first.items():
        check = functools.partial(_check, name, param.device.type, dtype)
        module.register_forward_pre_hook(check)
    return [weight.name for weight in weights]


def _checked(model: nn.Module, optimizer: Optimizer, dtype: torch.dtype) -> FusedOptimizer:
    """The optimizer, unless it or the model cannot be used."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "the model is DistributedDataParallel, whose buckets have the type that parameters had "
            f"when it was made: {_AFTER}, then DistributedDataParallel(model)"
        )
    kind = type(optimizer)
    if not isinstance(optimizer, FusedOptimizer) or optimizer._made_from is not None:
        raise TypeError(
            "low_precision_weights() takes optimizers of faststep.optim that keep masters, not "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    if optimizer in accumulating or optimizer in releasing:
        raise RuntimeError(f"gradients of this optimizer are accumulated or released: {_AFTER}")
    if optimizer._has_remainders and dtype is not torch.bfloat16:
        raise ValueError(
            f'master_weights="remainder16" is for torch.bfloat16, not {dtype}: use "fp32"'
        )
    if not optimizer._keeps_masters:
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if has_master(param):
                    raise ValueError(
                        f"{kind.__name__}: {described(optimizer, number, index)} has no master, "
                        "and would get one here: make the optimizer with master_weights="
                    )
    return optimizer


def _weights_of(model: nn.Module, optimizer: FusedOptimizer) -> list[_Weight]:
    """What is to be converted, in the order of the model's parameters."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    for module in model.modules():
        for param in module.parameters() if isinstance(module, _BYPASSING) else ():
            owners[param].append(module)
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    found = []
    for name, param in model.named_parameters():
        is_cast = all(
            type(module) in _CASTING and "forward" not in vars(module) for module in owners[param]
        )
        if is_lazy(param):
            raise ValueError(f"'{name}' is not made yet (lazy): run the model once, before this")
        if is_cast and param in groups and param.requires_grad and param.dtype is torch.float32:
            found.append(_Weight(name, param, groups[param], owners[param]))
    if not found:
        raise ValueError(
            "low_precision_weights() found nothing to convert: no float32 weight of a Linear or "
            "convolution that only such modules have, and that this optimizer trains"
        )
    return found


def _refuse(weight: _Weight) -> None:
    """Raise for a parameter that cannot be converted without changing what is computed."""
    name, param = weight.name, weight.param
    if type(param) is not nn.Parameter:
        raise TypeError(f"'{name}' is a {type(param).__name__}, which cannot be converted in place")
    if param.grad is not None:
        raise RuntimeError(f"'{name}' has a gradient in float32: call optimizer.zero_grad() before")
    if param.is_cpu and param.untyped_storage().is_shared():
        raise ValueError(f"'{name}' shares its memory with other processes, which would lose it")
    if is_fsdp_shard(param):
        raise TypeError(f"'{name}' is sharded by FullyShardedDataParallel")


def _refuse_one_memory(model: nn.Module, weights: list[_Weight]) -> None:
    """Raise for a weight whose memory another parameter has as well."""
    users = Counter(param.untyped_storage().data_ptr() for param in model.parameters())
    for name, param, *_ in weights:
        if param.numel() and users[param.untyped_storage().data_ptr()] > 1:
            raise ValueError(
                f"'{name}' shares its memory with another parameter, and would lose it"
            )


@torch.no_grad()
def _convert(
    optimizer: FusedOptimizer, formats: StateFormats, weight: _Weight, dtype: torch.dtype
) -> None:
    param, group = weight.param, weight.group
    master = param.detach()
    param.data = _upper_half(master) if optimizer._has_remainders else master.to(dtype)
    if master.stride() != param.stride():  # it had gaps
        master = torch.empty_like(param, dtype=torch.float32).copy_(master)
    state = {**optimizer.state.get(param, {}), MASTER: master}
    staying = [k for k, v in state.items() if is_bf16(v) and not formats.is_asked(k, param)]
    optimizer.state[param] = formats.fitting(state, param, staying)
    if not optimizer._zeros_differ(group):  # else the first step makes the rest
        [rule] = optimizer._rules([group], [formats.shards])
        begin_state(optimizer, group, rule, param)


def _upper_half(master: Tensor) -> Tensor:
    """What a remainder lies beside without loss: rounded to the nearest, a tie away from zero."""
    bits = master.view(torch.int32)
    upper = (bits - (bits << 16 >> 16)) >> 16
    rounded = upper.to(torch.int16).view(torch.bfloat16)
    return torch.where(master.isnan(), master.to(torch.bfloat16), rounded)


def _check(name: str, device: str, dtype: torch.dtype, module: nn.Module, args: object) -> None:
    """Raise before a forward that would compute something else than with fp32 weights."""
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) is not dtype:
        raise RuntimeError(
            f"'{name}' is {dtype} (low_precision_weights), so its {type(module).__name__} must be "
            f'called under torch.autocast("{device}", dtype={dtype})'
        )
