"""nvcc, where it is found, and what it says of the kernels.

`python tests/nvcc.py` records in tests/cuda/resources.json what the kernels use.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
PLACES = [os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in HOMES if home)]
NVCC = shutil.which("nvcc", path=os.pathsep.join(PLACES)) or ""
MADE_OF: dict[str, list[str]] = runpy.run_path(str(ROOT / "cuda/targets.py"))["MADE_OF"]
VIRTUAL = {  # architecture of the PTX that an architecture is assembled from
    arch: virtual for virtual, codes in MADE_OF.items() for arch in codes if arch[:3] == "sm_"
}
ARCHITECTURES = list(VIRTUAL)
SOURCES = ["cuda/*", "csrc/base/*", "csrc/rules/*"]
_ONE_AT_A_TIME = threading.Lock()  # of what several architectures are assembled from
RESOURCES = ROOT / "tests/cuda/resources.json"
needs_nvcc = pytest.mark.skipif(not NVCC, reason="nvcc is not installed")

KERNELS = {
    *("fst_begin", "fst_update", "fst_unscale", "fst_norm"),
    *("fst_scale", "fst_clamp", "fst_accumulate", "fst_loss_scale"),
    *("fst_image", "fst_image_smooth", "fst_cross_entropy"),
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


def ptx(virtual: str = "compute_80") -> Path:
    """The kernels in PTX, with the lines of their source, made if a source is newer."""
    options = ["--options-file=cuda/nvcc.flags", "-lineinfo", "-Werror=all-warnings", "-ptx"]
    with _ONE_AT_A_TIME:
        return _made(f"{virtual}.ptx", [*options, f"-arch={virtual}"], "cuda/kernels.cu")


def cubin(arch: str) -> Path:
    """The machine code for an architecture; what the assembler says lies beside it."""
    code = f"-gencode=arch={VIRTUAL[arch]},code={arch}"
    verbose = "-Xptxas=-v,--warning-as-error"
    options = ["--options-file=cuda/nvcc.flags", "-lineinfo", verbose, "-cubin", code]
    return _made(f"{arch}.cubin", options, str(ptx(VIRTUAL[arch]).relative_to(ROOT)))


def _made(name: str, options: list[str], source: str) -> Path:
    built = ROOT / f"build/machine/{version()}/{name}"
    newest = max(file.stat().st_mtime for glob in SOURCES for file in ROOT.glob(glob))
    if not built.exists() or built.stat().st_mtime < newest:
        built.parent.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}{built.suffix}")
        said = run(NVCC, *options, "-o", str(unfinished), source)
        built.with_suffix(".txt").write_text(said)
        unfinished.rename(built)
    return built


def assembled() -> dict[str, str]:
    """What the assembler says of each architecture."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(cubin, ARCHITECTURES)
        said = [path.with_suffix(".txt").read_text() for path in built]
    return dict(zip(ARCHITECTURES, said, strict=True))


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
