"""``python -m faststep doctor``: what bounds a script, and which remedies help, tried on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ..run.program import Program
from .findings import LEAST, Suspect, suspects
from .gains import Gain, compare, ratio, results_of
from .phases import PHASES
from .runs import DoctorError, Length, Runs

__all__ = ["Answer", "DoctorError", "Finding", "Trial", "examine"]

FIRST = Length(6.0, 20, 0.5)  # the run that shows what bounds the script
SHORT = Length(4.0, 10)  # those that are compared
PROMISING = 1.03  # a gain that is worth more pairs of runs
LARGE = 1.25  # a gain that a second pair is enough to confirm; others take a third one
REPEATED = 1.02  # the least gain of the slowest run with a remedy over the fastest one without
BUILT_IN = 1.1  # the least gain over torch's own optimizers and clipping that is a finding
SURE = ("same bits", "rounding")


class Finding(NamedTuple):
    """A cause that costs at least 5 % of a step and has a remedy, or that ends in an error."""

    cause: str
    gain: float
    line: str | None
    text: str


class Trial(NamedTuple):
    """A remedy that was tried, beside the script as it is."""

    remedy: str
    gain: float
    low: float
    high: float
    results: str
    memory: int  # bytes of the peak, more than without
    change: dict[str, Any]

    @property
    def is_proven(self) -> bool:
        """True if a repetition has confirmed that it is faster."""
        return self.low > 1.0 and self.gain >= PROMISING


class Answer(NamedTuple):
    """What the doctor says."""

    verdict: str
    phases: dict[str, float]
    findings: list[Finding]
    trials: list[Trial]
    best: Trial | None
    found: dict[str, Any]  # of the script as it is

    def as_json(self) -> dict[str, Any]:
        """With plain lists and dicts."""
        seconds = self.found["steps"]
        return {
            "verdict": self.verdict,
            "phases": self.phases,
            "findings": [one._asdict() for one in self.findings],
            "trials": [_shown(one) for one in self.trials],
            "best": None if self.best is None else _shown(self.best),
            "step": {
                "count": len(seconds),
                "mean": sum(seconds) / len(seconds),
                "median": sorted(seconds)[len(seconds) // 2],
            },
            "threads": self.found["threads"],
            "cores": self.found["cores"],
            "peak": self.found["peak"],
            "cpu": self.found["cpu"],  # seconds per second
        }

    def parts_of_a_step(self) -> list[tuple[str, float]]:
        """The phases and their shares, largest first."""
        return sorted(self.phases.items(), key=lambda one: -one[1])

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


def _shown(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial._asdict().items() if key != "change"}


def examine(
    program: Program,
    minutes: float = 3.0,
    network: bool = False,
    in_place: bool = False,
    accept: Collection[str] = (),
    say: Callable[[str], object] = lambda text: None,
) -> Answer:
    """Run a script several times, each of them thrown away, and say what bounds it.

    Args:
        program: the script, which trains on one process.
        minutes: the most time that this takes. Default: 3.
        network: let the script use the network. Default: False, the loopback alone.
        in_place: run it without a sandbox: what it writes stays. Default: False.
        accept: remedies, by name, that the best combination may have though they change training.
            Default: none.
        say: is told what happens.

    Raises:
        DoctorError: the script fails, or trains no step in this time.
    """
    runs = Runs(program, time.monotonic() + 60.0 * minutes, network, in_place)
    say("running the script as it is")
    base = runs.measure(FIRST, tries=True)
    if len(base["steps"]) < 2:
        raise DoctorError("the script made fewer than two steps of an optimizer in this time")
    likely = suspects(base)
    trials, findings = _Trials(runs, base, accept, say), []
    for suspect in likely:
        best = max(
            (trials.of(name, change) for name, change in suspect.changes.items()),
            key=lambda trial: 0.0 if trial is None else trial.gain,
            default=None,
        )
        findings += _judged(suspect, best)
    findings.sort(key=lambda one: (one.gain != 1.0, -one.gain))  # errors first
    best = trials.together()
    total = sum(base["steps"])
    phases = {phase: base["phases"].get(phase, 0.0) / total for phase in PHASES}
    shown = {phase: share for phase, share in phases.items() if share}
    return Answer(_verdict(shown, findings), shown, findings, trials.made, best, base)


def _judged(suspect: Suspect, best: Trial | None) -> list[Finding]:
    """The finding that a suspect is, if it is one."""
    where, text = suspect.line, suspect.text
    if suspect.is_error:
        return [Finding(suspect.cause, 1.0, where, text)]
    if best is not None and best.is_proven:
        is_built_in = suspect.cause == "slow-optimizer" or best.remedy == "faststep's clipping"
        if best.gain >= (BUILT_IN if is_built_in else 1.0 + LEAST):
            said = f"{text}. {best.remedy}: {best.gain:.2f}x, {best.results}"
            return [Finding(suspect.cause, best.gain, where, said)]
    if suspect.needs_trial:
        return []
    return [Finding(suspect.cause, 1.0 / (1.0 - min(0.95, suspect.share)), where, text)]


class _Trials:
    """Tries remedies beside the script as it is."""

    def __init__(
        self,
        runs: Runs,
        base: dict[str, Any],
        accept: Collection[str],
        say: Callable[[str], object],
    ) -> None:
        self._runs = runs
        self._bases = [base]
        self._accept = accept
        self._say = say
        self.made: list[Trial] = []

    def of(self, name: str, change: dict[str, Any]) -> Trial | None:
        """The trial of a remedy; None if the time is over or the script fails with it."""
        for trial in self.made:
            if trial.remedy == name:
                return trial
        switched = self._bases[0]["switched"].get(name)
        if not self._has_time(1) or (switched is not None and switched[2] < PROMISING):
            return None
        self._say(f"trying {name}")
        try:
            found = [self._runs.measure(SHORT, change)]
            gain = self._gain(found)
            while self._wants_more(gain, found):
                self._say(f"{name}: {gain.gain:.2f}x; once more")
                if len(self._bases) == len(found):
                    self._bases.append(self._runs.measure(SHORT))
                found.append(self._runs.measure(SHORT, change))
                gain = self._gain(found)
            if self._least_ratio(found) < REPEATED or len(found) < 2:
                gain = gain._replace(low=min(gain.low, 1.0))  # nothing has confirmed it
        except DoctorError as error:
            self._say(f"{name}: {error}")
            return None
        results = results_of(self._bases[0]["losses"], found[0]["losses"])
        memory = found[0]["peak"] - self._bases[0]["peak"]
        self.made.append(Trial(name, *gain, results, memory, change))
        return self.made[-1]

    def together(self) -> Trial | None:
        """All proven remedies that keep bits, round or are accepted, as a whole."""
        proven = [
            one
            for one in self.made
            if one.is_proven and (one.results in SURE or one.remedy in self._accept)
        ]
        if len(proven) < 2:
            return proven[0] if proven else None
        change: dict[str, Any] = {}
        for one in proven:
            for key, value in one.change.items():
                if key == "parts":
                    change[key] = [*dict.fromkeys([*change.get(key, []), *value])]
                elif key == "loader":
                    change[key] = {**value, **change.get(key, {})}
                else:
                    change[key] = value
        whole = self.of(" + ".join(one.remedy for one in proven), change)
        best = max(proven, key=lambda one: one.gain)
        return whole if whole is not None and whole.gain > best.gain else best

    def _wants_more(self, gain: Gain, found: list[dict[str, Any]]) -> bool:
        """True if one more pair may confirm a gain, and there is time for it."""
        enough = 2 if gain.gain >= LARGE else 3
        is_promising = gain.gain >= PROMISING and self._least_ratio(found) >= REPEATED
        is_new = len(self._bases) == len(found)
        return is_promising and len(found) < enough and self._has_time(1 + is_new)

    def _least_ratio(self, found: list[dict[str, Any]]) -> float:
        return min(ratio(one["steps"], run["steps"]) for one in self._bases for run in found)

    def _gain(self, found: list[dict[str, Any]]) -> Gain:
        pairs = zip(self._bases, found, strict=False)
        return compare([(base["steps"], run["steps"]) for base, run in pairs])

    def _has_time(self, runs: int) -> bool:
        return self._runs.left > runs * (self._runs.started + 2 * SHORT.seconds)


def _verdict(phases: dict[str, float], findings: list[Finding]) -> str:
    if findings:
        first = findings[0]
        where = f" ({first.line})" if first.line else ""
        gain = f", {first.gain:.2f}x to gain" if first.gain > 1.0 else ""
        return f"{first.cause}{gain}: {first.text}{where}"
    main = max(phases, key=phases.__getitem__)
    return f"nothing to mend was found: {main} takes {phases[main]:.0%} of a step"
