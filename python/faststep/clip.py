"""Gradient clipping: torch.nn.utils' functions in one pass to measure and one to scale.

The four functions have the names, arguments, results and errors of torch.nn.utils. What differs:

* The norm is summed in double precision over one fixed tree, so it is the same for any number of
  threads, does not overflow for gradients of about 1e19 and is within 1e-6 of the exact value.
  torch's CPU functions sum in float32. The result is rounded to torch's result dtype at the end.
  The clip coefficient uses the unrounded value; `error_if_nonfinite` looks at the rounded one.
* Gradients are written only where the coefficient changes them.
* After `unscale_` of faststep's GradScaler, large fp32 and fp64 gradients take one pass instead of
  two. It scales by the norm from `unscale_`, and checks each chunk's sum of squares on the way. If
  a sum differs, the gradient was written in between: the norm is computed again, and a second pass
  corrects the gradients. Those that were not written may then be rounded twice. Gradients that
  share a version counter, as views of one buffer do, take two passes.
* CUDA gradients take one launch to measure and one to scale, which reads the norm on the device;
  nothing waits for the device unless `error_if_nonfinite` is set, as in torch.

DTensors are measured and scaled by their local tensors. Their norm is that of all ranks, by one
all-reduce of a few numbers per process group; it is a DTensor that every rank has whole. `Partial`
gradients are reduced first. Every rank must make the call, as with torch's functions; in
`clip_grad_norm_` it may be one without gradients, and if one rank fails the others raise an error
that names it.

Gradients other than strided real CPU or CUDA tensors (sparse, complex, wrapper classes other than
DTensor, integer, CUDA where this build has no kernels), those on several devices, DTensors in norms
of an order of 0 or below, and calls inside torch.compile or a TorchDispatchMode, go to torch's
function of the same name; a list with one such gradient goes there as a whole.

Sums of faststep.accumulate that wait for their division are divided first. Parameters that
faststep.release_gradients has updated in backward raise an error, as no gradient is left to clip.
Neither is looked for inside torch.compile.
"""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as _torch_clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as _torch_clip_grad_value_
from torch.nn.utils import clip_grads_with_norm_ as _torch_clip_grads_with_norm_
from torch.nn.utils import get_total_norm as _torch_get_total_norm

from . import _C
from ._devices import has_kernels_for
from ._torch.dtensor import any_dtensor
from ._torch.modes import is_watched
from ._torch.optim import increment_version
from .grads.clip_shards import clamp_shards, clip_shards, norm_of_shards, scale_shards
from .grads.divide import divide_grads_of, divide_these
from .grads.owners import refuse_clipping
from .grads.total import promoted, returned

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]

_Tensors = list[Tensor] | tuple[Tensor, ...]


def _is_for_torch() -> bool:
    """True if torch's own functions must run, because its operators are traced or watched."""
    return torch.compiler.is_compiling() or is_watched()


def _ready(parameters: Tensor | Iterable[Tensor]) -> _Tensors:
    """The parameters as a sequence, after their gradients were divided where they are sums.

    Raises:
        RuntimeError: gradients were used and freed in backward.
    """
    parameters = _as_sequence(parameters)
    refuse_clipping(parameters)
    divide_grads_of(parameters)
    return parameters


def _as_sequence(tensors: Tensor | Iterable[Tensor]) -> _Tensors:
    if isinstance(tensors, Tensor):
        return [tensors]
    return tensors if isinstance(tensors, (list, tuple)) else list(tensors)


def _norm(
    tensors: _Tensors, norm_type: float, error_if_nonfinite: bool, max_norm: float | None = None
) -> Tensor:
    """The norm, after clipping if `max_norm` is given; TypeError if torch must do it."""
    wide, dtypes = _C.norm(tensors, norm_type)
    norm = torch.tensor(wide, dtype=torch.float64, device="cpu")
    norm = returned(norm, promoted(dtypes), norm_type, error_if_nonfinite)
    if max_norm is not None and _scale(tensors, max_norm, wide):
        increment_version(tensors)
    return norm


def _clip(
    parameters: _Tensors, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor | None:
    """Clip and return the norm; None, with nothing written, if the gradients must go elsewhere."""
    try:
        norm_type, max_norm = float(norm_type), float(max_norm)
        if error_if_nonfinite:  # found before anything is written
            grads = _C.collect_grads(parameters)
            return _norm(grads, norm_type, True, max_norm) if grads else torch.tensor(0.0)
        norm, found, dtypes, written = _C.clip_grads(parameters, norm_type, max_norm)
    except TypeError:
        return None
    if not found:
        return torch.tensor(0.0)
    increment_version(written)
    return torch.tensor(norm, dtype=promoted(dtypes), device="cpu")


def _is_wide(norm: Tensor) -> bool:
    """True if this is a norm in CPU memory whose clip coefficient torch keeps in 32 or 64 bits."""
    return _C.fusable([norm]) and norm.dtype in (torch.float32, torch.float64)


def _for_device(tensor: object) -> bool:
    """True if a list that begins with this tensor goes to the CUDA kernels."""
    return isinstance(tensor, Tensor) and tensor.is_cuda and has_kernels_for(tensor)


def _norm_on_device(
    tensors: _Tensors, norm_type: float, error_if_nonfinite: bool, max_norm: float | None = None
) -> Tensor:
    """The norm, after clipping if `max_norm` is given; waits only for `error_if_nonfinite`."""
    wide = torch.empty((), dtype=torch.float64, device=tensors[0].device)
    dtype = promoted(_C.device_norm(tensors, float(norm_type), wide))
    norm = returned(wide, dtype, float(norm_type), error_if_nonfinite)
    if max_norm is not None:
        _C.device_clip(tensors, max_norm, wide)
        increment_version(tensors)
    return norm


def _scale(grads: _Tensors, max_norm: float, norm: float) -> bool:
    """Multiply by min(1, max_norm / (norm + 1e-6)); NaN counts as below 1, as in torch.clamp.

    True if the gradients were written; TypeError, before that, if they cannot be.
    """
    denominator = norm + 1e-6
    coefficient = max_norm / denominator if denominator else max_norm * math.inf
    if coefficient >= 1.0:
        return False
    _C.scale(grads, coefficient)
    return True


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`.

    Each gradient becomes grad * min(1, max_norm / (norm + 1e-6)). With an infinite norm finite
    elements become 0 and infinite ones NaN; with a NaN norm all become NaN, as in torch.

    Args:
        parameters: tensors of any shape, or one tensor; those without a gradient are left out.
        max_norm: the largest norm allowed, in units of the gradients.
        norm_type: order p of the norm; may be `inf`. Default: 2.0.
        error_if_nonfinite: raise if the returned norm is NaN or infinite. Default: False.
        foreach: accepted for torch's sake, changes nothing for CPU gradients. Default: None.

    Returns:
        The norm before clipping, 0-d, in the promoted dtype of the gradients and on the device of
        the first; `tensor(0.)` if there is no gradient. A DTensor if the first gradient is one.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; or torch's errors
            for gradients that go to torch (see the module's docstring).

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
    arXiv:1211.5063; formula and defaults of `torch.nn.utils.clip_grad_norm_`.
    """
    if _is_for_torch():
        return _torch_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    is_generator = isinstance(parameters, types.GeneratorType)
    parameters = _ready(parameters)
    if is_generator and not parameters:
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2
        )
    # By the parameters: a rank without gradients must not leave the others waiting.
    divided = any_dtensor(parameters)
    norm = None if divided else _clip(parameters, max_norm, norm_type, error_if_nonfinite)
    if norm is not None:
        return norm
    grads = _C.collect_grads(parameters)
    if divided or any_dtensor(grads):
        with contextlib.suppress(TypeError):
            return clip_shards(parameters, float(max_norm), float(norm_type), error_if_nonfinite)
    elif grads and _for_device(grads[0]):
        with contextlib.suppress(TypeError):
            return _norm_on_device(grads, norm_type, error_if_nonfinite, float(max_norm))
    return _torch_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of `tensors`, taken over the norms of the single tensors.

    For p > 0 that is the norm of all elements in one vector. For p = 0 it is, as in torch, the
    number of tensors that have a non-zero element. Gradients that :func:`faststep.accumulate` has
    summed up are divided first.

    Args:
        tensors: tensors of any shape, or one tensor.
        norm_type: order p of the norm; may be `inf`. Default: 2.0.
        error_if_nonfinite: raise if the returned norm is NaN or infinite. Default: False.
        foreach: accepted for torch's sake, changes nothing for CPU tensors. Default: None.

    Returns:
        The norm, 0-d, in the promoted dtype of the tensors and on the device of the first;
        `tensor(0.)` for no tensors. A DTensor if the first tensor is one.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; or torch's errors
            for tensors that go to torch (see the module's docstring).

    Source: `torch.nn.utils.get_total_norm`.
    """
    if _is_for_torch():
        return _torch_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    tensors = _as_sequence(tensors)
    if not tensors:
        return torch.tensor(0.0)
    divide_these(tensors)
    with contextlib.suppress(TypeError):
        if _for_device(tensors[0]):
            return _norm_on_device(tensors, norm_type, error_if_nonfinite)
        return _norm(tensors, float(norm_type), error_if_nonfinite)
    if any_dtensor(tensors):
        with contextlib.suppress(TypeError):
            return norm_of_shards(tensors, float(norm_type), error_if_nonfinite)
    return _torch_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale all gradients by min(1, max_norm / (total_norm + 1e-6)).

    Args:
        parameters: tensors of any shape, or one tensor; those without a gradient are left out.
        max_norm: the largest norm allowed, in units of the gradients.
        total_norm: the norm of the gradients, 0-d. Where it is not a plain tensor in float32 or
            float64 on the gradients' device the call goes to torch's function.
        foreach: accepted for torch's sake, changes nothing for CPU gradients. Default: None.

    Raises:
        TypeError, RuntimeError: torch's errors for a `total_norm` that is not a 0-d tensor and for
            gradients that go to torch (see the module's docstring).

    Source: `torch.nn.utils.clip_grads_with_norm_`.
    """
    if _is_for_torch():
        return _torch_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
    parameters = _ready(parameters)
    grads = _C.collect_grads(parameters)
    on_device = _for_device(total_norm)
    if any_dtensor([total_norm, *grads]):
        with contextlib.suppress(TypeError):
            return scale_shards(grads, float(max_norm), total_norm)
    if not (on_device or _is_wide(total_norm)) or total_norm.dim() != 0:
        return _torch_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
    with contextlib.suppress(TypeError):
        if on_device and grads:
            _C.device_clip(grads, float(max_norm), total_norm)
        if on_device or _scale(grads, float(max_norm), total_norm.item()):
            increment_version(grads)
        return None
    return _torch_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)


def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value]; NaN stays NaN.

    Args:
        parameters: tensors of any shape, or one tensor; those without a gradient are left out.
        clip_value: the largest magnitude allowed, in units of the gradients. A negative or NaN
            value goes to torch's function.
        foreach: accepted for torch's sake, changes nothing for CPU gradients. Default: None.

    Raises:
        RuntimeError: torch's errors, among them the one for a list without any gradient.

    Source: `torch.nn.utils.clip_grad_value_`.
    """
    if _is_for_torch():
        return _torch_clip_grad_value_(parameters, clip_value, foreach)
    limit = float(clip_value)
    parameters = _ready(parameters)
    grads = _C.collect_grads(parameters)
    if not grads or not limit >= 0.0:
        return _torch_clip_grad_value_(parameters, limit, foreach)
    with contextlib.suppress(TypeError):
        (_C.device_clamp if _for_device(grads[0]) else _C.clamp)(grads, limit)
        increment_version(grads)
        return None
    if any_dtensor(grads):
        with contextlib.suppress(TypeError):
            return clamp_shards(parameters, limit)
    return _torch_clip_grad_value_(parameters, limit, foreach)
