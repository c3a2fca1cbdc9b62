"""Private names of torch: optimizers and the GradScaler."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState as OptState
from torch.autograd.graph import increment_version as increment_version
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

global_post_hooks = _global_optimizer_post_hooks
global_pre_hooks = _global_optimizer_pre_hooks


# What a step of torch's classes calls of its object. The second name was another before torch 2.13.
CALLED_BY_STEPS = (
    "_init_group",
    "_accelerator_graph_capture_health_check"
    if hasattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check")
    else "_cuda_graph_capture_health_check",
    "_optimizer_step_code",
)


def is_torchs(function: object) -> bool:
    """True if a function is torch's, or faststep's, with all that is wrapped around it."""
    while function is not None:
        where = getattr(function, "__globals__", {}).get("__name__", "")
        if not where.startswith(("torch.", "faststep.")):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.lru_cache(8)
def are_torchs(*functions: Any) -> bool:
    """True if all are torch's or faststep's; remembered, as a step asks again and again."""
    return all(map(is_torchs, functions))


def replaces_unscaling() -> bool:
    """True if a script has replaced what unscales gradients in torch's GradScaler."""
    return not is_torchs(torch.amp.GradScaler._unscale_grads_)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks that are called before each step: those of all optimizers, then this one's."""
    own = optimizer._optimizer_step_pre_hooks
    return [*global_pre_hooks.values(), *own.values()]


def is_of_scheduler(step: Any, inner: Any) -> bool:
    """True if this is a scheduler's wrapper, which notes that it was called, around `inner`.

    The mark that schedulers leave on it is copied by functools.wraps to what a script puts around.
    """
    code = getattr(step, "__code__", None)
    where = getattr(code, "co_filename", None)
    return where == lr_scheduler.__file__ and step.__wrapped__ is inner


def method_of_script(optimizer: torch.optim.Optimizer, base: type) -> str:
    """The name of what a script has put in the place of a method of a base class; "" if nothing.

    In a subclass, on the object or on the base class itself.
    """
    kind = type(optimizer)
    own = dict(vars(optimizer))
    if is_of_scheduler(own.get("step"), kind.step):
        del own["step"]
    below = kind.__mro__[: kind.__mro__.index(base)]
    for name in dict.fromkeys(["step", *own, *(name for cls in below for name in vars(cls))]):
        theirs = own.get(name, getattr(kind, name, None))
        if name.startswith("__") or not hasattr(base, name) or isinstance(theirs, type):
            continue
        if (callable(theirs) or isinstance(theirs, property)) and not is_torchs(theirs):
            return f"{name}()"
    return ""


def is_capturing() -> bool:
    """True while torch's current CUDA stream is captured into a graph."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialized and torch.cuda.is_current_stream_capturing())


def dtypes_of(tensors: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """The element types that occur in `tensors`."""
    return set(map(operator.attrgetter("dtype"), tensors))


def step_dtype(fused: bool | None) -> torch.dtype:
    """The dtype of the `step` entry that torch's optimizers create.

    float32 with `fused=True`; without it float64 where that is the default dtype, else float32
    (`_get_scalar_dtype` in torch/optim/optimizer.py).
    """
    if not fused and torch.get_default_dtype() == torch.float64:
        return torch.float64
    return torch.float32


def cuda_amp_is_unavailable() -> bool:
    """True where torch.amp.GradScaler("cuda") warns and disables itself."""
    common = getattr(torch.cuda.amp, "common", None)
    test = getattr(common, "amp_definitely_not_available", None)
    return bool(test()) if test is not None else not torch.cuda.is_available()


# torch's own scale update, in place and without a synchronisation, on any device. It takes the
# scale, 0-d float32; the growth tracker, 0-d int32; a flag, 0-d float32; and three numbers.
update_scale_as_torch: Callable[..., object] = torch._amp_update_scale_
