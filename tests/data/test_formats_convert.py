"""`convert`: what goes in comes out of `open`, and nothing is left or lost when it fails."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset

import faststep.data
from faststep.cli import main
from faststep.data import ArrayDataset, DataLoader, FormatError, convert
from faststep.data.formats import mapped

from .shapes import Mapped, Streamed
from .torch_and_ours import plain
from .written import FIELDS, WRITERS, rows, times_open

results: Any = sys.modules["faststep.data.formats.results"]


class Samples(list[Any]):
    """Raises what is an error among them."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, BaseException):
            raise found
        return found


class Doubled(ArrayDataset):
    def __getitem__(self, index: int) -> Any:
        return 2 * super().__getitem__(index)


def read(path: Path) -> list[Any]:
    dataset: Any = faststep.data.open(path)
    return [dataset[i] for i in range(len(dataset))]


FIXED = [
    {"x": (torch.full((2, 3), i, dtype=torch.bfloat16), [i, float(i)]), "y": np.float32(i)}
    for i in range(70)
]
RAGGED = [
    {"tokens": torch.arange(n, dtype=torch.int32), "text": "ä" * n, "raw": bytes(n), "label": n}
    for n in (3, 3, 0, 5, 1)
]


@pytest.mark.parametrize("kind", [Mapped, Streamed])
def test_rows_come_back(tmp_path: Path, kind: Any) -> None:
    assert convert(kind(FIXED.__getitem__, 70), tmp_path / "out") == 70
    got = read(tmp_path / "out")
    want = [
        {
            "x": (s["x"][0], [torch.tensor(s["x"][1][0]), torch.tensor(s["x"][1][1]).double()]),
            "y": torch.tensor(s["y"]),
        }
        for s in FIXED
    ]
    assert [plain(sample) for sample in got] == [plain(sample) for sample in want]
    loader = DataLoader(faststep.data.open(tmp_path / "out"), 70)
    assert loader.path == "arrays"
    assert torch.equal(next(iter(loader))["x"][0][:, 0, 0], torch.arange(70).bfloat16())


@pytest.mark.parametrize("order", [1, -1])
def test_fields_of_varying_length_come_back(tmp_path: Path, order: int) -> None:
    samples = RAGGED[::order]
    convert(Samples(samples), tmp_path / "out")
    for got, want in zip(read(tmp_path / "out"), samples, strict=True):
        assert got["tokens"].dtype == torch.int32
        assert got["tokens"].tolist() == list(range(int(want["label"])))
        assert (got["text"], got["raw"], int(got["label"])) == (
            want["text"],
            want["raw"],
            want["label"],
        )
    with pytest.raises(IndexError, match="no record 5"):
        faststep.data.open(tmp_path / "out")[5]


def test_arrays_are_copied_in_blocks(tmp_path: Path) -> None:
    parts = [
        ArrayDataset({"a": np.arange(40, dtype=np.uint16).reshape(10, 4)[:, ::2], "b": b})
        for b in (torch.ones(10).bfloat16(), torch.zeros(10).bfloat16())
    ]
    convert(ConcatDataset(parts), tmp_path / "out")
    want = [part[i] for part in parts for i in range(10)]
    assert plain(read(tmp_path / "out")) == plain(want)
    convert(Doubled(torch.arange(3)), tmp_path / "doubled")
    assert [int(x) for x in read(tmp_path / "doubled")] == [0, 2, 4]
    with pytest.raises(TypeError, match=r"\['columns'\] are for open"):
        convert(parts[0], tmp_path / "other", columns=["a"])
    np.savez(tmp_path / "x.npz", a=np.arange(12).reshape(4, 3))
    assert convert(tmp_path / "x.npz", tmp_path / "npz") == 4
    assert read(tmp_path / "npz")[3]["a"].tolist() == [9, 10, 11]


WRONG: list[tuple[list[Any], str]] = [
    ([torch.ones(2, 3), torch.ones(2, 4)], r"record 1: data is float32 .*\(\*, 4\).*image_size"),
    ([torch.ones(3), torch.ones(3).int()], "record 1: data is int32"),
    ([{"a": 1}, {"b": 1}], r"record 1 has other fields .*data\['b'\]"),
    ([{"a": object()}], r"record 0: data\['a'\] is a object"),
    ([np.array([1.0], np.longdouble)], "record 0: data has the type float128"),
    ([torch.eye(3).to_sparse()], "record 0: data is not a dense tensor"),
    ([torch.eye(3).to_mkldnn()], "record 0: data is not a dense tensor"),
    ([np.array(["a"])], "record 0: data has the type <U1"),
    ([{1: 1.0}], "Samples: .*only texts can be kept"),
    ([], "Samples: there is no record"),
    ([1, RuntimeError("broken")], "broken"),
    ([1, KeyboardInterrupt("now")], "now"),
]


@pytest.mark.parametrize(("samples", "message"), WRONG)
def test_nothing_is_left_behind(tmp_path: Path, samples: list[Any], message: str) -> None:
    with pytest.raises((FormatError, RuntimeError, KeyboardInterrupt), match=message):
        convert(Samples(samples), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_only_its_own_results_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(Samples([1, 2]), out)
    with pytest.raises(FileExistsError, match="out exists"):
        convert(Samples([3]), out)
    with pytest.raises(RuntimeError, match="broken"):
        convert(Samples([3, RuntimeError("broken")]), out, force=True)
    assert [int(x) for x in read(out)] == [1, 2]
    convert(Samples([3]), out, force=True)
    assert [int(x) for x in read(out)] == [3]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="mine was not made by this command"):
        convert(Samples([3]), tmp_path / "mine", force=True)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]
    with pytest.raises(FileNotFoundError, match="none is not a directory"):
        convert(Samples([3]), tmp_path / "none" / "out")


def test_a_link_to_a_result(tmp_path: Path) -> None:
    convert(Samples([1]), tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(FileExistsError):
        convert(Samples([2]), tmp_path / "link")
    convert(Samples([2]), tmp_path / "link", force=True)
    assert [int(x) for x in read(tmp_path / "real")] == [2]
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    assert (tmp_path / "link").is_symlink()


def test_results_are_replaced_where_files_cannot_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(Samples([1]), out)
    monkeypatch.setattr(results, "_exchange", lambda one, other: False)
    convert(Samples([2]), out, force=True)
    assert [int(x) for x in read(out)] == [2]
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if str(target) == str(out) and "faststep.json" in os.listdir(source):
            monkeypatch.setattr(os, "rename", rename)
            raise OSError("no rename")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no rename"):
        convert(Samples([3]), out, force=True)
    assert [int(x) for x in read(out)] == [2]
    assert os.listdir(tmp_path) == ["out"]


SLOW = """
import sys, time, torch
from faststep.data import convert
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index == 500:
            print("half", flush=True)
            time.sleep(60)
        return torch.full((100,), index)
convert(Slow(), sys.argv[1], force=True)
"""


@pytest.mark.parametrize("before", [[], [7]])
def test_a_killed_conversion_leaves_what_was_there(tmp_path: Path, before: list[int]) -> None:
    out = tmp_path / "out"
    if before:
        convert(Samples(before), out)
    command = [sys.executable, "-c", SLOW, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert [name for name in os.listdir(tmp_path) if name[0] != "."] == ["out"] * len(before)
    if before:
        assert [int(x) for x in read(out)] == before
    convert(Samples([1, 2]), out, force=True)
    assert [int(x) for x in read(out)] == [1, 2]


def test_damaged_results(tmp_path: Path) -> None:
    convert(Samples(RAGGED), tmp_path / "out")
    text = tmp_path / "out" / "text.npy"
    whole = text.read_bytes()
    text.write_bytes(whole[:-1] + b"\xff")
    with pytest.raises(FormatError, match=r"out: .*'text'.*, record 4: 'utf-8' codec"):
        faststep.data.open(tmp_path / "out")[4]
    text.write_bytes(whole)
    offsets = tmp_path / "out" / "tokens.offsets.npy"
    with open(offsets, "r+b") as file:
        file.seek(-40, 2)
        file.write(b"\xff" * 8)
    with pytest.raises(FormatError, match=r"out: .*'tokens'.*, record 0: .* not inside"):
        faststep.data.open(tmp_path / "out")[0]


# ---- from every format ----


TENSORS = sorted(WRITERS.keys() - {"texts", "zip", "json"})


@pytest.mark.parametrize("source", TENSORS)
def test_every_format(tmp_path: Path, source: str) -> None:
    WRITERS[source](tmp_path / source, rows(6))
    assert convert(tmp_path / source, tmp_path / "out") == 6
    field = FIELDS.get(source, "x")
    got = [sample if field is None else sample[field] for sample in read(tmp_path / "out")]
    want = [row.tobytes() if source == "lmdb" else row.tolist() for row in rows(6)]
    assert [row if isinstance(row, bytes) else row.tolist() for row in got] == want
    assert sorted(os.listdir(tmp_path)) == sorted([source, "out"])


def test_images_of_one_size(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for i, size in enumerate([(40, 30), (30, 50), (20, 20)]):
        (tmp_path / "in" / f"class{i}").mkdir(parents=True)
        noise = np.random.default_rng(i).integers(0, 255, (*size, 3), dtype=np.uint8)
        image_module.fromarray(noise).save(tmp_path / "in" / f"class{i}" / "x.png")
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out")]
    assert main(command) == 1
    with pytest.raises(SystemExit):
        main([*command, "--image-size", "0"])
    assert main([*command, "--image-size", "20"]) == 0
    source = faststep.data.open(tmp_path / "in")
    got: Any = faststep.data.open(tmp_path / "out")
    assert isinstance(got, ArrayDataset)
    assert [(x.shape, int(y)) for x, y in got] == [((3, 20, 20), i) for i in range(3)]
    assert torch.equal(got[2][0], source[2][0])
    want = torch.nn.functional.interpolate(
        source[0][0][None].float(), (26, 20), mode="bilinear", antialias=True
    )
    assert (got[0][0] - want[0, :, 3:23]).abs().max() <= 1


@pytest.mark.parametrize("source", sorted({*TENSORS} - {"lmdb"}))
def test_damage_is_a_format_error_in_every_format(tmp_path: Path, source: str) -> None:
    """LMDB is left out: it keeps no checksums, and follows what is damaged inside."""
    generator, refused = random.Random(4), 0
    WRITERS[source](tmp_path / source, rows(6))
    whole = (tmp_path / source).read_bytes()
    for _ in range(25):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        (tmp_path / "bad").write_bytes(damaged[: generator.choice([None, 50, -50])])
        try:
            if source == "npz":  # with another first name it is any zip archive
                dataset: Any = mapped.open_npz(tmp_path / "bad", read=True)
            else:
                dataset = faststep.data.open(tmp_path / "bad")
            samples = dataset
            if not isinstance(dataset, IterableDataset):
                samples = map(dataset.__getitem__, range(min(len(dataset), 100)))
            assert all(sample is not None for sample in samples)
        except FormatError as error:
            assert str(tmp_path / "bad") in str(error)  # noqa: PT017
            refused += 1
    assert refused > 5


def numbers(values: list[int], *names: str) -> ArrayDataset:
    return ArrayDataset({name: torch.tensor(values) for name in names or ("x",)})


def xs(path: Path) -> list[int]:
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
    assert xs(out) == [2, 3]
    assert {k: after.pop(k) for k in before} == before
    assert sorted(after) == ["faststep.json", "mine_1.npy", "x.npy"]
    assert (out / "mode").stat().st_mode & 0o777 == 0o400
    assert tree(outside) == {"deep.txt": b"deep"}
    assert sorted(os.listdir(tmp_path)) == ["out", "outside"]
    convert(numbers([4]), out, force=True)
    assert xs(out) == [4]
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
    assert xs(out) == [2]
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
    assert xs(out) == [2]


def test_what_comes_while_it_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    convert(numbers([1]), out)

    def report(done: int, total: int | None) -> None:
        (out / "late").write_text("late")
        (out / "y.npy").write_text("late, and of the name of a new one")

    with pytest.raises(OSError, match=r"out is the new result; 'y\.npy'.* is in .*/\.out-"):
        convert(numbers([2], "x", "y"), out, force=True, report=report)
    assert xs(out) == [2]
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
    assert xs(out) == [1 if when == "before" else 2]
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
    command = ["convert", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "b: 1 records" in printed.out
    assert "1/1" in printed.err
    (tmp_path / "b" / "notes").write_text("mine")
    assert main(command) == 1
    assert "--force replaces" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert xs(tmp_path / "b") == [1]
    assert (tmp_path / "b" / "notes").read_text() == "mine"
    (tmp_path / "b" / "faststep.json").write_text(files("../notes"))
    assert main([*command, "--force"]) != 0
    assert "'../notes' is not the name of a file" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "other")]) == 1
    assert "none" in capsys.readouterr().err


def test_no_descriptor_is_kept_of_types_that_numpy_has_not(tmp_path: Path) -> None:
    """Mapped files keep none: a process has a thousand."""
    data = torch.arange(12).reshape(6, 2).to(torch.bfloat16)
    convert(ArrayDataset({"x": data}), tmp_path / "x")
    dataset: Any = faststep.data.open(tmp_path / "x")
    assert dataset[5]["x"].equal(data[5])
    assert times_open(tmp_path / "x" / "x.npy") == 0
