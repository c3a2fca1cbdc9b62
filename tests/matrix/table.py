"""The table of docs/compatibility.md: a row for each pair of torch and CPython."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- begin: written by make matrix -->", "<!-- end -->"
HEAD = """| torch | CPython | tested on | passed | failed | skipped | remarks |
|---|---|---|---|---|---|---|"""


class Row(NamedTuple):
    """What came out of one pair; the counts are empty where nothing could be tested."""

    torch: str
    python: str
    date: str
    passed: str
    failed: str
    skipped: str
    remarks: str

    def told(self) -> str:
        """The counts as text, or why there are none."""
        counts = (f"{self.passed} passed", f"{self.failed} failed", f"{self.skipped} skipped")
        return ", ".join(counts) if self.passed else self.remarks

    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Torch's and Python's version without the patch level."""
        minor = [tuple(map(int, re.findall(r"\d+", v)[:2])) for v in (self.torch, self.python)]
        return minor[0], minor[1]


def _rows(text: str) -> list[Row]:
    lines = text.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def update(page: Path, rows: Iterable[Row]) -> None:
    """Replace the rows of these pairs; others stay as they are."""
    text = page.read_text()
    merged = {row.key(): row for row in (*_rows(text), *rows)}
    lines = ["| " + " | ".join(merged[key]) + " |" for key in sorted(merged)]
    before, rest = text.split(BEGIN)
    table = "\n".join([BEGIN, HEAD, *lines, END])
    page.write_text(before + table + rest.split(END)[1])
