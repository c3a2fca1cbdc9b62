"""Which remedies are repeated, when they are proven, and what is kept of them."""

import random
from typing import Any

import pytest

from faststep import doctor
from faststep.doctor import _in_order
from faststep.doctor.findings import Suspect, suspects
from faststep.doctor.runs import DoctorError
from faststep.doctor.trials import Trials

from .test_doctor import QUIET

EVERYTHING = {"parts": ["optim", "amp", "clip", "data", "loss", "memory", "threads"]}
MEMORY, WORKERS = {"parts": ["memory"]}, {"loader": {"num_workers": 2}}


class Runs:
    """Stands for runs of a script: what a change gains, with noise from run to run.

    Args:
        gains: by what changes.
        noise: of a run, relative.
        seconds: that are left; each run takes six.
    """

    started = 0.0

    def __init__(self, gains: dict[str, float], noise: float = 0.0, seconds: float = 1e9) -> None:
        self._gains, self._noise, self.left = gains, noise, seconds
        self._random = random.Random(1)
        self.made: list[dict[str, Any]] = []

    def measure(self, length: Any, change: Any = None, rounds: bool = False) -> dict[str, Any]:
        change = change or {}
        self.left -= 6.0
        self.made.append(change)
        gain = 1.0
        for key, value in self._gains.items():
            is_all = key == "all" and change.get("parts") == EVERYTHING["parts"]
            if is_all or key in change or change.get("parts") == [key]:
                gain *= value
        mean = 0.1 / gain * (1.0 + self._random.gauss(0.0, self._noise))
        return {"steps": [mean] * 30, "losses": [1.0, 0.5], "peak": 1000, "switched": {}}


def trials(runs: Any, switched: dict[str, Any] | None = None, accept: Any = ()) -> Trials:
    base = {**runs.measure(None), "switched": switched or {}}
    runs.made.clear()
    return Trials(runs, base, accept, lambda text: None)


def test_a_large_gain_needs_one_repetition() -> None:
    runs = Runs({"loader": 3.0})
    made = trials(runs)
    made.make({"workers": WORKERS})
    assert len(runs.made) == 3  # of which one is the script as it is
    assert made.made[0].is_proven


def test_a_small_gain_is_proven_by_more_pairs() -> None:
    """Whose slowest run is not faster than the fastest without."""
    runs = Runs({"all": 1.08}, noise=0.02)
    made = trials(runs)
    made.make({"all of `run`": EVERYTHING})
    assert made.made[0].is_proven
    assert 1.0 < made.made[0].low < 1.08
    assert len(runs.made) > 3


def test_what_gained_between_steps_is_proven_by_two_pairs() -> None:
    for switched, count in (([1.08, 1.05, 1.1], 3), ([1.08, 1.0, 1.2], 5)):
        runs = Runs({"all": 1.08})
        made = trials(runs, {"all of `run`": switched, "nothing": [1.01, 0.98, 1.02]})
        made.make({"all of `run`": EVERYTHING})
        assert made.made[0].is_proven
        assert len(runs.made) == count
    runs = Runs({"all": 1.08})
    made = trials(runs, {"all of `run`": [1.3, 1.2, 1.4], "nothing": [0.7, 0.3, 1.6]})  # all noise
    made.make({"all of `run`": EVERYTHING})
    assert len(runs.made) == 5


def test_a_remedy_that_does_nothing_is_hardly_ever_proven() -> None:
    runs = Runs({}, noise=0.04)
    proven = 0
    for _ in range(100):
        made = trials(runs)
        made.make({"nothing": {}})
        proven += made.made[0].is_proven
    assert proven <= 2


def test_what_gains_nothing_between_steps_is_not_tried() -> None:
    made = trials(Runs({}), {"workers": [0.6, 0.5, 0.7]})
    made.make({"workers": WORKERS})
    assert (made.made, made.left) == ([], [])


def test_time_is_kept_to_repeat_what_looks_best() -> None:
    """Three runs confirm a gain; what is then left without time is named."""
    runs = Runs({"loader": 2.0}, seconds=6.0 * 5.5)
    made = trials(runs)
    made.make({"workers": WORKERS, "memory": MEMORY, "flush": {"flush": True}})
    assert made.named("workers") is not None
    assert made.made[0].is_proven
    assert made.left == ["flush"]


@pytest.mark.parametrize(("own", "results"), [(0.5, "rounding"), (1.0, "changes training")])
def test_what_is_doubtful_is_compared_with_one_rounding(own: float, results: str) -> None:
    """After all repetitions, as that takes a run."""
    runs: Any = Runs({"loader": 3.0})
    made = trials(runs)
    measure = runs.measure

    def other(length: Any, change: Any = None, rounds: bool = False) -> Any:
        found = measure(length, {"rounds": True} if rounds else change)
        return {**found, "losses": [own, 0.5] if rounds else [0.6, 0.5]}

    runs.measure = other
    made.make({"workers": WORKERS, "memory": MEMORY})
    assert [one.results for one in made.made] == [results] * 2
    assert runs.made.count({"rounds": True}) == 1
    assert runs.made[-1] == {"rounds": True}
    assert (made.together() is None) is (results == "changes training")
    runs = Runs({"loader": 3.0}, seconds=6.0 * 4.5)
    made = trials(runs)
    runs.measure, measure = other, runs.measure
    made.make({"workers": WORKERS})  # which is repeated once less, so that there is time for it
    assert runs.made[-1] == {"rounds": True}


def test_a_script_that_fails_in_a_repetition() -> None:
    runs: Any = Runs({"loader": 1.2})
    made = trials(runs)
    measure = runs.measure

    def failing(length: Any, change: Any = None, rounds: bool = False) -> Any:
        if change == WORKERS and runs.made:
            raise DoctorError("too many open files")
        return measure(length, change, rounds)

    runs.measure = failing
    made.make({"workers": WORKERS})
    assert made.made == []


@pytest.mark.parametrize(
    ("gains", "remedies", "best"),
    [
        # All of `run` has what was proven, and is no slower.
        ({"memory": 1.1, "all": 1.2}, {"memory": MEMORY, "run": EVERYTHING}, "run"),
        ({"memory": 1.1, "all": 1.09}, {"memory": MEMORY, "run": EVERYTHING}, "memory"),
        ({"memory": 1.3, "all": 0.9}, {"memory": MEMORY, "run": EVERYTHING}, "memory"),
        ({"loader": 2.0, "all": 1.2}, {"workers": WORKERS, "run": EVERYTHING}, "workers + run"),
        ({"loader": 2.0, "all": 1.02}, {"workers": WORKERS, "run": EVERYTHING}, "workers + run"),
        ({"loader": 2.0, "all": 0.8}, {"workers": WORKERS, "run": EVERYTHING}, "workers"),
        ({"autocast": 2.0, "all": 1.2}, {"bf16": {"autocast": "bf16"}, "run": EVERYTHING}, "run"),
        ({"all": 0.9}, {"run": EVERYTHING}, None),
    ],
)
def test_the_best_has_all_of_run(
    gains: dict[str, float], remedies: dict[str, Any], best: str | None
) -> None:
    made = trials(Runs(gains))
    made.make(remedies)
    found = made.together()
    assert (found and found.remedy) == best


def test_what_is_accepted_is_kept_with_the_rest() -> None:
    made = trials(Runs({"autocast": 2.0, "all": 1.2}), accept=["bf16"])
    made.make({"bf16": {"autocast": "bf16"}, "run": EVERYTHING})
    best = made.together()
    assert best is not None
    assert (best.remedy, best.results) == ("bf16 + run", "changes training")
    assert best.change == {"autocast": "bf16", **EVERYTHING}
    assert best.gain == pytest.approx(2.4)


def test_what_changes_training_comes_last_unless_it_is_accepted() -> None:
    suspected = [Suspect("a", 0.5, "", {"w": WORKERS}), Suspect("b", 0.1, "", {"memory": MEMORY})]
    known: dict[str, Any] = {
        "all of `run`": EVERYTHING, "bf16": {"autocast": "bf16"}, "batch": {"batch": 2.0},
        "compiled": {"compile": True}, "channels": {"channels_last": True},
    }  # fmt: skip
    kept, others = _in_order(suspected, known, [], [])
    assert [*kept] == ["w", "all of `run`", "memory", "channels"]
    assert [*others] == ["bf16", "batch"]
    kept, others = _in_order(suspected, known, ["bf16"], [])
    assert [*kept] == ["w", "all of `run`", "bf16", "memory", "channels"]
    kept, others = _in_order(suspected, known, [], ["memory", "compile"])
    assert ([*kept], [*others]) == (["memory", "compiled"], [])


def test_an_accepted_remedy_that_is_unknown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Any = Runs({}, seconds=0.0)
    found = {**QUIET, "losses": [], "peak": 0, "cuda": False, "loaders": []}
    monkeypatch.setattr(runs, "measure", lambda *args, **kwargs: found)
    monkeypatch.setattr(doctor, "notes", lambda found: [])
    said: list[str] = []
    doctor.examine(runs, True, accept=["autocast to bf17"], say=said.append)
    [line] = [one for one in said if "bf17" in one]
    assert line.startswith("--accept 'autocast to bf17' is no remedy that is tried")
    assert "all of `run`" in line


def test_the_optimizer_and_clipping_are_one_cause_for_one_remedy() -> None:
    """A gain is not said twice: the dearer of the two is blamed."""
    torchs = {
        "class": "AdamW", "module": "torch.optim.adamw", "tensors": 2, "steps": 50,
        "bytes": 8, "denormals": 0.0, "place": ["adamw.py", 1],
    }  # fmt: skip
    for shares, cause in (((2.0, 0.5), "slow-optimizer"), ((0.5, 2.0), "slow-clipping")):
        phases = dict(zip(("optimizer", "clipping"), shares, strict=True))
        [suspect] = suspects({**QUIET, "phases": phases, "optimizers": [torchs]})
        assert (suspect.cause, suspect.most) == (cause, pytest.approx(0.5))
    alone = suspects({**QUIET, "phases": {"optimizer": 2.0, "clipping": 0.5}, "optimizers": []})
    assert [one.cause for one in alone] == ["slow-clipping"]
