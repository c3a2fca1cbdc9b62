"""python -m fuzz: runs cases in a child, and saves what it takes to repeat those that fail."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MOST_FAILURES = 10
LOG = "child.log"
TESTS = str(Path(__file__).parents[1])


@dataclass
class Report:
    cases: int = 0
    failures: list[Path] = field(default_factory=list)
    counts: Counter[tuple[str, bool]] = field(default_factory=Counter)


def _case_of(log: str, first: int) -> int:
    words = log.split(maxsplit=2)
    return int(words[1]) if words[:1] == ["case"] else first


def _save(folder: Path, seed: int, case: int, first: int, code: int, log: str, said: str) -> Path:
    path = folder / f"seed-{seed}-case-{case}.txt"
    again = f"--seed {seed} --first {case} --cases 1"
    before = f"--seed {seed} --first {first} --cases {case - first + 1}"
    path.write_text(
        f"exit code {code} in case {case} of seed {seed}. To run it again, with tests in "
        f"PYTHONPATH:\n  python -m fuzz.child {again}\nand with those before it:\n"
        f"  python -m fuzz.child {before}\n\nIts calls, the last one failed:\n{log}\n\n{said}\n"
    )
    return path


def fuzz(
    seed: int, seconds: float, folder: Path, *more: str, first: int = 0, most: int = MOST_FAILURES
) -> Report:
    """Runs cases for so long, going on behind those that fail, until so many have."""
    folder.mkdir(parents=True, exist_ok=True)
    report, end = Report(), time.monotonic() + seconds
    while len(report.failures) < most and (left := end - time.monotonic()) > 0:
        log = folder / LOG
        child = subprocess.run(
            [
                *(sys.executable, "-m", "fuzz.child", "--seed", str(seed), "--first", str(first)),
                *("--seconds", str(left), "--log", str(log), *more),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, *sys.path[1:]])},
            check=False,
        )
        text = log.read_text(errors="replace") if log.exists() else ""
        case = _case_of(text, first)
        report.cases += case - first
        if child.returncode == 0:
            rows = json.loads(text.split("\n", 1)[1])
            report.counts += Counter({(name, good): n for name, good, n in rows})
            break
        said = child.stdout[-20000:]
        saved = _save(folder, seed, case, first, child.returncode, text, said)
        report.failures.append(saved)
        print(f"seed {seed}, case {case}: exit code {child.returncode}; see {saved}", flush=True)
        if not text.startswith("case"):
            break  # it never began
        first = case + 1
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    report = fuzz(options.seed, options.seconds, options.folder, first=options.first)
    calls = sum(report.counts.values())
    print(f"{report.cases} cases, {calls} calls at least, {len(report.failures)} failures")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
