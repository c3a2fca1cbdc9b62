"""``python -m faststep doctor``: whole answers, and what they leave behind."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor import Answer, fork_server, scratch
from faststep.doctor.findings import suspects
from faststep.doctor.gains import compare, deviations, is_rounding
from faststep.doctor.runs import DoctorError, Length, Runs
from faststep.doctor.sandbox import is_available
from programs import MAIN, Programs

from .conftest import HASTY, Faststep
from .scripts import ON_RANKS, written

needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or not is_available(), reason="no sandbox on this system"
)


def left_behind(files: set[Path]) -> list[Path]:
    """Those that stay though no process maps them; programs beside the test have their own."""
    found: list[Path] = []
    for _ in range(100):
        maps = [_text_of(path) for path in Path("/proc").glob("[0-9]*/maps")]
        found = [one for one in files if one.exists() and not any(str(one) in m for m in maps)]
        if not found:
            break
        time.sleep(0.1)
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # of a process that has ended, or of another user


@needs_sandbox
def test_a_whole_answer(faststep: Faststep, tmp_path: Path) -> None:
    """What is proven is saved, `run --with` does it, and nothing of all runs is left."""
    (tmp_path / "last.pt").write_text("mine")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time, torch\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 400\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.005)\n"
        "        return torch.full((8,), float(index))\n"
        "weight = torch.nn.Parameter(torch.ones(8))\n"
        "optimizer = torch.optim.SGD([weight], lr=1e-9)\n"
        "loader = torch.utils.data.DataLoader(Slow(), batch_size=4)\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    for x in loader:\n"
        "        (x * weight).sum().backward()\n"
        "        optimizer.step()\n"
        "    torch.save(weight, 'last.pt')\n"
        "print('workers', loader.num_workers)\n"
    )
    before = {*Path("/dev/shm").iterdir()}
    files = ("--json", "answer.json", "--save", "proven.json", "--html", "page.html")
    done = faststep("doctor", "--minutes", 2, "--only", "loader", *files, script, 100)
    assert done.returncode == 0, done.stderr
    assert left_behind({*Path("/dev/shm").iterdir()} - before) == []
    made = {"answer.json", "proven.json", "page.html"}
    assert {path.name for path in tmp_path.iterdir()} == made | {"last.pt", "train.py"}
    assert (tmp_path / "last.pt").read_text() == "mine"

    answer: dict[str, Any] = json.loads((tmp_path / "answer.json").read_text())
    first = answer["findings"][0]
    assert first["cause"] == "starved-loader"
    assert first["line"] == f"{script}:12"
    assert first["gain"] > 1.2
    assert answer["verdict"].startswith("starved-loader")
    assert answer["phases"]["data"] > 0.5
    assert abs(sum(answer["phases"].values()) - 1.0) < 0.1
    [trial] = answer["trials"]
    assert trial.keys() == {"remedy", "gain", "low", "high", "results", "memory"}
    assert trial["low"] <= trial["gain"] <= trial["high"]
    assert trial["results"] == "same bits"
    assert answer["best"] == trial
    assert answer["switched"]["one batch again and again"][0] > 2.0
    assert answer["machine"]["copy"] > 1e8
    assert "starved-loader" in done.stdout
    assert "starved-loader" in (tmp_path / "page.html").read_text()

    workers = json.loads((tmp_path / "proven.json").read_text())["changes"]["loader"]["num_workers"]
    kept = faststep("run", "--with", "proven.json", script, 1)
    assert f"workers {workers}" in kept.stdout
    assert f"num_workers={workers}" in kept.stderr


@needs_sandbox
def test_runs_are_forked_from_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_of: Callable[..., Runs]
) -> None:
    """It has imported what takes long, and outlives a run that dies."""
    started: list[Any] = []
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: started.append(args) or start(*args, **kwargs)
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "assert 'torch._dynamo' in sys.modules\n"
        "import torch\n"
        f"if os.path.exists('{tmp_path}/dies'):\n"
        "    os.write(2, b'it has died'), os.abort()\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "while True:\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
    )
    runs = runs_of(script)
    first = runs.measure(Length(0.1, 5))
    again = runs.measure(Length(0.1, 5))
    both = [*zip(first["losses"], again["losses"], strict=False)]  # of as many steps as both made
    assert len(both) >= 5
    assert all(one == other for one, other in both)
    assert first["peak"] > 100 << 20
    assert len(started) <= 1  # none, if there was one
    started.clear()
    (tmp_path / "dies").touch()
    with pytest.raises(DoctorError, match="it has died"):
        runs.measure(Length(0.1, 5))
    (tmp_path / "dies").unlink()
    assert len(runs.measure(Length(0.1, 5))["steps"]) >= 5
    assert not started
    monkeypatch.setattr(fork_server, "PATIENCE", 0.1)  # it imports still
    own = Runs(runs.program, runs.until, False, "namespaces")
    server = own._server_with("")
    del own
    assert not server.is_alive


@pytest.fixture
def no_unshare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PATH for a system that lets this user make no namespaces."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("touch", "sleep"):
        (folder / name).symlink_to(shutil.which(name) or "")
    return folder


@needs_sandbox
@pytest.mark.parametrize("kind", ["namespaces", "scratch"])
def test_what_a_script_writes_is_gone(
    runs_of: Callable[..., Runs], tmp_path: Path, kind: str
) -> None:
    if kind == "scratch" and not scratch.is_available(network=False):
        pytest.skip("no Landlock")
    mark = f"41{os.getpid()}.25"
    (tmp_path / "kept").write_text("before")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, torch\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "open('kept', 'w').write('after')\n"
        "os.remove('train.py')\n"
        "os.makedirs('new/folder')\n"
        "subprocess.run(['touch', '/tmp/faststep-doctor-left'])\n"
        f"subprocess.Popen(['sleep', '{mark}'])\n"
        "weight = torch.nn.Parameter(torch.ones(512, 512))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(200):\n"
        "    weight.square().sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    torch.save(weight, 'new/folder/last.pt')\n"
    )
    found = runs_of(script, kind=kind).measure(Length(0.5, 20))
    assert "checkpoint-in-loop" in [one.cause for one in suspects(found)]
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "train.py"}
    assert (tmp_path / "kept").read_text() == "before"
    assert not Path("/tmp/faststep-doctor-left").exists()
    commands = [
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_mine(path)
    ]
    assert not [line for line in commands if mark.encode() in line]


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid() and bool(path.read_bytes())
    except OSError:
        return False


@pytest.mark.slow
@needs_sandbox
def test_ranks_of_torchrun(tmp_path: Path, programs: Programs) -> None:
    """Rank 0 answers for all; the others say nothing."""
    script = written(tmp_path, ON_RANKS["exposed-communication"])
    words = ("--only", "denormals", str(script))
    done = programs.ranks(2, HASTY + MAIN, str(tmp_path), "doctor", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A step takes") == 1
    assert done.stdout.startswith("exposed-communication")
    assert list(tmp_path.iterdir()) == [script]


FILES_OF_RANKS = """
import contextlib, os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, other = dist.get_rank(), 1 - dist.get_rank()
if rank == 0:
    os.remove("removed")
os.makedirs(f"made/{rank}")
for number in range(100):
    dist.barrier()
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"made/by-both{number}")
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"many/{number}")
with open(f"made/{rank}/text", "w") as file:
    file.write(f"of {rank}")
with open("both", "a") as file:
    file.write(f"{rank}")
dist.barrier()
assert open(f"made/{other}/text").read() == f"of {other}"
assert sorted(open("both").read()) == ["+", "0", "1"], open("both").read()
assert not os.path.exists("removed")
assert sorted(os.listdir()) == ["both", "made", "many", "train.py"]
weight = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(100000):
    weight.square().sum().backward()
    optimizer.step()
    dist.all_reduce(weight.grad)
"""


def test_ranks_see_each_others_files_without_namespaces(
    faststep: Faststep, tmp_path: Path, no_unshare: Path
) -> None:
    if not scratch.is_available(network=True):
        pytest.skip("no Landlock")
    (tmp_path / "train.py").write_text(FILES_OF_RANKS)
    (tmp_path / "both").write_text("+")
    (tmp_path / "removed").write_text("is there")
    (tmp_path / "many").mkdir()
    for number in range(100):
        (tmp_path / "many" / str(number)).touch()
    options = ("--minutes", 1.5, "--network", "--only", "denormals")
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = faststep("doctor", *options, "train.py", PATH=str(no_unshare), **ranks)
    assert done.returncode == 0, done.stderr
    assert "A step takes" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "both", "removed", "many"}
    assert len(list((tmp_path / "many").iterdir())) == 100
    assert (tmp_path / "both").read_text() == "+"


@needs_sandbox
def test_ranks_of_two_machines(tmp_path: Path, programs: Programs) -> None:
    """The first one answers for both, and finds the rank of the second to be late."""
    script = written(tmp_path, ON_RANKS["uneven-ranks"])
    words = ("--minutes", "1.5", "--network", "--only", "denormals", str(script))
    done = programs.ranks(2, HASTY + MAIN, str(tmp_path), "doctor", *words, LOCAL_WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("uneven-ranks")
    assert done.stdout.count("A step takes") == 1
    assert "the others wait for rank 1, where data takes" in done.stdout
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    ("options", "said"), [((), "pass --network"), (("--network",), "takes several machines from")]
)
def test_ranks_of_several_machines_that_could_not_meet(
    faststep: Faststep, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "train.py").touch()
    done = faststep("doctor", *options, "train.py", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    assert done.returncode == 1
    assert said in done.stderr


def test_the_rank_that_others_wait_for() -> None:
    """It is named if it has more to do than looks at stacks may be wrong by."""
    others = [{"rank": rank, "phases": {"data": 0.1, "communication": 0.9}} for rank in (1, 2)]
    last = {"rank": 3, "phases": {"data": 0.4, "forward": 0.2, "backward": 0.4}}
    found = {**QUIET, "phases": {"data": 0.5, "communication": 4.5}, "ranks": [*others, last]}
    [suspect] = suspects(found)
    assert (suspect.cause, suspect.share) == ("uneven-ranks", pytest.approx(0.5))
    assert "rank 3, where data takes 40% of a step and 10% elsewhere" in suspect.text
    assert "num_workers=2" not in suspect.changes
    last["phases"] = {"data": 0.16, "communication": 0.84}
    assert not [one for one in suspects(found) if one.cause == "uneven-ranks"]


def test_a_gain_has_the_interval_of_its_noise() -> None:
    steady = [1.0, 1.01, 0.99] * 40
    gain = compare([(steady, [0.5 * one for one in steady]), (steady, [0.5 * s for s in steady])])
    assert gain.gain == pytest.approx(2.0)
    assert 1.9 < gain.low <= gain.gain <= gain.high < 2.1
    noisy = [0.2, 1.8] * 60
    same = compare([(noisy, noisy[::-1]), (noisy[::-1], noisy)])
    assert same.low <= 1.0 <= same.high


def test_what_a_change_does_to_losses() -> None:
    nan = float("nan")
    assert not any(deviations([1.0, 0.5, nan], [1.0, 0.5, nan]))
    assert is_rounding(deviations([1.0, 0.5], [1.0, 0.5000001]), [])
    far = deviations([1.0, 0.5, 0.5], [1.0, 0.6, 0.5])
    assert far == pytest.approx([0.0, 1 / 6, 1 / 6])
    assert not is_rounding(far, [])
    assert is_rounding(far, [0.0, 0.1, 0.1])
    assert not is_rounding(far, [0.0, 0.001, 0.1])
    assert not is_rounding(deviations([1.0], [nan]), [])


# What a run of a script without a fault has found.
QUIET: dict[str, Any] = {
    "steps": [0.1] * 50, "faults": 0.0, "allocated": [1000] * 50, "cores": 2,
    "threads": 2, "phases": {"forward": 2.0, "backward": 3.0}, "lines": [], "loaders": [],
    "optimizers": [], "autocast": {}, "autocast_steps": 0, "evaluated": 0.0,
    "is_ddp": False, "switched": {}, "machine": {}, "graph": None, "collecting": 0.0, "ranks": [],
}  # fmt: skip


def test_what_the_optimizer_moves() -> None:
    """On a GPU the host does not wait for it, and the time of its phase says nothing."""
    machine = {"copy": 2e9, "fp32": 1e9, "bf16": 1e9, "operations": 0, "convolutions": 0}
    found = {
        **QUIET, "machine": machine, "optimizers": [{"moved": 4e8}], "gpu": None,
        "phases": {"optimizer": 1.0, "forward": 4.0},
    }  # fmt: skip
    phases = {"optimizer": 0.2, "forward": 0.8}
    answer = Answer("", phases, [], [], None, found, [], [])
    assert answer.of_the_machine()[-1] == "The optimizer moves 20 GB/s."
    on_device = answer._replace(found={**found, "gpu": {"capability": [9, 0]}})
    assert on_device.of_the_machine()[-1] == "The optimizer moves 0.4 GB: 200 ms of copies."


def test_a_script_without_a_fault_is_not_suspected() -> None:
    assert suspects(QUIET) == []


def test_what_python_itself_costs() -> None:
    [suspect] = suspects({**QUIET, "collecting": 0.3})
    assert (suspect.cause, suspect.needs_trial) == ("garbage-collector", True)
    assert (
        suspects({**QUIET, "collecting": 0.3, "switched": {"objects are frozen": [1, 1, 1]}}) == []
    )
    [suspect] = suspects({**QUIET, "switched": {"gradients set to None": [1.3, 1.2, 1.4]}})
    assert (suspect.cause, suspect.needs_trial) == ("zeroed-gradients", True)


def test_numbers_that_are_read_one_by_one(tmp_path: Path) -> None:
    """In a loop of their own, and not where the loop that trains reads its loss."""
    script = tmp_path / "train.py"
    script.write_text(
        "for step in range(9):\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    total += loss.item()\n"
        "    for one, other in zip(labels, guessed):\n"
        "        counts[one.item()] += other\n"
    )
    found = {
        **QUIET,
        "steps": [0.01] * 20,
        "phases": {"everything else": 0.2},
        "lines": [["everything else", [str(script), line], None, 0.05] for line in (2, 5, 6)],
    }
    [suspect] = suspects(found)
    assert (suspect.cause, suspect.line) == ("synchronising", f"{script}:5")
    assert suspect.share == pytest.approx(0.5)
