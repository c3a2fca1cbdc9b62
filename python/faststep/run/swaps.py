"""Puts faststep's classes and functions in place of torch's.

torch's classes stay what they are. Their `__new__` makes an object of faststep's class, which is a
subclass, when exactly torch's class is called. So every way of importing a class sees the swap,
`isinstance` holds, and a script's subclass has torch's code alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.utils
import torch.utils.data
from torch.autograd import graph
from torch.optim import Optimizer

from .. import clip, nn, optim
from .._devices import has_kernels_for
from ..data.stats import Metered
from ..memory import save_on_cpu
from ..optim.base import FusedOptimizer
from ..optim.hooked import HookedOptimizer
from .kernels import NO_KERNELS, cuda_is_used, listed, why_none
from .loaders import CudaGradScaler, DataLoader, GradScaler, HostGradScaler
from .optimizers import CLASSES
from .timing import CallTimes

FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


LOADERS: dict[type, type] = {torch.utils.data.DataLoader: DataLoader}
SCALERS: dict[type, type] = {
    kind._torchs: kind for kind in (GradScaler, CudaGradScaler, HostGradScaler)
}
CLIPPING = {getattr(torch.nn.utils, name): getattr(clip, name) for name in FUNCTIONS}
LOSS = {torch.nn.functional.cross_entropy: nn.functional.cross_entropy}


class Swaps:
    """The classes and functions to swap.

    Attributes:
        done: what the first line says of each part.
        made: how many objects of a class of faststep were made.
        left: how many stayed torch's, by class and reason.
        met: how many optimizers of each class were made, by whomever.
        spawned: how many processes were started anew, not forked, and swapped too.
    """

    def __init__(self, meter: CallTimes) -> None:
        self.done: list[str] = []
        self.made: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.met: Counter[type] = Counter()
        self.spawned = 0
        self._meter = meter
        self._ours: dict[type, type] = {}

    def swap_optim(self) -> None:
        for torchs, ours in CLASSES.items():
            self._swap_class(torchs, ours)
            setattr(ours, "__init__", self._kept_without_kernels(torchs, ours))  # noqa: B010
        # Whatever else C refuses is torch's too, or torch's error.
        setattr(FusedOptimizer, "_is_for_torch", lambda optimizer, *what: True)  # noqa: B010
        for kind in (FusedOptimizer, optim.Adafactor):
            self._note_steps_of_torch(kind)
        but = f", but torch's on CUDA: {why}" if (why := why_none()) else ""
        self.done.append(f"torch.optim -> faststep.optim{but}")

    def swap_amp(self) -> None:
        for torchs, ours in SCALERS.items():
            self._swap_class(torchs, ours)
        for name in ("scale", "unscale_", "step", "update"):
            method = self._meter.timed("GradScaler", getattr(GradScaler, name))
            setattr(GradScaler, name, method)
        self.done.append("torch.amp.GradScaler -> faststep.amp.GradScaler")

    def swap_clip(self) -> None:
        for torchs, ours in CLIPPING.items():
            _replace(torchs, self._meter.timed("clipping", ours))
        self.done.append("torch.nn.utils.clip_grad_norm_ -> faststep.clip_grad_norm_")

    def swap_data(self) -> None:
        for torchs, ours in LOADERS.items():
            self._swap_class(torchs, ours)
        setattr(Metered, "__next__", self._meter.timed("DataLoader", Metered.__next__))  # noqa: B010
        self.done.append("torch.utils.data.DataLoader -> faststep.data.DataLoader")

    def swap_loss(self) -> None:
        for torchs, fused in LOSS.items():
            ours = self._meter.timed("cross_entropy", fused)
            ours.__prepare_scriptable__ = lambda torchs=torchs: torchs  # for torch.jit.script
            _replace(torchs, ours)
        self.done.append(
            "torch.nn.functional.cross_entropy -> faststep.nn.functional.cross_entropy"
        )

    def swap_memory(self) -> None:
        self._swap_class(graph.save_on_cpu, save_on_cpu)
        self.done.append("torch.autograd.graph.save_on_cpu -> faststep.memory.save_on_cpu")

    def count_steps(self) -> None:
        """Measure the steps of all optimizers; those of other classes below the hooks of torch."""
        for name in ("_fused_step", "_try_step"):
            step = self._meter.timed_step(getattr(FusedOptimizer, name))
            setattr(FusedOptimizer, name, step)
        step = self._meter.timed_step(optim.Adafactor._factored_step)
        setattr(optim.Adafactor, "_factored_step", step)  # noqa: B010
        patch = vars(Optimizer)["_patch_step_function"]

        def patched(optimizer: Optimizer) -> None:
            kind = type(optimizer)
            self.met[kind] += 1
            if not isinstance(optimizer, HookedOptimizer) and not hasattr(kind.step, "hooked"):
                setattr(kind, "step", self._meter.timed_step(kind.step))  # noqa: B010
            patch(optimizer)

        setattr(Optimizer, "_patch_step_function", patched)  # noqa: B010
        make = HookedOptimizer._step_by_torchs_class

        def noted(optimizer: HookedOptimizer, *args: Any, **kwargs: Any) -> Any:
            self.left[f"{type(optimizer).__name__}.step", "a script's code is part of it"] += 1
            return make(optimizer, *args, **kwargs)

        setattr(HookedOptimizer, "_step_by_torchs_class", self._meter.timed_step(noted))  # noqa: B010

    def note_spawned(self) -> None:
        self.spawned += 1

    def whose(self, kind: type) -> str:
        """Whose step an optimizer has."""
        if kind.__module__.startswith("faststep."):
            return "faststep's"
        nearest = self._nearest(kind)
        if kind in self._ours or kind.__module__.startswith("torch."):
            return "torch's"
        where = f"{kind.__module__}'s"
        return where if nearest is None else f"{where}, a subclass of torch's {nearest.__name__}"

    def _note_steps_of_torch(self, kind: type[Any]) -> None:
        """Those that our classes leave to torch's operators, whole or in part."""
        by_torch = kind._step_by_torch

        def noted(optimizer: torch.optim.Optimizer, what: Any, reason: str) -> Any:
            reason = reason.removesuffix("; nothing was updated")
            self.left[f"{type(optimizer).__name__}.step", reason] += 1
            return by_torch(optimizer, what, reason)

        setattr(kind, "_step_by_torch", noted)  # noqa: B010

    def _swap_class(self, torchs: type, ours: type) -> None:
        """Let calls of a class of torch make objects of ours."""
        self._ours[torchs] = ours
        name = f"{torchs.__module__.split('.')[1]}.{torchs.__name__}"

        def new(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            kind = cls
            if cls is torchs:
                kind = ours
                self.made[name] += 1
            elif self._nearest(cls) is torchs:
                self.left[name, f"{cls.__module__}.{cls.__qualname__} is a subclass"] += 1
            following: Any = super(torchs, kind).__new__  # type: ignore[arg-type]
            if following is object.__new__:
                return following(kind)
            return following(kind, *args, **kwargs)

        _, *parameters = inspect.signature(torchs.__init__).parameters.values()  # type: ignore[misc]
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        setattr(new, "__signature__", inspect.Signature([first, *parameters]))  # noqa: B010
        new.__name__, new.__qualname__ = "__new__", f"{torchs.__qualname__}.__new__"
        setattr(torchs, "__new__", new)  # noqa: B010

    def _kept_without_kernels(self, torchs: type[Any], ours: type[Any]) -> Any:
        """The constructor of our class, which makes torch's object on a device without kernels.

        Our class would have torch's operators take each parameter alone.
        """
        make = ours.__init__
        name = f"optim.{torchs.__name__}"

        @functools.wraps(make)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if type(optimizer) is ours and cuda_is_used():
                args, kwargs, params = listed(args, kwargs)
                if any(param.is_cuda and not has_kernels_for(param) for param in params):
                    self.made[name] -= 1
                    self.left[name, NO_KERNELS] += 1
                    optimizer.__class__ = torchs
                    torchs.__init__(optimizer, *args, **kwargs)
                    return
            make(optimizer, *args, **kwargs)

        return init

    def _nearest(self, kind: type) -> type | None:
        """The class of torch that a script's class extends; None for those of faststep."""
        if any(base in self._ours.values() for base in kind.__mro__):
            return None
        return next((base for base in kind.__mro__ if base in self._ours), None)


def _replace(torchs: Any, ours: Any) -> None:
    """Put a function in the place of torch's, in all modules of torch that have it."""
    name = torchs.__name__
    ours.__module__, ours.__doc__ = torchs.__module__, torchs.__doc__  # for pickle
    for module in [m for key, m in sys.modules.items() if key.split(".")[0] == "torch"]:
        if vars(module).get(name) is torchs:
            setattr(module, name, ours)
