"""The doctor on real training loops: what it proves, and what `run --with` then gains.

    python benchmarks/whole/diagnose.py                     # all of it, in some twenty minutes
    python benchmarks/whole/diagnose.py --works CNN GPT --minutes 2 --accept "autocast to bf16"

Each script is examined. Then plain runs and runs with what was proven take turns, and the ratio of
their mean seconds per step stands beside the gain that the doctor has said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from works import FOLDERS, WORKS, Work

from compare import RESULTS, machine

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = 10**6  # steps
SECONDS = 5.0  # of a run that is compared
PAIRS = 2
Found = dict[str, Any]


def environment() -> dict[str, str]:
    """That of a script, which finds the modules beside it."""
    paths = [*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def examined(work: Work, given: argparse.Namespace, folder: Path) -> Found:
    """The doctor's answer, and how long it took."""
    command = [sys.executable, "-m", "faststep", "doctor", "--minutes", str(given.minutes)]
    for remedy in given.accept:
        command += ["--accept", remedy]
    command += ["--json", str(folder / "answer.json"), "--save", str(folder / "proven.json")]
    command += [str(work.path), *work.arguments, "--steps", str(ENDLESS)]
    command += ["--files", str(folder / "files")]
    begun = time.monotonic()
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
    text = (folder / "answer.json").read_text()
    answer: Found = json.loads(text.replace(f"{ROOT}/", ""))  # lines as paths in the repository
    return {**answer, "seconds": time.monotonic() - begun}


def mean_step(work: Work, steps: int, folder: Path, *options: str) -> float:
    """Mean seconds of a step of a fresh run."""
    command = [sys.executable, *options, str(work.path), *work.arguments]
    command += ["--result", str(folder / "result.json"), "--files", str(folder / "files")]
    command += ["--steps", str(steps), "--warm-up", "5"]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    phases = json.loads((folder / "result.json").read_text())["phases"]
    return sum(map(sum, phases.values())) / steps


def row(name: str, given: argparse.Namespace) -> Found:
    """What is said of a script, and what came of it."""
    work = WORKS[name]
    with tempfile.TemporaryDirectory(prefix="diagnose-") as made:
        folder = Path(made)
        answer = examined(work, given, folder)
        steps = max(10, int(SECONDS / answer["step"]["mean"]))
        options = ("-m", "faststep", "run", "--with", str(folder / "proven.json"))
        seconds: dict[str, list[float]] = {"plain": [], "with": [], "run": []}
        for _ in range(PAIRS):
            seconds["plain"].append(mean_step(work, steps, folder))
            seconds["with"].append(mean_step(work, steps, folder, *options))
            seconds["run"].append(mean_step(work, steps, folder, *options[:3]))
        plain = sum(seconds["plain"])
    return {
        "work": name,
        **{key: answer[key] for key in ("verdict", "findings", "trials", "best", "step")},
        "answered": answer["seconds"],
        "got": plain / sum(seconds["with"]),
        "run": plain / sum(seconds["run"]),
    }


def as_table(rows: list[Found]) -> str:
    """A line for each script."""
    lines = [
        "| script | step | answer after | proven | said | 95 % interval | got | `run` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        best = one["best"] or {"remedy": "nothing", "gain": 1.0, "low": 1.0, "high": 1.0}
        lines.append(
            f"| {one['work']} | {1e3 * one['step']['mean']:.3g} ms | {one['answered']:.0f} s "
            f"| {best['remedy']} | {best['gain']:.2f}x | {best['low']:.2f} to {best['high']:.2f} "
            f"| {one['got']:.2f}x | {one['run']:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    plain = [name for name, work in WORKS.items() if not work.arguments]
    parser.add_argument("--works", nargs="+", choices=WORKS, default=plain, metavar="NAME")
    parser.add_argument("--minutes", type=float, default=1.5, help="for each script")
    parser.add_argument("--accept", action="append", default=[], metavar="REMEDY")
    parser.add_argument("--save", metavar="NAME", help="in benchmarks/results/whole")
    given = parser.parse_args()
    rows = []
    for name in given.works:
        rows.append(row(name, given))
        print(as_table(rows[-1:]).splitlines()[-1], rows[-1]["verdict"], flush=True)
    about = {"machine": machine(), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    print(as_table(rows))
    if given.save:
        base = RESULTS / "whole" / given.save
        base.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        base.with_suffix(".md").write_text(f"# The doctor's answers\n\n{as_table(rows)}\n")


if __name__ == "__main__":
    main()
