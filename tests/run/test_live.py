"""`run --live` and `run --log`: figures of real scripts, which end as without."""

import contextlib
import fcntl
import importlib.util
import io
import json
import math
import os
import pty
import re
import statistics
import struct
import subprocess
import sys
import termios
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Run
from faststep.cli import live
from faststep.doctor.sampler import INTERVAL
from faststep.doctor.watching import PERIOD, Figures, Watch, _number
from programs import MAIN, Programs

ROOT = Path(__file__).parents[2]

# Waits for its loader, and half as long in forward.
SLOW = """
import os, sys, time, torch
torch.set_num_threads(1)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        time.sleep(0.04)
        return torch.ones(4)

class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in torch.utils.data.DataLoader(Slow()):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
"""
FORKS = "if os.fork() == 0:\n    raise SystemExit(0)\nos.wait()\n"


def lines_of(path: Path) -> list[Figures]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_of_a_script_with_a_slow_loader(run: Run, tmp_path: Path) -> None:
    """A fork that comes to the end of the script adds nothing."""
    log = tmp_path / "log.jsonl"
    done = run(SLOW + FORKS, options=("--log", str(log)))
    assert done.returncode == 0, done.stderr
    lines = lines_of(log)
    assert len(lines) >= 2
    for line in lines:
        assert line.keys() == Figures.__annotations__.keys()
        assert line["steps_per_second"] > 0
        assert 2**20 < line["rss"] <= line["peak"]
        assert line["rank"] == 0
        assert line["gpu"] is None
    steps = [line["step"] for line in lines]
    assert steps == sorted({*steps})
    assert lines[-1]["step"] == 30
    assert lines[-1]["loss"] == float(done.stdout)
    phases = lines[0]["phases"]
    assert sum(phases.values()) == pytest.approx(1.0)
    assert phases["data"] > phases["forward"] > 0.1
    assert "no step" not in done.stderr


def test_text_where_stderr_is_no_terminal(run: Run) -> None:
    done = run(SLOW, options=("--live",), TERM="xterm")
    assert done.returncode == 0
    assert "\x1b" not in done.stderr + done.stdout
    said = re.findall(
        r"^faststep run: step (\d+), \S+ steps/s, loss .*data \d+%", done.stderr, re.M
    )
    assert said[-1] == "30"


def test_a_page_on_a_terminal(tmp_path: Path) -> None:
    """It takes the last lines of the terminal, and gives them back at the end."""
    pytest.importorskip("rich")
    script = tmp_path / "script.py"
    script.write_text(SLOW)
    receive, send = pty.openpty()
    fcntl.ioctl(send, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "faststep", "run", "--live", str(script)]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=send, env=environment
    ) as process:
        os.close(send)
        shown = read_terminal(receive)
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(receive)
    assert process.returncode == 0, shown
    assert b"\x1b" not in printed
    assert shown.count("\x1b[1;28r") >= 3
    assert shown.rindex("\x1b[r") > shown.rindex("\x1b[1;28r")
    plain = re.sub(r"\x1b[\[0-9;]*[A-Za-z]|\x1b[78]", " ", shown)
    assert re.search(r"data +\d+\.\d%", plain)
    assert re.search(r"step +\d+ +\S+ +steps/s", plain)
    assert "step 30," in plain[plain.rindex("\r\n", 0, plain.index("made 1 optim.SGD")) - 400 :]


def read_terminal(receive: int) -> str:
    """Everything until nobody has the other end."""
    pieces = []
    while True:
        try:
            piece = os.read(receive, 65536)
        except OSError:
            break  # as Linux says it
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces).decode()


def test_watching_takes_less_than_a_hundredth_of_a_core(tmp_path: Path) -> None:
    """Its thread, and what hooks add to the shortest of steps that compute nothing.

    Such a step is the unit, 50 us where this was written: so neither a slow CPU nor other programs
    matter. A hundredth of a core are ten of them for each of 20 looks per second.
    """
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    looks = []

    def shortest(seconds: float) -> float:
        least, end = math.inf, time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun = time.thread_time()
            weight.sum().backward()
            optimizer.step()
            least = min(least, time.thread_time() - begun)
        return least

    plain = shortest(0.3)
    watch: Any = Watch([live.Log((tmp_path / "log.jsonl").open("w"))], print)
    looked = watch._sampler._looked

    def counted(*found: Any) -> None:
        looked(*found)
        looks.append(time.thread_time())  # of the sampler's thread

    watch._sampler._looked = counted
    begun = time.perf_counter()
    with watch:
        hooked = shortest(2.5)
    seconds = time.perf_counter() - begun
    assert len(looks) <= seconds / INTERVAL + 1
    assert statistics.median(after - before for before, after in pairwise(looks)) < 10 * plain
    assert 2 <= len(lines_of(tmp_path / "log.jsonl")) <= seconds / PERIOD + 1
    assert hooked < 2 * plain


ENDS = {
    "raises": ("raise ValueError('the reason')", 1, "ValueError: the reason\n"),
    "leaves": ("raise SystemExit(3)", 3, ""),
    "interrupted": ("os.kill(os.getpid(), 2)", -2, "KeyboardInterrupt\n"),
}


@pytest.mark.parametrize("name", ENDS)
def test_scripts_end_as_without(run: Run, tmp_path: Path, name: str) -> None:
    text, status, said = ENDS[name]
    source = (
        "import os, torch\nweight = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\nfor step in range(9):\n"
        f"    weight.sum().backward()\n    optimizer.step()\n    if step == 5:\n        {text}\n"
    )
    endings = []
    for options in ((), ("--live", "--log", str(tmp_path / "log.jsonl"))):
        done = run(source, options=options)
        assert done.returncode == status
        lines = done.stderr.splitlines(keepends=True)
        endings.append("".join(line for line in lines if not line.startswith("faststep run: ")))
    assert endings[0] == endings[1]
    assert endings[1].endswith(said)
    if said:
        assert f'File "{tmp_path / "script.py"}", line 8, in <module>\n' in endings[1]
    assert lines_of(tmp_path / "log.jsonl")[-1]["step"] == 6


def test_a_rank_has_a_file_of_its_own_and_shows_nothing(run: Run, tmp_path: Path) -> None:
    options = ("--live", "--log", str(tmp_path / "log.jsonl"))
    done = run(SLOW, options=options, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 0
    assert done.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "log.1.jsonl"}
    assert {line["rank"] for line in lines_of(tmp_path / "log.1.jsonl")} == {1}


ON_RANKS = """
import time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.0)
for step in range(150):
    (weight.sum() * (1.0 + dist.get_rank())).backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def test_rank_0_shows_a_line_of_each_rank(tmp_path: Path, programs: Programs) -> None:
    """torchrun's store brings it there; each rank writes a log of its own."""
    (tmp_path / "script.py").write_text(ON_RANKS)
    words = ("run", "--live", "--log", "log.jsonl", "script.py")
    done = programs.ranks(2, MAIN, str(tmp_path), *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^faststep run: step 150, .*loss 4;", done.stderr, re.M)
    line = r"^faststep run: rank 1, \S+ steps/s, loss 8, data 0%, \d+ MiB$"
    assert re.search(line, done.stderr, re.M), done.stderr
    assert {line["rank"] for line in lines_of(tmp_path / "log.1.jsonl")} == {1}
    assert not (tmp_path / "log.jsonl").exists()


def test_the_page_has_lines_of_ranks(tmp_path: Path) -> None:
    """Those that wait most for data, by their numbers."""
    pytest.importorskip("rich")
    figures: Any = {
        "step": 9, "steps_per_second": 2.0, "loss": None, "rss": 2**20, "peak": 2**20,
        "cpu": 1.0, "gpu": None, "phases": {"data": 0.0},
    }  # fmt: skip
    others = [{**figures, "rank": rank, "phases": {"data": 0.1 * rank}} for rank in range(1, 9)]
    with (tmp_path / "page").open("w") as stream:
        page = live.Page(stream, lambda: others)
        page._figures.append(figures)
        rows = page._rows("the note")
    assert len(rows) <= live.HEIGHT
    shown = [row for row in rows if "rank" in row]
    assert [row.split()[1] for row in shown] == ["4", "5", "6", "7", "8"]
    assert rows[-1] == "the note"


BY_HAND = """
import torch, weakref

class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        global graph
        graph = weakref.ref(ctx)
        return x * float("inf")

    @staticmethod
    def backward(ctx, grad):
        return grad

weight = torch.ones(2, requires_grad=True)
for _ in range(5):
    loss = Kept.apply(weight).sum()
    loss.backward()
    with torch.no_grad():
        weight -= 0.0 * weight.grad
del loss
print(graph() is None)
"""


def test_updates_by_hand_and_a_loss_that_json_lacks(run: Run, tmp_path: Path) -> None:
    """No graph is kept either."""
    log = tmp_path / "log.jsonl"
    done = run(BY_HAND, options=("--live", "--log", str(log)))
    assert done.stdout == "True\n", done.stderr
    assert "loss inf" in done.stderr
    assert [(line["step"], line["loss"]) for line in lines_of(log)] == [(5, None)]


COMPILED = """
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)

@torch.compile(backend="eager")
def step():
    loss = weight.square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in range(6):
    print(step().item())
"""


def test_steps_that_are_compiled(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = run(COMPILED, options=("--only", "memory", "--log", str(log)))
    assert done.returncode == 0, done.stderr
    losses = [4 * 0.64**step for step in range(6)]
    assert [float(line) for line in done.stdout.split()] == pytest.approx(losses)
    assert lines_of(log)[-1]["step"] == 6


def test_losses_that_are_not_read() -> None:
    assert _number(torch.tensor([2.5])) == 2.5
    assert _number(None) is None
    assert _number(torch.ones((), device="meta")) is None
    assert _number(torch.ones((), dtype=torch.complex64)) is None
    assert _number(torch.ones(()).as_subclass(type("Mine", (torch.Tensor,), {}))) is None


def test_the_gpu_is_asked_until_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    watch: Any = Watch([], said.append)
    watch._root = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 10 * device.index)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 2**30)
    assert watch._gpu() == {"utilization": 0.1, "memory": 2**30}
    monkeypatch.delattr(torch.cuda, "utilization")
    assert watch._gpu() is None
    assert watch._gpu() is None
    assert len(said) == 1
    assert "no figures of the GPU" in said[0]


def test_the_programs_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the log, with what they show replaced."""
    page = (ROOT / "docs" / "doctor.md").read_text().split("\n## While it trains\n")[1]
    board, metrics = re.findall(r"^```python\n(import json.*?)^```", page, re.M | re.S)
    line = {"step": 3, "steps_per_second": 2.0, "loss": 0.5}
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    shown: list[Any] = []
    writer = types.SimpleNamespace(add_scalar=lambda *given: shown.append(given))
    replaced = types.SimpleNamespace(SummaryWriter=lambda _: contextlib.nullcontext(writer))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", replaced)
    exec(board, {})
    assert shown == [("steps per second", 2.0, 3), ("loss", 0.5, 3)]
    shown.clear()
    replaced = types.SimpleNamespace(
        Gauge=lambda *names: types.SimpleNamespace(set=shown.append), start_http_server=shown.append
    )
    monkeypatch.setitem(sys.modules, "prometheus_client", replaced)
    with (tmp_path / "log.jsonl").open() as log:
        monkeypatch.setattr(sys, "stdin", log)
        exec(metrics, {})
    assert shown == [9200, 2.0]


@pytest.mark.parametrize(
    ("term", "is_installed", "said"),
    [("xterm", False, "because rich is not installed"), ("dumb", True, "")],
)
def test_terminals_without_a_page(
    monkeypatch: pytest.MonkeyPatch, term: str, is_installed: bool, said: str
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: is_installed or None)
    assert type(live._display()) is live.Text
    assert said in terminal.getvalue()
    assert bool(said) == bool(terminal.getvalue())
