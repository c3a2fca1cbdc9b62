"""Checkpoints as one safetensors file: what is in it, what it takes, and what is refused.

Those that several ranks save are in tests/zero/test_consolidated.py.
"""

import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from faststep.cli import main
from programs import Programs

Save = Callable[[Any, Path], None]


class Model(nn.Module):
    """Tied weights, several types, a transposed weight, one without elements and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.token = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.token.weight
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 3, "scales": {"first": torch.ones(2)}}

    def set_extra_state(self, state: Any) -> None:
        pass


def trained() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def to_folder(states: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(states, checkpoint_id=path, no_dist=True)


def to_file(states: Any, path: Path) -> None:
    torch.save(states, path)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}


def assert_same(out: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(out)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert torch.equal(found[name], value), name


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["consolidate", *map(str, arguments)]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("save", [to_folder, to_file])
def test_weights_have_the_bits_of_the_model(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    save(whole(model, optimizer), tmp_path / "saved")
    out = tmp_path / "out.safetensors"
    out.write_text("an earlier one")
    assert main(["consolidate", str(tmp_path / "saved"), str(out)]) == 0
    assert_same(out, tensors_of(model))
    said = capsys.readouterr().out
    assert f"{out}: 13 tensors" in said
    assert "'model'" in said
    assert "Left out, as they are no tensors: _extra_state" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "saved"]
    header = json.loads(out.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert header["__metadata__"] == {"format": "pt"}


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "a state dict alone": lambda model, _: tensors_of(model),
    "nested": lambda model, optimizer: {"app": whole(model, optimizer), "step": 4},
    "Lightning's names": lambda model, optimizer: {
        "state_dict": tensors_of(model), "optimizer_states": [optimizer.state_dict()], "loops": {},
    },
    "an average beside it": lambda model, optimizer: {
        "ema": {k: v + 1 if v.is_floating_point() else v for k, v in tensors_of(model).items()},
        **whole(model, optimizer),
        "rng": {"cpu": torch.get_rng_state()},
    },
    "under a name of one's own": lambda model, optimizer: {
        "net": tensors_of(model), "opt": optimizer.state_dict(), "scaler": {"scale": 2.0},
    },
    "a model called optimizer's": lambda model, optimizer: {
        "generator": tensors_of(model), "optimizer": {"g": optimizer.state_dict()},
    },
}  # fmt: skip


@pytest.mark.parametrize("save", [to_folder, to_file])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_found(layout: str, save: Save, tmp_path: Path) -> None:
    model, optimizer = trained()
    save(LAYOUTS[layout](model, optimizer), tmp_path / "saved")
    out = tmp_path / "out.safetensors"
    assert main(["consolidate", str(tmp_path / "saved"), str(out)]) == 0
    assert_same(out, tensors_of(model))


def test_flat_states_of_an_optimizer_are_no_model(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_state_dict(model, optimizer, options=options)
    to_folder({"net": states[0], "opt": states[1]}, tmp_path / "saved")
    out = tmp_path / "out.safetensors"
    assert main(["consolidate", str(tmp_path / "saved"), str(out)]) == 0
    assert_same(out, tensors_of(model))


@pytest.mark.parametrize("save", [to_folder, to_file])
def test_a_model_that_is_not_clear_is_asked_for(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {name: {"w": torch.full((3,), float(number))} for number, name in enumerate("ab")}
    saved, out = tmp_path / "saved", tmp_path / "out"
    save({**parts, "top": torch.ones(1)}, saved)
    said = refused(capsys, saved, out)
    assert f"{saved}: which model is not clear, pass --key" in said
    assert "'a' has 1 tensors; 'b' has 1 tensors" in said
    assert not out.exists()
    said = refused(capsys, saved, out, "--key", "c")
    assert "no tensors in 'c': 'a' has 1 tensors" in said
    assert main(["consolidate", str(saved), str(out), "--key", "b"]) == 0
    assert_same(out, parts["b"])
    assert main(["consolidate", str(saved), str(out), "--key", ""]) == 0
    assert_same(out, {"top": torch.ones(1)})


@pytest.mark.parametrize("save", [to_folder, to_file])
def test_without_a_model(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    save({"optimizer": trained()[1].state_dict(), "epoch": 3}, saved)
    said = refused(capsys, saved, out)
    assert f"{saved}: there is no model" in said
    assert "['epoch', 'optimizer']" in said
    assert list(tmp_path.iterdir()) == [saved]


def test_what_is_no_whole_tensor_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    for value, problem in {
        torch.eye(3).to_sparse(): "is a Tensor of layout torch.sparse_coo",
        torch.ones(2, dtype=torch.complex64): "safetensors has no type for 'w', torch.complex64",
        torch.empty(2, device="meta"): "is on the meta device",
    }.items():
        to_file({"model": {"v": torch.ones(2), "w": value}}, saved)
        said = refused(capsys, saved, out)
        assert str(saved) in said
        assert "'w'" in said
        assert problem in said
    assert list(tmp_path.iterdir()) == [saved]


def damaged_folder(path: Path, how: str) -> str:
    """Damages a folder; returns the file that an error has to name."""
    (shard,) = path.glob("*.distcp")
    if how == "missing":
        shard.unlink()
    elif how == "torn":
        os.truncate(shard, shard.stat().st_size // 2)
    elif how == "overwritten":
        shard.write_bytes(b"x" * shard.stat().st_size)
        return str(path)
    elif how == "not ended":
        (path / ".metadata").unlink()
        return str(path)
    elif how == "torn index":
        os.truncate(path / ".metadata", 100)
        return str(path)
    return str(shard)


@pytest.mark.parametrize("how", ["missing", "torn", "overwritten", "not ended", "torn index"])
def test_a_damaged_folder(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    to_folder(whole(*trained()), saved)
    out.write_text("an earlier one")
    named = damaged_folder(saved, how)
    said = refused(capsys, saved, out)
    assert named in said
    assert "Traceback" not in said
    assert out.read_text() == "an earlier one"
    assert sorted(tmp_path.iterdir()) == [out, saved]


@pytest.mark.parametrize("how", ["absent", "torn", "no archive", "of code", "a list", "before 1.6"])
def test_a_damaged_file(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    if how == "of code":
        torch.save({"model": nn.Linear(2, 2)}, saved)
    elif how == "a list":
        torch.save([torch.ones(2)], saved)
    elif how == "before 1.6":
        torch.save({"w": torch.ones(2)}, saved, _use_new_zipfile_serialization=False)
    elif how != "absent":
        torch.save(whole(*trained()), saved)
        os.truncate(saved, saved.stat().st_size // 2)
        if how == "no archive":
            saved.write_text("text")
    said = refused(capsys, saved, out)
    assert str(saved) in said
    assert "Traceback" not in said
    assert not out.exists()


def test_where_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    to_file(whole(*trained()), saved)
    before = saved.read_bytes()
    assert f"{saved} is the checkpoint itself" in refused(capsys, saved, saved)
    assert saved.read_bytes() == before
    assert f"{tmp_path} is a folder" in refused(capsys, saved, tmp_path)
    absent = tmp_path / "no folder" / "out"
    assert f"{absent} is in a folder that does not exist" in refused(capsys, saved, absent)


def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    to_file({"model": {"w": torch.ones(100_000)}}, saved)
    out.write_text("an earlier one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        said = refused(capsys, saved, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{out} cannot be written" in said
    assert out.read_text() == "an earlier one"
    assert sorted(tmp_path.iterdir()) == [out, saved]


MIB = 2**20
LAYERS, LAYER = 12, 4 * MIB  # bytes; 48 MiB of weights, and twice as much of states
PEAK = """
import ctypes, re, sys
from pathlib import Path
ctypes.CDLL(None).mallopt(-3, 1_000_000)  # M_MMAP_THRESHOLD: what is freed goes back
from faststep.cli import consolidate, main
import torch, torch.distributed.checkpoint
small, large, out = sys.argv[1:]
main(["consolidate", small, out])
def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
assert main(["consolidate", large, out]) == 0
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize("save", [to_folder, to_file])
def test_memory_is_that_of_a_tensor(save: Save, tmp_path: Path, programs: Programs) -> None:
    made = [torch.randn(LAYER // 4) for _ in range(LAYERS)]
    states = {n: {"exp_avg": w + 1, "exp_avg_sq": w + 2} for n, w in enumerate(made)}
    for count, name in ((1, "small"), (LAYERS, "large")):
        model = {f"w{n}": made[n] for n in range(count)}
        optimizer = {"state": {n: states[n] for n in range(count)}, "param_groups": []}
        save({"model": model, "optimizer": optimizer}, tmp_path / name)
    places = [str(tmp_path / name) for name in ("small", "large", "out")]
    done = programs.run(PEAK, *places)
    peak = int(done.stdout.splitlines()[-1])
    # Pages of a mapped file, of which the system can take back all, count as resident too.
    mapped = LAYERS * LAYER if save is to_file else 0
    assert peak < mapped + 3.5 * LAYER, peak / MIB
