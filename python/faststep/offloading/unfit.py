"""Errors of steps that an offloaded optimizer cannot make."""

from __future__ import annotations

from torch import Tensor

from .._torch.optim import is_capturing


def refuse_capture() -> None:
    """Raise while a CUDA graph is captured, which would not wait for the host."""
    if is_capturing():
        raise RuntimeError(
            "an optimizer that is offloaded cannot be captured into a CUDA graph: the host updates "
            "its parameters. Capture the model's forward and backward of other parameters only"
        )


def unfit(param: Tensor, grad: Tensor) -> NotImplementedError:
    """The error of a gradient that cannot be copied."""
    return NotImplementedError(
        f"offload() cannot copy a gradient of {grad.dtype}, {grad.layout} and shape "
        f"{tuple(grad.shape)} on {grad.device}, of a parameter of {param.dtype}, shape "
        f"{tuple(param.shape)} and strides {param.stride()}: it takes dense gradients of the "
        "parameter's type or float32, and parameters that require one when they are offloaded or "
        "at a step; nothing was updated"
    )
