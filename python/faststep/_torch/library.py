"""The functions of libtorch that the C side calls, found by name."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_SYMBOLS = {
    # void torch::autograd::impl::bump_version(const at::Tensor&), which moves a tensor's version
    # counter: what it takes is the address of a pointer to a tensor's record.
    "bump_version": "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    # bool at::hasCallbacks(): somebody listens to what runs; every operator asks it.
    "has_callbacks": "_ZN2at12hasCallbacksEv",
    # bool at::impl::torch_function_mode_enabled(), which every attribute of a tensor asks.
    "has_modes": "_ZN2at4impl27torch_function_mode_enabledEv",
    # int64_t c10::impl::TorchDispatchModeTLS::stack_len(): the modes that this thread is in.
    "mode_depth": "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
}


def address_of(function: str) -> int:
    """The place of one of these functions of libtorch in memory; 0 if it has none."""
    try:
        found = ctypes.CDLL(libtorch_cpu_path())[_SYMBOLS[function]]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


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
