"""The kernels of every architecture, and those of the devices that are here."""

import re
import shutil
import subprocess
from importlib.resources import files

import pytest
import torch

from faststep import _C
from nvcc import KERNELS, PLACES

from .common import REHEARSAL

CUOBJDUMP = shutil.which("cuobjdump", path=":".join(PLACES))


def test_every_device_has_its_kernels() -> None:
    for ordinal in range(torch.cuda.device_count()):
        found = _C.device_info(ordinal)
        assert found["device"] == ordinal
        assert found["update_blocks"] >= 1
        if not REHEARSAL:
            multiprocessors = torch.cuda.get_device_properties(ordinal).multi_processor_count
            assert found["update_blocks"] % multiprocessors == 0


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="device"):
        _C.device_info(torch.cuda.device_count())


def kernels_by_architecture(listing: str) -> dict[str, set[str]]:
    """What cuobjdump lists: the functions of each image of machine code."""
    found: dict[str, set[str]] = {}
    arch = ""
    for line in listing.splitlines():
        if match := re.search(r"\barch = (sm_\d+)", line):
            arch = match[1]
            found.setdefault(arch, set())
        elif match := re.search(r"\bFunction (\w+)", line):
            found.setdefault(arch, set()).add(match[1])
    return found


@pytest.mark.skipif(REHEARSAL or not CUOBJDUMP, reason="cuobjdump is missing")
def test_every_architecture_has_every_kernel() -> None:
    fatbin = str(files("faststep").joinpath("kernels.fatbin"))
    command = [str(CUOBJDUMP), "--dump-resource-usage", fatbin]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = kernels_by_architecture(done.stdout)
    assert found
    for arch, kernels in found.items():
        assert kernels >= KERNELS, f"{arch}: {kernels}"
