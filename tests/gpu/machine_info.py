"""Says what this machine is; fails where nothing can be tested on it: python -m gpu.machine_info"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import torch

import faststep
from faststep import _C
from faststep.cli.info import collect

from .common import REHEARSAL, why_not


def driver_says() -> str:
    """nvidia-smi's table, or why there is none."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return "nvidia-smi: not found"
    done = subprocess.run([found], capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout + done.stderr).strip()


def device_line(ordinal: int) -> str:
    properties = torch.cuda.get_device_properties(ordinal)
    kernels = _C.device_info(ordinal)
    return (
        f"device {ordinal}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"{properties.multi_processor_count} multiprocessors, "
        f"sm_{properties.major}{properties.minor}; kernels loaded: {kernels}"
    )


def main() -> int:
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {faststep.__file__}")
    for title, text in collect().items():
        print(f"{title}: {text}")
    print(driver_says(), flush=True)
    if reason := why_not():
        print(reason)
        return 1
    for ordinal in range(0 if REHEARSAL else torch.cuda.device_count()):
        print(device_line(ordinal))
    return 0


if __name__ == "__main__":
    sys.exit(main())
