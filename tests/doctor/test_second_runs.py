"""Remedies that are tried in runs of their own: what they do to a script's memory and losses."""

import ctypes.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor.gains import deviations, is_rounding
from faststep.doctor.remedies import general, is_chosen
from faststep.doctor.runs import DoctorError, Length, Runs
from faststep.doctor.sandbox import is_available
from faststep.doctor.trials import Trials
from programs import MAIN, SCRIPT, Programs

from .conftest import Faststep

LENGTH = Length(0.5, 8)
# Each large block is mapped by itself: else the peak depends on what glibc's heap keeps.
BLOCKS = """
import ctypes, torch
from torch import nn

ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(16, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 16)]
        self.inner = nn.Sequential(*layers, *OTHERS)

    def forward(self, x):
        return x + self.inner(x)

model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(200):
    x = torch.randn(2000, 16)
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
"""
RANKS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
OTHERS
for _ in range(100000):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    schedule.step()
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_available(), reason="no sandbox on this system"
)


def written(folder: Path, text: str) -> Path:
    (folder / "train.py").write_text(text)
    return folder / "train.py"


@pytest.mark.slow
def test_checkpointed_blocks_save_memory_and_keep_bits(
    tmp_path: Path, runs_of: Callable[..., Runs]
) -> None:
    runs = runs_of(written(tmp_path, BLOCKS.replace("*OTHERS", "")))
    few = Length(0.0, 3)
    plain, changed = (runs.measure(few, {"checkpoint_blocks": on}) for on in (False, True))
    assert len(plain["losses"]) > 4
    assert not any(deviations(plain["losses"], changed["losses"]))
    assert changed["peak"] < plain["peak"] - (50 << 20)
    runs = runs_of(written(tmp_path, BLOCKS.replace("OTHERS", "[nn.BatchNorm1d(16)]")))
    with pytest.raises(DoctorError, match="no blocks that can be computed again"):
        runs.measure(LENGTH, {"checkpoint_blocks": True})


def test_a_script_that_hangs_while_switches_are_turned(
    tmp_path: Path, runs_of: Callable[..., Runs]
) -> None:
    """What was measured before is not lost, nor is the time of the trials."""
    text = BLOCKS.replace("*OTHERS", "").replace("2000", "8").replace("range(200)", "range(10**9)")
    text = text.replace("    x =", "    time.sleep(0.02 if step < 60 else 600)\n    x =")
    shorter = "import sys, time\nsys.modules['faststep.doctor.recorder'].STUCK = 2.0\n"
    runs = runs_of(written(tmp_path, shorter + text))
    found = runs.measure(LENGTH, tries=True)
    assert len(found["steps"]) >= LENGTH.least_steps
    assert runs.left > 20.0


def test_a_sharded_optimizer_takes_the_place_of_the_scripts(
    tmp_path: Path, runs_of: Callable[..., Runs]
) -> None:
    runs = runs_of(written(tmp_path, RANKS.replace("OTHERS", "")), ranks=2)
    plain, changed = (runs.measure(LENGTH, {"shard": stage}) for stage in (0, 2))
    assert plain["is_ddp"]
    assert "a sharded optimizer" in dict(general(plain))
    assert len(plain["losses"]) > 4
    assert is_rounding(deviations(plain["losses"], changed["losses"]), [])
    assert {one["class"] for one in changed["optimizers"]} == {"ShardedOptimizer"}
    written(tmp_path, RANKS.replace("OTHERS", "torch.amp.GradScaler('cpu')"))
    with pytest.raises(DoctorError, match="no scaler, can be sharded"):
        runs.measure(LENGTH, {"shard": 2})


def test_a_sharded_optimizer_is_not_kept_by_itself() -> None:
    runs: Any = None
    made = Trials(runs, {"switched": {}}, ["a sharded optimizer"], lambda text: None)
    trial: Any = type("", (), {"results": "rounding", "change": {"shard": 2}, "remedy": ""})
    assert not made._may_be_kept(trial)


def test_another_allocator_is_loaded_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs_of: Callable[..., Runs],
    programs: Programs,
) -> None:
    """Where it is installed; here a library stands for it that allocates nothing."""
    library = ctypes.util.find_library("m")
    names = {"tcmalloc_minimal": library}
    monkeypatch.setattr(ctypes.util, "find_library", names.get)
    found: Any = {"cuda": False, "is_ddp": False, "phases": {}, "machine": {}, "steps": [1.0]}
    known = dict(general({**found, "loaders": []}))
    assert known["tcmalloc"] == {"preload": library}
    assert "jemalloc" not in known
    text = "import os\nassert os.environ.get('LD_PRELOAD') == EXPECTED\n" + BLOCKS
    text = text.replace("*OTHERS", "").replace("2000", "8")
    runs = runs_of(written(tmp_path, text.replace("EXPECTED", repr(library))))
    assert runs.measure(LENGTH, known["tcmalloc"])["steps"]
    with pytest.raises(DoctorError, match="AssertionError"):
        runs.measure(LENGTH)
    (tmp_path / "proven.json").write_text(json.dumps({"changes": known["tcmalloc"]}))
    again = "import sys\nsys.orig_argv = [sys.executable, '-m', 'faststep', *sys.argv[2:]]\n"
    words = ("run", "--with", "proven.json", "train.py", "a b")
    done = programs.run(again + MAIN, str(tmp_path), *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"{library} allocates") == 1


def test_remedies_that_have_to_be_asked_for() -> None:
    found: Any = {"cuda": False, "is_ddp": False, "phases": {}, "machine": {}, "steps": [1.0]}
    known = dict(general({**found, "loaders": [{"batch": 8}]}))

    def chosen(*only: str) -> list[str]:
        return [name for name, change in known.items() if is_chosen(change, only)]

    assert chosen() == ["all of `run`"]
    assert chosen("checkpointing") == ["checkpointed blocks"]
    both = ["batches half as large", "checkpointed blocks"]
    assert chosen("checkpointing", "batch") == [
        *both,
        "checkpointed blocks, batches twice as large",
    ]
    assert chosen("accumulation") == ["gradients of two steps"]
    assert chosen("compile") == ["compiled models"]


def test_the_gain_of_larger_windows_is_that_of_a_sample(
    tmp_path: Path, runs_of: Callable[..., Runs]
) -> None:
    runs = runs_of(written(tmp_path, BLOCKS.replace("*OTHERS", "").replace("2000", "512")))
    found = runs.measure(LENGTH)
    trials = Trials(runs, found, [], lambda text: None)
    changed = trials._measured({"accumulate": 2})
    mean, before = (sum(one["steps"]) / len(one["steps"]) for one in (changed, found))
    assert mean < 1.6 * before  # and not twice


LARGE = """
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in range(STEPS):
    optimizer.zero_grad()
    made = model(torch.randn(512, 512))
    made.square().mean().backward()
    optimizer.step()
print(made.dtype, repr(float(made.detach().square().mean())))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="bfloat16 is not faster"
)
def test_autocast_that_is_accepted_is_kept(
    faststep: Faststep, programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LARGE.replace("STEPS", "100000"))
    words = ["doctor", "--minutes", "2", "--only", "autocast"]
    words += ["--json", "answer.json", "--save", "proven.json", "--accept", "autocast to bf16"]
    done = faststep(*words, "train.py")
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    [trial] = answer["trials"]
    assert (trial["remedy"], trial["results"]) == ("autocast to bf16", "changes training")
    assert answer["best"] == trial
    assert answer["findings"] == []
    saved = json.loads((tmp_path / "proven.json").read_text())
    assert saved["changes"] == {"autocast": "bf16"}
    (tmp_path / "train.py").write_text(LARGE.replace("STEPS", "3"))
    plain = programs.run(SCRIPT, str(tmp_path / "train.py"), OMP_NUM_THREADS="1")
    kept = faststep("run", "--with", "proven.json", "train.py")
    said = [done.stdout.split() for done in (plain, kept)]
    assert said[0][0] == said[1][0] == "torch.float32"
    assert said[0][1] != said[1][1]
