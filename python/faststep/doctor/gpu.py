"""Settings of a GPU that slow a script, as torch and NVML say them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

SLOWED = 0.9  # of the highest clock, and of the usual limit of power
# Why a clock is below the highest, by the bits of NVML, with the remedy.
_REASONS = {
    0x2: "somebody has set its clocks: nvidia-smi -rgc -rac",
    0x4: "it takes as much power as it may",
    0x8 | 0x20 | 0x40: "it is too hot: look at fans and at the air around",
    0x80: "its power supply gives no more: look at the cables and the server's limit",
}
_POWER = 0x4


def described(optimizers: Iterable[Optimizer]) -> dict[str, Any] | None:
    """The first GPU with parameters of a script, while it is at work; None if there is none."""
    params = [one for each in optimizers for group in each.param_groups for one in group["params"]]
    device = next((one.device for one in params if one.is_cuda), None)
    if device is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "cuda": torch.version.cuda,
        **_by_nvml(f"GPU-{properties.uuid}"),
    }


def _by_nvml(uuid: str) -> dict[str, Any]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {"unknown": "nvidia-ml-py is not installed"}
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return {
            "clock": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "highest": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            "limit": nvml.nvmlDeviceGetPowerManagementLimit(gpu),
            "usual": nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
            "persistent": bool(nvml.nvmlDeviceGetPersistenceMode(gpu)),
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "newest": nvml.nvmlSystemGetCudaDriverVersion_v2(),
        }
    except nvml.NVMLError as error:
        return {"unknown": f"NVML says: {error}"}


def notes_on_gpu(found: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each setting that matters to a script, with its remedy."""
    gpu = found["gpu"]
    if gpu is None:
        return
    if "unknown" in gpu:
        yield f"clocks, power and driver of the GPU are not known: {gpu['unknown']}"
        return
    if gpu["clock"] < SLOWED * gpu["highest"]:
        for bits, text in _REASONS.items():
            if gpu["reasons"] & bits:
                yield f"the GPU runs at {gpu['clock']} of {gpu['highest']} MHz: {text}"
    if gpu["reasons"] & _POWER and gpu["limit"] < SLOWED * gpu["usual"]:
        watts = gpu["usual"] // 1000
        yield f"the GPU may take {gpu['limit'] // 1000} of {watts} W: nvidia-smi -pl {watts}"
    major, minor = map(int, (gpu["cuda"] or "0.0").split(".")[:2])
    if gpu["newest"] < 1000 * major + 10 * minor:
        yield (
            f"driver {gpu['driver']} is older than torch's CUDA {gpu['cuda']}, some of which it "
            "lacks: take a newer driver"
        )
    if not gpu["persistent"]:
        yield "each start of the script waits for the GPU's driver: nvidia-smi -pm 1"
