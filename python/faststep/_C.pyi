"""The extension module. Tensors are dense CPU tensors in float32, float64, bfloat16 or float16."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

class TensorError(TypeError):
    """A tensor cannot be used: (group, index, role, kind, detail)."""

class Plan:
    """What an optimizer remembers of its parameters between steps."""

    def step(
        self,
        param_lists: list[list[Tensor]],
        groups: Sequence[tuple[int, tuple[str, ...], bool, tuple[float, ...], bool]],
        state: dict[Tensor, dict[str, Any]],
        fresh: list[tuple[int, int]] | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        measure_found_inf: bool,
        max_norm: float,
        write_grads: bool,
        /,
    ) -> list[tuple[int, int]] | tuple[bool, float | None, list[Tensor], list[Tensor] | None]:
        """One step of all parameters that have a gradient.

        Returns a list of (group, index) whose state is missing, and then nothing was done; else
        (skipped, norm or None, parameters and moments that were written, gradients that were or
        None). `fresh` is such a list whose states were created since. A NaN for `max_norm` means
        no clipping.

        Raises:
            TensorError: a tensor cannot be used; nothing was done.
        """

def clamp(tensors: Sequence[Tensor], limit: float, /) -> None:
    """Clamp all elements to [-limit, limit] in place; NaN stays."""

def collect_grads(params: Sequence[Tensor], /) -> list[Tensor]:
    """The gradients that are not None, in order."""

def cpu_info() -> dict[str, Any]:
    """The instruction set in use ("isa"), those "supported" and "compiled", and the "threads"."""

def fusable(tensors: Sequence[Tensor], /) -> bool:
    """Whether the functions of this module take these tensors."""

def measure(tensors: Sequence[Tensor], inv_scale: float, /) -> tuple[float, bool]:
    """(sum of squares of all elements times inv_scale, whether one is infinite or NaN)."""

def norm(
    tensors: Sequence[Tensor],
    norm_type: float,
    max_norm: float | None = ...,
    only_finite: bool = ...,
    /,
) -> tuple[float, int, bool]:
    """The norm of the tensors' norms, accumulated in double, and clipping by it.

    All elements are multiplied by min(1, max_norm / (norm + 1e-6)), NaN included, if that is not
    1, and unless `only_finite` is set and the norm is not finite. With None, the default, nothing
    is multiplied.

    Returns (norm, dtypes, whether the tensors were written); `dtypes` has a bit for each of
    float32, float64, bfloat16, float16, from the lowest, that occurs.
    """

def rules() -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Per optimizer rule: its number, its states per element, the names of its hyper-parameters."""

def scale(tensors: Sequence[Tensor], factor: float, /) -> None:
    """Multiply all elements by factor in place."""

def unscale(
    tensors: Sequence[Tensor], inv_scale: float, allow_fp16: bool = ..., /
) -> tuple[float, bool]:
    """Multiply by inv_scale in place; returns what `measure` would have.

    Raises:
        ValueError: a tensor is float16 and `allow_fp16` is False; nothing was changed.
    """

def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
    /,
) -> None:
    """Update a loss scale in place; 0-d tensors, float32 and (the trackers) int32."""

def use_threads_of(path: str | None, /) -> bool:
    """Run on the thread pool of the libtorch_cpu at `path`; False if it offers none."""
