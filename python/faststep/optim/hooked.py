"""The surroundings of a step: hooks, and code of a script in the place of torch's.

A script may replace `torch.optim.AdamW.step`, or a function that this step calls, and a subclass
may override `_init_group`. Such code expects torch's step, which is then made as a whole.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from .. import _C
from .._torch.modes import is_watched
from .._torch.optim import CALLED_BY_STEPS, global_post_hooks, global_pre_hooks, is_torchs


class _TorchsStep:
    """The step of torch's class, and what it calls.

    Args:
        kind: a class of faststep or of a script, with torch's class among its bases.
        torchs: those of its bases that are torch's.
    """

    def __init__(self, kind: type, torchs: list[type]) -> None:
        self.torchs: Any = torchs[0]
        self.before: Any = kind.__mro__[kind.__mro__.index(torchs[0]) - 1]
        name = torchs[-2].__name__.lower()  # of AdamW "adam"; the last one is Optimizer
        modules = sys.modules
        self.module = modules.get(f"torch.optim.{name}") or modules[f"torch.optim._{name}"]
        places = (f"_torchs_step.module.{name}", "_torchs_step.torchs.step", *CALLED_BY_STEPS)
        self.now = operator.attrgetter(*places)
        self.known: tuple[Any, ...] = ()

    def is_replaced(self, kind: type) -> bool:
        """True if a script's code is part of it, for an object of this class."""
        found = self.now(kind)
        if not all(map(is_torchs, found)):
            return True
        self.known = found
        return False

    def hook(self) -> None:
        """As torch does when it makes the first object of its class."""
        if not getattr(self.torchs.step, "hooked", None):
            self.torchs.step = Optimizer.profile_hook_step(self.torchs.step)
            self.torchs.step.hooked = True


class HookedOptimizer(Optimizer):
    """An optimizer whose step gives way to torch's where a script's code is part of that."""

    _torchs_step: ClassVar[_TorchsStep | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torchs = [b for b in cls.__mro__ if f"{b.__module__}.".startswith("torch.optim.")]
        cls._torchs_step = _TorchsStep(cls, torchs) if len(torchs) > 1 else None

    @classmethod
    def _has_scripts_code(cls) -> bool:
        """True if a script's code is part of the step of torch's class."""
        return cls._torchs_step is not None and cls._torchs_step.is_replaced(cls)

    def _steps_by_script(self) -> bool:
        """As `_has_scripts_code`, also for what was set on the object itself."""
        torchs = self._torchs_step
        if torchs is None:
            return False
        kind = type(self)
        changed = torchs.now(kind) != torchs.known and torchs.is_replaced(kind)
        return changed or "_init_group" in self.__dict__

    def _step_by_torchs_class(self, *args: Any, **kwargs: Any) -> Any:
        """torch's step, with its hooks."""
        torchs: Any = self._torchs_step
        return super(torchs.before, self).step(*args, **kwargs)

    def _is_asked_for_more(self) -> bool:
        """True if the next step unscales or clips, or must look at a scaler's flag."""
        return False

    def _step_around_script(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step that does so, with torch's for the update."""
        raise NotImplementedError

    def _patch_step_function(self) -> None:
        super()._patch_step_function()
        if self._torchs_step is not None:
            self._torchs_step.hook()

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Put around `step` the hooks and the report to profilers that torch puts there.

        The report takes longer than the step of a small model. It is left out if no profiler runs,
        no mode sees it, no hook is set and the step has no closure, which may set one.
        """
        whole = Optimizer.profile_hook_step(func)
        if not is_torchs(Optimizer.profile_hook_step):
            return whole
        is_ours = str(inspect.unwrap(func).__module__).startswith("faststep.")

        @functools.wraps(func)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return whole(self, *args, **kwargs)
            if is_ours and self._steps_by_script():
                if not self._is_asked_for_more():
                    return self._step_by_torchs_class(*args, **kwargs)
                around = Optimizer.profile_hook_step(type(self)._step_around_script)
                return around(self, *args, **kwargs)
            hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            seen = hooked or global_pre_hooks or global_post_hooks or _C.is_recorded()
            if seen or is_watched() or args or kwargs:  # a closure may set hooks
                return whole(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return wrapper
