"""Lists and dicts in shared memory: they read as what was frozen, in every process."""

import copy
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststep.data import DataLoader, freeze

from .shapes import Mapped
from .torch_and_ours import without_sanitizer

TEXT = ["", "a", "ä€𝄞", "x" * 1000, "\udc80 lone", "nul\0"]
LISTS: dict[str, list[Any]] = {
    "empty": [],
    "str": TEXT * 5,
    "bytes": [b"", b"\0\xff", b"x" * 999],
    "int": [0, -1, 2**63 - 1, -(2**63)],
    "huge int": [1, 2**63, 2**200],
    "float": [0.0, -1.5, float("inf"), 1e-320],
    "bool": [True, False, True],
    "path": [PurePosixPath("/a/b"), PurePosixPath("ü")],
    "files": [f"/data/train/ü{i}.jpg" for i in range(30)],
    "paths": [PurePosixPath(f"/data/{i}.jpg") for i in (1, 12, 121)],
    "one": ["ä only"],
    "all alike": [b"abc"] * 3,
    "each in the next": ["aba", "ababa", "abababa", "aba"],
    "half a character": ["\ud83d\udc80", "\ud83d\udc81", "\ud83d\udc80\udc80"],
    "mixed": ["a", 1, None, 2.5, True],
    "tuples": [("a", 1), ("b", 2), ()],
    "lists": [[1, 2], [], ["x", [3]]],
    "columns": [list(range(100)), [str(i) for i in range(200)], "short", {i: i for i in range(99)}],
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_read_as_they_were(name: str, kind: type) -> None:
    want = kind(LISTS[name])
    got = freeze(want)
    assert len(got) == len(want)
    assert kind(got) == want
    assert [got[i] for i in range(-len(want), len(want))] == [*want, *want]
    assert [type(item) for item in got][:3] == [type(i) for i in want][:3]
    assert got == want
    assert want == got
    assert got != kind([*want, 1])
    assert got != (list if kind is tuple else tuple)(want)
    for part in (slice(1, None), slice(None, None, -1), slice(0, -1, 2), slice(5, 2)):
        assert kind(got[part]) == want[part]
        assert got[part] == want[part]
        assert kind(got[part][1:]) == want[part][1:]
    for item in want:
        assert item in got
    assert "missing" not in got
    for index in (len(want), -len(want) - 1):
        with pytest.raises(IndexError):
            got[index]
    with pytest.raises(TypeError):
        got[0] = 1


DICTS: dict[str, dict[Any, Any]] = {
    "empty": {},
    "str": {text: len(text) for text in TEXT},
    "bytes": {b"a": "x", b"": "y"},
    "int": {i * 7919: str(i) for i in range(-50, 500)},
    "columns": {
        "paths": [str(i) for i in range(300)],
        "n": 5,
        "map": {str(i): i for i in range(99)},
    },
}


@pytest.mark.parametrize("name", DICTS)
def test_dicts_read_as_they_were(name: str) -> None:
    want = DICTS[name]
    got = freeze(want)
    assert [*got] == [*want]
    assert dict(got) == want
    assert got == want
    assert got != {**want, "more": 1}
    for key, value in want.items():
        assert got[key] == value
        assert key in got
    for key in ("missing", b"missing", 10**30, 1.5, None, ("a",)):
        assert key not in got
        assert got.get(key, 7) == 7
        with pytest.raises(KeyError):
            got[key]
    with pytest.raises(TypeError, match="unhashable"):
        got[[]]
    if name == "int":
        assert got[7919.0] == want[7919]
        assert got[False] == want[0]
        for equal in (np.int64(7919), np.uint8(0), np.float64(7919)):
            assert got[equal] == want[equal]
        assert Fraction(1, 2) not in got


@given(st.lists(st.text(), max_size=30), st.dictionaries(st.text(), st.integers(), max_size=30))
def test_any_text(items: list[str], table: dict[str, int]) -> None:
    assert [*freeze(items)] == items
    frozen = freeze(table)
    assert dict(frozen) == table
    assert all(frozen[key] == value for key, value in table.items())


@given(st.binary(max_size=3), st.lists(st.binary(max_size=3), min_size=1), st.binary(max_size=3))
def test_any_bytes_with_shared_ends(prefix: bytes, items: list[bytes], suffix: bytes) -> None:
    items = [prefix + item + suffix for item in items]
    assert list(freeze(items)) == items


def test_copies_and_pickles() -> None:
    for want in (LISTS["str"], LISTS["columns"], DICTS["columns"]):
        frozen = freeze(want)
        assert copy.copy(frozen) is frozen
        assert copy.deepcopy(frozen) is frozen
        assert pickle.loads(pickle.dumps(frozen)) == want
    part = freeze(LISTS["str"])[3:7]
    assert pickle.loads(pickle.dumps(part)) == LISTS["str"][3:7]


def test_what_cannot_be_frozen() -> None:
    with pytest.raises(TypeError, match="not str"):
        freeze("text")
    with pytest.raises(TypeError, match=r"obj\[1\] cannot be frozen"):
        freeze(["a", [*range(70), lambda: None]])
    with pytest.raises(TypeError, match="keys of obj must all be str, bytes or int"):
        freeze({"a": 1, 2: 3})
    with pytest.raises(TypeError, match="tuple"):
        freeze({(1, 2): 3})


def test_no_addresses_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is closed once: its number may be another file's by then."""
    closed: list[int] = []
    close = os.close

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no addresses")

    def note(file: int) -> None:
        closed.append(file)
        close(file)

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", fail)
        patch.setattr("os.close", note)
        with pytest.raises(OSError, match="no addresses"):
            freeze(["a"])
        gc.collect()
    assert len(closed) == 1


def test_memory_is_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        frozen = freeze([LISTS["str"] * 20, ["x"]])
        part = frozen[0]
        with pytest.raises(TypeError):
            freeze([lambda: None])
    del frozen
    assert part[1] == "a"
    del part
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_it(method: str) -> None:
    frozen = freeze([f"/data/{i}.jpg" for i in range(5000)])
    dataset = Mapped(frozen.__getitem__, len(frozen))
    context = multiprocessing.get_context(method)
    ours = DataLoader(dataset, 1000, num_workers=1, multiprocessing_context=context)
    assert [name for batch in ours for name in batch] == [*frozen]


def private_bytes() -> int:
    """Of memory that is not the frozen block, which belongs to whoever mapped it first."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split(maxsplit=1)[0]
        if not word.endswith(":"):
            counted = "faststep-frozen" not in line
        elif counted and word.startswith("Private_"):
            total += int(line.split()[1]) << 10
    return total


def grown(path_of: Callable[[int], str]) -> int:
    def sized(index: int) -> tuple[int, int]:
        return len(path_of(index)), private_bytes() if index % 10_000 == 9999 else 0

    ours = DataLoader(Mapped(sized, 100_000), 10_000, num_workers=1)
    sizes = [int(private.max()) for _, private in ours]
    return sizes[-1] - sizes[0]


def made(index: int) -> str:
    """A path that lies nowhere: what a worker needs anyway, however large its parent."""
    return f"/data/{index:090}.jpg"


@without_sanitizer
def test_a_worker_gets_no_copy_of_the_memory() -> None:
    paths = [*map(made, range(100_000))]
    anyway = grown(made)
    assert grown(freeze(paths).__getitem__) - anyway < 4_000_000
    assert grown(paths.__getitem__) - anyway > 8_000_000
