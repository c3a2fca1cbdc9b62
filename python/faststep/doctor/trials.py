"""Tries remedies on a script, each in runs that are thrown away."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from .gains import Gain, compare, deviations, is_rounding, ratio
from .remedies import EVERYTHING, NOTHING
from .runs import DoctorError, Length, Runs

SHORT = Length(3.0, 5)
PROMISING = 1.03  # a gain that is worth more pairs of runs
LARGE = 1.5  # a gain that two pairs are enough to confirm, if they agree; others take a third one
REPEATED = 1.02  # the least gain of the slowest run with a remedy over the fastest one without
AT_ONCE = 3  # remedies that are repeated beside one run of the script as it is
MOST_PAIRS = 6
STUDENT = {4: 4.54, 5: 3.75, 6: 3.36}  # Student's t that 1 % exceed, by the number of pairs
SURE = ("same bits", "rounding")
UNKNOWN = "not compared"  # until all is repeated
CHANGING = {"autocast", "batch", "accumulate", "tf32"}  # whatever the losses of some steps say
Found = dict[str, Any]
Remedies = dict[str, dict[str, Any]]  # what each changes, by name


@dataclass(eq=False)
class Trial:
    """A remedy that was tried, in runs that have each one of the script as it is beside them.

    Attributes:
        memory: bytes of the peak, more than without.
        losses: of the first run.
        switched: what it has gained between steps, at least.
        pairs: results without and with it.
    """

    remedy: str
    change: dict[str, Any]
    gain: float = 1.0
    low: float = 1.0
    high: float = 1.0
    results: str = UNKNOWN
    memory: int = 0
    losses: list[float] = field(default_factory=list)
    switched: float = 1.0
    pairs: list[tuple[Found, Found]] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """True if a repetition has confirmed that it is faster."""
        return self.low > 1.0 and self.gain >= PROMISING

    def add(self, base: Found, found: Found) -> None:
        """Take a further pair of runs into account."""
        if not self.pairs:
            self.memory, self.losses = found["peak"] - base["peak"], found["losses"]
        self.pairs.append((base, found))
        gain = compare([(one["steps"], other["steps"]) for one, other in self.pairs])
        low = self._confirmed(gain)
        self.gain, self.high = gain.gain, gain.high
        self.low = low if low > 1.0 else min(gain.low, 1.0)

    def as_json(self) -> dict[str, Any]:
        """What an answer says of it."""
        names = ("remedy", "gain", "low", "high", "results", "memory")
        return {name: getattr(self, name) for name in names}

    def _confirmed(self, gain: Gain) -> float:
        """The bound above 1.0 that repetitions have confirmed, if they have."""
        count = len(self.pairs)
        if count < 2 or gain.gain < PROMISING:
            return 1.0
        bounds = [1.0]
        least = min(
            ratio(base["steps"], found["steps"])
            for base, _ in self.pairs
            for _, found in self.pairs
        )
        is_apart = least >= REPEATED and (gain.gain >= LARGE or count > 2)
        if is_apart or self.switched >= REPEATED:
            bounds.append(max(gain.low, REPEATED))
        if count in STUDENT:
            logs = [math.log(ratio(one["steps"], other["steps"])) for one, other in self.pairs]
            error = statistics.stdev(logs) / math.sqrt(count)
            bounds.append(math.exp(statistics.fmean(logs) - STUDENT[count] * error))
        return max(bounds)


class Trials:
    """Makes trials beside the script as it is.

    Attributes:
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
        self._base = base
        self._accept = accept
        self._say = say
        self._own: list[float] | None = None  # deviations of losses that one rounding makes
        self._trials: dict[str, Trial] = {}
        self.left: list[str] = []

    @property
    def made(self) -> list[Trial]:
        """The trials, in the order in which they were begun."""
        return [*self._trials.values()]

    def named(self, name: str) -> Trial | None:
        """The trial of a remedy, if it was tried."""
        return self._trials.get(name)

    def make(self, remedies: Remedies) -> None:
        """Try remedies, and repeat those that are promising."""
        for _ in range(2):  # in the second turn those for which time had to be kept
            for name, change in remedies.items():
                self._begin(name, change)
            self._repeat()
        for one in self._trials.values():
            if one.results == UNKNOWN:
                one.results = self._compared_with_rounding(one.losses)

    def _begin(self, name: str, change: dict[str, Any]) -> None:
        """Try a remedy once.

        Not if the first run has shown that it gains nothing, nor if the time that is left is needed
        to repeat what looks better.
        """
        _, low, high = self._base["switched"].get(name, (0.0, 0.0, math.inf))
        if name in self._trials or high < PROMISING:
            return
        self.left = [one for one in self.left if one != name]
        waiting = [one.gain for one in self._trials.values() if self._is_open(one)]
        needed = 0 if not waiting else 2 if max(waiting) >= LARGE else 4
        if not self._has_time(1 + needed + self._has_to_compare()):
            self.left.append(name)
            return
        self._say(f"trying {name}")
        one = Trial(name, change, switched=low / self._noise())
        try:
            found = self._measured(change)
        except DoctorError as error:
            self._say(f"{name}: {error}")
            return
        one.results = self._results(change, found["losses"])
        one.add(self._base, found)
        self._trials[name] = one

    def _repeat(self) -> None:
        """Repeat what is promising until it is proven or refuted, or the time is over."""
        while waiting := [one for one in self._trials.values() if self._is_open(one)]:
            if not self._has_time(2 + self._has_to_compare()):
                return
            waiting.sort(key=lambda one: -one.gain)
            said = ", ".join(f"{one.remedy} ({one.gain:.2f}x)" for one in waiting[:AT_ONCE])
            self._say(f"once more: {said}")
            try:
                base = self._runs.measure(SHORT)
            except DoctorError as error:
                self._say(f"the script as it is: {error}")
                return
            for one in waiting[:AT_ONCE]:
                if not self._has_time(1):
                    return
                try:
                    one.add(base, self._measured(one.change))
                except DoctorError as error:
                    self._say(f"{one.remedy}: {error}")
                    del self._trials[one.remedy]

    def together(self) -> Trial | None:
        """All proven remedies that keep bits, round or are accepted, as a whole.

        With all of `run`, unless that is slower than the script as it is, or than what is proven.
        """
        fit = [one for one in self.made if self._may_be_kept(one)]
        proven = [one for one in fit if one.is_proven]
        if not proven:
            return None
        best = max(proven, key=lambda one: one.gain)
        parts = [one for one in fit if one in proven or (_is_all(one.change) and one.gain > 1.0)]
        whole = self._whole(parts)
        if whole is None or whole.gain < (best.low if whole.is_proven else best.gain):
            return best
        return whole

    def _whole(self, parts: list[Trial]) -> Trial | None:
        """The trial of several remedies at once."""
        change: dict[str, Any] = {}
        for one in parts:
            for key, value in one.change.items():
                if key == "parts":
                    change[key] = [*dict.fromkeys([*change.get(key, []), *value])]
                elif key == "loader":
                    change[key] = {**value, **change.get(key, {})}
                else:
                    change[key] = value
        for one in parts:  # one that has all others
            if _is_same(change, one.change):
                return one
        if any(_is_all(one.change) for one in parts):
            parts = [one for one in parts if one.change.keys() != {"parts"} or _is_all(one.change)]
        name = " + ".join(one.remedy for one in parts)
        self.make({name: change})
        return self.named(name)

    def _may_be_kept(self, trial: Trial) -> bool:
        if "shard" in trial.change:
            return False  # by a line in the script: its checkpoints are other ones then
        return trial.results in (*SURE, UNKNOWN) or trial.remedy in self._accept

    def _is_open(self, trial: Trial) -> bool:
        """True if one more pair may prove a gain."""
        count = len(trial.pairs)
        most = MOST_PAIRS if self._may_be_kept(trial) else 3
        if trial.is_proven or count >= most:
            return False
        if _is_all(trial.change):  # which is looked at more patiently
            return trial.gain >= (1.0 if count > 1 else 1.0 / PROMISING)
        return trial.gain >= (REPEATED if count > 1 else PROMISING)

    def _measured(self, change: dict[str, Any]) -> dict[str, Any]:
        """A run with a change; the seconds are those of as many samples as without it."""
        share = 2.0 * self._needed() / max(self._runs.left, 1e-3)  # not all, if it hangs
        found = self._runs.measure(SHORT._replace(most=min(1.0, max(0.5, share))), change)
        samples = change.get("batch", 1.0) * change.get("accumulate", 1)
        found["steps"] = [seconds / samples for seconds in found["steps"]]
        return found

    def _results(self, change: dict[str, Any], losses: list[float]) -> str:
        """The effect of a change on losses: "same bits", "rounding" or "changes training"."""
        if CHANGING & change.keys():
            return "changes training"
        found = deviations(self._base["losses"], losses)
        if not any(found):
            return "same bits"
        return "rounding" if is_rounding(found, []) else UNKNOWN

    def _has_to_compare(self) -> bool:
        """True if one run is needed to judge the results of others."""
        results = [one.results for one in self._trials.values()]
        return self._own is None and UNKNOWN in results

    def _compared_with_rounding(self, losses: list[float]) -> str:
        """The same where losses differ by more than rounding does in most scripts."""
        if self._own is None and self._has_time(1):
            self._say("looking at how far one rounding of the gradients moves the losses")
            try:
                perturbed = self._runs.measure(SHORT, rounds=True)
            except DoctorError as error:
                self._say(str(error))
            else:
                self._own = deviations(self._base["losses"], perturbed["losses"])
        found = deviations(self._base["losses"], losses)
        return "rounding" if is_rounding(found, self._own or []) else "changes training"

    def _noise(self) -> float:
        """The gain between steps, or the loss, that is none."""
        gain = self._base["switched"].get(NOTHING, (1.0,))[0]
        return float(max(gain, 1.0 / gain))

    def _has_time(self, runs: int) -> bool:
        return self._runs.left > runs * self._needed()

    def _needed(self) -> float:
        """Seconds of a run."""
        least = SHORT.least_steps * statistics.fmean(self._base["steps"])
        return self._runs.started + max(2 * SHORT.seconds, least)


def _is_all(change: dict[str, Any]) -> bool:
    return _is_same(change, EVERYTHING)


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two changes are one, whatever the order of their parts."""
    first, second = ({**each, "parts": sorted(each.get("parts", ()))} for each in (one, other))
    return first == second
