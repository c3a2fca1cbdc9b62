"""csrc/py/torch/dlpack.h declares torch's tensor interface: against torch's header, and in use."""

import ctypes
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
INCLUDE = Path(torch.__file__).parent / "include"
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
pytestmark = pytest.mark.skipif(not shutil.which(COMPILER[0]), reason="no C compiler is installed")
needs_header = pytest.mark.skipif(
    not (INCLUDE / "ATen/dlpack.h").is_file(), reason="torch is installed without its headers"
)

# (our struct and field, torch's): every field that is read, by place and size
SIZES = [
    ("fst_dl_device", "DLDevice"),
    ("fst_dl_dtype", "DLDataType"),
    ("fst_dl_tensor", "DLTensor"),
    ("fst_dl_managed", "DLManagedTensorVersioned"),
    ("fst_dl_header", "DLPackExchangeAPIHeader"),
    ("fst_dl_api", "DLPackExchangeAPI"),
    ("int32_t", "DLDeviceType"),
]
FIELDS = [
    *(("fst_dl_device", name, "DLDevice", name) for name in ("device_type", "device_id")),
    *(("fst_dl_dtype", name, "DLDataType", name) for name in ("code", "bits", "lanes")),
    *(
        ("fst_dl_tensor", name, "DLTensor", name)
        for name in ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")
    ),
    *(
        ("fst_dl_managed", ours, "DLManagedTensorVersioned", theirs)
        for ours, theirs in {
            "version.major": "version.major",
            "version.minor": "version.minor",
            "context": "manager_ctx",
            "deleter": "deleter",
            "flags": "flags",
            "tensor": "dl_tensor",
        }.items()
    ),
    ("fst_dl_header", "version.major", "DLPackExchangeAPIHeader", "version.major"),
    ("fst_dl_header", "version.minor", "DLPackExchangeAPIHeader", "version.minor"),
    ("fst_dl_header", "previous", "DLPackExchangeAPIHeader", "prev_api"),
    ("fst_dl_api", "header", "DLPackExchangeAPI", "header"),
    *(
        ("fst_dl_api", ours, "DLPackExchangeAPI", theirs)
        for ours, theirs in {
            "managed_tensor_allocator": "managed_tensor_allocator",
            "managed_tensor_from_py_object": "managed_tensor_from_py_object_no_sync",
            "managed_tensor_to_py_object": "managed_tensor_to_py_object_no_sync",
            "tensor_from_py_object": "dltensor_from_py_object_no_sync",
            "current_work_stream": "current_work_stream",
        }.items()
    ),
]
CONSTANTS = {
    "0": "kDLInt",
    "FST_DL_CPU": "kDLCPU",
    "FST_DL_CUDA": "kDLCUDA",
    "FST_DL_UINT": "kDLUInt",
    "FST_DL_FLOAT": "kDLFloat",
    "FST_DL_BFLOAT": "kDLBfloat",
    "FST_DL_COMPLEX": "kDLComplex",
}
SIGNATURES = {
    "managed_tensor_to_py_object_no_sync": "int (*)(DLManagedTensorVersioned *, void **)",
    "dltensor_from_py_object_no_sync": "int (*)(void *, DLTensor *)",
    "current_work_stream": "int (*)(DLDeviceType, int32_t, void **)",
}


def comparison() -> str:
    """C that compiles only where both headers mean the same."""
    lines = ["#include <stddef.h>", "#include <ATen/dlpack.h>", '#include "py/torch/dlpack.h"']

    def must(condition: str) -> None:
        lines.append(f'_Static_assert({condition}, "differs");')

    for ours, theirs in SIZES:
        must(f"sizeof({ours}) == sizeof({theirs})")
        must(f"_Alignof({ours}) == _Alignof({theirs})")
    for struct, field, other, its in FIELDS:
        must(f"offsetof({struct}, {field}) == offsetof({other}, {its})")
        must(f"sizeof((({struct} *)0)->{field}) == sizeof((({other} *)0)->{its})")
    for ours, theirs in CONSTANTS.items():
        must(f"(int){ours} == (int){theirs}")
    for name, signature in SIGNATURES.items():
        member = f"__typeof__(((DLPackExchangeAPI *)0)->{name})"
        must(f"__builtin_types_compatible_p({member}, {signature})")
    return "\n".join(lines) + "\n"


def compile_c(source: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = folder / "check.c"
    file.write_text(source)
    command = [*COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-Werror", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_header
def test_declarations_match_those_of_torch(tmp_path: Path) -> None:
    done = compile_c(
        comparison(), tmp_path, "-fsyntax-only", f"-isystem{INCLUDE}", f"-I{ROOT / 'csrc'}"
    )
    assert done.returncode == 0, done.stderr


@needs_header
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("int32_t device_type, device_id;", "int32_t device_id, device_type;"),
        ("uint8_t code, bits;", "uint8_t bits, code;"),
        ("int64_t *shape, *strides;", "int64_t *strides, *shape;"),
        ("int32_t ndim;", "int64_t ndim;"),
        ("uint64_t flags;", "uint32_t flags;"),
        ("FST_DL_BFLOAT = 4", "FST_DL_BFLOAT = 3"),
        ("    void (*managed_tensor_allocator)(void);\n", ""),
    ],
)
def test_a_wrong_declaration_is_noticed(tmp_path: Path, right: str, wrong: str) -> None:
    header = (ROOT / "csrc/py/torch/dlpack.h").read_text()
    assert right in header
    (tmp_path / "py/torch").mkdir(parents=True)
    (tmp_path / "py/torch/dlpack.h").write_text(header.replace(right, wrong))
    done = compile_c(comparison(), tmp_path, "-fsyntax-only", f"-isystem{INCLUDE}", f"-I{tmp_path}")
    assert "differs" in done.stderr or "no member" in done.stderr


READER = """
#include "py/torch/dlpack.h"

/* out: version, device, code, bits, lanes, ndim, address, then shape and strides */
int read_tensor(const fst_dl_header *header, void *object, int64_t *out)
{
    fst_dl_tensor t;
    while (header && header->version.major != 1)
        header = header->previous;
    if (!header || ((const fst_dl_api *)header)->tensor_from_py_object(object, &t))
        return -1;
    *out++ = header->version.minor;
    *out++ = t.device.device_type;
    *out++ = t.dtype.code;
    *out++ = t.dtype.bits;
    *out++ = t.dtype.lanes;
    *out++ = t.ndim;
    *out++ = (int64_t)(intptr_t)t.data + (int64_t)t.byte_offset;
    for (int d = 0; d < t.ndim; d++) {
        out[d] = t.shape[d];
        out[t.ndim + d] = t.strides[d];
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.Tensor], list[int]]:
    """The fields of a tensor as our declarations read them."""
    folder = tmp_path_factory.mktemp("abi")
    library = folder / "reader.so"
    done = compile_c(READER, folder, f"-I{ROOT / 'csrc'}", "-shared", "-fPIC", "-o", str(library))
    assert done.returncode == 0, done.stderr
    read_tensor = ctypes.PyDLL(str(library)).read_tensor  # holds the GIL
    read_tensor.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.POINTER(ctypes.c_int64)]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer_of.restype = ctypes.c_void_p

    def fields(tensor: torch.Tensor) -> list[int]:
        out = (ctypes.c_int64 * (7 + 2 * tensor.dim()))()
        api = pointer_of(type(tensor).__dlpack_c_exchange_api__, b"dlpack_exchange_api")
        assert read_tensor(api, tensor, out) == 0
        return list(out)

    return fields


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matrix": lambda base: base.view(4, 30),
    "transposed": lambda base: base.view(4, 30).t(),
    "channels_last": lambda base: base.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every third": lambda base: base[17:90:3],
    "0-d": lambda base: base[5],
    "empty": lambda base: base[:0],
    "expanded": lambda base: base[:7].expand(3, 7),
    "Parameter": lambda base: torch.nn.Parameter(base[100:], requires_grad=False),
}


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.float32, 2),
        (torch.float64, 2),
        (torch.float16, 2),
        (torch.bfloat16, 4),
        (torch.complex64, 5),
        (torch.int32, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("view", VIEWS)
def test_fields_are_read_from_the_right_places(
    read: Callable[[torch.Tensor], list[int]], view: str, dtype: torch.dtype, code: int
) -> None:
    tensor = VIEWS[view](torch.zeros(120, dtype=dtype))
    minor, device, kind, bits, lanes, ndim, address, *rest = read(tensor)
    assert minor >= 0
    assert (device, kind, bits, lanes) == (1, code, 8 * tensor.element_size(), 1)
    assert ndim == tensor.dim()
    assert address == tensor.data_ptr() or tensor.numel() == 0
    assert rest == [*tensor.shape, *tensor.stride()]


def test_a_parameter_that_needs_gradients_is_read(
    read: Callable[[torch.Tensor], list[int]],
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    assert read(parameter)[-5:] == [parameter.data_ptr(), 3, 5, 5, 1]
