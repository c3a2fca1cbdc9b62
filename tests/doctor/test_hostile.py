"""Scripts that fork, hang, fail or leave processes: what is said of them, and what is left."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faststep.doctor import runs as runs_of_doctor
from faststep.doctor import scratch
from faststep.doctor.runs import DoctorError, Length, Runs
from faststep.doctor.sandbox import Kind, is_available
from programs import MAIN, Programs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_available() or not scratch.is_available(network=False),
    reason="no sandbox on this system",
)

START = """
import os, subprocess, sys, time, torch
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)

def train(steps=10**6):
    for _ in range(steps):
        weight.square().sum().backward()
        optimizer.step()
        time.sleep(0.001)
"""
KINDS: tuple[Kind, ...] = ("namespaces", "scratch", "none")
Made = Callable[[Kind, str], Runs]


@pytest.fixture
def of(runs_of: Callable[..., Runs], tmp_path: Path) -> Made:
    """Makes `Runs` of a script that is written to a file."""

    def made(kind: Kind, text: str) -> Runs:
        script = tmp_path / "train.py"
        script.write_text(START + text)
        return runs_of(script, kind=kind)

    return made


def commands(mark: str) -> list[str]:
    """The processes whose command lines have a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [text] if mark in text else []
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [0, 1])
def test_a_fork_that_ends_is_not_the_script(of: Made, kind: Kind, status: int) -> None:
    # Frozen: else it looks through all that was imported when it ends, which takes a second.
    fork = f"import gc\ngc.freeze()\nif os.fork() == 0:\n    sys.exit({status})\nos.wait()\n"
    assert len(of(kind, fork + "train()").measure(Length(0.1, 5))["steps"]) >= 5


def test_forks_that_train_are_not_the_script(of: Made) -> None:
    forks = "children = [os.fork() for _ in range(2)]\nif 0 in children:\n    train()\n"
    found = of("namespaces", forks + "train()").measure(Length(0.1, 5))
    assert len(found["steps"]) >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_processes_with_a_session_of_their_own_end(of: Made, kind: Kind) -> None:
    mark = f"42{os.getpid()}.25"
    start = f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
    of(kind, start + "train()").measure(Length(0.1, 5))
    assert commands(mark) == []


def test_shared_memory_is_given_back_without_namespaces(of: Made) -> None:
    mark = f"of-test-{os.getpid()}"
    text = f"""
from multiprocessing import shared_memory
open("/dev/shm/{mark}-file", "w").write("text")
assert open("/dev/shm/{mark}-file").read() == "text"
memory = shared_memory.SharedMemory(create=True, size=100, name="{mark}-memory")
train()
"""
    of("scratch", text).measure(Length(0.1, 5))
    assert not [*Path("/dev/shm").glob(f"{mark}-*")]


def test_a_remedy_that_hangs_is_an_error_of_its_own(of: Made) -> None:
    """Here the thread that fills a dataset is in none of the workers."""
    text = """
import queue, threading
samples = queue.Queue(1)

def fill():
    while True:
        samples.put(torch.ones(8))

class Filled(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return samples.get()

threading.Thread(target=fill, daemon=True).start()
for x in torch.utils.data.DataLoader(Filled(), batch_size=4):
    (weight * x).sum().backward()
    optimizer.step()
"""
    runs = of("namespaces", text)
    runs.until = time.monotonic() + 30.0
    with pytest.raises(DoctorError, match="fewer than two steps"):
        runs.measure(Length(0.1, 5, 0.2), {"loader": {"num_workers": 1}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "fewer than two steps"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("sys.exit('no data')", "ended with status 1: no data"),
        ("sys.stderr.write('--lr is missing'); sys.exit(2)", "ended with status 2:\n--lr is"),
        ("sys.stderr.write('it is gone'); sys.stderr.flush(); os._exit(0)", "it is gone"),
        ("raise ValueError('the reason')", 'failed:\nTraceback (most recent call last):\n  File "'),
        (
            "import urllib.request; urllib.request.urlopen('http://a.invalid')",
            "unless --network is passed",
        ),
    ],
)
def test_errors_are_those_of_the_script(of: Made, text: str, said: str) -> None:
    with pytest.raises(DoctorError) as caught:
        of("namespaces", text).measure(Length(0.1, 5))
    assert said in str(caught.value)
    assert "faststep" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import sqlite3\nsqlite3.connect({!r}).execute('create table one(a)')",
            "--in-place runs the script without a sandbox",
        ),
        (
            "torch._C.PyTorchFileWriter({!r})",
            "only Python's own functions and torch.save may write",
        ),
        (
            "import socket\nsocket.create_connection(('127.0.0.1', 9))",
            r"PermissionError(.|\n)*unless --network is passed",
        ),
    ],
)
def test_what_a_sandbox_without_namespaces_refuses(
    of: Made, tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(DoctorError, match=said):
        of("scratch", text.format(str(tmp_path / "new"))).measure(Length(0.1, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGTERM, ()), (signal.SIGINT, ("--in-place",)), (signal.SIGKILL, ("--in-place",))],
)
def test_a_doctor_that_is_ended_leaves_nothing(
    programs: Programs, tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    mark = f"44{os.getpid()}.25"
    folder = tmp_path / "temporary"
    folder.mkdir()
    text = f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\ntrain()"
    (tmp_path / "train.py").write_text(START + text)

    def end_it() -> None:
        end = time.monotonic() + 120
        while not commands(mark) and time.monotonic() < end:
            time.sleep(0.1)
        started.append(commands(mark))
        os.kill(int((tmp_path / "pid").read_text()), number)

    started: list[list[str]] = []
    code = "import os, sys, tempfile\ntempfile.tempdir = None\n"
    code += "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\n" + MAIN
    other = threading.Thread(target=end_it)
    other.start()
    done = programs.run(code, str(tmp_path), "doctor", *options, "train.py", TMPDIR=str(folder))
    other.join()
    assert started[0], done.stderr
    end = time.monotonic() + 20
    while commands(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert commands(mark) == []
    assert done.returncode in (130, 143, -signal.SIGKILL)
    if number != signal.SIGKILL:
        assert not [*folder.glob("faststep*")]


# Last: it ends the process from which runs are forked.
@pytest.mark.parametrize("kind", ["namespaces", "none"])
def test_a_script_that_never_lets_python_go_on_is_ended(
    of: Made, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_of_doctor, "GRACE", -3.0)  # of the five that a run has at least
    mark = f"43{os.getpid()}.25"
    text = f"subprocess.Popen(['sleep', '{mark}'])\nimport ctypes\nctypes.PyDLL(None).sleep(4242)\n"
    of(kind, "train()").measure(Length(0.1, 5))  # there is a server then
    runs = of(kind, text)
    runs.until = time.monotonic()
    with pytest.raises(DoctorError, match="did not end within"):
        runs.measure(Length(0.1, 5))
    assert time.monotonic() < runs.until + 11.0
    assert commands(mark) == []
