"""Tries remedies on a script, each in runs that are thrown away."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from .gains import Gain, compare, deviations, is_rounding, ratio
from .runs import DoctorError, Length, Runs

__all__ = ["PROMISING", "Trial", "Trials"]

SHORT = Length(3.0, 5)
PROMISING = 1.03  # a gain that is worth more pairs of runs
LARGE = 1.5  # a gain that a second pair is enough to confirm; others take a third one
REPEATED = 1.02  # the least gain of the slowest run with a remedy over the fastest one without
SURE = ("same bits", "rounding")
CHANGING = {"autocast", "batch", "accumulate"}  # whatever the losses of some steps say


class Trial(NamedTuple):
    """A remedy that was tried, beside the script as it is."""

    remedy: str
    gain: float
    low: float
    high: float
    results: str
    memory: int  # bytes of the peak, more than without
    change: dict[str, Any]
    losses: list[float]

    @property
    def is_proven(self) -> bool:
        """True if a repetition has confirmed that it is faster."""
        return self.low > 1.0 and self.gain >= PROMISING


class Trials:
    """Makes trials beside the script as it is.

    Attributes:
        made: the trials.
        left: names of remedies for which there was no time.

    Args:
        runs: makes their runs.
        base: what the run of the script as it is has found.
        accept: remedies that the best combination may have though they change training.
        say: is told what happens.
    """

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
        self._own: list[float] | None = None  # deviations of losses that one rounding makes
        self.made: list[Trial] = []
        self.left: list[str] = []

    def of(self, name: str, change: dict[str, Any]) -> Trial | None:
        """The trial of a remedy.

        None if the time is over, if the script fails with it, or if the first run has shown that
        it gains nothing.
        """
        for trial in self.made:
            if trial.remedy == name:
                return trial
        switched = self._bases[0]["switched"].get(name)
        if switched is not None and switched[2] < PROMISING:
            return None
        if not self._has_time(1):
            self.left.append(name)
            return None
        self._say(f"trying {name}")
        try:
            gain, found = self._repeated(name, change)
            results = self._results(change, found[0]["losses"])
        except DoctorError as error:
            self._say(f"{name}: {error}")
            return None
        memory = found[0]["peak"] - self._bases[0]["peak"]
        self.made.append(Trial(name, *gain, results, memory, change, found[0]["losses"]))
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
        best = max(proven, key=lambda one: one.gain)
        if any(_is_same(change, one.change) for one in proven):  # one that has all others
            return best
        whole = self.of(" + ".join(one.remedy for one in proven), change)
        return whole if whole is not None and whole.gain > best.gain else best

    def _repeated(self, name: str, change: dict[str, Any]) -> tuple[Gain, list[dict[str, Any]]]:
        """The gain of runs with a change, as many as it needs, and what they have found."""
        found = [self._measured(change)]
        gain = self._gain(found)
        while self._wants_more(gain, found):
            self._say(f"{name}: {gain.gain:.2f}x; once more")
            if len(self._bases) == len(found):
                self._bases.append(self._runs.measure(SHORT))
            found.append(self._measured(change))
            gain = self._gain(found)
        if self._least_ratio(found) < REPEATED or len(found) < 2:
            gain = gain._replace(low=min(gain.low, 1.0))  # nothing has confirmed it
        return gain, found

    def _measured(self, change: dict[str, Any]) -> dict[str, Any]:
        """A run with a change; the seconds are those of as many samples as without it."""
        found = self._runs.measure(SHORT, change)
        found["steps"] = [seconds / change.get("batch", 1.0) for seconds in found["steps"]]
        return found

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

    def _results(self, change: dict[str, Any], losses: list[float]) -> str:
        """The effect of a change on losses: "same bits", "rounding" or "changes training"."""
        if CHANGING & change.keys():
            return "changes training"
        found = deviations(self._bases[0]["losses"], losses)
        if not any(found):
            return "same bits"
        if not is_rounding(found, []) and self._own is None and self._has_time(1):
            self._say("looking at how far one rounding of the gradients moves the losses")
            perturbed = self._runs.measure(SHORT, rounds=True)
            self._own = deviations(self._bases[0]["losses"], perturbed["losses"])
        return "rounding" if is_rounding(found, self._own or []) else "changes training"

    def _has_time(self, runs: int) -> bool:
        return self._runs.left > runs * (self._runs.started + 2 * SHORT.seconds)


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two changes are one, whatever the order of their parts."""
    first, second = ({**each, "parts": sorted(each.get("parts", ()))} for each in (one, other))
    return first == second
