"""torch.amp.GradScaler with fused passes over the gradients."""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._devices import HOST_ONLY, devices_of
from .._torch.dtensor import any_dtensor
from .._torch.optim import OptState, are_torchs, cuda_amp_is_unavailable, is_torchs
from .._torch.ranks import is_distributed
from ..clip import clip_grad_norm_
from ..grads.params import params_of
from ..optim.base import FusedOptimizer
from ..optim.checks import refuse_shards
from ..optim.request import ScalerRequest, check_limit, has_grads, refuse_unchecked, step_with
from .protocol import any_found, can_be_seen, takes_found_inf
from .scale_update import ScaleUpdate, check_bounds, check_hysteresis
from .unscale import UnscalingScaler

# What a step calls of a scaler.
_PASSES = ("unscale_", "_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device")
_passes_of = operator.attrgetter(*_PASSES)


class GradScaler(UnscalingScaler):
    """Loss scaling as torch.amp.GradScaler does it, with fewer passes over the gradients.

    Same arguments, methods, errors and state dict. What goes beyond torch:

    * With faststep's optimizers `step` runs no pass of its own: the optimizer's first pass finds
      overflows (and the norm), its second unscales, clips and updates. Where a script can look
      (hooks on steps, a step of its own or one that it has replaced), the gradients are unscaled
      first, and `optimizer.step` is called only without an overflow, as by torch's scaler. It is
      so for all optimizers that do not unscale in the step (`fused=True`, `max_grad_norm`).
    * `step(optimizer, max_norm=...)` clips by the global norm of the unscaled gradients, with
      any optimizer.
    * `unscale_` takes all dtypes in one pass; bfloat16 gradients are allowed. With scale 1 it
      only looks for overflows and writes nothing.
    * An overflow on several devices at once skips the step of torch's fused optimizers too
      (torch's scaler hands them the sum of the flags, and they skip only for exactly 1).
    * If `optimizer.step` raises, the optimizer's `grad_scale` and `found_inf` are what they were
      before `step`.

    Gradients that are not plain strided real CPU or CUDA tensors take torch's way. On CUDA nothing
    waits for the device, unless a script can look: the overflow is found, the step skipped and the
    scale updated there.

    Args:
        device: device type of the losses. Default: "cuda".
        init_scale: first scale. Default: 65536.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow; above
            1. Default: 2.
        backoff_factor: multiplies the scale after an overflow; below 1. Default: 0.5.
        growth_interval: steps without overflow until the scale grows. Default: 2000.
        enabled: if False, `step` calls `optimizer.step` (after clipping, with `max_norm`) and the
            other methods do nothing. Default: True.
        min_scale: `update()` without `new_scale` keeps the scale at or above this.
            Default: None, no bound.
        max_scale: `update()` without `new_scale` keeps the scale at or below this.
            Default: None, no bound.
        hysteresis: back off only from the n-th overflow since the scale last grew; 1 is torch's
            behaviour (see faststep.amp.scale_update). Default: 1.

    `min_scale`, `max_scale` and `hysteresis` are not part of the state dict: like an optimizer's
    class they belong to the script. With `hysteresis` above 1 the state dict has one more entry,
    `_hysteresis_tracker` (int); torch's GradScaler ignores it, and a state dict without it loads
    as a fresh tracker.

    Raises:
        AssertionError: `growth_factor` or `backoff_factor` out of range, as in torch.
        ValueError: a bound that is not finite and positive, `min_scale` above `max_scale`,
            `init_scale` outside the bounds, or `hysteresis` below 1.
        TypeError: `hysteresis` is not an int.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; hysteresis and
    min_scale as in Megatron-LM.
    """

    # Of a scaler that torch's class has set up: see faststep.run.
    _min_scale: float | None = None
    _max_scale: float | None = None
    _hysteresis: int = 1
    _init_hysteresis_tracker: int = 1
    _hysteresis_tracker: Tensor | None = None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        check_bounds(init_scale, min_scale, max_scale)
        check_hysteresis(hysteresis)
        if enabled and device == "cuda" and cuda_amp_is_unavailable():
            # torch's text; warned here because its stacklevel would name this file.
            warnings.warn(
                "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
                stacklevel=2,
            )
            enabled = False
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = self._init_hysteresis_tracker = hysteresis

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        if self._hysteresis > 1:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
            )

    def step(
        self, optimizer: Optimizer, *args: Any, max_norm: float | None = None, **kwargs: Any
    ) -> float | None:
        """Unscale the gradients, check them, clip them if asked, and step the optimizer.

        The step is skipped if a gradient is infinite or NaN. As in torch, gradients that
        `unscale_` has already checked are not checked again.

        Args:
            optimizer: any optimizer.
            *args, **kwargs: go to `optimizer.step`.
            max_norm: clip the unscaled gradients of all parameters of `optimizer` to this global
                2-norm. faststep's optimizers do it inside the step, without a pass more; for
                others the gradients are unscaled and clipped in place first. Default: None, no
                clipping.

        Returns:
            What `optimizer.step` returns, or None where it was not called.

        Raises:
            RuntimeError: second step since `update`, keyword `closure` with a scaler that is
                enabled, or a closure together with `max_norm` for an optimizer not of faststep.
            AssertionError: `scale` was never called, or no gradient was checked.
            ValueError: float16 gradients, where they must be unscaled before the step; a `max_norm`
                that is negative or NaN.
        """
        check_limit("max_norm", max_norm)
        return self._step(optimizer, max_norm, args, kwargs)

    def _step(
        self,
        optimizer: Optimizer,
        max_norm: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> float | None:
        fused = hasattr(type(optimizer), "_asked")  # faststep's, sharded or not
        if max_norm is not None and not fused:
            self._clip_before_step(optimizer, max_norm, args, kwargs)
            max_norm = None
        if not self._enabled:
            lent = {} if max_norm is None else {"_asked": ScalerRequest(max_norm=max_norm)}
            result: float | None = step_with(optimizer, lent, args, kwargs)
            return result
        if (
            max_norm is not None
            or takes_found_inf(optimizer)
            or (fused and not isinstance(optimizer, FusedOptimizer))
            or (isinstance(optimizer, FusedOptimizer) and optimizer._is_divided_by_fsdp1())
        ):
            return self._step_unscaled(optimizer, fused, max_norm, args, kwargs)
        if not isinstance(optimizer, FusedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if (
            args
            or kwargs
            or not self._has_torchs_passes()
            or can_be_seen(optimizer)
            or (is_distributed() and any_dtensor(params_of(optimizer)))  # all ranks go one way
        ):
            return self._step_as_torch(optimizer, args, kwargs)
        if (optimizer._devices or devices_of(params_of(optimizer))) != HOST_ONLY:
            return self._step_unscaled(optimizer, fused, None, args, kwargs, refuses_fp16=True)
        self._step_unseen(optimizer)
        return None

    def _step_as_torch(
        self, optimizer: FusedOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        """Unscale, and call `step` unless a gradient is infinite or NaN."""
        result = super().step(optimizer, *args, **kwargs)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        optimizer._skipped = any_found(found, next(iter(found)).device)
        return result

    def _step_unseen(self, optimizer: FusedOptimizer) -> None:
        """The same in host memory where nobody sees it: one call looks, unscales and updates."""
        state, scale = self._begin_step(optimizer, {})
        if state["stage"] is not OptState.READY or not has_grads(optimizer):
            self._step_as_torch(optimizer, (), {})
            return
        found = torch.zeros((), dtype=torch.float32, device="cpu")
        if not optimizer._try_step(scale, found):
            self._step_as_torch(optimizer, (), {})
            return
        state["found_inf_per_device"] = {found.device: found}
        if "step" in vars(optimizer):  # a scheduler notes the call
            step_with(optimizer, {"_fused_step": lambda *_: None}, (), {})
        state["stage"] = OptState.STEPPED

    def _step_unscaled(
        self,
        optimizer: Optimizer,
        fused: bool,
        max_norm: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refuses_fp16: bool = False,
    ) -> float | None:
        """The step of an optimizer that unscales by itself; one that is `fused` measures too."""
        state, scale = self._begin_step(optimizer, kwargs)
        before: Tensor | None = getattr(optimizer, "grad_scale", None)
        ready = state["stage"] is OptState.READY
        measures = fused and ready and self._has_torchs_passes()
        lent: dict[str, Any] = {"grad_scale": before}
        if ready and fused and before is None:
            lent["grad_scale"] = scale  # which torch multiplies by 1: one launch more on a device
        elif ready:
            lent["grad_scale"] = scale * (1 if before is None else before)
        elif not state["found_inf_per_device"]:
            refuse_unchecked(optimizer)
        if measures:
            lent["found_inf"] = torch.zeros((), dtype=torch.float32, device=scale.device)
            had_grads = has_grads(optimizer)
        else:
            if ready:
                self._check_inf_per_device(optimizer)
            found = state["found_inf_per_device"].values()
            lent["found_inf"] = any_found(found, scale.device)
        if measures or max_norm is not None:
            lent["_asked"] = ScalerRequest(
                looks_for_inf=measures, refuses_fp16=refuses_fp16, max_norm=max_norm
            )
        result: float | None = step_with(optimizer, lent, args, kwargs)
        # Without gradients nothing was checked, and torch's update() says so. A closure may have
        # made the first ones, or another rank have some.
        if measures and (
            had_grads
            or has_grads(optimizer)
            or (isinstance(optimizer, FusedOptimizer) and optimizer._ranks_have_grads())
        ):
            state["found_inf_per_device"] = {lent["found_inf"].device: lent["found_inf"]}
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale from the overflows of this iteration, or set it to `new_scale`.

        Does not wait for the device and does not write to any recorded found-inf tensor.

        Args:
            new_scale: a float or a 1-element tensor without requires_grad on the scaler's device
                type; taken as it is, without regard to the bounds. Default: None.

        Raises:
            AssertionError: `scale` was never called, no gradient was checked since the last
                update, or `new_scale` is a tensor of another kind.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            super().update(new_scale)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found = [
            found_inf.to(device=scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]
        if not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        rule = ScaleUpdate(
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._min_scale,
            self._max_scale,
            self._hysteresis,
        )
        combined = sum(found[1:], start=found[0])
        rule.update(scale, growth_tracker, self._hysteresis_tracker, combined)
        states: Any = self._per_optimizer_states
        self._per_optimizer_states = defaultdict(states.default_factory)

    def _get_hysteresis_tracker(self) -> int:
        if self._hysteresis_tracker is None:
            return self._init_hysteresis_tracker
        return int(self._hysteresis_tracker.item())

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, or none if disabled; `_hysteresis_tracker` with `hysteresis` > 1.

        Waits for the device.
        """
        state = super().state_dict()
        if self._enabled and self._hysteresis > 1:
            state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.amp.GradScaler.

        Args:
            state_dict: what `state_dict` returned; without `_hysteresis_tracker` that tracker
                starts anew.

        Raises:
            RuntimeError: the state dict is empty, and this scaler is enabled.
        """
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        left = min(int(state_dict.get("_hysteresis_tracker", self._hysteresis)), self._hysteresis)
        self._init_hysteresis_tracker = left
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(left)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        return state

    def _begin_step(
        self, optimizer: Optimizer, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Tensor]:
        """Raise torch's errors for a step out of order; return what is known, and the scale."""
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        return state, scale

    def _has_torchs_passes(self) -> bool:
        """True if a script has replaced nothing of what a step calls of the scaler."""
        if not are_torchs(*_passes_of(type(self)), *_passes_of(torch.amp.GradScaler)):
            return False
        own = vars(self)
        return own.keys().isdisjoint(_PASSES) or all(is_torchs(own.get(name)) for name in _PASSES)

    def _clip_before_step(
        self, optimizer: Optimizer, max_norm: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Unscale and clip in place, for an optimizer that cannot clip inside its step."""
        refuse_shards(optimizer)
        state = self._begin_step(optimizer, kwargs)[0] if self._enabled else None
        if any(callable(value) for value in (*args, kwargs.get("closure"))):
            raise RuntimeError(
                "max_norm cannot be combined with a closure for "
                f"{type(optimizer).__name__}: the closure computes the gradients after they are "
                "clipped. Clip inside the closure instead, or use an optimizer of faststep.optim."
            )
        if state is not None and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        clip_grad_norm_(params_of(optimizer), max_norm)
