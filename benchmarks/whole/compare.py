"""Real training loops as a whole: plain torch, and the ways to use faststep.

    python benchmarks/whole/compare.py                          # all of it, in some ten minutes
    python benchmarks/whole/compare.py --quick                  # half of the scripts, one round
    python benchmarks/whole/compare.py --works CNN --also retain mallopt
    python benchmarks/whole/compare.py --tcmalloc libtcmalloc_minimal.so.4

Each run is a process, and the modes take turns, backwards in every second round. The time of a step
is the least of the medians of all runs of a mode. Page faults are those of getrusage(), the peak is
VmHWM, of the process that trains. modes.py says what each mode changes.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from modes import ALWAYS, MODES, PLAIN, Mode, absent, preloading
from rewrite import NotThisScriptError
from works import FOLDERS, WORKS, Work
from written import as_tables

from faststep.cli.busy import Watch
from faststep.cli.console import CommandError, ProgressBar

sys.path.append(str(Path(__file__).parents[1]))
from report import machine

RESULTS = Path(__file__).parents[1] / "results"
SMOKE_STEPS = 3
Found = dict[str, Any]


def once(work: Work, mode: Mode, arguments: list[str], folder: Path) -> Found:
    """One run in a process of its own; raises NotThisScriptError where the mode does not fit."""
    script = work.path
    source = script.read_text()
    changed = mode.change(source)
    if changed != source:
        script = folder / work.script
        script.write_text(changed)
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    paths = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *mode.command, str(script), *arguments, "--result", str(result)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **mode.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not result.is_file():
        raise CommandError(f"{work.script}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: Found = json.loads(result.read_text())
    return found


def here(work: Work, mode: Mode, arguments: list[str], folder: Path) -> Found:
    """The same in this process, which has imported torch."""
    script, result = folder / work.script, folder / "result.json"
    script.write_text(mode.change(work.path.read_text()))
    before = sys.argv, sys.path
    sys.path = [*map(str, FOLDERS), *sys.path]
    sys.argv = [str(script), *arguments, "--result", str(result)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path = before
    found: Found = json.loads(result.read_text())
    return found


def summary(runs: list[Found], plain: list[float]) -> Found:
    """Of all runs of a mode: the least median time, with its phases, and what it cost."""
    steps = [[sum(step) for step in zip(*run["phases"].values(), strict=True)] for run in runs]
    medians = [statistics.median(step) for step in steps]
    best = medians.index(min(medians))
    losses = runs[0]["losses"]
    return {
        "seconds": medians[best],
        "medians": medians,
        "phases": {name: statistics.median(s) for name, s in runs[best]["phases"].items()},
        "faults": statistics.median(run["faults"] for run in runs),
        "peak": max(run["peak"] for run in runs),
        "loss_difference": max(abs(a - b) for a, b in zip(losses, plain, strict=True)),
        "losses": [losses[0], losses[-1]],
    }


def best_workers(work: Work, arguments: list[str], folder: Path) -> Found:
    """With how many workers plain torch is fastest; all modes then have as many."""
    times = {}
    for workers in (0, 1, 2):
        run = once(work, MODES[PLAIN], [*arguments, "--workers", str(workers)], folder)
        times[workers] = summary([run], run["losses"])["seconds"]
    return {"best": min(times, key=times.__getitem__), "seconds": times}


def measured(name: str, modes: Mapping[str, Mode], rounds: int, show: Any) -> Found:
    """Everything about one script, in all modes."""
    work = WORKS[name]
    found: Found = {"work": name, "what": work.what, "modes": {}, "absent": {}}
    runs: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory(prefix="whole-") as folder:
        sizes = ["--steps", str(work.steps), "--warm-up", str(work.warm_up)]
        if work.from_files:
            sizes += ["--files", f"{folder}/files"]
            found["workers"] = best_workers(work, sizes, Path(folder))
            sizes += ["--workers", str(found["workers"]["best"])]
        for number in range(rounds):
            for mode in list(modes)[:: -1 if number % 2 else 1]:
                if mode in found["absent"]:
                    continue
                try:
                    run = once(work, modes[mode], sizes, Path(folder))
                    runs.setdefault(mode, []).append(run)
                except NotThisScriptError as reason:
                    found["absent"][mode] = str(reason)
                show(f"{name}, {mode}")
    plain = runs[PLAIN][0]["losses"]
    found["modes"] = {mode: summary(these, plain) for mode, these in runs.items()}
    return found


def smoke() -> list[Found]:
    """Tiny sizes, in this process where the mode allows that: shows that all of it runs."""
    works = []
    for name, work in WORKS.items():
        runs: dict[str, list[Found]] = {}
        with tempfile.TemporaryDirectory(prefix="whole-") as folder:
            sizes = ["--tiny", "--steps", str(SMOKE_STEPS), "--files", f"{folder}/files"]
            for mode, how in MODES.items():
                if how.in_process:
                    runs[mode] = [here(work, how, sizes, Path(folder))]
        plain = runs[PLAIN][0]["losses"]
        modes = {mode: summary(these, plain) for mode, these in runs.items()}
        works.append({"work": name, "what": work.what, "modes": modes, "absent": {}})
    return works


def chosen_modes(given: argparse.Namespace) -> dict[str, Mode]:
    """Those that can be measured here; says which cannot."""
    modes = {name: MODES[name] for name in dict.fromkeys((*ALWAYS, *given.also))}
    if given.modes:
        modes = {name: MODES[name] for name in dict.fromkeys((PLAIN, *given.modes))}
    if given.tcmalloc:
        modes["tcmalloc"] = preloading(given.tcmalloc)
    reasons = {name: absent(mode) for name, mode in modes.items()}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is not measured: {reason}", file=sys.stderr)
    return {name: mode for name, mode in modes.items() if not reasons[name]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, metavar="NAME", help=", ".join(WORKS))
    parser.add_argument("--also", nargs="+", choices=MODES, default=[], metavar="MODE")
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help="only these")
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="half of the scripts")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of a smoke run")
    parser.add_argument("--tcmalloc", metavar="LIBRARY", help="preloaded, as a rival")
    parser.add_argument("--save", metavar="NAME", help="in benchmarks/results/whole, which git has")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    watch = Watch()
    about: Found = {"machine": machine(), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    if given.smoke:
        results = {**about, "works": smoke(), "others": watch.others()}
        if given.json:
            given.json.write_text(json.dumps(results))
        print(as_tables(results))
        return
    modes = chosen_modes(given)
    names = given.works or [name for name in WORKS if WORKS[name].in_quick or not given.quick]
    rounds = given.rounds or (1 if given.quick else 3)
    progress = ProgressBar(len(names) * len(modes) * rounds)
    done = 0

    def show(note: str) -> None:
        nonlocal done
        done += 1
        progress.show(done, note)

    works = [measured(name, modes, rounds, show) for name in names]
    progress.close()
    results = {**about, "rounds": rounds, "others": watch.others(), "works": works}
    stamp = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-whole"
    base = RESULTS / ("whole" if given.save else "local") / (given.save or stamp)
    base.parent.mkdir(parents=True, exist_ok=True)
    text = as_tables(results)
    base.with_name(f"{base.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    base.with_name(f"{base.name}.md").write_text(f"# Whole training steps\n\n{text}\n")
    print(f"{text}\n\nWritten: {base}.md and .json")


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        raise SystemExit(str(error)) from None
