"""Compiles the kernels for one architecture as setup.py does, with line information beside."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nvcc import NVCC, ROOT, run, version

SOURCES = ["cuda/*", "csrc/base/*", "csrc/rules/*"]


def target(arch: str) -> str:
    """The architecture of the PTX that cuda/targets.flags assembles for this one."""
    for line in (ROOT / "cuda/targets.flags").read_text().splitlines():
        found = re.match(r"-gencode=arch=(compute_\w+),code=\[?([\w,]+)", line)
        if found and arch in found[2].split(","):
            return found[1]
    raise SystemExit(f"cuda/targets.flags does not name {arch}")


def compiled(arch: str) -> Path:
    """A cubin of all kernels, made if a source is newer."""
    built = ROOT / f"build/machine/{version()}/{arch}.cubin"
    newest = max(file.stat().st_mtime for glob in SOURCES for file in ROOT.glob(glob))
    if not built.exists() or built.stat().st_mtime < newest:
        built.parent.mkdir(parents=True, exist_ok=True)
        made = built.with_suffix(f".{os.getpid()}")
        code = f"-gencode=arch={target(arch)},code={arch}"
        flags = ["--options-file=cuda/nvcc.flags", "-lineinfo", "-cubin", code]
        run(NVCC, *flags, "-o", str(made), "cuda/kernels.cu")
        made.rename(built)
    return built
