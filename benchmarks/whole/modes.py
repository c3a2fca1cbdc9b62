"""The ways in which every script is run, and what it needs for that."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rewrite import (
    clipping_inside,
    compiled,
    retaining,
    swapped,
    with_arguments,
)

PLAIN, FUSED, SWAPPED, INSIDE, RUN = "plain", "fused", "swapped", "max_grad_norm", "run"
RETAIN, KEPT = "retain", "swapped, retain"

_BUT_LOSS = "optim,amp,clip,data,memory,threads"
_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Before torch: no block is mapped by itself, and nothing goes back; 64 MiB are taken at a time.
_MALLOPT = """
import ctypes
mallopt = ctypes.CDLL(None).mallopt
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
    assert mallopt(name, 2**31 - 1)
assert mallopt(M_TOP_PAD, 64 << 20)
"""


def _same(source: str) -> str:
    return source


def _swapped_retaining(source: str) -> str:
    return retaining(swapped(source))


def _mallopt(source: str) -> str:
    return f"{_MALLOPT}\n{source}"


def _deepspeed(source: str) -> str:
    name = "deepspeed.ops.adam.DeepSpeedCPUAdam"
    changed = swapped(source, {f"torch.optim.{kind}": name for kind in ("Adam", "AdamW")})
    is_adamw = "AdamW(" in source
    return with_arguments(changed, adamw_mode=is_adamw, weight_decay=0.01 if is_adamw else 0.0)


def _bitsandbytes(source: str) -> str:
    names = {f"torch.optim.{kind}": f"bitsandbytes.optim.{kind}8bit" for kind in ("Adam", "AdamW")}
    return swapped(source, names)


@dataclass(frozen=True)
class Mode:
    """How a script is run.

    Args:
        change: what is changed in it.
        environment: what the environment of its process has more.
        command: between the interpreter and the script.
        needs: a module that must be installed.
        in_process: whether the smoke run can do without a process for it.
    """

    change: Callable[[str], str] = _same
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    needs: str = ""
    in_process: bool = False


MODES = {
    PLAIN: Mode(in_process=True),
    FUSED: Mode(partial(with_arguments, fused=True), in_process=True),
    SWAPPED: Mode(swapped, in_process=True),
    INSIDE: Mode(clipping_inside, in_process=True),
    RUN: Mode(command=("-m", "faststep", "run")),
    RETAIN: Mode(retaining),
    KEPT: Mode(_swapped_retaining),
    "run, torch's loss": Mode(command=("-m", "faststep", "run", "--only", _BUT_LOSS)),
    "mallopt": Mode(_mallopt),
    "mallopt, huge pages": Mode(_mallopt, _HUGE),
    "THP_MEM_ALLOC_ENABLE": Mode(environment={"THP_MEM_ALLOC_ENABLE": "1"}),
    "torch.compile": Mode(compiled),
    "DeepSpeedCPUAdam": Mode(_deepspeed, {"DS_ACCELERATOR": "cpu"}, needs="deepspeed"),
    "bitsandbytes": Mode(_bitsandbytes, needs="bitsandbytes"),
}
ALWAYS = (PLAIN, FUSED, RETAIN, SWAPPED, KEPT, RUN)


def preloading(library: str) -> Mode:
    """Plain torch with another allocator."""
    return Mode(environment={"LD_PRELOAD": library})


def absent(mode: Mode) -> str:
    """Why a mode cannot be measured here; empty if it can."""
    if mode.needs and importlib.util.find_spec(mode.needs) is None:
        return f"{mode.needs} is not installed"
    if mode.command:
        command = [sys.executable, *mode.command, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"this faststep has no `{' '.join(mode.command)}`"
    return ""
