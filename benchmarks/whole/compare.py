"""Real training loops as a whole: plain torch, and the ways to use faststep.

    python benchmarks/whole/compare.py                          # all of it, in three hours
    python benchmarks/whole/compare.py --quick                  # half of the scripts, three rounds
    python benchmarks/whole/compare.py --modes swapped run --rounds 5       # the chart of README
    python benchmarks/whole/compare.py --works CNN --also "torch.compile" mallopt
    python benchmarks/whole/compare.py --tcmalloc libtcmalloc_minimal.so.4

A round has a new process for each mode. All of them start, and then take turns of some steps,
there and back. The ratio of two modes in a round is the median over neighbouring turns. Rounds go
on until the 95 % intervals of the ratios to plain torch are narrower than 3 %, or there were 12.
Page faults are those of getrusage(), the peak is VmHWM, of the process that trains. modes.py says
what each mode changes.
"""

from __future__ import annotations

import argparse
import itertools
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
from turns import interval, play, ratios
from works import FOLDERS, WORKS, Work
from written import as_tables

from faststep.cli.busy import BusyWatch
from faststep.cli.console import CommandError, ProgressBar

sys.path.append(str(Path(__file__).parents[1]))
from report import machine

RESULTS = Path(__file__).parents[1] / "results"
SMOKE_STEPS = 3
TURNS = 4  # of a process
LEAST_ROUNDS, MOST_ROUNDS = 3, 12
WIDTH = 0.03  # of an interval, of the ratio
Found = dict[str, Any]


def command_of(
    work: Work, mode: Mode, arguments: list[str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """How a mode runs a script; raises NotThisScriptError where it does not fit."""
    script = work.path
    source = script.read_text()
    changed = mode.change(source)
    if changed != source:
        folder.mkdir(exist_ok=True)
        script = folder / work.script
        script.write_text(changed)
    paths = [*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **mode.environment}
    return [sys.executable, *mode.command, str(script), *arguments], environment


def products_of(work: Work, arguments: list[str], folder: Path) -> Found:
    """The operations of a step's products, and the machine's rates."""
    command, environment = command_of(work, MODES[PLAIN], arguments, folder)
    result = folder / "products.json"
    command[1:1] = [str(Path(__file__).with_name("products.py")), str(result)]
    command += ["--result", str(folder / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"{work.script}: {done.stderr[-4000:]}")
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
    """Of all runs of a mode: the median time of a step, with its phases, and what it cost."""
    steps = [[sum(step) for step in zip(*run["phases"].values(), strict=True)] for run in runs]
    losses = runs[0]["losses"]
    return {
        "seconds": statistics.median(statistics.median(step) for step in steps),
        "turns": [run.get("turns", []) for run in runs],
        "phases": {
            name: statistics.median(statistics.median(run["phases"][name]) for run in runs)
            for name in runs[0]["phases"]
        },
        "faults": statistics.median(run["faults"] for run in runs),
        "peak": max(run["peak"] for run in runs),
        "loss_difference": max(abs(a - b) for a, b in zip(losses, plain, strict=True)),
        "losses": [losses[0], losses[-1]],
    }


def best_workers(work: Work, arguments: list[str], folder: Path) -> Found:
    """With how many workers plain torch is fastest; all modes then have as many."""
    turn = max(1, work.steps // TURNS)
    plain = command_of(work, MODES[PLAIN], arguments, folder)
    commands = {
        str(workers): ([*plain[0], "--workers", str(workers)], plain[1]) for workers in (0, 1, 2)
    }
    seconds = {workers: sum(run["turns"]) for workers, run in play(commands, turn, TURNS).items()}
    return {"best": min(seconds, key=seconds.__getitem__), "seconds": seconds}


def is_known(runs: Mapping[str, list[Found]]) -> bool:
    """True if the interval of each mode's ratio to plain torch is narrow."""
    plain = [run["turns"] for run in runs[PLAIN]]
    for these in runs.values():
        _, low, high = interval(ratios(plain, [run["turns"] for run in these]))
        if high > (1.0 + WIDTH) * low:
            return False
    return True


def measured(name: str, modes: Mapping[str, Mode], rounds: int, show: Any) -> Found:
    """Everything about one script, in all modes."""
    work = WORKS[name]
    found: Found = {"work": name, "what": work.what, "modes": {}, "absent": {}}
    runs: dict[str, list[Found]] = {}
    turn = max(1, work.steps // TURNS)
    with tempfile.TemporaryDirectory(prefix="whole-") as made:
        folder = Path(made)
        sizes = ["--steps", str(turn * TURNS), "--warm-up", str(work.warm_up), *work.arguments]
        if work.from_files:
            sizes += ["--files", f"{folder}/files"]
        found["products"] = products_of(work, sizes, folder)  # it alone makes the files
        if work.from_files:
            found["workers"] = best_workers(work, sizes, folder)
            sizes += ["--workers", found["workers"]["best"]]
        commands = {}
        for number, (mode, how) in enumerate(modes.items()):
            try:
                commands[mode] = command_of(work, how, sizes, folder / str(number))
            except NotThisScriptError as reason:
                found["absent"][mode] = str(reason)
        for number in range(rounds):
            for mode, run in play(commands, turn, TURNS).items():
                runs.setdefault(mode, []).append(run)
            show(f"{name}, round {number + 1} of at most {rounds}")
            if number + 1 >= LEAST_ROUNDS and is_known(runs):
                break
    plain = runs[PLAIN][0]["losses"]
    found["modes"] = {mode: summary(these, plain) for mode, these in runs.items()}
    return found


def smoke() -> list[Found]:
    """Tiny sizes, in this process where the mode allows that: shows that all of it runs."""
    works = []
    for name, work in WORKS.items():
        if work.arguments:
            continue
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
    parser.add_argument("--rounds", type=int, help="at most; default: 12, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="half of the scripts")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of a smoke run")
    parser.add_argument("--tcmalloc", metavar="LIBRARY", help="preloaded, as a rival")
    parser.add_argument("--save", metavar="NAME", help="in benchmarks/results/whole, which git has")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    watch = BusyWatch()
    about: Found = {"machine": machine(), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    if given.smoke:
        results = {**about, "works": smoke(), "others": watch.others()}
        if given.json:
            given.json.write_text(json.dumps(results))
        print(as_tables(results))
        return
    modes = chosen_modes(given)
    names = given.works or [name for name in WORKS if WORKS[name].in_quick or not given.quick]
    rounds = given.rounds or (LEAST_ROUNDS if given.quick else MOST_ROUNDS)
    progress = ProgressBar(len(names) * rounds)
    works = []
    for done, name in enumerate(names):
        played = itertools.count(done * rounds + 1)
        works.append(
            measured(name, modes, rounds, lambda note, n=played: progress.show(next(n), note))
        )
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
