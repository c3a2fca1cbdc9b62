"""The kernels as they are built: for every architecture, without warnings, spills or surprises."""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import setuptools
from setuptools.errors import CompileError

from device import fake
from nvcc import (
    ARCHITECTURES,
    ENTRY,
    KERNELS,
    MADE_OF,
    NVCC,
    RESOURCES,
    ROOT,
    assembled,
    needs_nvcc,
    version,
)
from nvcc import resources as resources_in

RECORDED = json.loads(RESOURCES.read_text())
FATBIN_MAGIC, PTX, ELF = 0xBA55ED50, 1, 2


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return assembled()


@needs_nvcc
def test_every_architecture_is_assembled(said: dict[str, str]) -> None:
    assert {"sm_75", "sm_80", "sm_90", "sm_100", "sm_120"} <= set(ARCHITECTURES)
    for arch, text in said.items():
        assert {name for name, *_ in ENTRY.findall(text)} == KERNELS, arch


@needs_nvcc
def test_nothing_is_spilled_and_nothing_is_on_the_stack(said: dict[str, str]) -> None:
    numbers = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill lo")
    for arch, text in said.items():
        found = numbers.findall(text)
        assert len(found) > len(KERNELS)
        assert set(found) == {("0", "0", "0")}, f"{arch}\n{text}"


@needs_nvcc
def test_resources_are_as_recorded(said: dict[str, str]) -> None:
    """Another nvcc may choose otherwise, within limits; `python tests/nvcc.py` records anew."""
    found = resources_in(said)
    if version() == RECORDED["nvcc"]:
        assert found == RECORDED["kernels"]
    used = [kernel for table in found.values() for kernel in table.values()]
    assert max(kernel["registers"] for kernel in used) <= 128  # two blocks per multiprocessor
    assert max(kernel["shared"] for kernel in used) <= 8 << 10


def test_the_record_is_whole() -> None:
    assert set(RECORDED["kernels"]) == set(ARCHITECTURES)
    assert all(set(table) == KERNELS for table in RECORDED["kernels"].values())


def images(data: bytes) -> dict[tuple[int, int], int]:
    """What a fatbin holds, by kind and architecture: the major version of its format."""
    magic, _, header, size = struct.unpack_from("<IHHQ", data)
    assert magic == FATBIN_MAGIC
    assert len(data) >= header + size
    found, at = {}, header
    while at < header + size:
        kind, _, own_header, own_size, major = struct.unpack_from("<HHIQ10xH", data, at)
        found[kind, struct.unpack_from("<I", data, at + 28)[0]] = major
        at += own_header + own_size
    return found


def holds_every_architecture(data: bytes) -> None:
    numbers = [int(arch.removeprefix("sm_")) for arch in ARCHITECTURES]
    found = images(data)
    assert set(found) == {
        *((ELF, number) for number in numbers),
        (PTX, min(numbers)),  # for devices between those that have machine code
        (PTX, max(numbers)),  # for newer ones, with what only they have
    }
    cuda = int(version().split(".")[0])
    assert {major + 4 for (kind, _), major in found.items() if kind == PTX} == {cuda}  # fatbin.c


@pytest.mark.skipif(os.environ.get("FASTSTEP_CUDA") != "1", reason="no FASTSTEP_CUDA=1, or no nvcc")
def test_the_package_holds_an_image_for_every_architecture() -> None:
    data = files("faststep").joinpath("kernels.fatbin").read_bytes()
    holds_every_architecture(data)
    assert len(data) < 2_200_000  # compressed: the wheel adds it


class Driver:
    """Stands in for libcuda.so.1, with GPUs of these compute capabilities."""

    def __init__(self, *gpus: int, error: int = 0) -> None:
        self.gpus, self.error = gpus, error

    def __call__(self, name: str) -> Driver:
        assert name == "libcuda.so.1"
        return self

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.error

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0 if ordinal < len(self.gpus) else 101

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:  # noqa: N802
        value._obj.value = divmod(self.gpus[device.value], 10)[which - 75]
        return 0


def no_driver(name: str) -> Driver:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the kernels are made of, an nvcc that only notes that it was called, and one
    GPU."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "cuda", tmp_path / "cuda")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n'
        f"[ -e {tmp_path}/broken ] && exit 1\n"
        'while [ "$1" != -o ]; do shift; done\necho built >"$2"\n'
    )
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(ctypes, "CDLL", Driver(90))
    return tmp_path


def build(monkeypatch: pytest.MonkeyPatch, cuda: str = "", nvcc: bool = True) -> bool:
    """Builds the kernels alone; whether there are any afterwards."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("FASTSTEP_CUDA", cuda)
    module: dict[str, Any] = runpy.run_path("setup.py")
    command = module["BuildExt"](setuptools.Distribution())
    command.force = False
    if not nvcc:
        command.build_kernels.__func__.__globals__["nvcc"] = lambda: None
    command.build_kernels("package/kernels.fatbin")
    return Path("package/kernels.fatbin").exists()


def calls(tree: Path) -> list[str]:
    return (tree / "calls").read_text().splitlines() if (tree / "calls").exists() else []


def codes(call: str) -> list[str]:
    """What a call of nvcc compiles for."""
    return re.findall(r"-gencode=\S+", call)


ALL = [f"-gencode=arch={ptx},code=[{','.join(made)}]" for ptx, made in MADE_OF.items()]


def test_kernels_are_built_again_only_when_a_source_changed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(monkeypatch)
    assert build(monkeypatch)
    assert len(calls(tree)) == 1
    assert "--options-file=cuda/nvcc.flags" in calls(tree)[0]
    sources = ["cuda/update_chunk.h", "cuda/nvcc.flags", "csrc/rules/adam.h", "csrc/base/device.h"]
    for count, source in enumerate(sources, 2):
        later = (tree / "build/kernels/sm_90.fatbin").stat().st_mtime + 1
        os.utime(tree / source, (later, later))
        assert build(monkeypatch)
        assert len(calls(tree)) == count
        os.utime(tree / source, (0, 0))
    os.utime(tree / "csrc/cpu/update.h", (2**31, 2**31))
    assert build(monkeypatch)
    assert len(calls(tree)) == 1 + len(sources)


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        ((90,), ["-gencode=arch=compute_80,code=[compute_80,sm_90]"]),
        ((75,), ["-gencode=arch=compute_75,code=[compute_75,sm_75]"]),
        ((89, 86, 89), ["-gencode=arch=compute_80,code=[compute_80,sm_80]"]),
        ((110,), ["-gencode=arch=compute_80,code=[compute_80,sm_100]"]),
        ((140,), ["-gencode=arch=compute_80,code=[compute_80,sm_120]"]),
        (
            (120, 70, 75),
            [
                "-gencode=arch=compute_75,code=[compute_75,sm_75]",
                "-gencode=arch=compute_80,code=[compute_80,sm_120]",
            ],
        ),
        ((70,), []),
        ((), []),
    ],
)
def test_kernels_are_built_for_the_gpus_that_are_seen(
    tree: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], wanted: list[str]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Driver(*gpus))
    assert build(monkeypatch) == bool(wanted)
    assert [codes(call) for call in calls(tree)] == [wanted] * bool(wanted)


@pytest.mark.parametrize("driver", [no_driver, Driver(90, error=100)])
def test_a_machine_without_gpu_gets_kernels_on_demand(
    tree: Path, monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    assert build(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert not build(monkeypatch)
    assert build(monkeypatch, cuda="1")
    assert [codes(call) for call in calls(tree)][1:] == [ALL]


def test_kernels_of_other_architectures_do_not_stay(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpus, cuda, count in [((90,), "", 1), ((90,), "1", 2), ((80,), "", 3), ((90,), "", 3)]:
        monkeypatch.setattr(ctypes, "CDLL", Driver(*gpus))
        assert build(monkeypatch, cuda=cuda)
        assert len(calls(tree)) == count
    used, built = (tree / name for name in ("package/kernels.fatbin", "build/kernels/sm_90.fatbin"))
    built.write_text("of sm_90\n")
    assert build(monkeypatch)
    assert used.read_text() == "of sm_90\n"


def test_the_driver_is_asked_as_it_wants_to_be(tmp_path: Path) -> None:
    fake.build(fake.DRIVER)
    code = f"""
import ctypes, runpy, setuptools
setuptools.setup = lambda **_: None
driver = ctypes.CDLL({str(ROOT / fake.DRIVER)!r})  # found by its name from here on
driver.fake_cuda_machine(2, 89, 13000)
print(runpy.run_path("setup.py")["gpus"]())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[89, 89]\n"


def test_kernels_are_left_out_on_demand(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(monkeypatch)
    assert not build(monkeypatch, cuda="0")
    assert len(calls(tree)) == 1


def test_without_nvcc_there_are_no_kernels(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build(monkeypatch, nvcc=False)
    with pytest.raises(CompileError, match="nvcc is neither in PATH nor in CUDA_HOME"):
        build(monkeypatch, cuda="1", nvcc=False)


def test_an_nvcc_that_fails(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "broken").touch()
    for cuda in ("", "1"):
        with pytest.raises(CompileError, match=r"nvcc failed; FASTSTEP_CUDA=0 builds no CUDA"):
            build(monkeypatch, cuda=cuda)
    assert len(calls(tree)) == 2


@needs_nvcc
def test_nvcc_is_found_outside_the_path(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes the options of a build for all architectures: of a kernel that does nothing."""
    (tree / "cuda/kernels.cu").write_text('extern "C" __global__ void nothing() {}\n')
    monkeypatch.setenv("CUDA_HOME", str(Path(NVCC).resolve().parents[1]))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert build(monkeypatch, cuda="1")
    holds_every_architecture(Path("package/kernels.fatbin").read_bytes())


def test_kernels_that_were_compiled_before(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken as they are, unless there are to be none."""
    made = tree / "made.fatbin"
    made.write_text("made")
    monkeypatch.setenv("FASTSTEP_FATBIN", str(made))
    assert not build(monkeypatch, cuda="0")
    assert build(monkeypatch, cuda="1")
    assert Path("package/kernels.fatbin").read_text() == "made"
    assert calls(tree) == []


def test_kernels_for_cuda_12(tree: Path) -> None:
    """The older assembler gets PTX of its version for each architecture of the wheel."""
    last = "for file; do :; done\n"
    tools = {
        "nvcc": last + 'printf "// %s\\n.version 9.0\\n.target odd\\n" "$*" >"$file"\n',
        "ptxas": last + f'echo "$*" >>{tree}/calls; cat "$4" >"$file"\n',
        "fatbinary": f'echo "$*" >>{tree}/calls\n',
    }
    for name, code in tools.items():
        path = tree / "bin" / name
        path.write_text("#!/bin/sh\n" + code)
        path.chmod(0o755)
    script, ptxas = ROOT / ".ci" / "kernels-for-cuda-12", tree / "bin" / "ptxas"
    subprocess.run([sys.executable, script, "made/it.fatbin", ptxas], check=True)
    *assembled_for, bound = calls(tree)
    asked = re.findall(r"-arch=(sm_\d+)", " ".join(assembled_for))
    assert sorted(asked) == sorted(ARCHITECTURES)
    assert all("--fmad false" in call for call in assembled_for)
    kinds = re.findall(r"kind=(\w+),sm=(\d+)", bound)
    wanted = [("elf", name[3:]) for name in ARCHITECTURES] + [("ptx", "75"), ("ptx", "120")]
    assert sorted(kinds) == sorted(wanted)
    assert "--create=made/it.fatbin" in bound
