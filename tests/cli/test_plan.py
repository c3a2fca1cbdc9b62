"""`plan`: what a dry run counts, what each way takes, the choice, and errors."""

import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from faststep._torch.fake import NoMemory
from faststep.cli import main
from faststep.memory.recompute import Recomputed
from faststep.sizing.dry_run import DryRun, dry_run
from faststep.sizing.formats import formats_of
from faststep.sizing.machine import Machine
from faststep.sizing.ways import Way, bucket_mb_for, chosen, tokens_for_offload, ways_of
from faststep.zero.deepspeed import lines_for
from programs import Programs

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.narrow(self.wide(x).relu())

def model():
    return nn.Sequential(*[Block() for _ in range(4)]).bfloat16()

def alone():
    return nn.Sequential(*[Block() for _ in range(4)])

def with_loss():
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = torch.randn(4096, 256)
    return model, lambda: model(x).square().mean()

def of_values():
    model = nn.Linear(2, 2)
    return model, lambda: model(torch.ones(2)).sum() * float(torch.rand(1))

def of_shapes():
    model = nn.Linear(2, 2)
    return model, lambda: model(torch.ones(3)).sum()

def broken():
    raise RuntimeError("no weights here")

def nothing():
    return 3

def frozen():
    return nn.ReLU()
"""
OFFLOADED = """
import ctypes, json, mmap, sys, warnings
import torch
import faststep

ctypes.CDLL(None).mallopt(-3, 32768)  # M_MMAP_THRESHOLD: what is freed goes back at once

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

warnings.simplefilter("ignore")
dtype, options = getattr(torch, sys.argv[1]), json.loads(sys.argv[2])
params = [torch.nn.Parameter(torch.ones(1024, 1024, dtype=dtype)) for _ in range(8)]
optimizer = faststep.optim.AdamW(params, **options)
for param in params:
    param.grad = torch.ones_like(param)
before = resident()
faststep.offload(optimizer)
optimizer.step()
print(resident() - before)
"""
ROOMY = Machine(8, 1, 80 * 2**30, 300e9, 50e9, 25e9, 200e9, 300e12)


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "factory.py"
    path.write_text(FACTORY)
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def cells(page: str, way: str) -> list[str]:
    found = re.search(rf"^{re.escape(way)}(?: [*!])?  +(\S.*)$", page, re.MULTILINE)
    assert found, page
    return found[1].split()


def test_a_table_a_choice_and_a_plot(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png = tmp_path / "bars.png"
    page = planned(capsys, f"{factory}:with_loss", "--gpus", 2, "--memory", "102MB", "--plot", png)
    assert "Sequential: 2.1 million parameters (float32); AdamW, fp32 states" in page
    assert "2 ranks: 1 x 2 GPUs of 0.095 GiB" in page
    count = 4 * (2 * 256 * 1024 + 1280)
    for way in ("none", "stage 3, checkpointing, offload"):
        whole = 4 * count / 2**30
        assert float(cells(page, way)[0]) == pytest.approx(
            whole if way == "none" else whole / 2, abs=6e-4
        )
    assert f"{2 * 4 * count / 2 / 1e9:.2f}" == cells(page, "stage 2")[7]
    assert "Choice: stage 2, checkpointing, because" in " ".join(page.split())
    assert "faststep.zero.shard(model, optimizer, stage=2)" in page
    assert "torch.utils.checkpoint" in page
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_model_alone(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = planned(capsys, f"{factory}:model", "--nodes", 512, "--masters", "remainder16")
    assert "4096 ranks" in page
    assert "activations are not counted" in page.replace("and compute ", "")
    assert "Choice: none, because" in page
    assert "stage 3: " in page
    assert 'master_weights="remainder16"' in page


@pytest.mark.parametrize(
    ("gpus", "memory", "lines"),
    [
        (1, "20MB", ["faststep.offload(optimizer, model=model)", "# offload was"]),
        (
            2,
            "25MB",
            [
                'optimizer = faststep.zero.shard(model, optimizer, stage=1, offload="optimizer")',
                "# offload was",
            ],
        ),
        (
            16,
            "11MB",
            [
                'optimizer = faststep.zero.shard(model, optimizer, stage=3, offload="optimizer")',
                "# offload was",
            ],
        ),
    ],
)
def test_lines_of_an_offload(
    factory: Path, gpus: int, memory: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = planned(capsys, f"{factory}:alone", "--gpus", gpus, "--memory", memory)
    assert ", offload, because" in page
    begin = page.splitlines().index(
        "    optimizer = faststep.optim.AdamW(model.parameters(), lr=...)"
    )
    found = page.splitlines()[begin + 1 :][: len(lines)]
    for line, expected in zip(found, lines, strict=True):
        assert line.strip().startswith(expected)


def test_nothing_fits(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join(planned(capsys, f"{factory}:with_loss", "--memory", "1MB").split())
    assert "Nothing fits, where 10 % of 0.001 GiB stay free. The least is stage 3, check" in page


def test_a_factory_of_a_module(
    factory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(factory.parent)
    assert "2.1 million" in planned(capsys, "factory:with_loss", "--device", "cpu")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        (":of_values", [], "loss() reads values"),
        (":of_shapes", [], "loss() failed on tensors without memory: RuntimeError"),
        (":broken", [], "broken failed on tensors without memory: RuntimeError: no weights here"),
        (":nothing", [], "must return a torch.nn.Module, or one and a function loss(), not 3"),
        (":frozen", [], "returned a model without parameters to train"),
        (":lacking", [], "has no function lacking"),
        ("x:model", [], "cannot be imported: FileNotFoundError"),
        (":with_loss", ["--states", "int8", "--optimizer", "RMSprop"], "RMSprop does not take"),
    ],
)
def test_errors_name_the_factory(
    factory: Path, name: str, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{factory}x.py:model" if name == "x:model" else f"{factory}{name}"
    assert main(["plan", place, *options]) == 1
    assert problem in capsys.readouterr().err


def test_lines_in_place_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": 9}')
    assert planned(capsys, "--from", path).splitlines() == lines_for(path)
    path.write_text("{")
    assert main(["plan", "--from", str(path)]) == 1
    assert f"{path} is no JSON" in capsys.readouterr().err


def test_other_errors(
    factory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["--memory", "80"], ["--gpus", "0"], ["--link", "-1"]):
        with pytest.raises(SystemExit):
            main(["plan", "x", *option])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", f"{factory}:model", "--plot", "x.png"]) == 1
    assert 'pip install "faststep[demo]", or leave --plot away' in capsys.readouterr().err


def _three(tokens: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Sequential(nn.Linear(32, 64), nn.Sigmoid(), nn.Linear(64, 16))
    x = torch.ones(tokens, 32)
    return model, lambda: model(x).sum()


def test_a_dry_run_counts_bytes_and_operations() -> None:
    with NoMemory():
        model, loss = _three(1000)
        run = dry_run(model, loss)
    first, last = model[0], model[2]
    inside, out = 4000 * 64, 4000 * 16
    # The Linear's result is not needed after the Sigmoid, but x is from before.
    assert run.kept == pytest.approx(inside + 4, abs=64)
    assert run.forward == pytest.approx(2 * inside + out, rel=0.5)
    assert run.flops == 2 * 1000 * (2 * 32 * 64 + 3 * 64 * 16 - 0 * out)
    assert set(run.live) == {id(p) for p in model.parameters()}
    assert run.live[id(last.weight)] >= inside + last.weight.nbytes
    assert run.live[id(first.weight)] <= 2 * inside + first.weight.nbytes + first.bias.nbytes
    assert all(param.grad is None for param in model.parameters())


def test_what_a_script_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: called.append("unfreeze"))
    for frozen in (1, 0):
        monkeypatch.setattr(gc, "get_freeze_count", lambda frozen=frozen: frozen)
        with NoMemory():
            dry_run(*_three(10))
        assert called == ([] if frozen else ["freeze", "unfreeze"])


def test_checkpoints_keep_inputs_alone() -> None:
    found = []
    for repeats in (False, True):
        with NoMemory():
            blocks = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))] * 6
            model, x = nn.Sequential(*blocks), torch.ones(4096, 64, requires_grad=True)
            if repeats:
                Recomputed(blocks[0]).put()
            found.append(dry_run(model, lambda model=model, x=x: model(x).sum()))  # type: ignore[misc]
    plain, thin = found
    assert thin.kept < plain.kept / 5
    assert thin.flops == pytest.approx(plain.flops * 7 / 6, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "dtype", "bytes_of"),
    [
        ("AdamW", torch.float32, {"fp32": 8, "bf16": 4, "int8": 2.0625}),
        ("Lion", torch.float32, {"fp32": 4, "bf16": 2, "int8": 1.03125}),
        ("RMSprop", torch.float32, {"fp32": 4, "bf16": 2}),
        (
            "AdamW",
            torch.bfloat16,
            {
                **{"fp32 and fp32": 12, "bf16 and fp32": 8, "int8 and fp32": 6.0625},
                **{"fp32 and remainder16": 10, "bf16 and remainder16": 6},
                "int8 and remainder16": 4.0625,
            },
        ),
        (
            "AdamW",
            torch.float16,
            {"fp32 and fp32": 12, "bf16 and fp32": 8, "int8 and fp32": 6.0625},
        ),
    ],
)
def test_formats(kind: str, dtype: torch.dtype, bytes_of: dict[str, float]) -> None:
    found = formats_of(kind, [dtype])
    names = {f"{f.states} and {f.masters}".removesuffix(" and none"): f for f in found}
    assert {name: one.bytes[dtype].per_element for name, one in names.items()} == bytes_of


def test_the_time_of_messages() -> None:
    two_nodes = ROOMY._replace(nodes=2)
    assert ROOMY._replace(gpus=1).seconds(1e9, 4) == 0
    assert ROOMY.seconds(300e9, 0) == pytest.approx(1)
    assert two_nodes.seconds(50e9, 0) == pytest.approx(1)
    assert two_nodes.seconds(0, 10) == pytest.approx(10 * 5e-6 * 4)


def _ways(machine: Machine) -> tuple[nn.Module, list[Way]]:
    with NoMemory():
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
        x = torch.ones(4096, 2048)
        run = dry_run(model, lambda: model(x).sum())
    (kept, *_) = formats_of("AdamW", [torch.float32])
    return model, ways_of(model, kept, machine, 25, [run], on_cuda=True)


def test_the_choice_is_the_fastest_that_fits() -> None:
    model, ways = _ways(ROOMY)
    peaks = {str(way): way.memory.peak for way in ways}
    assert peaks["none"] > peaks["stage 1"] > peaks["stage 2"] > peaks["stage 3"]
    assert str(chosen(ways, ROOMY)) == "none"
    for name, before in (("stage 1", "none"), ("stage 2", "stage 1"), ("stage 3", "stage 2")):
        tight = ROOMY._replace(memory=int((peaks[before] - 1) / 0.9))
        best = chosen([way for way in ways if not way.offloads], tight)
        assert str(best) == name
    assert chosen(ways, ROOMY._replace(memory=1)) is None
    offload = next(way for way in ways if way.offloads and way.stage == 1)
    plain = next(way for way in ways if not way.offloads and way.stage == 1)
    part = sum(param.nbytes for param in model.parameters()) // ROOMY.ranks
    assert offload.host == plain.memory.states + 2 * part
    assert plain.memory.peak - offload.memory.peak == plain.memory.states
    tokens = tokens_for_offload(model, offload, ROOMY)
    spent = 6 * tokens / ROOMY.ranks * sum(p.numel() for p in model.parameters())
    assert spent / ROOMY.flops == pytest.approx(offload.update, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "options", "per_element"),
    [
        pytest.param(torch.float32, {}, 16, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, {"master_weights": "fp32"}, 16, marks=pytest.mark.slow),
        (torch.bfloat16, {"master_weights": "remainder16", "state_dtype": "int8"}, 8.07),
    ],
)
def test_an_offload_takes_what_is_planned(
    dtype: torch.dtype, options: dict[str, str], per_element: float, programs: Programs
) -> None:
    """In host memory: what a process grows by. On the device: parameters and gradients."""
    formats = formats_of("AdamW", [dtype])
    wanted = "".join(f', {name}="{value}"' for name, value in options.items())
    [kept] = [one for one in formats if one.options == wanted]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(dtype)
    way = ways_of(model, kept, ROOMY._replace(gpus=1), 25, [], on_cuda=True)[1]
    grown = programs.run(OFFLOADED, str(dtype).removeprefix("torch."), json.dumps(options))
    assert int(grown.stdout) == pytest.approx(way.host, rel=0.05)
    assert way.host == pytest.approx(per_element * 2**23, rel=1e-3)
    assert way.memory.between == 2 * dtype.itemsize * 2**23


def test_buckets_grow_with_the_ranks() -> None:
    model = _three(1)[0]
    assert bucket_mb_for(model, 4096) == 25  # all are in one
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(32)))
    assert bucket_mb_for(large, 8) == 25
    assert bucket_mb_for(large, 512) > 100


def test_no_run_has_no_activations() -> None:
    model, _ = _three(1)
    (kept, *_) = formats_of("AdamW", [torch.float32])
    assert all(
        way.memory.activations == way.compute == 0
        for way in ways_of(model, kept, ROOMY, 25, [], on_cuda=True)
    )
    assert DryRun().flops == 0
