"""``python -m faststep demo``: three training scripts in plain torch, alone and under ``run``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import plots
from .busy import BusyWatch, busy_note
from .console import CommandError, ProgressBar, at_least, table, times
from .scripts.meter import PHASES

HELP = "train three small models, each with plain torch and under `run`, and compare"

WHOLE = "whole step"
PLAIN, OURS = "torch", "faststep run"
COMMANDS = {PLAIN: (), OURS: ("-m", "faststep", "run")}
WARM_UP = 3
SCRIPTS = Path(__file__).parent / "scripts"

_PLOT = "demo.png"


@dataclass(frozen=True)
class Training:
    """One of the scripts.

    Args:
        script: its file in ``scripts``.
        what: what it trains, for the reader.
        steps: how many of its steps count as one of ``--steps``.
        needs: the modules that it imports beside torch.
    """

    script: str
    what: str
    steps: int = 1
    needs: tuple[str, ...] = ()


TRAININGS = {
    "gpt": Training("transformer.py", "A GPT learns the standard library's source"),
    "images": Training("image_folder.py", "ResNet-18 reads JPEGs", needs=("PIL", "numpy")),
    "table": Training("tabular.py", "An MLP learns a table", steps=40),
}


@dataclass(frozen=True)
class Result:
    """The figures of one run of a script.

    Args:
        seconds: of each step after the first ones, by phase and of the whole.
        losses: of all steps.
        faults: page faults per step.
        peak: the most resident memory, in bytes.
    """

    seconds: dict[str, list[float]]
    losses: list[float]
    faults: float
    peak: int

    @classmethod
    def read(cls, text: str) -> Result:
        """Read the figures that ``scripts/meter.py`` has written."""
        found = json.loads(text)
        phases: dict[str, list[float]] = {phase: found["phases"][phase] for phase in PHASES}
        whole = [sum(step) for step in zip(*phases.values(), strict=True)]
        return cls({**phases, WHOLE: whole}, found["losses"], found["faults"], found["peak"])

    def medians(self) -> dict[str, float]:
        """The median seconds of each phase."""
        return {phase: statistics.median(seconds) for phase, seconds in self.seconds.items()}

    def taken(self) -> dict[str, float]:
        """All that the run took, the whole step first, by what it is and its unit."""
        medians = {f"{phase}, ms": 1e3 * seconds for phase, seconds in self.medians().items()}
        whole = f"{WHOLE}, ms"
        rest = {"page faults per step": self.faults, "peak memory, MB": self.peak / 1e6}
        return {whole: medians.pop(whole), **medians, **rest}


Results = dict[str, dict[str, Result]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``demo``."""
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=12,
        help="the table's model takes 40 times as many; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=TRAININGS,
        default=list(TRAININGS),
        metavar="NAME",
        help=f"some of {', '.join(TRAININGS)}; default: all",
    )
    plots.add_arguments(parser, _PLOT)


def _once(training: Training, command: Sequence[str], arguments: Sequence[str]) -> Result:
    """Run a script in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        words = [*command, str(SCRIPTS / training.script), *arguments, "--result", result.name]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandError(f"{training.script} failed:\n{done.stderr[-4000:]}")
        return Result.read(Path(result.name).read_text())


def train(arguments: argparse.Namespace) -> Results:
    """Run each script with plain torch and under ``run``.

    Raises:
        CommandError: a module is missing, or a script failed.
    """
    for name in arguments.only:
        for module in TRAININGS[name].needs:
            if importlib.util.find_spec(module) is None:
                raise CommandError(f'{name} needs {module}: pip install "faststep[demo]"')
    progress = ProgressBar(len(arguments.only) * len(COMMANDS))
    found: Results = {}
    done = 0
    with tempfile.TemporaryDirectory(prefix="faststep-demo-") as files:
        for name in arguments.only:
            training = TRAININGS[name]
            steps = arguments.steps * training.steps
            options = ["--steps", str(steps), "--warm-up", str(WARM_UP * training.steps)]
            options += ["--seed", str(arguments.seed), "--files", files]
            for way, command in COMMANDS.items():
                progress.show(done, f"{name}, {way}")
                found.setdefault(name, {})[way] = _once(training, command, options)
                done += 1
    progress.show(done)
    progress.close()
    return found


def _gaps(first: Sequence[float], second: Sequence[float]) -> str:
    """How far two curves are from each other in the second step, and at most."""
    gaps = [abs(x - y) for x, y in zip(first, second, strict=True)]
    most = math.nan if any(map(math.isnan, gaps)) else max(gaps)  # max() ignores a NaN
    return f"{gaps[min(1, len(gaps) - 1)]:.1e} in the second step, {most:.1e} at most"


def report(name: str, plain: Result, ours: Result) -> str:
    """The phases, the losses and the memory of one script, as text."""
    a, b = plain.medians(), ours.medians()
    rows = [
        [phase, f"{1e3 * a[phase]:.2f}", f"{1e3 * b[phase]:.2f}", times(a[phase] / b[phase])]
        for phase in (*PHASES, WHOLE)
    ]
    rows.append(["page faults per step", f"{plain.faults:.0f}", f"{ours.faults:.0f}", ""])
    rows.append(["peak memory, MB", f"{plain.peak / 1e6:.0f}", f"{ours.peak / 1e6:.0f}", ""])
    return "\n".join(
        [
            f"{TRAININGS[name].what}: {len(ours.losses)} steps",
            table(["median ms per step", PLAIN, OURS, "ratio"], rows),
            *(
                f"Loss with {way}: {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
                for way, result in ((PLAIN, plain), (OURS, ours))
            ),
            f"Difference between the losses: {_gaps(plain.losses, ours.losses)}",
        ]
    )


def run(arguments: argparse.Namespace) -> None:
    """Train, print the comparison, and write the plot."""
    output = plots.plot_path(arguments, _PLOT)
    print(
        f"Each script is run as `python SCRIPT` and as `python -m faststep run SCRIPT`, from seed "
        f"{arguments.seed}, with {torch.get_num_threads()} threads.",
        flush=True,
    )
    watch = BusyWatch()
    found = train(arguments)
    note = busy_note(watch.others())
    for name, results in found.items():
        print("\n" + report(name, results[PLAIN], results[OURS]))
    if note:
        print("\n" + note)
    if output is not None:
        plots.plot_trainings(
            output,
            {
                TRAININGS[name].what: [(way, x.losses, x.taken()) for way, x in results.items()]
                for name, results in found.items()
            },
            note,
        )
        print(f"\nPlot: {output}")
