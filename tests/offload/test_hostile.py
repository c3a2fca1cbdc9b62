"""offload() while its threads copy: scripts that move memory, drop objects, fork, raise or exit.

The simulated link lets a copy begin 30 ms after its gradient has arrived. AddressSanitizer sees
threads that use memory of before.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep import _C

from .common import assert_same, bits

COUNT = 30_000
RATE = COUNT * 4 / 0.03
TASKS = Path("/proc/self/task")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(0.0, 1.0, COUNT))
        self.second = nn.Parameter(torch.linspace(-1.0, 0.0, COUNT))

    def forward(self, scale: float = 1.0) -> Tensor:
        return (self.first.sin() * scale + self.second.square()).sum()


def made(offloads: bool, **options: Any) -> tuple[Two, Any, Any]:
    model = Two()
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1)
    handle = None
    if offloads:
        handle = faststep.offload(optimizer, **options)
        handle._copies.pipe.pace(RATE, RATE)
    return model, optimizer, handle


def write_over_freed_memory() -> list[Tensor]:
    return [torch.full((COUNT,), 1e30) for _ in range(4)]


def exchange_data(grad: Tensor) -> None:
    grad.data = torch.ones(COUNT)


def put_into_other_storage(grad: Tensor) -> None:
    grad.set_(torch.ones(COUNT))


def share_memory(grad: Tensor) -> None:
    grad.share_memory_()


def write(grad: Tensor) -> None:
    grad.mul_(0.5)


def grow(grad: Tensor) -> None:
    grad.resize_(100 * COUNT)


def resize_to_nothing(grad: Tensor) -> None:
    grad.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "act", [exchange_data, put_into_other_storage, share_memory, write, grow, resize_to_nothing]
)
def test_a_gradient_moves_while_it_is_copied(act: Callable[[Tensor], None]) -> None:
    found = []
    for offloads in (True, False):
        model, optimizer, _ = made(offloads)
        error = ""
        for step in range(2):
            model().backward()
            if step == 0:
                act(model.first.grad)
                kept = write_over_freed_memory()
            try:
                optimizer.step()
            except (TypeError, RuntimeError) as raised:
                error = str(raised)
            optimizer.zero_grad()
        del kept
        found.append([*bits(model.state_dict(), optimizer.state_dict()), error])
    assert_same(*found)


def test_gradients_are_written_after_a_step_that_returns_at_once() -> None:
    found = []
    for offloads in (True, False):
        model, optimizer, handle = made(offloads)
        if offloads:
            handle._copies.wait_in_forward(model)
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_gradients_are_dropped_in_backward() -> None:
    """By a hook that runs behind those of the offload."""
    found = []
    for offloads in (True, False):
        model, optimizer, _ = made(offloads)
        zero_grad = optimizer.zero_grad
        handles = [
            param.register_post_accumulate_grad_hook(lambda _, zero_grad=zero_grad: zero_grad())
            for param in model.parameters()
        ]
        model().backward()
        kept = write_over_freed_memory()
        for handle in handles:
            handle.remove()
        optimizer.step()
        model().backward()
        optimizer.step()
        del kept
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_a_parameter_moves_while_it_is_copied_back() -> None:
    """What was copied goes to the memory of before; the next step sees the new one."""
    found = []
    for offloads in (True, False):
        model, optimizer, handle = made(offloads)
        if offloads:
            handle._copies.wait_in_forward(model)
        first = vars(model)["_parameters"]["first"]
        for step in range(3):
            model().backward()
            if step == 1:  # between the hook and the copy
                first.data = first.detach().clone()
            optimizer.step()
            if step == 0:
                first.untyped_storage().resize_(0)
                kept = write_over_freed_memory()
                first.untyped_storage().resize_(COUNT * 4)
                first.detach().fill_(0.25)
                with torch.no_grad():
                    first.add_(0.0)
            optimizer.zero_grad()
        assert all(float(one.min()) == float(one.max()) for one in kept)
        if offloads:
            handle.wait()
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("in_backward", [False, True])
def test_parameters_move_between_steps(in_backward: bool) -> None:
    """Updates in backward go to the memory of now, and another type is for the step to refuse."""
    found = []
    for offloads in (True, False):
        model, optimizer, _ = made(offloads, in_backward=in_backward)
        for step in range(5):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                for param in model.parameters():
                    param.data = param.data.clone() * 2
            if step == 2:
                model.half()
            if step == 3:
                model.first.data = model.first.data.float()
                model.second.requires_grad_(False)
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_a_parameter_gets_its_first_memory_back() -> None:
    """With other values, and after a step that has seen it elsewhere."""
    found = []
    for offloads in (True, False):
        model, optimizer, _ = made(offloads)
        before = model.first.data
        model.first.data = before.clone()
        optimizer.step()
        before.fill_(0.5)
        model.first.data = before
        model().backward()
        optimizer.step()
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_a_parameter_of_another_type_without_a_gradient() -> None:
    found = []
    for offloads in (True, False):
        model, optimizer, _ = made(offloads)
        model.second.data = model.second.data.half()
        model.first.sin().sum().backward()
        optimizer.step()
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_two_optimizers_of_one_module() -> None:
    """Who reads it waits for the parameters of both."""
    model = Two()
    optimizers = [faststep.optim.AdamW([param], lr=0.1) for param in model.parameters()]
    handles = [faststep.offload(one, model=model) for one in optimizers]
    for step in range(2):
        model().backward()
        if step:
            handles[1]._copies.pipe.pace(RATE, RATE)
        for one in optimizers:
            one.step()
            one.zero_grad()
        read = bits(model.state_dict())
        for handle in handles:
            handle.wait()
        assert_same(read, bits(model.state_dict()))


def test_a_parameter_without_memory() -> None:
    """With a gradient it is an error before anything is written, and without one nothing."""
    found = []
    for offloads in (True, False):
        model, optimizer, _ = made(offloads)
        model().backward()
        optimizer.step()
        second = vars(model)["_parameters"]["second"]
        model().backward()
        second.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="parameter 1 in group 0") as caught:
            optimizer.step()
        second.grad = None
        first = vars(model)["_parameters"]["first"]
        first.data = first.detach().clone()
        optimizer.step()
        found.append([*bits(first, optimizer.state_dict()), str(caught.value)])
    assert_same(*found)


def test_states_move_while_they_are_updated() -> None:
    """Those that a script has put in the place of the slab's."""
    found = []
    for offloads in (True, False):
        model, optimizer, handle = made(offloads)
        if offloads:
            handle._copies.wait_in_forward(model)
        model().backward()
        optimizer.step()
        if offloads:
            handle.wait()
        state = optimizer.state[model.first]
        state["exp_avg"] = state["exp_avg"].clone()
        model().backward()
        optimizer.step()
        moved = state["exp_avg"]
        if offloads:
            moved.untyped_storage().resize_(0)
            kept = write_over_freed_memory()
            handle.wait()
            assert all(float(one.min()) == float(one.max()) for one in kept)
        found.append(bits(model.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("cycle", [False, True])
def test_an_optimizer_goes_while_its_gradients_are_copied(cycle: bool) -> None:
    """Also by the collector, which clears lists before it drops what they belong to."""
    model, optimizer, handle = made(True)
    before = bits(model.state_dict())
    threads = len(os.listdir("/proc/self/task"))
    model().backward()
    model.zero_grad()
    if cycle:
        handle._copies.pipes = [handle._copies.pipe, handle]
    del optimizer, handle
    gc.collect()
    assert len(os.listdir("/proc/self/task")) < threads
    assert_same(bits(model.state_dict()), before)
    model().backward()  # no hook is left


def test_a_backward_that_raises_leaves_the_next_step_right() -> None:
    def fail(grad: Tensor) -> None:
        raise KeyboardInterrupt

    found = []
    for offloads in (True, False):
        model, optimizer, offloaded = made(offloads)
        model(2.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle = model.first.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(3.0).backward()
        handle.remove()
        optimizer.zero_grad()
        model(4.0).backward()
        optimizer.step()
        if offloads:  # and copied in backward
            assert {place.wanted for place in offloaded._copies.places.entries()} == {1}
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_a_fork_while_gradients_are_copied() -> None:
    """The child has no threads: its step changes nothing, its copy of the optimizer goes, and the
    parent's step is right."""
    found = []
    for offloads in (True, False):
        model, optimizer, handle = made(offloads)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            model().backward()
        counters = [state["step"] for state in optimizer.state.values()]
        versions = [param._version for param in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            code = 1
            try:
                if handle is not None:
                    with pytest.raises(RuntimeError, match="before a fork"):
                        optimizer.step()
                    assert versions == [param._version for param in model.parameters()]
                    assert all(counter == 1 for counter in counters)
                del optimizer, handle
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        optimizer.step()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


EXITS = """
import atexit, torch, faststep
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(30_000))
model = Model()
optimizer = faststep.optim.AdamW(model.parameters())
handle = faststep.offload(optimizer, model=model)
handle._copies.pipe.pace(2e6, 2e6)
(model.weight * 2).sum().backward()
optimizer.step()
model.me, optimizer.me = model, optimizer  # goes only with the interpreter
atexit.register(lambda: print("exits"))
"""


def blocks(task: Path, number: signal.Signals) -> bool:
    [mask] = re.findall(r"SigBlk:\s*(\w+)", (task / "status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_threads_leave_signals_to_those_of_the_script() -> None:
    """Else one of them may take a signal that a script waits for by sigwait()."""
    before = set(TASKS.iterdir())
    offload = _C.OffloadPipe(2, 1)
    tasks = set(TASKS.iterdir()) - before
    assert len(tasks) == 4
    for task in tasks:
        while blocks(task, signal.SIGSEGV):  # which faulthandler reports: the thread starts
            time.sleep(0.001)
        for of_script in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
            assert blocks(task, of_script)
    del offload


def test_an_interpreter_exits_while_threads_copy() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "exits\n", "")
