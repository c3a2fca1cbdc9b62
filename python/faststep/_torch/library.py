"""The functions of libtorch that the C side calls, found by name."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch


def address_of_bump_version() -> int:
    """Where libtorch's function is that moves a tensor's version counter; 0 if it has none.

    `void torch::autograd::impl::bump_version(const at::Tensor&)`: what it takes is the address of a
    pointer to a tensor's record.
    """
    return _address_in_libtorch("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE")


def address_of_has_callbacks() -> int:
    """Where libtorch's function is that tells whether anybody listens to what runs; or 0.

    `bool at::hasCallbacks()`, which every operator asks.
    """
    return _address_in_libtorch("_ZN2at12hasCallbacksEv")


def address_of_has_modes() -> int:
    """Where libtorch's function is that tells whether a TorchFunctionMode is active; or 0.

    `bool at::impl::torch_function_mode_enabled()`, which every attribute of a tensor asks.
    """
    return _address_in_libtorch("_ZN2at4impl27torch_function_mode_enabledEv")


def address_of_mode_depth() -> int:
    """Where libtorch's function is that tells how many TorchDispatchModes this thread is in; or 0.

    `int64_t c10::impl::TorchDispatchModeTLS::stack_len()`
    """
    return _address_in_libtorch("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv")


def _address_in_libtorch(symbol: str) -> int:
    try:
        function = ctypes.CDLL(libtorch_cpu_path())[symbol]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def libtorch_cpu_path() -> str:
    """The file that has torch's CPU operators and its thread pool.

    A full path for a torch from a wheel; the bare file name, for the loader to find, where torch
    keeps its libraries elsewhere.
    """
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(
        sys.platform, "libtorch_cpu.so"
    )
    path = Path(torch.__file__).parent / "lib" / name
    return str(path) if path.is_file() else name
