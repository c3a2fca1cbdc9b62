"""Counts the instructions of fixed passes under Callgrind, and compares with what is expected.

Unlike times, counts do not depend on who else uses the machine, so a change that makes a loop do
more fails here. They depend on the compiler: `make count-renew` adds or renews the counts of the
one in use. Another compiler's counts must not be exceeded by more than half.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

Counts = dict[str, dict[str, int]]  # of each pass, by instruction set

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "build/c/tests/c/count_passes"
EXPECTED = Path(__file__).with_name("instructions.json")
LEVELS = ("base", "avx2") if platform.machine() == "x86_64" else ("base",)  # Callgrind's
TOLERANCE = 1.02  # libraries differ: memcpy, sqrt
OTHER_COMPILER = 1.5


def compiler() -> str:
    """As "x86_64 gcc-12"."""
    command = os.environ.get("CC", "cc").split()
    text = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    first = text.stdout.split("\n", 1)[0]
    version = re.search(r"(\d+)\.\d+", re.sub(r"\(.*?\)", "", first))
    name = "clang" if "clang" in first else "gcc"
    return f"{platform.machine()} {name}-{version.group(1) if version else '?'}"


def _count(level: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"),
                *("--collect-atstart=no", "--toggle-collect=measured", "--dump-after=measured"),
                *(PROGRAM, level),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"valgrind failed for {level}:\n{done.stderr[-4000:]}")
        names = [line for line in done.stdout.splitlines() if "checks" not in line]
        totals = [
            int(re.findall(r"^totals: (\d+)", Path(folder, f"out.{i + 1}").read_text(), re.M)[0])
            for i in range(len(names))
        ]
    return dict(zip(names, totals, strict=True))


def compare(counts: Counts, expected: dict[str, Counts], key: str) -> list[str]:
    """What is wrong, a line each."""
    known = expected.get(key)
    faults = []
    for level, passes in counts.items():
        if known is not None and set(passes) != set(known.get(level, {})):
            faults.append(f"{level}: other passes than expected; run make count-renew")
        for name, count in passes.items():
            if known is not None:
                limit = known.get(level, {}).get(name, 0) * TOLERANCE
            else:
                others = [of.get(level, {}).get(name, 0) for of in expected.values()]
                limit = max(others, default=0) * OTHER_COMPILER
            if count > limit:
                faults.append(f"{level}, {name}: {count} instructions, at most {limit:.0f}")
    return faults


def _better(counts: Counts, known: Counts) -> int:
    """How many passes take so much less that the expectation is worth renewing."""
    return sum(
        count * TOLERANCE < known.get(level, {}).get(name, 0)
        for level, passes in counts.items()
        for name, count in passes.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true", help="write what is counted")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        print("INSTRUCTIONS WERE NOT COUNTED: valgrind is missing (apt-get install valgrind)")
        return 1
    key = compiler()
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    counts = {level: _count(level) for level in LEVELS}
    if options.renew:
        expected[key] = counts
        EXPECTED.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
        print(f"written for {key}: {EXPECTED}")
        return 0
    if key not in expected:
        print(f"nothing is expected of {key}: make count-renew; compared with other compilers")
    faults = compare(counts, expected, key)
    print("\n".join(faults) or f"{sum(map(len, counts.values()))} counts as expected of {key}")
    if not faults and (better := _better(counts, expected.get(key, {}))):
        print(f"{better} are lower by more than 2 %: make count-renew")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
