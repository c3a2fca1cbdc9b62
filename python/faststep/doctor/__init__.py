"""``python -m faststep doctor``: what bounds a script, and which remedies help, tried on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from .findings import LEAST, OPTIMIZER, Suspect, suspects
from .phases import PHASES
from .remedies import ALL, KINDS, general, is_chosen
from .runs import DoctorError, Length, Runs
from .system import notes
from .trials import CHANGING, SURE, Remedies, Trial, Trials

__all__ = ["KINDS", "MINUTES", "SURE", "Answer", "DoctorError", "Finding", "Trial", "examine"]

MINUTES, FEW_SECONDS = 3.0, 88.0  # the latter where a step is short, unless a user asks for more
SHORT_STEP = 0.2  # seconds
NOISE = 1.1  # of a gain, beyond all that a remedy can save
FIRST = Length(6.0, 8, 0.5)  # the run that shows what bounds the script
BUILT_IN = 1.1  # the least gain over torch's own optimizers and clipping that is a finding


class Finding(NamedTuple):
    """A cause that costs at least 5 % of a step and has a remedy, or that ends in an error."""

    cause: str
    gain: float
    line: str | None
    text: str


class Answer(NamedTuple):
    """The answer of the doctor."""

    verdict: str
    phases: dict[str, float]  # shares of a step, largest first
    findings: list[Finding]
    trials: list[Trial]
    best: Trial | None
    found: dict[str, Any]  # of the script as it is
    left: list[str]  # remedies for which there was no time
    notes: list[str]  # on the system

    def as_json(self) -> dict[str, Any]:
        """With plain lists and dicts."""
        seconds = self.found["steps"]
        return {
            "verdict": self.verdict,
            "phases": self.phases,
            "findings": [one._asdict() for one in self.findings],
            "trials": [one.as_json() for one in self.trials],
            "best": None if self.best is None else self.best.as_json(),
            "step": {
                "count": len(seconds),
                "mean": mean_step(self.found),
                "median": sorted(seconds)[len(seconds) // 2],
            },
            "threads": self.found["threads"],
            "cores": self.found["cores"],
            "peak": self.found["peak"],
            "machine": self.found["machine"],
            "switched": self.found["switched"],
            "left": self.left,
            "system": self.notes,
            "cpu": self.found["cpu"],  # seconds per second
        }

    def of_the_machine(self) -> list[str]:
        """Sentences on what this machine does in a second, and what a step needs of it."""
        machine, step = self.found["machine"], mean_step(self.found)
        if not machine:
            return []
        said = [f"This machine copies {machine['copy'] / 1e9:.3g} GB/s."]
        share = needed_by_products(self.found)
        if share is not None:
            said.append(
                f"Matrix products of this script's shapes run at {machine['fp32'] / 1e9:.3g} "
                f"GFLOP/s in fp32 and {machine['bf16'] / 1e9:.3g} in bf16: at the first rate the "
                f"{machine['operations'] / 1e9:.3g} GFLOP of a step take {share:.0%} of it."
            )
        spent = self.phases.get("optimizer", 0.0) * step
        if spent and self.found["optimizers"]:
            moved = sum(one["moved"] for one in self.found["optimizers"])
            if self.found["gpu"]:  # the host does not wait for it, so its phase is another time
                least = 1e3 * moved / machine["copy"]
                said.append(f"The optimizer moves {moved / 1e9:.3g} GB: {least:.3g} ms of copies.")
            else:
                said.append(f"The optimizer moves {moved / spent / 1e9:.3g} GB/s.")
        return said

    def table_of_switches(self) -> tuple[list[str], list[list[str]]]:
        """As `table_of_trials`, for what was turned on and off between the steps of one run."""
        rows = [
            [name, f"{gain[0]:.2f}x", f"{gain[1]:.2f} to {gain[2]:.2f}"]
            for name, gain in self.found["switched"].items()
        ]
        return ["between steps of one run", "gain", "95 % interval"], rows

    def table_of_trials(self) -> tuple[list[str], list[list[str]]]:
        """The titles of the columns, and a row for each trial, best first."""
        rows = [
            [
                one.remedy,
                f"{one.gain:.2f}x",
                f"{one.low:.2f} to {one.high:.2f}",
                one.results,
                f"{one.memory / 2**20:+.0f} MiB",
            ]
            for one in sorted(self.trials, key=lambda one: -one.gain)
        ]
        return ["tried", "gain", "95 % interval", "results", "memory"], rows


def examine(
    runs: Runs,
    is_timed: bool = False,
    accept: Collection[str] = (),
    only: Collection[str] = (),
    say: Callable[[str], object] = lambda text: None,
) -> Answer:
    """Run a script several times, each of them thrown away, and say what bounds it.

    Args:
        runs: of the script.
        is_timed: take all of their time where a step takes below 0.2 s, too, and not half of it.
        accept: remedies, by name, that the best combination may have though they change training.
            Default: none.
        only: kinds of remedies that are tried, of `KINDS`. Default: all that need not be named.
        say: is told what happens.

    Raises:
        DoctorError: the script fails, or trains no step in this time.
    """
    begun = time.monotonic()
    say("running the script as it is")
    base = runs.measure(FIRST, tries=True, only=only)
    if not is_timed and mean_step(base) < SHORT_STEP:
        runs.until = begun + FEW_SECONDS
    suspected, trials = suspects(base), Trials(runs, base, accept, say)
    may_be_kept, others = _in_order(suspected, dict(general(base)), accept, only)
    known = {**may_be_kept, **others}
    for name in accept:
        if name not in known:
            names = ", ".join(known) or "there are none"
            say(f"--accept {name!r} is no remedy that is tried on this script: {names}")
    trials.make(may_be_kept)
    best = trials.together()
    trials.make(others)
    findings: list[Finding] = []
    for suspect in suspected:
        tried = filter(None, map(trials.named, suspect.changes))
        findings += _judged(suspect, max(tried, key=lambda trial: trial.gain, default=None))
    findings.sort(key=lambda one: (one.gain != 1.0, -one.gain))  # errors first
    total = sum(base["steps"])
    phases = {phase: base["phases"].get(phase, 0.0) / total for phase in PHASES}
    shown = {name: phases[name] for name in sorted(phases, key=lambda one: -phases[one])}
    shown = {name: share for name, share in shown.items() if share}
    verdict = _verdict(base, shown, findings, trials.made)
    said = notes(base)
    return Answer(verdict, shown, findings, trials.made, best, base, trials.left, said)


def _in_order(
    suspected: Sequence[Suspect], known: Remedies, accept: Collection[str], only: Collection[str]
) -> tuple[Remedies, Remedies]:
    """The remedies that the best combination may have, most important first; and the others."""
    remedies: Remedies = dict(suspected[0].changes) if suspected else {}
    remedies |= {name: known[name] for name in (ALL, *accept) if name in known}
    for one in suspected:
        remedies |= one.changes
    remedies = {k: v for k, v in {**remedies, **known}.items() if is_chosen(v, only)}
    informing = {"shard", *CHANGING}  # what is not kept by itself
    others = {k: v for k, v in remedies.items() if informing & v.keys() and k not in accept}
    return {k: v for k, v in remedies.items() if k not in others}, others


def _judged(suspect: Suspect, best: Trial | None) -> list[Finding]:
    """The finding that a suspect is, if it is one."""
    where, text = suspect.line, suspect.text
    if suspect.is_error:
        return [Finding(suspect.cause, 1.0, where, text)]
    least = BUILT_IN if suspect.changes is OPTIMIZER else 1.0 + LEAST
    is_possible = best is not None and best.gain * (1.0 - suspect.most) < NOISE
    if best is not None and best.is_proven and best.gain >= least and is_possible:
        said = f"{text}. {best.remedy}: {best.gain:.2f}x, {best.results}"
        return [Finding(suspect.cause, best.gain, where, said)]
    if suspect.needs_trial:
        return []
    if best is not None and best.gain >= 1.0 + LEAST:
        said = f"{text}. {best.remedy}: {best.gain:.2f}x, which was not tried often enough"
        return [Finding(suspect.cause, best.gain, where, said)]
    said = f"{text}. That can gain at most this"
    return [Finding(suspect.cause, 1.0 / (1.0 - min(0.95, suspect.share)), where, said)]


def _verdict(
    found: dict[str, Any], phases: dict[str, float], findings: list[Finding], trials: list[Trial]
) -> str:
    if findings:
        first = findings[0]
        where = f" ({first.line})" if first.line else ""
        gain = f", {first.gain:.2f}x to gain" if first.gain > 1.0 else ""
        return f"{first.cause}{gain}: {first.text}{where}"
    main = max(phases, key=phases.__getitem__)
    said = f"nothing to mend was found: {main} takes {phases[main]:.0%} of a step"
    share = needed_by_products(found)
    computing = phases.get("forward", 0.0) + phases.get("backward", 0.0)
    if share is not None and computing:
        said += f"; forward and backward run at {share / computing:.0%} of what this machine does"
        said += " in its own matrix products"
    proven = [one for one in trials if one.is_proven and one.results not in SURE]
    if proven:
        best = max(proven, key=lambda one: one.gain)
        said += f". {best.remedy} would be {best.gain:.2f}x, and changes training"
    return said


def needed_by_products(found: dict[str, Any]) -> float | None:
    """The share of a step that its matrix products need at this machine's own rate in fp32."""
    machine = found["machine"]
    if not machine or not machine["fp32"]:
        return None
    return float(machine["operations"] / machine["fp32"]) / mean_step(found)


def mean_step(found: dict[str, Any]) -> float:
    """Seconds."""
    return float(sum(found["steps"]) / len(found["steps"]))
