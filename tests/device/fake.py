"""A CUDA machine without a GPU: a fake driver that runs the real kernels on a simulator, and CPU
tensors that claim to lie in its memory.

The library is built once per session by the C tests' Makefile; it calls itself libcuda.so.1, so the
extension finds it loaded. A claiming tensor is a `torch.Tensor` whose type has an exchange API that
answers with another device; torch itself goes on computing on the CPU.
"""

import ctypes
import fcntl
import functools
import math
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from faststep import _C

ROOT = Path(__file__).parents[2]
LIBRARY = "build/c/tests/cuda/simt/libcuda.so.1"
DRIVER = "build/c/tests/cuda/libcuda.so.1"  # without kernels, and without claims
OLD_DRIVER = "build/c/tests/cuda/old/libcuda.so.1"
EMPTY_FATBIN = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0)
API = "__dlpack_c_exchange_api__"
FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


def build(*names: str) -> None:
    """What the C tests are made of, as the libraries that stand in for the driver.

    Other tests may want it now, too.
    """
    command = ["make", "-s", f"-j{os.cpu_count()}", "-f", "tests/c/Makefile", *names]
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/c.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}:\n{done.stdout}{done.stderr}", pytrace=False)


@functools.cache
def library() -> ctypes.CDLL:
    """The fake driver, with the simulator and the real kernels."""
    build(LIBRARY)
    loaded = ctypes.CDLL(str(ROOT / LIBRARY))
    loaded.fake_cuda_stream.restype = ctypes.c_void_p
    loaded.fake_cuda_end_capture.restype = ctypes.c_void_p
    loaded.fake_cuda_malloc.restype = ctypes.c_void_p
    loaded.fake_cuda_complaint.restype = ctypes.c_char_p
    loaded.fake_cuda_calls.restype = ctypes.c_long
    loaded.claim_api.restype = ctypes.c_void_p
    loaded.fake_cuda_machine(2, 90, 13000)
    fatbin = ROOT / LIBRARY.replace("libcuda.so.1", "kernels.fatbin")
    fatbin.write_bytes(EMPTY_FATBIN)  # the kernels are elsewhere
    _C.use_kernels_of(str(fatbin))
    return loaded


def _capsule_pointer(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, b"dlpack_exchange_api"))


def _capsule(pointer: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(pointer, b"dlpack_exchange_api", None)


waiting_is_an_error = False  # as after torch.cuda.set_sync_debug_mode("error")


def _note_wait(name: str) -> None:
    if waiting_is_an_error:
        raise RuntimeError(f"called a synchronizing CUDA operation: {name}")


def _waits(name: str) -> Any:
    """A method of torch's that has to wait for what it reads."""

    def method(tensor: torch.Tensor, *args: Any) -> Any:
        _note_wait(name)
        return getattr(torch.Tensor, name)(tensor, *args)

    return method


class OnCuda(torch.Tensor):
    """A CPU tensor that says it lies on a CUDA device; see `claim`."""

    ordinal = 0
    item = _waits("item")
    tolist = _waits("tolist")
    nonzero = _waits("nonzero")
    __bool__ = _waits("__bool__")
    __float__ = _waits("__float__")
    __int__ = _waits("__int__")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.ordinal)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return _to(self, *args, **kwargs)

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        like = plain(self).new_empty(*args, **kwargs)
        return allocated(like.shape, like.dtype, self.ordinal)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        _note_wait("cpu")
        return plain(self).clone()


class OnSecondCuda(OnCuda):
    ordinal = 1


_taken: list[int] = []
TYPES = (OnCuda, OnSecondCuda)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as what it is: a CPU tensor."""
    return tensor.detach().as_subclass(torch.Tensor)


def claim(tensor: torch.Tensor, ordinal: int = 0) -> torch.Tensor:
    """The same memory, said to lie on a CUDA device."""
    return tensor.detach().as_subclass(TYPES[ordinal])


def allocated(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, ordinal: int = 0
) -> torch.Tensor:
    """A tensor in the driver's own memory, until the test ends: that can be copied to."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    address = library().fake_cuda_malloc(ordinal, ctypes.c_size_t(size))
    _taken.append(address)
    memory = (ctypes.c_uint8 * size).from_address(address)
    count = math.prod(shape)
    flat = (
        torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
    )
    return claim(flat.reshape(shape), ordinal)


def free_allocated() -> None:
    while _taken:
        library().fake_cuda_free(ctypes.c_void_p(_taken.pop()))


def parameter(tensor: torch.Tensor, ordinal: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(claim(tensor.clone(), ordinal))


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device = kwargs.pop("device", None)
    rest = []
    for arg in args:
        if isinstance(arg, (str, torch.device)):
            device = arg
        else:
            rest.append(arg)
    target = tensor.device if device is None else torch.device(device)
    moved = target.type != tensor.device.type or (target.index or 0) != (tensor.device.index or 0)
    if not kwargs.pop("non_blocking", False) and tensor.is_cuda and target.type == "cpu":
        _note_wait("to")
    copy = kwargs.pop("copy", False) or moved
    result = torch.Tensor.to(plain(tensor), *rest, copy=copy, **kwargs)
    same = result.dtype == tensor.dtype and result.data_ptr() == tensor.data_ptr()  # 0 where empty
    if result is tensor or (same and not copy):
        return tensor
    return claim(result, target.index or 0) if target.type == "cuda" else result


def _factory(name: str) -> Any:
    original = getattr(torch, name)

    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        target = torch.device("cpu" if device is None else device)
        if target.type != "cuda":
            return original(*args, device=device, **kwargs)
        return claim(original(*args, **kwargs), target.index or 0)

    return create


class Living(ctypes.Structure):
    """What the driver has given and not got back: `fake_cuda_living`."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("memory", "pinned", "events", "registered", "objects")
    ]


class Machine:
    """What a test asks of the fake driver."""

    lasting: ClassVar[set[int]] = set()  # handles of streams

    def __init__(self) -> None:
        self.library = library()

    def calls(self, name: str | None) -> int:
        """Calls of an entry point of the driver so far, of all for None."""
        return int(self.library.fake_cuda_calls(None if name is None else name.encode()))

    def fail(self, name: str, nth: int, code: int) -> None:
        """Let the nth call of an entry point from now on return an error."""
        self.library.fake_cuda_fail(name.encode(), ctypes.c_long(nth), code)

    def stream(self, ordinal: int = 0, lasts: bool = True) -> int:
        """A new stream: of torch's own, or one that may be destroyed; see `use`."""
        handle = int(self.library.fake_cuda_stream(ordinal))
        if lasts:
            self.lasting.add(handle)
        return handle

    def lasts(self, ordinal: int, handle: int) -> bool:
        """What `faststep._torch.streams.lasts` says on a machine with CUDA."""
        return handle in self.lasting

    def use(self, stream: int | None, ordinal: int = 0) -> None:
        """Make a stream the current one."""
        self.library.claim_stream(ordinal, ctypes.c_void_p(stream))

    def lag(self, operations: int) -> None:
        """Let streams hold back that many operations."""
        self.library.fake_cuda_lag(ctypes.c_size_t(operations))

    def capture(self, stream: int) -> None:
        """Begin to capture a stream into a graph."""
        self.library.fake_cuda_begin_capture(ctypes.c_void_p(stream))

    def captured(self, stream: int) -> Any:
        """The graph that was captured; see `replay`."""
        return ctypes.c_void_p(self.library.fake_cuda_end_capture(ctypes.c_void_p(stream)))

    def replay(self, graph: Any, stream: int) -> None:
        self.library.fake_cuda_replay(graph, ctypes.c_void_p(stream))

    def drop(self, graph: Any) -> None:
        """Let a graph go."""
        self.library.fake_cuda_free_graph(graph)

    def living(self) -> Living:
        """What the driver has given and not got back."""
        self.library.fake_cuda_alive.restype = Living
        living: Living = self.library.fake_cuda_alive()
        return living

    def entry_points(self) -> list[str]:
        """The names of the driver's functions."""
        self.library.fake_cuda_entry.restype = ctypes.c_char_p
        names: list[str] = []
        while name := self.library.fake_cuda_entry(ctypes.c_size_t(len(names))):
            names.append(name.decode())
        return names

    def synchronize(self) -> None:
        self.library.fake_cuda_synchronize()

    def complaint(self) -> str | None:
        text = self.library.fake_cuda_complaint()
        return None if text is None else text.decode()


def start(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make a CUDA machine for one test."""
    machine = Machine()
    _C.use_streams(machine.lasts)
    original = _capsule_pointer(getattr(torch.Tensor, API))
    for ordinal, kind in enumerate(TYPES):
        pointer = machine.library.claim_api(ctypes.c_void_p(original), ordinal)
        monkeypatch.setattr(kind, API, _capsule(pointer), raising=False)
        machine.use(machine.stream(ordinal), ordinal)
    for name in FACTORIES:
        monkeypatch.setattr(torch, name, _factory(name))
    plain_to = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        devices = [a for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device))]
        if any(torch.device(d).type == "cuda" for d in devices):
            return _to(tensor, *args, **kwargs)
        return plain_to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return machine
