"""The report of the parts: what passed, the ends of the logs of what did not, and the figures."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .parts import Part

__all__ = ["keep", "write_report"]

TAIL = 60  # lines of a log
FIRST = "info"  # the part whose log says what the machine is
MOST = 8 << 20  # bytes of a file in the archive

Found = Sequence[tuple[Part, dict[str, Any] | None]]


def _table(found: Found) -> list[str]:
    rows = ["| part | result | seconds | limit | |", "|---|---|---:|---:|---|"]
    for part, result in found:
        if result is None:
            rows.append(f"| {part.name} | not run | | {part.limit} | |")
            continue
        said = str(result["summary"]).replace("|", "\\|")
        cells = [part.name, result["status"], f"{result['seconds']:.0f}", str(part.limit), said]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _counted(found: Found) -> str:
    statuses = ["not run" if result is None else result["status"] for _, result in found]
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _log(folder: Path, name: str, lines: int) -> list[str]:
    path = folder / f"{name}.log"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return ["```", *text.rstrip().splitlines()[-lines:], "```"]


def _is_bad(result: dict[str, Any] | None) -> bool:
    return result is not None and result["status"] not in ("passed", "skipped", "not run")


def write_report(folder: Path, sources: str, found: Found) -> None:
    """Write report.md and report.json from the parts' results."""
    results = [result for _, result in found if result is not None]
    old = [r["name"] for r in results if r["sources"] != sources]
    lines = ["# On a GPU", "", f"{_counted(found)}. Sources {sources}.", ""]
    if old:
        lines += [f"Of other sources, so out of date: {', '.join(old)}.", ""]
    lines += _table(found)
    lines += ["", "## Machine", "", *_log(folder, FIRST, TAIL)]
    for part, result in found:
        if _is_bad(result):
            lines += ["", f"## {part.name}: the end of its log", "", *_log(folder, part.name, TAIL)]
    for part, _ in found:
        figures = folder / f"{part.name}.md"
        if figures.is_file():  # a level below the report's own headings
            text = f"\n{figures.read_text()}".replace("\n#", "\n###")
            lines += ["", f"## {part.name}: what it wrote", "", text.strip()]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    (folder / "report.json").write_text(json.dumps(results, indent=1) + "\n")


def keep(folder: Path, results: Path) -> None:
    """Put the report, and an archive of all files of the parts, into another folder."""
    results.mkdir(parents=True, exist_ok=True)
    for name in ("report.md", "report.json"):
        (results / name).write_bytes((folder / name).read_bytes())
    new = results / "parts.new"
    with tarfile.open(new, "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.stat().st_size <= MOST:
                archive.add(path, path.name)
    os.replace(new, results / "parts.tar.gz")
