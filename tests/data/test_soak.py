"""Fifty epochs on every path leave a process with what it had after the first of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from . import soak

for module in ("h5py", "PIL.Image", "simplejpeg"):
    pytest.importorskip(module)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROW = 1 << 14
WARM, LAST = 15, 51
# A batch is 128 kB: one kept in each epoch would be 4600 kB. malloc takes up to 2000 at a time.
KILOBYTES = 3000
OBJECTS = LAST - WARM - 1  # less than one in each epoch


@pytest.mark.parametrize("name", soak.PATHS)
def test_fifty_epochs(tmp_path: Path, name: str) -> None:
    seen: dict[int, soak.Usage] = {}
    others = soak.usage().children  # multiprocessing's, of tests before
    epochs = soak.epochs(name, ROW, tmp_path)
    for number in epochs:
        if number in (WARM, LAST):
            seen[number] = soak.usage()
        if number == LAST:
            break
    assert soak.grown(seen[WARM], seen[LAST], OBJECTS, KILOBYTES) == []
    before = soak.usage()
    epochs.close()
    after = soak.usage()
    assert after.children == others
    assert soak.grown(before, after, 0, KILOBYTES) == []


def test_what_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak of each kind, of the least size that matters."""
    kept: list[Any] = []

    class Keeping(soak.DataLoader):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            kept.append((open("/dev/null"), bytearray(b"x" * soak.BATCH * ROW)))  # noqa: SIM115
            return iterator

    monkeypatch.setattr(soak, "DataLoader", Keeping)
    for number in soak.epochs("arrays", ROW, tmp_path):
        if number == WARM:
            first = soak.usage()
        if number == LAST:
            break
    found = soak.grown(first, soak.usage(), OBJECTS, KILOBYTES)
    assert [text.split(":")[0] for text in found] == ["descriptors", "objects", "kilobytes"]
