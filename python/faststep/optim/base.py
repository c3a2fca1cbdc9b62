"""The base of the fused optimizers: the step and its errors."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _C
from .._devices import HOST, HOST_ONLY
from .._torch.compiler import disable_dynamo
from .._torch.fsdp import is_fsdp_shard
from .._torch.modes import watched_by
from .._torch.optim import is_of_scheduler
from .._torch.tensors import has_no_memory
from ..grads.owners import refuse_shared, releasing, unscaling
from ..grads.params import described, params_of
from .by_torch import LeftToTorchError, leave_to_torch, step_by_torch, torchs_class, update_by_torch
from .checks import refuse_group_options, refuse_part
from .hooked import HookedOptimizer
from .load_states import before_hooks, loading_states, show_as_torch
from .lost_updates import warn_of_lost_updates
from .masters import check_new_group, complete_states, ending_of, new_dtype, refuse_by_torch
from .param_shards import Shards
from .plan_step import PlanStep, on_device
from .request import Formula, Rule, ScalerRequest, StepAnswer, StepRequest, request_of
from .state_kinds import AS_TORCH, GROUP_OPTIONS, all_kinds
from .step import Stepper, loss_of, states_on_host, wait_for_states
from .step_options import ClippedOptimizer
from .zeros import Zeros

_PARAMS_OF = operator.itemgetter("params")


def number(value: float | Tensor) -> float:
    """A hyper-parameter that may be a one-element tensor."""
    if type(value) is float:  # isinstance() with Tensor takes as long as all the rest
        return value
    return float(value.item() if isinstance(value, Tensor) else value * 1.0)  # no string is one


class FusedOptimizer(ClippedOptimizer, HookedOptimizer):
    """Base of all optimizers: steps all parameters of all groups in C.

    Where torch has the class, this one stands before torch's in the bases. A step is one C call. It
    is two calls if it clips or checks on several devices, and one more if states were missing.

    A class has `_formula` or, if a group's options change it, `_formula_of`.

    torch's class makes the whole step, at its speed, if a gradient is sparse, a parameter complex
    or a group `differentiable`, and raises its errors. Clipping and unscaling stay part of it.
    `Arguments` of step_options.py says what the options beside torch's are.
    """

    _formula: ClassVar[Formula]

    # True if a state may have entries of other code before ours exist (SGD).
    _begins_in_parts: ClassVar[bool] = False

    # Of a class whose objects show a script what torch's do: the class of faststep with its step.
    _made_from: ClassVar[type[FusedOptimizer] | None] = None

    # Class attributes stand in where pickle and deepcopy restore an optimizer without __init__.
    _stepper: Stepper | None = None
    _asked: ScalerRequest = ScalerRequest()  # set by faststep.amp.GradScaler around a step
    _is_asked_to_unscale: bool = False
    _norm_is_whole: bool = False  # no wrapper has the rest: known from the first clipped step
    _has_shards: bool | None = None  # of FSDP1: known from the first step that measures

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if a scaler leaves the gradients to the step, as `grad_scale` and `found_inf`.

        torch.amp.GradScaler and frameworks read it. torch's classes set it with `fused=True` alone.
        It is also true if the step clips, or if `grad_scale` is set, by which the step divides.
        """
        return (
            self._is_asked_to_unscale
            or self._max_grad_norm is not None
            or getattr(self, "grad_scale", None) is not None
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._is_asked_to_unscale = bool(value)

    def _formula_of(self, group: dict[str, Any]) -> Formula:
        return self._formula

    def _new_state(self, group: dict[str, Any], rule: Rule, param: Tensor) -> None:
        """Create the missing entries of `self.state[param]`: of zeros, in the parameter's shape."""
        state = self.state[param]
        for key in self._formula_of(group).state_keys:
            state[key] = self._zeros.like(param, new_dtype(self, group, rule, param, key))

    @functools.cached_property
    def _zeros(self) -> Zeros:
        """Makes new states; a copy of an optimizer has its own."""
        return Zeros()

    def _drop_new_state(self, param: Tensor) -> None:
        """Undo `_new_state` after a step that did not happen, if zeros are not as good as none."""

    def _check_capture(self) -> None:
        """Raise torch's error for a step that must not be captured into a CUDA graph."""

    def _zeros_differ(self, group: dict[str, Any]) -> bool:
        """True if a state of zeros makes the next step differ from a missing state.

        It does in SGD with dampening.
        """
        return False

    @property
    def _devices(self) -> tuple[int, ...]:
        """Of the parameters, as the C side calls them; empty before the first step."""
        return () if self._stepper is None else self._stepper.devices

    def _ranks_have_grads(self) -> bool:
        """True if a rank had a gradient at the last step that measured DTensors."""
        return self._stepper is not None and self._stepper.ranks_have_grads()

    def _lr_of(self, lr: float | Tensor) -> tuple[float, dict[int, Tensor] | None]:
        """The learning rate, as a number or as a tensor that each device reads for itself."""
        if isinstance(lr, Tensor) and lr.is_cuda:
            devices = self._devices
            if devices and HOST not in devices:
                return 0.0, {device: on_device(lr, device) for device in devices}  # 0.0: not read
        return number(lr), None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError for a group with `max_grad_norm` or the like of its own."""
        if self._made_from is None and isinstance(param_group, dict):  # else torch says what it is
            refuse_group_options(param_group)
        self._norm_is_whole, self._has_shards = False, None
        super().add_param_group(param_group)
        check_new_group(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.
        """
        loss = None if closure is None else loss_of(closure)
        if torch.compiler.is_compiling():
            self._step_uncompiled()
        else:
            self._fused_step()
        return loss

    @classmethod
    def _has_own_step(cls) -> bool:
        """True if a script's code makes the step, and may do something with the gradients."""
        return not cls._has_our_step() or cls._has_scripts_code()

    @classmethod
    def _has_our_step(cls) -> bool:
        """True if `step` is that of this class, with nothing around it but its hooks."""
        step: Any = cls.step
        if getattr(step, "__code__", None) is _HOOKED:
            step = step.__wrapped__
        return step is _STEP

    def _has_replaced_step(self) -> bool:
        """As `_has_own_step`, also for what was set on the object itself, or later.

        The wrapper of a scheduler sees only that it is called.
        """
        step = vars(self).get("step")
        around = step is not None and not is_of_scheduler(step, type(self).step)
        return around or not self._has_our_step() or self._steps_by_script()

    @disable_dynamo
    def _step_uncompiled(self) -> None:
        self._fused_step(by_torch=self._steps_by_script())

    def _step_around_script(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else loss_of(closure)
        self._fused_step(by_torch=True)
        return loss

    def _fused_step(self, request: StepRequest | None = None, by_torch: bool = False) -> None:
        if request is None:
            request = request_of(self, self._max_grad_norm, self._keep_grads, **self._asked)
        if releasing.known:
            refuse_shared(self)
        if request.max_norm is not None and not self._norm_is_whole:
            refuse_part(self)
            self._norm_is_whole = True
        reason = watched_by() or ("with code of the script" if by_torch else None)
        if reason is None:
            try:
                answer = self._step_by_plan(request)
            except LeftToTorchError as error:
                reason = error.reason
            except _C.TensorError as error:
                explained = self._explained(*error.args)
                if not self._is_for_torch(*error.args):
                    raise explained from None
                reason = str(explained)
        if reason is not None:  # not above, where torch's errors would be shown with ours
            answer = self._step_by_torch(request, reason)
        self._note(answer)
        if answer.norm is None and answer.skipped is True and request.measures:
            self._last_norm = math.nan

    def _note(self, answer: StepAnswer) -> None:
        self._skipped = answer.skipped
        if answer.norm is not None:
            self._last_norm = answer.norm

    def _try_step(self, grad_scale: Tensor, found_inf: Tensor) -> bool:
        """Unscale and update by one call of C. False, and nothing has changed, if it cannot.

        It cannot at an overflow, and where a step would raise or be left to torch.
        """
        request = StepRequest(
            grad_scale, found_inf, True, write_grads=True, refuses_fp16=True, is_tried=True
        )
        try:
            if releasing.known:
                refuse_shared(self)
            answer = self._step_by_plan(request)
        except Exception:  # comes again in the step that follows
            return False
        self._note(answer)
        return not answer.skipped

    def _is_asked_for_more(self) -> bool:
        request = request_of(self, self._max_grad_norm, self._keep_grads, **self._asked)
        asks = request.measures or not (request.grad_scale is request.found_inf is None)
        return asks or self._keeps_masters or not all(k.is_torchs for k in all_kinds(self))

    def _step_by_plan(self, request: StepRequest) -> StepAnswer:
        """The step in C."""
        params = list(map(_PARAMS_OF, self.param_groups))
        if set(map(type, params)) != {list}:  # of a script, which has replaced one
            params = list(map(list, params))
        plan_step = PlanStep(self, params, self._rules)
        if self._stepper is None:
            self._stepper = Stepper()
            self._stepper.find_devices(plan_step)
            warn_of_lost_updates(self)
        stepper = self._stepper
        if stepper.devices != HOST_ONLY:
            self._check_capture()
        if self._has_shards is not False and request.measures and self._is_divided_by_fsdp1():
            stepper.divide()
        return stepper.step(plan_step, request)

    def _is_divided_by_fsdp1(self) -> bool:
        """True if FullyShardedDataParallel has left a part of the parameters on this rank."""
        if self._has_shards is None:
            self._has_shards = any(map(is_fsdp_shard, params_of(self)))
        return self._has_shards

    def _rules(
        self, groups: Sequence[dict[str, Any]] = (), found: list[Shards | None] | None = None
    ) -> list[Rule]:
        """The rules and their numbers for this step of some groups. Default: of all.

        Calls with the same list `found`, empty at first, look at all parameters at most once.
        """
        rules, found = [], [] if found is None else found
        for group in groups or self.param_groups:
            if group.get("differentiable") or group.get("capturable"):
                leave_to_torch(group, self._devices)
            number, places, keys, has_step = self._formula_of(group)
            lr_on_device = None
            ending: Sequence[Any] = ()
            if type(group["lr"]) is not float:
                lr, lr_on_device = self._lr_of(group["lr"])
                group = {**group, "lr": lr}
            if (
                self._keeps_masters
                or self._kinds != AS_TORCH
                or not GROUP_OPTIONS.isdisjoint(group)
            ):
                keys, *ending = ending_of(self, group, keys, found)
            hyper, maximize = _C.hyper(group, places), bool(group["maximize"])
            rules.append(Rule(number, keys, has_step, hyper, maximize, lr_on_device, *ending))
        return rules

    def _step_by_torch(self, request: StepRequest, reason: str) -> StepAnswer:
        """The step by operators of torch. `reason` is what `run` reports."""
        refuse_by_torch(self, reason)
        return step_by_torch(self, request)

    def _update_by_torch(self) -> None:
        """The update of torch's class, by the gradients as they are."""
        update_by_torch(self, FusedOptimizer)

    def _is_for_torch(self, group: int, index: int, *what: str) -> bool:
        """True if torch's operators step on what C cannot, or raise torch's error."""
        param = self.param_groups[group]["params"][index]
        grad = param if param.grad is None else param.grad
        if has_no_memory(param) or has_no_memory(grad):
            return True
        is_torchs = grad.is_sparse or param.is_complex()
        return is_torchs and torchs_class(self, FusedOptimizer) is not None

    def _explained(self, group: int, index: int, role: str, kind: str, detail: str) -> Exception:
        """The error for a tensor that cannot be used."""
        grad = self.param_groups[group]["params"][index].grad
        if role == "gradient" and grad is not None and grad.is_sparse:
            detail = "is sparse"
        whose = "" if role == "parameter" else f"{role} of "
        where = whose + described(self, group, index)
        if kind == "driver":
            return RuntimeError(f"{type(self).__name__}: {detail}, of which the first is {where}")
        error = {"type": TypeError, "key": KeyError}.get(kind, RuntimeError)
        return error(f"{type(self).__name__}: {where} {detail}; nothing was updated")

    def state_dict(self, native: bool = False) -> dict[str, Any]:
        """As torch's, with masters, and the `step` counters where torch keeps them.

        States in 8 bits are float32, and remainders are masters. With `native` both stay, for
        optimizers of faststep alone. Load it after the parameters, which remainders belong to.

        torch keeps counters in CPU memory unless a group is `fused` or `capturable` or the class is
        ASGD; here those of CUDA parameters are on the device, and saving them waits for it.
        """
        with states_on_host(self):
            complete_states(self)
            show = functools.partial(show_as_torch, self, native=native)
            return before_hooks(self, super().state_dict, show)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; beside masters states stay fp32, and without `master_weights` none are kept.

        Masters that a state dict lacks begin as the parameters. States become of `state_dtype`;
        without it they become of the parameter's type, as in torch, but for those in bfloat16 that
        the optimizer has in bfloat16 too. An error leaves everything as it was.

        Raises:
            ValueError: torch's errors; a state in codes lacks its scales or does not fit them.
        """
        made = self._made_from is not None  # a state of that name is the script's
        with states_on_host(self), nullcontext() if made else loading_states(self, self):
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._stepper is not None:  # it would keep small tensors of the old state alive
            self._stepper.forget()

    def __getstate__(self) -> dict[str, Any]:
        wait_for_states(self)
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            "_max_grad_norm": self._max_grad_norm,
            "_keep_grads": self._keep_grads,
            "_is_asked_to_unscale": self._is_asked_to_unscale and self not in unscaling,
            "_keeps_masters": self._keeps_masters,
            "_has_remainders": self._has_remainders,
            "_kinds": self._kinds,
        }


# What `_has_our_step` knows: the step, and the code that torch puts around it.
_STEP = FusedOptimizer.step
_HOOKED = FusedOptimizer.profile_hook_step(_STEP).__code__
