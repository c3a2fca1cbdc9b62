"""Forks, signals and the end of the interpreter: the loader goes on or ends, and hangs nowhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import DataLoader, convert
from faststep.data.order.orders import Order, SequentialOrder
from faststep.data.order.random_order import RandomOrder
from programs import Programs

from .test_lifetime import BATCH, ROWS, _no_thread_stays, dataset, wide  # noqa: F401
from .torch_and_ours import child


def within_a_second(end: Callable[[], float]) -> None:
    """`end` returns the seconds it took; on a busy machine not each time counts, but torch's own
    time-outs are 5 s at any time."""
    seconds = [end()]
    while min(seconds) >= 1.0 and len(seconds) < 5:
        seconds.append(end())
    assert min(seconds) < 1.0, seconds


@pytest.mark.parametrize("options", [{}, {"sampler": [*range(ROWS)]}, {"device": "cpu"}], ids=str)
def test_a_forked_child_goes_on(options: dict[str, Any]) -> None:
    ours = DataLoader(dataset(50_000), BATCH, **options)
    iterator = iter(ours)
    first = next(iterator)

    def work() -> None:
        assert torch.equal(first[1], torch.arange(BATCH))
        rest = torch.cat([labels for _, labels in iterator])
        assert torch.equal(rest, torch.arange(BATCH, ROWS))
        assert len(list(ours)) == ROWS // BATCH

    with iterator._lock:  # another thread may be in it
        child(work)
    assert torch.equal(torch.cat([labels for _, labels in iterator]), torch.arange(BATCH, ROWS))


def test_a_forked_child_may_drop_the_iterator() -> None:
    held = [iter(wide())]
    next(held[0])
    child(held.clear)
    assert len(list(held[0])) == ROWS // BATCH - 1
    held.clear()


def test_workers_of_another_loader_are_forked_meanwhile() -> None:
    iterator = iter(wide())
    next(iterator)
    for _ in torch.utils.data.DataLoader(
        range(8), 2, num_workers=1, multiprocessing_context="fork"
    ):
        next(iterator)
    assert len(list(iterator)) == ROWS // BATCH - 5


# `ready` says when Ctrl-C may come, from a terminal of its own.
CTRL_C = """
import os, signal, threading
os.setsid()
signal.alarm(300)
def ready():
    threading.Timer(0.3, os.killpg, (os.getpid(), signal.SIGINT)).start()
"""


def after_ctrl_c(programs: Programs, text: str) -> tuple[int, str, str]:
    """Of a program that says when it is ready: its exit code, and what it writes."""
    done = programs.run(CTRL_C + text)
    return done.returncode, done.stdout, done.stderr


ARRAYS = """
import os, signal, sys, threading, time, torch
from torch.utils.data import TensorDataset
from faststep.data import DataLoader, convert
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
ours = DataLoader(TensorDataset(torch.ones(64, 50_000)), 4)
iterator = iter(ours)
next(iterator)
"""


@pytest.mark.parametrize(
    "text",
    [
        "",  # a global iterator at the interpreter's end
        "sys.exit(0)",
        "threading.Thread(target=list, args=(iterator,)).start()",
        "class Cycle: pass\nc = Cycle(); c.c = c; c.i = iterator",
        "batch = next(iterator)\nimport atexit\natexit.register(lambda: next(iterator, None))",
    ],
)
def test_the_interpreter_ends(programs: Programs, text: str) -> None:
    done = programs.run(ARRAYS + text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c(programs: Programs) -> None:
    text = """
class Endless:
    def __iter__(self):
        return self
    def __next__(self):
        return list(range(64))
ours = DataLoader(ours.dataset, batch_sampler=Endless())
iterator = iter(ours)
try:
    ready()
    for batch in iterator:
        pass
except KeyboardInterrupt:
    assert len(next(iterator)[0]) == 64
    del iterator
    print("interrupted", flush=True)
"""
    assert after_ctrl_c(programs, ARRAYS + text) == (0, "interrupted\n", "")


class Alarm(Exception):  # noqa: N818
    """What a signal raises in the middle of the loader."""


class Counter:
    """A batch sampler that is no generator: an exception inside does not end it."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Counter:
        self.at = 0
        return self

    def __next__(self) -> list[int]:
        if self.at >= 6000:
            raise StopIteration
        self.at += 2
        return [self.at - 2, self.at - 1]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize(
    ("kind", "name"), [(RandomOrder, "_indices"), (SequentialOrder, "_compute")]
)
def test_an_interrupt_among_indices_loses_none(
    kind: type[Order], name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after a function that computes a part of the order."""
    count = 40_000

    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        data = TensorDataset(torch.arange(count))
        return DataLoader(data, batch_size=50, shuffle=kind is RandomOrder)

    expected = torch.cat([batch for (batch,) in loader()]).tolist()
    function = getattr(kind, name)
    calls = alarms = 0

    def interrupted(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 7 == 1:
            raise Alarm
        found = function(self, *args)
        if calls % 7 == 2:
            raise Alarm
        return found

    iterator = iter(loader())
    seen = [next(iterator)[0] for _ in range(ahead)]
    monkeypatch.setattr(kind, name, interrupted)
    while True:
        try:
            seen.append(next(iterator)[0])
        except Alarm:
            alarms += 1
        except StopIteration:
            break
    assert torch.cat(seen).tolist() == expected
    assert alarms > 1


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_sampler": Counter()}])
@pytest.mark.parametrize("workers", [0, 1])
def test_interrupts_anywhere_mix_up_nothing(options: dict[str, Any], workers: int) -> None:
    """A batch may be lost with the exception, as in torch; what comes is whole and in order."""
    ours = DataLoader(TensorDataset(torch.arange(6000)), num_workers=workers, **options)

    def interrupt(number: int, frame: Any) -> None:
        called = []
        while frame is not None:
            called.append(frame.f_code)
            frame = frame.f_back
        # While a sampler draws, an interrupt ends the epoch: torch's generator is then done for.
        draws = any(code.co_name == "request" for code in called)
        if not draws and any("faststep/data" in code.co_filename for code in called):
            raise Alarm

    def work() -> None:
        interrupts, seen = 0, []
        signal.signal(signal.SIGALRM, interrupt)
        for _ in range(4):
            iterator = iter(ours)
            ended = False
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            while not ended:
                try:
                    batch = next(iterator, None)
                except Alarm:
                    interrupts += 1
                else:
                    ended = batch is None
                    seen += [] if batch is None else batch[0].tolist()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert seen == sorted(set(seen))
            assert all(a + 1 == b for a, b in zip(seen[::2], seen[1::2], strict=True))
            assert 6000 - len(seen) <= 2 * interrupts
            seen.clear()
        assert interrupts > 10

    child(work)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    class Interrupts(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 500:
                os.kill(os.getpid(), signal.SIGINT)
            return index

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            convert(Interrupts([0] * 1000), tmp_path / "out")  # type: ignore[arg-type]

    child(work)
    assert os.listdir(tmp_path) == []


WORKERS = """
import os, signal, sys, threading, time, torch
from faststep.data import DataLoader
signal.signal(signal.SIGINT, signal.default_int_handler)
class Wide(torch.utils.data.Dataset):
    def __len__(self): return 40000
    def __getitem__(self, index): return torch.full((50_000,), float(index))
ours = DataLoader(Wide(), 2, num_workers=2, persistent_workers=%s)
iterator = iter(ours)
batch = next(iterator)
"""


@pytest.mark.parametrize(
    ("persistent", "text"),
    [(False, ""), (True, "class Cycle: pass\nc = Cycle(); c.c = c; c.i = iterator\nsys.exit(3)")],
)
def test_the_program_ends(programs: Programs, persistent: bool, text: str) -> None:
    said = "print(*[w.pid for w in iterator._workers], flush=True)\n"
    done = programs.run(WORKERS % persistent + said + text)
    assert done.returncode == (3 if text else 0)
    assert done.stderr == ""
    end = time.monotonic() + 60
    while (
        left := [p for p in done.stdout.split() if Path(f"/proc/{p}").exists()]
    ) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


def test_ctrl_c_with_workers(programs: Programs) -> None:
    text = """
try:
    ready()
    for batch in iterator:
        pass
except KeyboardInterrupt:
    pass
del iterator
assert batch.shape == (2, 50_000)
print(ours._faststep.workers._latest.memory.counts()["taken"], flush=True)
"""
    assert after_ctrl_c(programs, WORKERS % False + text) == (0, "0\n", "")


def test_an_interrupt_after_a_fork_leaves_no_lock(programs: Programs) -> None:
    text = """
import _thread, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=_thread.interrupt_main)  # the next Python function raises it
import faststep.data
signal.alarm(60)
for _ in range(2):
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
print("forked")
"""
    done = programs.run(text)
    assert "KeyboardInterrupt" in done.stderr
    assert (done.returncode, done.stdout) == (0, "forked\n")
