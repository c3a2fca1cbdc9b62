"""What the fused optimizers share: the step, the clipping options, and the errors."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from .._devices import HOST, HOST_ONLY, Scalars, agreed, devices_of, new_scalar, on_device
from .._torch.compiler import disable_dynamo, is_compiling, uncompiled
from .._torch.modes import is_watched
from .._torch.optim import has_global_step_hooks, increment_version, is_capturing
from .._torch.tensors import has_no_memory
from ..grads.norm import BackwardNorm
from ..grads.params import described
from .by_torch import Request, step_by_torch, update_by_torch
from .checks import check_limit, refuse_group_options, refuse_shards, refuse_unchecked
from .zeros import Zeros

__all__ = ["FusedOptimizer", "Rule", "number"]

_NO_CLIPPING = math.nan


class Rule(NamedTuple):
    """How one parameter group is stepped; the C side reads it by position."""

    number: int
    state_keys: tuple[str, ...]  # "step" first where has_step, then the states in the rule's order
    has_step: bool
    hyper: tuple[float, ...]  # in the order of the rule's row in csrc/rules/rules.def, lr first
    maximize: bool
    lr: dict[int, Tensor] | None = None  # per CUDA device: read there instead of from `hyper`


class Phase(IntEnum):
    """What one call of the plan does; see csrc/py/step/step_plan.h."""

    WHOLE = 0
    MEASURE = 1
    APPLY = 2


def number(value: float | Tensor) -> float:
    """A hyper-parameter that may be a one-element tensor."""
    if type(value) is float:  # isinstance() with Tensor takes as long as all the rest
        return value
    return float(value.item() if isinstance(value, Tensor) else value)


def _listed(params: Iterable[Tensor]) -> list[Tensor]:
    """A group's parameters, which scripts may have replaced by those in another container."""
    return params if type(params) is list else list(params)


def _wanted(norm_in_backward: bool | DistributedDataParallel) -> bool | DistributedDataParallel:
    """The value itself if it is a model, which torch.compile may have wrapped, else its truth."""
    if isinstance(norm_in_backward, torch.nn.Module):
        model = uncompiled(norm_in_backward)
        if isinstance(model, DistributedDataParallel):
            return model
        raise TypeError(
            "norm_in_backward must be True, False or a DistributedDataParallel model, not "
            f"{type(model).__name__}"
        )
    return bool(norm_in_backward)


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin in front of a torch optimizer: steps all parameters of all groups in one C call.

    A class gives `_rule_of` and, where states are created at the first step, `_new_state`.

    Args (keyword-only, on top of the torch class):
        max_grad_norm (float, optional): clip all gradients by their global 2-norm inside the step,
            with the formula of :func:`torch.nn.utils.clip_grad_norm_`. Default: None, no clipping.
        keep_grads (bool): with `max_grad_norm`, write the unscaled and clipped gradients back
            to `.grad`. Default: False, `.grad` stays as backward left it.
        norm_in_backward (bool or DistributedDataParallel): measure each gradient in a hook during
            backward instead of in a pass of the step that clips, with the same bits. With several
            ranks pass the model. Default: False, see :attr:`norm_in_backward`.
    """

    _number_of: ClassVar[dict[str, int]] = {name: row[0] for name, row in _C.rules().items()}

    # Whether a state may have entries of others before the first of ours.
    _begins_in_parts: ClassVar[bool] = False

    # Class attributes stand in where pickle and deepcopy restore an optimizer without __init__.
    max_grad_norm: float | None = None
    keep_grads: bool = False
    _plan: _C.Plan | None = None
    _measure_found_inf: bool = False  # set by faststep.amp.GradScaler around a step
    _step_max_norm: float | None = None
    _is_asked_to_unscale: bool = False
    _norm_is_whole: bool = False  # no parameter is a part of one: known from the first clipped step
    _devices: tuple[int, ...] = ()  # of the parameters, as the C side calls them
    _norms: dict[int, Tensor] | None = None  # per CUDA device: where it writes the norm
    _last_norm: float | Tensor | None = None
    _skipped: bool | Tensor = False
    _norm_in_backward: bool | DistributedDataParallel = False
    _backward_norm: BackwardNorm | None = None

    def _set_clipping(
        self,
        max_grad_norm: float | None,
        keep_grads: bool,
        norm_in_backward: bool | DistributedDataParallel,
    ) -> None:
        check_limit("max_grad_norm", max_grad_norm)
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.keep_grads = bool(keep_grads)
        self._norm_in_backward = _wanted(norm_in_backward)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a scaler leaves the gradients to the step, as `grad_scale` and `found_inf`.

        torch.amp.GradScaler and frameworks ask; torch's classes set it with `fused=True` alone. A
        step that clips needs the gradients as backward left them, and one that divides the scale.
        """
        return (
            self._is_asked_to_unscale
            or self.max_grad_norm is not None
            or self._norm_in_backward is not False
            or getattr(self, "grad_scale", None) is not None
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._is_asked_to_unscale = bool(value)

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        """The rule and its numbers for this step of a group."""
        raise NotImplementedError

    def _new_state(self, group: dict[str, Any], param: Tensor) -> None:
        """Create the missing entries of `self.state[param]`."""
        raise NotImplementedError

    def _refuse_half_state(self, group: int, index: int, keys: tuple[str, ...]) -> None:
        """Raise for a state that has begun and lacks a part, as torch's loop does."""
        param = self.param_groups[group]["params"][index]
        state = self.state.get(param)
        if not state or self._begins_in_parts:
            return
        if missing := [repr(key) for key in keys if key not in state]:
            detail = f"has no {', '.join(missing)}, only {', '.join(map(repr, state))}"
            raise _C.TensorError(group, index, "state", "key", detail)

    @functools.cached_property
    def _zeros(self) -> Zeros:
        """Makes new states; a copy of an optimizer has its own."""
        return Zeros()

    def _drop_new_state(self, param: Tensor) -> None:
        """Undo `_new_state` if the step did not happen, where zeros differ from no state."""

    def _check_capture(self) -> None:
        """Raise torch's error for a step that must not be captured into a CUDA graph."""

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        """Whether a new state of zeros and no state give different next steps."""
        return False

    def _lr_of(self, group: dict[str, Any]) -> tuple[float, dict[int, Tensor] | None]:
        """The learning rate, as a number or as a tensor that each device reads for itself."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.is_cuda and self._devices and HOST not in self._devices:
            return math.nan, {device: on_device(lr, device) for device in self._devices}
        return number(lr), None

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global 2-norm of the unscaled gradients before clipping, from the last step.

        A 0-d float32 tensor; None before the first step that measured (one with `max_grad_norm`, or
        under :class:`faststep.amp.GradScaler`). For CUDA parameters it lies on their device, NaN
        after a step that did not measure because it was skipped; nothing waits for the device.
        """
        if isinstance(self._last_norm, Tensor):
            return self._last_norm.to(torch.float32, copy=True)
        if self._last_norm is None:
            return None
        return torch.tensor(self._last_norm, dtype=torch.float32, device="cpu")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left everything as it was because a gradient was not finite.

        torch.amp.GradScaler does not call the step then, unless the optimizer is `fused=True` or
        clips. For CUDA parameters this waits for the device.
        """
        if isinstance(self._skipped, Tensor):
            return bool(self._skipped.item() != 0.0)  # not kept: a graph may be replayed
        return self._skipped

    @property
    def norm_in_backward(self) -> bool | DistributedDataParallel:
        """Whether gradients are measured in backward, by a hook on each parameter; may be set.

        A step that clips, or looks for infinities under :class:`faststep.amp.GradScaler`, then
        reads the gradients once instead of twice. Norm, clip coefficient and parameters have the
        same bits as without. Where a gradient is not as its hook saw it the step measures all
        gradients itself, counts that in :attr:`norm_fallbacks` and warns once.

        A change is seen by the tensor's identity, address and version counter, which every operator
        of torch moves. Writes that move none of these are NOT seen: through `grad.data`, a NumPy
        view or a DLPack capsule, between a gradient's hook and the step. Their norm would be wrong,
        which is why this must be asked for. Clip by `max_grad_norm` then, not by hand.

        With several ranks (torch.distributed) gradients may be reduced after their hooks, and every
        step measures itself. Under DistributedDataParallel set the model instead of True: its
        communication hook then measures each bucket as soon as it is reduced, and takes the place
        of the model's own reduction, with the same bits, for good. A copy of the optimizer has
        True. TypeError for a model that has such a hook already, or with `find_unused_parameters`
        or `static_graph`.

        A step whose scale differs from that of the step before measures itself as well.
        """
        return self._norm_in_backward

    @norm_in_backward.setter
    def norm_in_backward(self, wanted: bool | DistributedDataParallel) -> None:
        wanted = _wanted(wanted)
        if self._backward_norm is not None and wanted is not self._norm_in_backward:
            self._backward_norm.remove()
            self._backward_norm = None
        self._norm_in_backward = wanted
        self._measured_in_backward()

    @property
    def norm_fallbacks(self) -> dict[str, int]:
        """How many steps measured gradients although `norm_in_backward` is set, by reason.

        "changed": a gradient after its hook; "unmeasured": it had no hook yet, or was set by hand;
        "scale": the loss scale or divisor differs from that of the step before; "distributed":
        there are several ranks; "device": parameters on CUDA.
        """
        return {} if self._backward_norm is None else dict(self._backward_norm.fallbacks)

    def _measured_in_backward(self) -> BackwardNorm | None:
        """The hooks, if they are wanted; a copy of an optimizer sets its own when it steps."""
        wanted = self._norm_in_backward
        if wanted is not False and self._backward_norm is None:
            self._backward_norm = BackwardNorm(self, None if wanted is True else wanted)
        return self._backward_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError for a group with `max_grad_norm` or the like of its own."""
        if isinstance(param_group, dict):  # else torch says what it must be
            refuse_group_options(param_group)
        self._norm_is_whole = False
        super().add_param_group(param_group)
        if (norm := self._measured_in_backward()) is not None:
            norm.attach(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_compiling():
            self._step_uncompiled()
        else:
            self._fused_step()
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """What torch puts around `step`: hooks, and a record for profilers.

        The record costs more than the step of a small model. So it is left out where nobody
        listens, and no hook is set.
        """
        whole = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            if hooked or has_global_step_hooks() or is_compiling() or _C.is_recorded():
                return whole(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return wrapper

    @classmethod
    def _has_own_step(cls) -> bool:
        """Whether this is a script's subclass, whose step may do something with the gradients."""
        return inspect.unwrap(cls.step) is not FusedOptimizer.step

    @disable_dynamo
    def _step_uncompiled(self) -> None:
        self._fused_step()

    def _fused_step(self) -> None:
        groups = self.param_groups
        max_norm = self.max_grad_norm if self._step_max_norm is None else self._step_max_norm
        check_limit("max_grad_norm", max_norm)
        if max_norm is not None and not self._norm_is_whole:
            refuse_shards(self)
            self._norm_is_whole = True
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Any = getattr(self, "found_inf", None)
        if found_inf is not None and not isinstance(found_inf, Tensor):
            refuse_unchecked(self)  # torch's scaler passes the number 0 where it saw no gradient
            found_inf = None
        write_grads = grad_scale is not None if max_norm is None else self.keep_grads
        request = Request(grad_scale, found_inf, self._measure_found_inf, max_norm, write_grads)
        if is_watched():
            self._step_by_torch(request)
            return
        if self._plan is None:
            self._plan = _C.Plan()
            self._devices = devices_of(p for group in groups for p in group["params"])
        if self._devices != HOST_ONLY:
            self._check_capture()
        measures = self._measure_found_inf or max_norm is not None
        options = (
            self._measure_found_inf,
            _NO_CLIPPING if max_norm is None else max_norm,
            write_grads,
        )
        params = [_listed(group["params"]) for group in groups]
        in_backward = self._measured_in_backward()
        squares = None
        if in_backward is not None:
            squares = in_backward.for_step(self, params, grad_scale, measures)
        new: list[tuple[int, int]] = []
        short_of_memory = False
        phase = Phase.WHOLE
        scalars: dict[int, Scalars] = {}
        try:
            while True:
                if not scalars:
                    rules = [self._checked_rule_of(group) for group in groups]
                    phase = Phase.MEASURE if measures and len(self._devices) > 1 else Phase.WHOLE
                    scalars = self._scalars(grad_scale, found_inf, measures, phase)
                what, value = self._plan.step(
                    params, rules, self.state, new or None, scalars, *options, phase, squares
                )
                if what == "devices":  # parameters have moved
                    self._devices, scalars = tuple(value), {}
                elif what == "squares" and in_backward is not None:
                    in_backward.moved(self)
                    squares = None
                elif what == "memory":  # torch may hold blocks that nobody uses
                    if short_of_memory or is_capturing():
                        raise torch.OutOfMemoryError(f"{value}; nothing was updated")
                    short_of_memory = True
                    torch.cuda.empty_cache()
                elif what == "missing" and not set(new).isdisjoint(value):  # it is there, but None
                    group, index = next(pair for pair in value if pair in new)
                    state = self.state[params[group][index]]
                    key = next(key for key in rules[group].state_keys if state.get(key) is None)
                    raise _C.TensorError(group, index, f"state '{key}'", "value", "is None")
                elif what == "missing":
                    for group, index in value:
                        self._refuse_half_state(group, index, rules[group].state_keys)
                    new = sorted([*new, *value])  # the first may have been dropped meanwhile
                    with torch.no_grad():
                        for group, index in value:
                            self._new_state(groups[group], params[group][index])
                elif phase is Phase.MEASURE:
                    phase, scalars = Phase.APPLY, agreed(scalars)
                else:
                    break
        except BaseException as error:
            for group, index in new:
                self._drop_new_state(params[group][index])
            if isinstance(error, _C.TensorError):
                if self._is_for_torch(*error.args[:2]):
                    self._step_by_torch(request)
                    return
                raise self._explained(*error.args) from None
            raise
        self._skipped, norm, written, grads = value
        if in_backward is not None:
            in_backward.forget()
        increment_version(written)
        if grads is not None:
            increment_version(grads)
        if norm is not None:
            self._last_norm = norm
        self._note_on_device(scalars, found_inf, measures)
        if new and (self._skipped is True or self._must_know(new)) and self.step_was_skipped:
            for group, index in new:
                self._drop_new_state(params[group][index])

    def _step_by_torch(self, request: Request) -> None:
        """The step of :func:`_fused_step` by operators of torch."""
        for group in self.param_groups:
            self._refuse_differentiable(group)
        if self._backward_norm is not None:
            self._backward_norm.forget()
        self._skipped, norm = step_by_torch(self, request)
        if norm is not None:
            self._last_norm = norm

    def _update_by_torch(self) -> None:
        """The update of torch's class, by the gradients as they are."""
        update_by_torch(self, FusedOptimizer)

    def _is_for_torch(self, group: int, index: int) -> bool:
        """Whether a parameter that cannot be stepped here is for torch's operators."""
        param = self.param_groups[group]["params"][index]
        return has_no_memory(param) or (param.grad is not None and has_no_memory(param.grad))

    def _scalars(
        self, grad_scale: Tensor | None, found_inf: Tensor | None, measures: bool, phase: Phase
    ) -> dict[int, Scalars]:
        """The scale and the flag on every device in use, and room for the norm.

        Where several devices measure, each has a flag and a float64 norm of its own.
        """
        scalars = {}
        for device in self._devices:
            flag = None if found_inf is None else on_device(found_inf, device)
            if phase is Phase.MEASURE and (flag is None or self._measure_found_inf):
                flag = new_scalar(device, torch.float32)
            scale = None if grad_scale is None else on_device(grad_scale, device)
            needs_room = measures and (device != HOST or phase is Phase.MEASURE)
            norm = self._norm_on(device, phase) if needs_room else None
            scalars[device] = Scalars(scale, flag, norm)
        return scalars

    def _norm_on(self, device: int, phase: Phase) -> Tensor:
        """Where a device writes its norm; of several, one without gradients leaves its zero."""
        if phase is Phase.MEASURE:
            return new_scalar(device, torch.float64)
        if self._norms is None:
            self._norms = {}
        if device not in self._norms:
            self._norms[device] = new_scalar(device, torch.float64)
        return self._norms[device]

    def _note_on_device(
        self, scalars: dict[int, Scalars], found_inf: Tensor | None, measures: bool
    ) -> None:
        """Bring a flag back that was sent away, and keep what only the device knows."""
        first = next(iter(scalars.values()))
        flag = first.found_inf
        sent = found_inf if self._measure_found_inf else None
        if sent is not None and flag is not None and flag is not sent:
            sent.copy_(flag, non_blocking=True)
        if self._devices == HOST_ONLY:
            return
        if flag is not None:
            self._skipped = flag
        if measures:
            self._last_norm = first.norm

    def _must_know(self, new: list[tuple[int, int]]) -> bool:
        """Whether new states have to go again if the step was skipped: waits for the device."""
        return isinstance(self._skipped, Tensor) and any(
            self._zeros_differ(self.param_groups[group]) for group, _ in new
        )

    def _refuse_differentiable(self, group: dict[str, Any]) -> None:
        if group.get("differentiable"):
            raise RuntimeError(self._unsupported("differentiable=True"))

    def _checked_rule_of(self, group: dict[str, Any]) -> Rule:
        self._refuse_differentiable(group)
        return self._rule_of(group)

    def _explained(self, group: int, index: int, role: str, kind: str, detail: str) -> Exception:
        """The error for a tensor that cannot be used: torch's own where it has one."""
        param: Tensor = self.param_groups[group]["params"][index]
        whose = "" if role == "parameter" else f"{role} of "
        where = whose + described(self, group, index)
        if role == "gradient" and param.grad is not None and param.grad.is_sparse:
            return RuntimeError(self._sparse_error(where))
        if kind == "driver":
            return RuntimeError(f"{type(self).__name__}: {detail}, of which the first is {where}")
        error = {"type": TypeError, "key": KeyError}.get(kind, RuntimeError)
        return error(f"{type(self).__name__}: {where} {detail}; nothing was updated")

    def _sparse_error(self, where: str) -> str:
        unsupported = self._unsupported("sparse gradients")
        return f"{type(self).__name__}: {where} is sparse; {unsupported}; nothing was updated"

    def _unsupported(self, what: str) -> str:
        """That torch's class can do something which ours cannot, if there is one."""
        ours, torchs = (
            [cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith(package)]
            for package in ("faststep.optim.", "torch.optim.")
        )
        other = f"; use torch.optim.{torchs[0]}" if torchs[0] != "Optimizer" else ""
        return f"faststep.optim.{ours[0]} does not support {what}{other}"

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the `step` counters where torch keeps them.

        torch keeps them in CPU memory unless a group is `fused` or `capturable`; here those of CUDA
        parameters are on the device, and saving them waits for it.
        """
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            if group.get("fused") or group.get("capturable"):
                continue
            for index in group["params"]:
                state = state_dict["state"].get(index, {})
                step = state.get("step")
                if isinstance(step, Tensor) and step.is_cuda:
                    state_dict["state"][index] = {**state, "step": step.cpu()}
        return state_dict

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._plan is not None:  # it would keep small tensors of the old state alive
            self._plan.forget()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            "max_grad_norm": self.max_grad_norm,
            "keep_grads": self.keep_grads,
            "_norm_in_backward": self._norm_in_backward is not False,
            "_is_asked_to_unscale": self._is_asked_to_unscale,
        }
