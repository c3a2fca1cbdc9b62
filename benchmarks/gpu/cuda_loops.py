"""Training loops on a CUDA device as a whole: plain torch, torch's fused optimizer, and faststep.

    python benchmarks/gpu/cuda_loops.py [--rounds 3] [--json FILE] [--device cpu --tiny]

In each round every way has a process of its own. A gain is over plain torch in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import faststep.cli.scripts
from faststep.cli.console import table

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "whole")]
from modes import FUSED, MODES, PLAIN, RUN, SWAPPED  # noqa: E402

from cuda_report import cuda_machine  # noqa: E402

LOOPS = {
    "GPT-2 small, bf16": ("gpt.py",),
    "GPT of 4 x 256, bf16": ("gpt.py", "--small", "--steps", "40"),
    "ResNet-50, fp16": ("resnet50.py",),
}
WAYS = (PLAIN, FUSED, SWAPPED, RUN)
Found = dict[str, Any]


def run(way: str, script: str, arguments: list[str], folder: Path) -> Found:
    """The figures of one process; raises RuntimeError with what a script that fails has said."""
    mode = MODES[way]
    changed = folder / script
    changed.write_text(mode.change((HERE / "loops" / script).read_text()))
    command = [sys.executable, *mode.command, str(changed), *arguments]
    paths = [str(folder), str(HERE / "loops"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{way}, {script}: {done.stderr[-3000:]}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    found["said"] = [line for line in done.stderr.splitlines() if "faststep" in line]
    return found


def as_table(results: dict[str, dict[str, list[Found]]]) -> str:
    """Milliseconds of a step, the gain with its range over the rounds, peak, and losses."""
    rows = []
    for name, ways in results.items():
        plain = [statistics.median(one["seconds"]) for one in ways[PLAIN]]
        wanted = ways[PLAIN][0]["losses"]
        for way, runs in ways.items():
            own = [statistics.median(one["seconds"]) for one in runs]
            gains = [a / b for a, b in zip(plain, own, strict=True)]
            apart = max(abs(a - b) for a, b in zip(runs[0]["losses"], wanted, strict=True))
            rows.append(
                [
                    name,
                    way,
                    f"{1e3 * statistics.median(own):.2f}",
                    f"{statistics.median(gains):.2f}x ({min(gains):.2f} to {max(gains):.2f})",
                    f"{runs[0]['peak'] / 2**20:.0f}",
                    f"{apart:.1e}",
                ]
            )
    header = ["loop", "way", "ms of a step", "gain", "peak MiB", "loss differs by"]
    return table(header, rows, markdown=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sizes = ["--device", given.device, *(["--tiny"] if given.tiny else [])]
    results: dict[str, dict[str, list[Found]]] = {}
    with tempfile.TemporaryDirectory(prefix="loops-") as made:
        folder = Path(made)
        model = Path(faststep.cli.scripts.__file__).with_name("gpt.py")
        (folder / "gpt_model.py").write_text(model.read_text())
        for _ in range(given.rounds):
            for name in given.loops:
                script, *arguments = LOOPS[name]
                for way in WAYS:
                    try:
                        found = run(way, script, [*arguments, *sizes], folder)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        print(error, file=sys.stderr)
                        continue
                    results.setdefault(name, {}).setdefault(way, []).append(found)
    about = f"{cuda_machine()}, torch {torch.__version__}"
    if given.json:
        given.json.write_text(json.dumps({"machine": about, "loops": results}, indent=1) + "\n")
    print(f"{about}\n\n{as_table(results)}")


if __name__ == "__main__":
    main()
