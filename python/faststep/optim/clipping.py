"""The options of the fused optimizers beside torch's, and what their last step found."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._torch.compiler import uncompiled
from ..grads.norm import BackwardNorm
from .checks import check_limit
from .masters import keeps_masters
from .wrapped import PassesOn

__all__ = ["ClippedOptimizer"]


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


class ClippedOptimizer(PassesOn, torch.optim.Optimizer):
    """The options, of which `master_weights` is masters.py's, and what a step tells of the norm."""

    # Class attributes stand in where pickle and deepcopy restore an optimizer without __init__.
    _max_grad_norm: float | None = None
    _keep_grads: bool = False
    _last_norm: float | Tensor | None = None
    _skipped: bool | Tensor = False
    _norm_in_backward: bool | DistributedDataParallel = False
    _backward_norm: BackwardNorm | None = None
    _keeps_masters: bool = False  # of bf16 and fp16 parameters: see masters.py

    @property
    def _devices(self) -> tuple[int, ...]:
        """Of the parameters, as the C side calls them; empty before the first step."""
        raise NotImplementedError

    def _set_options(
        self,
        max_grad_norm: float | None,
        keep_grads: bool,
        norm_in_backward: bool | DistributedDataParallel,
        master_weights: object,
    ) -> None:
        check_limit("max_grad_norm", max_grad_norm)
        self._max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self._keep_grads = bool(keep_grads)
        self._norm_in_backward = _wanted(norm_in_backward)
        self._keeps_masters = keeps_masters(master_weights)

    @property
    def max_grad_norm(self) -> float | None:
        """The global 2-norm to which every step clips the gradients; None, or may be set."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, limit: float | None) -> None:
        self._max_grad_norm = limit

    @property
    def keep_grads(self) -> bool:
        """Whether a step that clips writes unscaled and clipped gradients back; may be set."""
        return self._keep_grads

    @keep_grads.setter
    def keep_grads(self, kept: bool) -> None:
        self._keep_grads = kept

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
        step measures itself. Under DistributedDataParallel set the model instead of True. A
        communication hook then measures each bucket as soon as it is reduced. It replaces the
        model's own reduction, with the same bits, and cannot be removed. A copied optimizer gets
        True instead of the model. TypeError for a model that has such a hook already, or with
        `find_unused_parameters` or `static_graph`.

        A step with another scale than the step before runs its own measuring pass.
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

        "changed": a gradient was written or replaced after its hook. "unmeasured": it had no hook
        yet, or was set by hand. "scale": the loss scale is not that of the step before, or the
        divisor of an accumulation window became known after the last backward. "distributed": there
        are several ranks, and no model was given. "device": parameters are on CUDA.
        """
        return {} if self._backward_norm is None else dict(self._backward_norm.fallbacks)

    def _measured_in_backward(self) -> BackwardNorm | None:
        """The hooks, if they are wanted; a copy of an optimizer sets its own when it steps."""
        wanted = self._norm_in_backward
        if wanted is not False and self._backward_norm is None:
            self._backward_norm = BackwardNorm(self, None if wanted is True else wanted)
        return self._backward_norm
