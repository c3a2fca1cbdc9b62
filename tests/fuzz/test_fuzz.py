"""Some cases of the fuzzer from a fixed seed, and a look at the fuzzer itself."""

import inspect
from pathlib import Path

import pytest
import torch

from faststep import _C

from . import child, steps
from .__main__ import fuzz
from .functions import SETTINGS
from .world import FaultError, World

SEED = 20261122
CASES = 1000
AT_MOST = 900.0  # seconds, on a machine that is busy

# What cannot be called with anything, and why; all else about these is fuzzed.
VOUCHED_FOR = {
    "Gather": "the addresses, lengths and strides of the rows",
    "Arena": "the number of a file, which the arena then owns",
    "Arena.put": "an address and how much is there",
    "Arena.take": "sizes from ten million on that the machine may have: to take them is slow",
    "hold": "the address of the record of the tensor's storage",
    "scan_tfrecords": "an address and how much is there",
    "use_callbacks": "the address of a function",
    "use_owners": "where a storage's record has what",
    "use_records": "where torch's records have what, and the address of a function",
    "use_threads_of": "a library's path: what is found there is called",
    "use_kernels_of": "a file's path: what is found there is loaded",
}


def public() -> set[str]:
    """Functions, types and their methods and attributes."""
    names = set()
    for name, value in vars(_C).items():
        if name.startswith("_") or not callable(value):
            continue
        names.add(name)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            members = [m for m in vars(value) if not m.startswith("_") or m == "__call__"]
            names |= {f"{name}.{member}" for member in members}
    return names


def test_everything_of_the_extension_is_fuzzed() -> None:
    assert public() == child.fuzzed()
    assert set(VOUCHED_FOR) <= public()
    assert set(SETTINGS) <= public()


def test_some_cases_of_it(tmp_path: Path) -> None:
    report = fuzz(SEED, AT_MOST, tmp_path, "--cases", str(CASES))
    assert not report.failures, "\n\n".join(path.read_text()[:20000] for path in report.failures)
    assert report.cases == CASES
    made = sum(report.counts.values())
    assert report.counts["not made", False] < 0.05 * made
    reached = {name for name, _ in report.counts}
    assert len(child.fuzzed() - reached) < 0.1 * len(child.fuzzed())


@pytest.mark.parametrize("rule", _C.rules())
def test_plans_take_the_states_that_the_fuzzer_gives_a_rule(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no step of that rule would go further than its arguments."""
    monkeypatch.setattr(steps, "RULES", {rule: _C.rules()[rule]})
    for seed in range(10):
        world = World(child.Random(seed), lambda line: None)
        own = steps.Stepping(world)
        _C.Plan().step([[]], [own.spec], {}, None, {}, False, float("nan"), False, 0)


@pytest.mark.parametrize("kind", ["crash", "hang", "fault"])
def test_it_finds(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = ["--hang", "4"] if kind == "hang" else []
    report = fuzz(1, AT_MOST, tmp_path, "--plant", kind, *limit, most=1)
    assert len(report.failures) == 1
    text = report.failures[0].read_text()
    assert "in case 3 of seed 1" in text
    assert "python -m fuzz.child --seed 1 --first 3 --cases 1" in text
    assert "seed 1, case 3" in capsys.readouterr().out


def test_it_finds_errors_that_are_not_set_and_steps_that_are_half_applied() -> None:
    def broken() -> None:
        raise SystemError("returned NULL without setting an exception")

    def half(tensor: torch.Tensor) -> None:
        tensor[0] = 5.0
        raise ValueError("no")

    world = World(child.Random(1), lambda line: None)
    with pytest.raises(FaultError, match="SystemError"):
        world.call("broken", broken, ())
    tensor = torch.zeros(3)
    with pytest.raises(FaultError, match="changed"):
        world.call("half", half, (tensor,), kept=[tensor])
    kept = torch.zeros(2)
    world.track(kept)
    with pytest.raises(FaultError, match="kept alive"):
        world.close()
