"""What is said of a GPU's settings, from a fake NVML and fake properties of torch."""

import sys
import types
from typing import Any

import pytest
import torch

from faststep.doctor import system
from faststep.doctor.gpu import described

HEALTHY: dict[str, Any] = {
    "ClockInfo": 1980, "MaxClockInfo": 1980, "CurrentClocksThrottleReasons": 0,
    "PowerManagementLimit": 700000, "PowerManagementDefaultLimit": 700000, "PersistenceMode": 1,
}  # fmt: skip


class NVMLError(Exception):
    """NVML's error."""


def said(monkeypatch: pytest.MonkeyPatch, cuda: int = 13000, **changed: Any) -> list[str]:
    """The notes on a GPU of which some figures are changed."""
    uuids: list[str] = []
    nvml: Any = types.SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=uuids.append,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
    )  # fmt: skip
    for name, value in {**HEALTHY, **changed}.items():
        setattr(nvml, f"nvmlDeviceGet{name}", lambda *which, value=value: value)
    if "refuses" in changed:
        nvml.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", None if "missing" in changed else nvml)
    properties = types.SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    param = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    optimizer: Any = types.SimpleNamespace(param_groups=[{"params": [param]}])
    gpu = described([optimizer])
    assert uuids == ([] if {"missing", "refuses"} & changed.keys() else ["GPU-12-34"])
    found = {
        "others": 0.0, "cores": 4, "swapped": 0, "peak": 1 << 20, "switched": {}, "loaders": [],
        "gpu": gpu,
    }  # fmt: skip
    return system.notes(found, {})


def refuse() -> None:
    raise NVMLError("the driver is not loaded")


def test_nothing_is_said_of_a_gpu_that_is_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch) == []
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    assert described([optimizer]) is None


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ClockInfo": 1200, "CurrentClocksThrottleReasons": 0x40}, "1200 of 1980 MHz: it is too"),
        ({"ClockInfo": 1200, "CurrentClocksThrottleReasons": 0x2}, "nvidia-smi -rgc -rac"),
        (
            {"PowerManagementLimit": 300000, "CurrentClocksThrottleReasons": 0x4},
            "may take 300 of 700 W: nvidia-smi -pl 700",
        ),
        ({"PersistenceMode": 0}, "nvidia-smi -pm 1"),
        ({"cuda": 12080}, "driver 570.1 is older than torch's CUDA 13.0"),
        ({"missing": True}, "not known: nvidia-ml-py is not installed"),
        ({"refuses": True}, "not known: NVML says: the driver is not loaded"),
    ],
)
def test_settings_of_a_gpu_that_matter_are_said(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], text: str
) -> None:
    [one] = said(monkeypatch, **changed)
    assert text in one


@pytest.mark.parametrize(
    "changed",
    [
        {"ClockInfo": 300, "CurrentClocksThrottleReasons": 0x1},  # idle
        {"PowerManagementLimit": 300000},  # which it does not reach
    ],
)
def test_settings_that_cost_nothing_are_not_said(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    assert said(monkeypatch, **changed) == []
