"""`convert(force=True)`: what an earlier one wrote is replaced, and nothing else is touched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import faststep.data
from faststep.cli import main
from faststep.data import ArrayDataset, convert

results: Any = sys.modules["faststep.data.formats.results"]


def numbers(values: list[int], *names: str) -> ArrayDataset:
    return ArrayDataset({name: torch.tensor(values) for name in names or ("x",)})


def read(path: Path) -> list[int]:
    dataset: Any = faststep.data.open(path)
    return [int(dataset[i]["x"]) for i in range(len(dataset))]


def tree(path: Path) -> dict[str, Any]:
    """All names under a directory, with their contents or where links lead."""
    found: dict[str, Any] = {}
    for place in sorted(path.rglob("*")):
        name = place.relative_to(path).as_posix()
        if place.is_symlink():
            found[name] = os.readlink(place)
        else:
            found[name] = place.read_bytes() if place.is_file() else None
    return found


@pytest.fixture(params=["at once", "one after the other"])
def exchange(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one after the other":
        monkeypatch.setattr(results, "_exchange", lambda one, other: False)


@pytest.mark.usefixtures("exchange")
def test_other_files_stay(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "deep.txt").write_text("deep")
    convert(numbers([1], "x", "old"), out)
    (out / "README").write_text("mine")
    (out / ".hidden").write_bytes(bytes(range(256)))
    (out / "mine.npy").write_bytes(b"no array of yours")
    (out / "sub" / "folder").mkdir(parents=True)
    (out / "sub" / "folder" / "x.npy").write_text("deep")
    (out / "empty").mkdir()
    (out / "link").symlink_to(outside)
    (out / "broken").symlink_to("nowhere")
    os.mkfifo(out / "pipe")
    (out / "mode").write_text("")
    (out / "mode").chmod(0o400)
    before = {k: v for k, v in tree(out).items() if k not in ("x.npy", "old.npy", "faststep.json")}
    convert(numbers([2, 3], "x", "mine"), out, force=True)
    after = tree(out)
    assert read(out) == [2, 3]
    assert {k: after.pop(k) for k in before} == before
    assert sorted(after) == ["faststep.json", "mine_1.npy", "x.npy"]
    assert (out / "mode").stat().st_mode & 0o777 == 0o400
    assert tree(outside) == {"deep.txt": b"deep"}
    assert sorted(os.listdir(tmp_path)) == ["out", "outside"]
    convert(numbers([4]), out, force=True)
    assert read(out) == [4]
    assert {k: v for k, v in tree(out).items() if k in before} == before
    assert "mine_1.npy" not in os.listdir(out)


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("kind", ["link", "directory"])
def test_what_stands_in_the_place_of_a_file_stays(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    convert(numbers([1]), out)
    (tmp_path / "moved.npy").write_bytes((out / "x.npy").read_bytes())
    (out / "x.npy").unlink()
    if kind == "link":
        (out / "x.npy").symlink_to(tmp_path / "moved.npy")
    else:
        (out / "x.npy").mkdir()
        (out / "x.npy" / "mine").write_text("mine")
    convert(numbers([2]), out, force=True)
    assert read(out) == [2]
    assert (tmp_path / "moved.npy").exists()
    if kind == "link":
        assert os.readlink(out / "x.npy") == str(tmp_path / "moved.npy")
    else:
        assert (out / "x.npy" / "mine").read_text() == "mine"


def files(*names: Any) -> str:
    fields = [{"name": "x", "kind": "rows", "file": name, "dtype": None} for name in names]
    head = {"format": "faststep arrays", "version": 1, "length": 1, "sample": None}
    return json.dumps(head | {"fields": fields})


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
MANIFESTS = [
    files("../secret"),
    files("/tmp/secret"),
    files("x.npy", "sub/thesis.npy"),
    files(".."),
    files("."),
    files(""),
    files("thesis.tex"),
    files("faststep.json"),
    files("x.npy\n"),
    files("x.npy\0"),
    files(None),
    files(["x.npy"]),
    files({"x.npy": 1}),
    files("x.npy").replace('"dtype"', '"offsets": "../secret", "dtype"'),
    files("x.npy").replace("faststep arrays", "other arrays"),
    files("x.npy").replace('"version": 1', '"version": 2'),
    files("x.npy")[:-10],
    '{"format": "faststep arrays", "version": 1, "fields": "x.npy"}',
    '{"format": "faststep arrays", "version": 1, "fields": 3}',
    '{"format": "faststep arrays", "version": 1}',
    "[]",
    "",
    "null",
    "\udcff",
    DEEP,
    "[" * 100_000,
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_a_damaged_or_hostile_manifest_removes_nothing(tmp_path: Path, number: int) -> None:
    (tmp_path / "secret").write_text("secret")
    out = tmp_path / "out"
    convert(numbers([1]), out)
    (out / "thesis.tex").write_text("years of work")
    (out / "sub").mkdir()
    (out / "sub" / "thesis.npy").write_text("years of work")
    (out / "faststep.json").write_bytes(MANIFESTS[number].encode(errors="surrogateescape"))
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"out was not made by this .*faststep\.json"):
        convert(numbers([2]), out, force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "none"])
def test_no_manifest(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    convert(numbers([1]), out)
    manifest = out / "faststep.json"
    manifest.rename(tmp_path / "elsewhere.json")
    if kind == "link":
        manifest.symlink_to(tmp_path / "elsewhere.json")
    elif kind == "directory":
        manifest.mkdir()
    elif kind == "pipe":
        os.mkfifo(manifest)
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"it has no faststep\.json"):
        convert(numbers([2]), out, force=True)
    assert tree(tmp_path) == before


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(numbers([1], "x", "y"), out)
    (out / "y.npy").unlink()
    convert(numbers([2]), out, force=True)
    assert sorted(os.listdir(out)) == ["faststep.json", "x.npy"]
    assert read(out) == [2]


def test_what_comes_while_it_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    convert(numbers([1]), out)

    def report(done: int, total: int | None) -> None:
        (out / "late").write_text("late")
        (out / "y.npy").write_text("late, and of the name of a new one")

    with pytest.raises(OSError, match=r"out is the new result; 'y\.npy'.* is in .*/\.out-"):
        convert(numbers([2], "x", "y"), out, force=True, report=report)
    assert read(out) == [2]
    assert (out / "late").read_text() == "late"
    (hidden,) = tmp_path.glob(".out-*")
    assert (hidden / "y.npy").read_text().startswith("late, and")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether the two directories have changed places is seen, not remembered."""
    out = tmp_path / "out"
    convert(numbers([1]), out)
    (out / "mine").write_text("mine")
    real = results._exchange

    def interrupted(one: str, other: str) -> bool:
        if when == "after":
            real(one, other)
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(numbers([2]), out, force=True)
    assert read(out) == [1 if when == "before" else 2]
    assert [p.read_text() for p in tmp_path.rglob("mine")] == ["mine"]
    assert len(list(tmp_path.iterdir())) == (1 if when == "before" else 2)


def test_fields_whose_names_become_one(tmp_path: Path) -> None:
    data = {"x_2": 1, "x": 2, "x?": 3, "x!": 4, "x_1": 5}
    arrays = ArrayDataset({name: torch.tensor([value]) for name, value in data.items()})
    convert(arrays, tmp_path / "out")
    dataset: Any = faststep.data.open(tmp_path / "out")
    assert {name: int(value) for name, value in dataset[0].items()} == data


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(numbers([1]), tmp_path / "a")
    convert(numbers([2]), tmp_path / "b")
    (tmp_path / "b" / "notes").write_text("mine")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--force"]) == 0
    assert read(tmp_path / "b") == [1]
    assert (tmp_path / "b" / "notes").read_text() == "mine"
    (tmp_path / "b" / "faststep.json").write_text(files("../notes"))
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--force"]) != 0
    assert "'../notes' is not the name of a file" in capsys.readouterr().err
