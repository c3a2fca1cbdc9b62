"""csrc/gpu/driver_calls.h declares the CUDA driver's functions anew: compared with its header."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRIVER = (ROOT / "csrc/gpu/driver_calls.h").read_text()
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
NVCC = shutil.which("nvcc")
HOMES = [os.environ.get("CUDA_HOME"), NVCC and Path(NVCC).resolve().parents[1], "/usr/local/cuda"]
HEADER = next((h for p in HOMES if p and (h := Path(p) / "include/cuda.h").is_file()), None)
pytestmark = pytest.mark.skipif(
    not HEADER or not shutil.which(COMPILER[0]), reason="CUDA's header or a compiler is missing"
)

HANDLES = {"CUcontext", "CUmodule", "CUfunction", "CUstream", "CUevent"}
HANDLES |= {"CUgraph", "CUgraphNode", "CUuserObject", "CUhostFn", "cu_host_function"}
ENUMS = {"CUresult", "CUdevice_attribute", "CUstreamCaptureStatus", "CUstreamCaptureMode"}
NUMBERS = {
    "int": "i32",
    "unsigned": "u32",
    "unsigned int": "u32",
    "size_t": "u64",
    "uint64_t": "u64",
    "cuuint64_t": "u64",
    "unsigned long long": "u64",
    "CUdeviceptr": "u64",
    "CUdevice": "i32",
    "cu_result": "i32",
    "void": "void",
    "char": "char",
} | dict.fromkeys(ENUMS, "i32")
# ours: CUDA's name
VALUES = {
    "CU_OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY",
    "CU_NOT_READY": "CUDA_ERROR_NOT_READY",
    "CU_ECC_UNCORRECTABLE": "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CU_NVLINK_UNCORRECTABLE": "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CU_ILLEGAL_ADDRESS": "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CU_LAUNCH_TIMEOUT": "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CU_ASSERT": "CUDA_ERROR_ASSERT",
    "CU_HARDWARE_STACK_ERROR": "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CU_LAUNCH_FAILED": "CUDA_ERROR_LAUNCH_FAILED",
    "CU_MULTIPROCESSOR_COUNT": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "CU_CAPABILITY_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "CU_CAPABILITY_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "CU_EVENT_DISABLE_TIMING": "CU_EVENT_DISABLE_TIMING",
    "CU_FOR_ALL_CONTEXTS": "CU_MEMHOSTREGISTER_PORTABLE",
    "CU_CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CU_NO_DESTRUCTOR_SYNC": "CU_USER_OBJECT_NO_DESTRUCTOR_SYNC",
    "CU_MOVE": "CU_GRAPH_USER_OBJECT_MOVE",
}


def shape_of(parameter: str) -> str:
    """What a parameter is to the calling convention: "u64", "i32 *", "void * *"."""
    words = parameter.replace("*", " * ").replace("const", " ").split()
    stars = words.count("*")
    words = [w for w in words if w != "*"]
    kind = next((k for k in (" ".join(words), " ".join(words[:-1])) if k in NUMBERS), None)
    if kind is None:
        name = next(w for w in words if w in HANDLES)
        return shape_of("void *" + "*" * stars) if name else ""
    return NUMBERS[kind] + " *" * stars


def shapes_of(parameters: str) -> list[str]:
    return [shape_of(p) for p in parameters.split(",")]


def ours() -> dict[str, list[str]]:
    table, *_ = DRIVER[DRIVER.index("#define ENTRY_POINTS") :].split("\n\n")
    table = table.replace("\\\n", " ")
    found = re.findall(r"X\((\w+),\s*\(([^()]*)\)\)", table)
    return {name: shapes_of(parameters) for name, parameters in found}


def preprocessed(text: str, *options: str) -> str:
    command = [*COMPILER, "-E", "-P", *options, "-include", str(HEADER), "-x", "c", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def test_every_function_is_declared_as_in_cuda() -> None:
    # this macro of the header shows every version of a function under the library's own name
    code = preprocessed("", "-D__CUDA_API_VERSION_INTERNAL")
    entries = ours()
    assert len(entries) > 20
    for name, shapes in entries.items():
        theirs = re.findall(rf"\bCUresult {name}\(([^()]*)\);", code)
        assert theirs, f"{name} is not in cuda.h"
        assert shapes in [shapes_of(t) for t in theirs], name


def test_every_constant_is_that_of_cuda(tmp_path: Path) -> None:
    body = DRIVER[DRIVER.index("enum {\n    CU_") :]
    ours = dict(re.findall(r"(CU_\w+) = (\d+),", body[: body.index("};")]))
    assert set(ours) == set(VALUES)
    checks = [f'_Static_assert((int){VALUES[n]} == {v}, "{n}");' for n, v in ours.items()]
    source = tmp_path / "values.c"
    source.write_text(f'#include "{HEADER}"\n' + "\n".join(checks))
    subprocess.run([*COMPILER, "-fsyntax-only", str(source)], check=True)


@pytest.mark.parametrize(
    ("declared", "shape"),
    [
        ("CUdeviceptr *dptr", "u64 *"),
        ("size_t bytesize", "u64"),
        ("CUcontext *pctx", "void * *"),
        ("const char **pStr", "char * *"),
        ("unsigned int Flags", "u32"),
        ("CUstreamCaptureMode *mode", "i32 *"),
        ("void *p", "void *"),
    ],
)
def test_shapes_tell_types_apart(declared: str, shape: str) -> None:
    assert shape_of(declared) == shape
