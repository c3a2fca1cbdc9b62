"""Compiles the kernels for one architecture as setup.py does, with line information beside."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from nvcc import NVCC, ROOT, run, version

ONE_AT_A_TIME = threading.Lock()
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
    return made(f"{arch}.cubin", f"-gencode=arch={target(arch)},code={arch}", "-cubin", ptx(arch))


def ptx(arch: str) -> Path:
    """What the cubins of several architectures are assembled from."""
    with ONE_AT_A_TIME:
        virtual = target(arch)
        return made(f"{virtual}.ptx", f"-arch={virtual}", "-ptx", ROOT / "cuda/kernels.cu")


def made(name: str, code: str, kind: str, source: Path) -> Path:
    built = ROOT / f"build/machine/{version()}/{name}"
    newest = max(file.stat().st_mtime for glob in SOURCES for file in ROOT.glob(glob))
    if not built.exists() or built.stat().st_mtime < newest:
        built.parent.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}{built.suffix}")
        flags = ["--options-file=cuda/nvcc.flags", "-lineinfo", kind, code]
        run(NVCC, *flags, "-o", str(unfinished), str(source.relative_to(ROOT)))
        unfinished.rename(built)
    return built
