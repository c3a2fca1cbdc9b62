"""Which optimizers and parameters can be sharded, and how ranks describe them to each other."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import optim
from .._devices import has_kernels_for
from .._torch.optim import method_of_script
from ..optim.base import FusedOptimizer
from ..optim.masters import has_remainders, keeps_masters
from ..optim.state_kinds import StateKinds
from .hooks.gradients import sharded_params
from .layout.flat_params import refuse_overlaps
from .step.slice_optimizer import Kind

_OURS = [kind for name in optim.__all__ if issubclass(kind := getattr(optim, name), FusedOptimizer)]
_FUSED: dict[type[Any], Any] = {
    one: kind for kind in _OURS for one in (kind, getattr(torch.optim, kind.__name__, kind))
}
_PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Kept(NamedTuple):
    """What a sharded optimizer keeps beside torch's options, the same on all ranks."""

    masters: bool
    has_remainders: bool
    kinds: StateKinds

    @classmethod
    def of(cls, optimizer: Optimizer, master_weights: bool | str | None) -> Kept:
        """By the options of an optimizer, and that of `shard`.

        Raises:
            ValueError: `master_weights` names no kind of them.
        """
        masters = getattr(optimizer, "_keeps_masters", False)
        halves = getattr(optimizer, "_has_remainders", False)
        if master_weights is not None:
            masters, halves = keeps_masters(master_weights), has_remainders(master_weights)
        return cls(masters, halves, getattr(optimizer, "_kinds", StateKinds()))

    def __str__(self) -> str:
        kinds, seed = self.kinds, self.kinds.noise_seed
        types = (kinds.dtype, *kinds.by_name) if kinds.by_name else kinds.dtype
        return (
            f"master_weights {'remainder16' if self.has_remainders else self.masters}, state_dtype "
            f"{types}, rounding_seed {seed}, codes from {kinds.codes_from}"
        )


def fused_class_of(optimizer: Optimizer, kept: Kept) -> Kind:
    """The class whose step makes the same update, with the optimizer's defaults.

    Raises TypeError if there is none, or a script's code, or autograd, is part of the update.
    """
    kind = vars(type(optimizer)).get("_made_from") or type(optimizer)
    base = next((one for one in kind.__mro__ if one in _FUSED), None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if base is None:
        *known, last = (one.__name__ for one in _OURS)
        raise TypeError(
            f"shard() takes {', '.join(known)} or {last} of torch.optim or faststep.optim, not a "
            f"{name}: what another class does in its step may need whole tensors"
        )
    if method := method_of_script(optimizer, base):
        raise TypeError(
            f"shard(): {name} has a {method} of its own, which would not be called: every rank "
            f"makes the update of {base.__name__} on flat parts of the parameters. Pass an "
            f"optimizer of the class {base.__name__} itself"
        )
    if getattr(optimizer, "_keep_grads", False):
        raise TypeError("shard() does not support an optimizer with keep_grads=")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise TypeError("shard() does not support differentiable=True: no autograd spans ranks")

    def made(groups: list[dict[str, Any]]) -> FusedOptimizer:
        fused: FusedOptimizer = _FUSED[base](groups)
        fused.defaults = optimizer.defaults  # Adagrad begins a state by them
        fused._keeps_masters, fused._has_remainders = kept.masters, kept.has_remainders
        fused._kinds = kept.kinds
        return fused

    return made


def line_of(name: str, param: Tensor, place: str, taken: set[int]) -> str:
    """The line about a parameter, at that place in the groups, that all ranks must have alike."""
    frozen = "" if param.requires_grad else ", frozen"
    frozen += ", sharded" if id(param) in taken else ""
    frozen += "" if param.is_cpu else f", on {param.device.type}"
    strides = "" if param.is_contiguous() else f" with strides {param.stride()}"
    return f"{name!r} {tuple(param.shape)}{strides} {param.dtype} ({place}{frozen})"


def named_in(model: nn.Module, params: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Parameters of an optimizer with their names, last ones first, as backward reaches them.

    Raises ValueError if the model lacks one.
    """
    wanted = {id(param): param for param in params}
    named: list[tuple[str, Tensor]] = [
        (name, param) for name, param in model.named_parameters() if id(param) in wanted
    ]
    strange = wanted.keys() - {id(param) for _, param in named}
    if strange:
        shapes = [tuple(wanted[key].shape) for key in strange]
        raise ValueError(
            f"shard(): {len(strange)} parameters of the optimizer are not in the model, the first "
            f"of shape {shapes[0]}: pass the module that has all of them"
        )
    return named[::-1]


def taken_of(params: Iterable[Tensor]) -> set[int]:
    """Those that are sharded already, by `id`."""
    wanted = set(map(id, params))
    if wanted & sharded_params():
        gc.collect()  # what sharded them may be gone
    return wanted & sharded_params()


def taken_by_another(what: str) -> TypeError:
    """The error for a parameter that is sharded already."""
    return TypeError(
        f"{what} is sharded already, for another optimizer: several may be sharded, each with "
        "parameters of its own; nothing was changed"
    )


def refuse_taken(named: Iterable[tuple[str, Tensor]], taken: set[int]) -> None:
    """Raise TypeError for a parameter that is sharded already."""
    for name, param in named:
        if id(param) in taken:
            raise taken_by_another(f"shard(): parameter {name!r}")


def refuse_fp16(named: Iterable[tuple[str, Tensor]], kept: Kept) -> None:
    """Raise ValueError for an fp16 parameter beside remainders."""
    for name, param in named:
        if kept.has_remainders and param.dtype is torch.float16:
            raise ValueError(
                f'shard(): parameter {name!r} is float16, and master_weights="remainder16" is '
                'for bfloat16: use "fp32"'
            )


def admit(named: Sequence[tuple[str, Tensor]], before: Sequence[tuple[str, Tensor]]) -> None:
    """Raise TypeError for parameters that cannot be sharded beside those from before."""
    for name, param in named:
        _check(name, param)
    refuse_overlaps([*before, *named], "shard()", "changed")


def _check(name: str, param: Tensor) -> None:
    """Raise TypeError for a parameter whose memory cannot be part of a flat tensor."""
    if type(param) not in _PLAIN:
        problem = f"is a {type(param).__name__}"
    elif not param.is_cpu and not param.is_cuda:
        problem = f"is on {param.device}, and only CPU memory and CUDA devices are supported"
    elif param.dtype not in _DTYPES:
        problem = f"is {param.dtype}"
    elif param.layout != torch.strided or torch.empty_like(param, device="meta").stride() != (
        param.stride()
    ):
        problem = "is not dense in memory"
    else:
        return
    raise TypeError(f"shard(): parameter {name!r} {problem}; nothing was changed")


def device_of(named: Sequence[tuple[str, Tensor]]) -> torch.device:
    """Where all parameters are; raises TypeError for several places or an unusable device."""
    if not named:
        return torch.device("cpu")
    first, some = named[0]
    elsewhere = [(name, param) for name, param in named if param.device != some.device]
    if elsewhere:
        name, param = elsewhere[0]
        problem = f", and {name!r} on {param.device}: all must be in one memory"
    elif some.is_cuda and some.device.index != torch.cuda.current_device():
        problem = (
            f", and the current device is cuda:{torch.cuda.current_device()}: call "
            "torch.cuda.set_device(local_rank) first"
        )
    elif some.is_cuda and not has_kernels_for(some):
        problem = ", which faststep cannot use: `python -m faststep info` says why"
    else:
        return some.device
    raise TypeError(
        f"shard(): parameter {first!r} is on {some.device}{problem}; nothing was changed"
    )
