"""Training loops on a CUDA device as a whole: plain torch, torch's fused optimizer, and faststep.

    python benchmarks/gpu/cuda_loops.py [--rounds 2] [--json FILE] [--device cpu --tiny]

In each round every way has a process of its own. They take turns of some steps, there and back; a
gain is over plain torch in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from faststep.cli.console import CommandError, table

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "whole")]
from modes import FUSED, MODES, PLAIN, RUN, SWAPPED  # noqa: E402
from turns import interval, play  # noqa: E402
from works import FOLDERS  # noqa: E402

from cuda_report import cuda_machine  # noqa: E402

LOOPS = {
    "GPT-2 small, bf16": ("gpt2.py", 10),
    "GPT of 4 x 256, bf16": ("gpt2.py", 40, "--small"),
    "ResNet-50, fp16": ("resnet50.py", 10),
}
WAYS = (PLAIN, FUSED, SWAPPED, RUN)
TURNS = 6
Found = dict[str, Any]


def round_of(name: str, sizes: list[str], folder: Path) -> dict[str, Found]:
    """The figures of each way in one round."""
    script, turn, *arguments = LOOPS[name]
    commands = {}
    for way in WAYS:
        mode = MODES[way]
        changed = folder / way / str(script)
        changed.parent.mkdir(exist_ok=True)
        changed.write_text(mode.change((HERE / "loops" / str(script)).read_text()))
        paths = [*map(str, FOLDERS), str(HERE / "loops"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        options = [*map(str, arguments), *sizes, "--turns", str(TURNS)]
        commands[way] = [sys.executable, *mode.command, str(changed), *options], environment
    return play(commands, int(turn), TURNS)


def rows_of(name: str, rounds: list[dict[str, Found]]) -> list[list[str]]:
    """Of each way: milliseconds of a step, the gain with its interval, peak, and losses."""
    plain, rows = [found[PLAIN] for found in rounds], []
    for way in rounds[0]:
        runs = [found[way] for found in rounds]
        mean, low, high = interval(
            [
                before / after
                for one, other in zip(plain, runs, strict=True)
                for before, after in zip(one["turns"], other["turns"], strict=True)
            ]
        )
        apart = max(abs(a - b) for a, b in zip(runs[0]["losses"], plain[0]["losses"], strict=True))
        milliseconds = statistics.median(s for run in runs for s in run["phases"]["step"]) * 1e3
        gain = f"{mean:.2f}x ({low:.2f} to {high:.2f})"
        peak = f"{runs[0]['peak'] / 2**20:.0f}"
        rows.append([name, way, f"{milliseconds:.2f}", gain, peak, f"{apart:.1e}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sizes = ["--device", given.device, *(["--tiny"] if given.tiny else [])]
    about = cuda_machine()
    print(about, flush=True)
    results: dict[str, list[dict[str, Found]]] = {}
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="loops-") as made:
        folder = Path(made)
        for name in given.loops:
            try:
                results[name] = [round_of(name, sizes, folder) for _ in range(given.rounds)]
            except CommandError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            rows += rows_of(name, results[name])
            print("; ".join(" ".join(row[1:]) for row in rows[-len(WAYS) :]), flush=True)
            if given.json:
                found = {"machine": about, "loops": results}
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    header = ["loop", "way", "ms of a step", "gain", "peak MiB", "loss differs by"]
    print(f"\n{table(header, rows, markdown=True)}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
