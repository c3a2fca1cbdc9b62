"""``python -m faststep info``: what is in use on this machine, and what is missing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import faststep

from .. import _C
from .._torch.library import address_of

HELP = "show versions, the instruction set, the thread pool and the state of CUDA"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``info``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name as the operating system reports it."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _instruction_set(cpu: dict[str, Any]) -> str:
    forced = os.environ.get("FASTSTEP_CPU")
    missing = [level for level in cpu["compiled"] if level not in cpu["supported"]]
    parts = [cpu["isa"] + (f", forced by FASTSTEP_CPU={forced}" if forced else "")]
    parts.append("usable here: " + ", ".join(cpu["supported"]))
    if missing:
        parts.append("compiled but not offered by this processor: " + ", ".join(missing))
    return "; ".join(parts)


def _thread_pool(kind: str) -> str:
    if kind == "torch_parallel_for":
        return f"torch's own intra-op pool, {torch.get_num_threads()} threads (torch_parallel_for)"
    return (
        f"the calling thread only: this torch exports no torch_parallel_for, so its "
        f"{torch.get_num_threads()} threads stay unused"
    )


def _torch_cuda() -> str:
    if torch.version.cuda is None:
        return "none: this torch was built without CUDA"
    if not torch.cuda.is_available():
        return (
            f"none: this torch was built for CUDA {torch.version.cuda} but finds no usable device"
        )
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"CUDA {torch.version.cuda}: {names}"


def _records_in_use() -> str:
    if faststep._layout is not None:
        return "recognized by torch's records of them"
    return f"torch is asked about each in every step: {faststep._why_no_layout}"


def _version_counters() -> str:
    if faststep._layout is not None and faststep._layout.move_version:
        return "moved by libtorch's own function"
    slower = "moved by torch.autograd.graph.increment_version, which takes longer"
    if faststep._layout is None:
        return f"{slower}: the faster way needs torch's records"
    missing = "this torch exports no torch::autograd::impl::bump_version that works"
    return f"{slower}: {missing}"


def _profilers() -> str:
    if address_of("has_callbacks"):
        return "told of a step only while one runs"
    return "told of every step: this torch exports no at::hasCallbacks, which says whether one runs"


def _our_cuda() -> str:
    if not _C.has_kernels():
        return (
            "none: this package was built without nvcc or where no GPU was seen; "
            "FASTSTEP_CUDA=1 pip install . builds kernels for all GPUs"
        )
    try:
        device = _C.device_info(0)
    except RuntimeError as error:
        return f"kernels that cannot be used here: {error}"
    return f"kernels loaded on device 0, {device['update_blocks']} blocks at a time"


def collect() -> dict[str, str]:
    """The lines of ``info``: a title and a text for each."""
    gil = getattr(sys, "_is_gil_enabled", None)
    threading = " (free-threaded)" if gil is not None and not gil() else ""
    cpu = _C.cpu_info()
    return {
        "faststep": f"{version_of('faststep') or 'not packaged'}, {Path(faststep.__file__).parent}",
        "torch": f"{torch.__version__}, CPU kernels {torch.backends.cpu.get_cpu_capability()}",
        "Python": f"{platform.python_version()} {platform.python_implementation()}{threading}",
        "system": platform.platform(),
        "processor": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores usable by this process",
        "instruction set": _instruction_set(dict(cpu)),
        "threads": _thread_pool(cpu["threads"]),
        "unchanged tensors": _records_in_use(),
        "version counters": _version_counters(),
        "profilers": _profilers(),
        "CUDA in faststep": _our_cuda(),
        "CUDA in torch": _torch_cuda(),
    }


def run(arguments: argparse.Namespace) -> None:
    """Print what :func:`collect` finds."""
    facts = collect()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for title, text in facts.items():
        print(f"{title.ljust(width)}  {text}")
