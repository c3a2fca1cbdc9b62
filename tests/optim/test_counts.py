"""What a step does, counted: on any machine the same, so that slowness which times hide fails here.

Calls of Python and bytes of its memory must not grow with the parameters, and passes are one
parallel region each.
"""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import faststep
from faststep import _C, optim
from faststep.amp import GradScaler
from programs import Programs

FEW, MANY = 4, 400
TESTS = Path(__file__).parents[1]
FAKE_TORCH = TESTS / "c" / "fake_torch.c"


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of functions, in Python or C, that Python code makes."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def bytes_of(function: Callable[[], Any]) -> int:
    """The most that was allocated through Python at one time, beyond what was there before."""
    tracemalloc.start()
    try:
        function()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def parameters(count: int) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(8)
    return params


def plain_step(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    return optim.AdamW(params, lr=0.01).step


def clipping_step(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    return optim.SGD(params, lr=0.01, momentum=0.9, max_grad_norm=1.0).step


def fused_chain(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    optimizer, scaler = optim.AdamW(params, lr=0.01), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))

    def chain() -> None:
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    return chain


def explicit_chain(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    optimizer, scaler = optim.AdamW(params, lr=0.01), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))

    def chain() -> None:
        scaler.unscale_(optimizer)
        faststep.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return chain


def clipping(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    return lambda: faststep.clip_grad_norm_(params, 1.0)


# (calls, bytes for few parameters, bytes per parameter more), a fifth above what was counted. Two
# functions hold the list of parameters as a tuple and note their gradients.
CASES: dict[str, tuple[Callable[..., Any], int, int, int]] = {
    "plain step": (plain_step, 59, 1200, 0),
    "clipping step": (clipping_step, 62, 1200, 0),
    "fused chain": (fused_chain, 149, 3500, 0),
    "explicit chain": (explicit_chain, 221, 3000, 40),
    "clip_grad_norm_": (clipping, 34, 700, 40),
}


def counts_of(name: str) -> list[tuple[int, int]]:
    """Calls and bytes of a case, for few parameters and for many."""
    make, *_ = CASES[name]
    counts = []
    for number in (FEW, MANY):
        step = make(parameters(number))
        for _ in range(4):  # states are made, and what is bound is traced
            step()
        counts.append((calls_of(step), bytes_of(step)))
    return counts


COUNTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from optim.test_counts import CASES, counts_of
print(json.dumps({name: counts_of(name) for name in CASES}))
"""


@pytest.mark.skipif(faststep._layout is None, reason="torch is asked about each tensor")
def test_python_does_the_same_for_any_number_of_parameters(programs: Programs) -> None:
    """In a process of its own: a step asks other optimizers that are alive, of other tests too."""
    counts = json.loads(programs.run(COUNTS, str(TESTS)).stdout)
    for name, (_, calls, size, each) in CASES.items():
        (few_calls, few_bytes), (many_calls, many_bytes) = counts[name]
        assert many_calls == few_calls <= calls, name
        assert few_bytes <= size, name
        assert many_bytes <= size + each * MANY, name


@pytest.mark.skipif(faststep._layout is None, reason="torch is asked about each tensor")
def test_a_mode_sees_no_tensor_of_a_step_like_the_one_before() -> None:
    """torch.set_default_device() makes such a mode, which costs a microsecond a call."""

    class Mode(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    params = parameters(MANY)
    step, calls = plain_step(params), []
    with Mode() as mode:
        for _ in range(4):
            before = mode.calls
            step()
            calls.append(mode.calls - before)
    assert calls[0] > MANY
    assert calls[2:] == [0, 0]
    assert len({param[0].item() for param in params}) == 1


BATCHES = """
import sys, torch
from torch.utils.data import TensorDataset
from faststep.data import DataLoader

def note(frame, event, arg):
    global calls
    calls += event in ("call", "c_call")

for rows in (10, 80):
    data = TensorDataset(torch.ones(100 * rows, 4), torch.ones(100 * rows))
    batches = iter(DataLoader(data, rows, shuffle=True))
    for _ in range(40):
        next(batches)
    calls = 0
    sys.setprofile(note)
    for _ in range(40):
        next(batches)
    sys.setprofile(None)
    print(calls)
"""


def test_batches_take_as_many_calls_for_any_number_of_rows(programs: Programs) -> None:
    """In a process of its own, where nothing looks at loaders."""
    done = programs.run(BATCHES)
    few, many = map(int, done.stdout.split())
    assert few == many <= 40 * 33, done.stderr


REGIONS = """
import ctypes, sys, torch, faststep
from faststep import _C

torch_ = ctypes.CDLL(sys.argv[1])
calls = ctypes.c_long.in_dll(torch_, "fake_torch_calls")
assert _C.use_threads_of(sys.argv[1])

def regions(count, elements, **kwargs):
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones(elements)
    optimizer = faststep.optim.AdamW(params, lr=0.01, **kwargs)
    optimizer.step()
    before = calls.value
    optimizer.step()
    return calls.value - before

print(regions(1, 1 << 21), regions(40, 1 << 16), regions(2000, 2048), regions(3, 8))
print(regions(1, 1 << 21, max_grad_norm=1.0), regions(2000, 2048, max_grad_norm=1.0))
"""


def test_a_pass_is_one_parallel_region(programs: Programs, tmp_path: Path) -> None:
    if not _C.use_threads_of(faststep._torch.library.libtorch_cpu_path()):
        pytest.skip("this torch offers no threads")
    library = tmp_path / "fake_torch.so"
    command = ["cc", "-O1", "-fPIC", "-shared", str(FAKE_TORCH), "-o", str(library), "-lpthread"]
    # Without a sanitizer, which would report what the compiler leaks.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environment)
    done = programs.run(REGIONS, str(library))
    assert done.stdout.split("\n")[:2] == ["1 1 1 0", "2 2"], done.stdout + done.stderr
