"""faststep makes ordinary PyTorch training scripts faster without changing what they compute."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _C
from ._torch import records as _records
from ._torch.library import address_of, libtorch_cpu_path
from ._torch.streams import lasts

_C.use_threads_of(libtorch_cpu_path())
_C.use_callbacks(address_of("has_callbacks"))
_C.use_modes(address_of("has_modes"))
_C.use_streams(lasts)
_layout, _why_no_layout = None, "FASTSTEP_RECORDS=0 says so"
if os.environ.get("FASTSTEP_RECORDS") != "0":
    _layout, _why_no_layout = _records.find()
if _layout is not None:
    _C.use_records(*_layout)
_KERNELS = Path(__file__).with_name("kernels.fatbin")  # missing in a build for the CPU
if _KERNELS.is_file():
    _C.use_kernels_of(str(_KERNELS))

from . import amp, data, memory, nn, optim, zero  # noqa: E402
from .accumulation import accumulate  # noqa: E402
from .clip import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm  # noqa: E402
from .offloading import offload  # noqa: E402
from .release import release_gradients  # noqa: E402

if TYPE_CHECKING:
    from .doctor.profile import profile
else:

    def __getattr__(name: str) -> Any:
        """`profile`, which is imported when it is used: it is seldom, and needs all of `run`."""
        if name != "profile":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .doctor.profile import profile

        return profile


__version__ = "0.1.0"

memory._begin()

__all__ = [
    "accumulate",
    "amp",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "data",
    "get_total_norm",
    "memory",
    "nn",
    "offload",
    "optim",
    "profile",
    "release_gradients",
    "zero",
]
