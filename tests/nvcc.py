"""nvcc, where it is found, and what it says of the kernels.

`python tests/nvcc.py` records in tests/cuda/resources.json what the kernels use.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
PLACES = [os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in HOMES if home)]
NVCC = shutil.which("nvcc", path=os.pathsep.join(PLACES)) or ""
ARCHITECTURES = re.findall(r"\bsm_\d+\b", (ROOT / "cuda/targets.flags").read_text())
VIRTUAL = {  # architecture of the PTX that an architecture is assembled from
    arch: virtual
    for virtual, code in re.findall(
        r"-gencode=arch=(compute_\d+),code=\[?(\S+)", (ROOT / "cuda/targets.flags").read_text()
    )
    for arch in re.findall(r"\bsm_\d+\b", code)
}
RESOURCES = ROOT / "tests/cuda/resources.json"
needs_nvcc = pytest.mark.skipif(not NVCC, reason="nvcc is not installed")

KERNELS = {
    *("fst_begin", "fst_update", "fst_unscale", "fst_norm"),
    *("fst_scale", "fst_clamp", "fst_accumulate", "fst_loss_scale"),
    *("fst_image", "fst_image_smooth"),
}
# What the assembler says of a kernel.
ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*\n.*\n\s+\d+ bytes stack frame.*\n"
    r".*Used (\d+) registers(?:.*?(\d+) bytes smem)?"
)


def run(*command: str) -> str:
    """What a command says; a failure of it, or a warning, fails the test."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done.stdout + done.stderr


def version() -> str:
    return re.findall(r"\bV(\d+\.\d+\.\d+)", run(NVCC, "--version"))[0]


def ptx(out: Path, fmad: bool = False, virtual: str = "compute_80") -> str:
    flags = (ROOT / "cuda/nvcc.flags").read_text().split()
    options = [f"--fmad={fmad}".lower() if flag == "--fmad=false" else flag for flag in flags]
    options += ["-ptx", f"-arch={virtual}", "-Werror=all-warnings", "-lineinfo"]
    run(NVCC, *options, "-o", str(out), "cuda/kernels.cu")
    return out.read_text()


def assembled() -> dict[str, str]:
    """What the assembler says of each architecture."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for virtual in {*VIRTUAL.values()}:
            ptx(Path(folder) / f"{virtual}.ptx", virtual=virtual)

        def assemble(arch: str) -> str:
            source = f"{folder}/{VIRTUAL[arch]}.ptx"
            verbose = "-Xptxas=-v,--warning-as-error"
            out = f"{folder}/{arch}.cubin"
            return run(NVCC, "-cubin", f"-arch={arch}", verbose, "-o", out, source)

        return dict(zip(ARCHITECTURES, pool.map(assemble, ARCHITECTURES), strict=True))


def resources(said: dict[str, str]) -> dict[str, dict[str, dict[str, int]]]:
    """Registers of a thread and bytes of shared memory of a block, by architecture and kernel."""
    return {
        arch: {
            name: {"registers": int(registers), "shared": int(shared or 0)}
            for name, registers, shared in sorted(ENTRY.findall(text))
        }
        for arch, text in said.items()
    }


if __name__ == "__main__":
    table = {"nvcc": version(), "kernels": resources(assembled())}
    text = re.sub(r"{\s+(\"reg.*),\s+(\"shared.*)\s+}", r"{\1, \2}", json.dumps(table, indent=1))
    RESOURCES.write_text(text + "\n")
