"""Training on two ranks: each contender in processes of its own, in turns with the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_rows import DTENSORS, SMOKE
from contest import Ring
from delayed import Waited
from dtensor_steps import STEPS
from figures import Figure
from programs import SCRIPT, Programs
from ranks import run_on_ranks as run_on_new_ranks
from sharded import DDP, DEEPSPEED, FSDP2, OUR_STAGES, REDUNDANCY, STAGE, TRAINERS, Measured
from timing import Outcome
from volume import Held
from workloads import Work

MODEL = "tiny" if SMOKE else "GPT, 27M"
RANKS = 2
TURNS = 1 if SMOKE else 3
STEPS_PER_TURN = 1 if SMOKE else 6
SMOKED = (STAGE.format(2), DDP)
RIVALS = (DDP, REDUNDANCY, FSDP2, *(DEEPSPEED.format(stage) for stage in (1, 2, 3)))
Found = dict[str, list[Measured]]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run_on_ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Run:
    """What rank 0 of a script answers. In a smoke run ranks are forks: imports take longest."""
    if not SMOKE:
        return lambda script, *words: run_on_new_ranks(script, RANKS, *words)
    programs: Programs = request.getfixturevalue("programs")

    def run(script: str, *words: object) -> Any:
        store = str(tmp_path_factory.mktemp("store") / "store")
        path = str(Path(__file__).with_name(script))
        done = programs.ranks(RANKS, SCRIPT, path, *map(str, words), STORE=store)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def trained(run_on_ranks: Run) -> tuple[Found, dict[str, str]]:
    """What each contender measured in each turn, and why some could not."""
    found: Found = {}
    absent: dict[str, str] = {}
    for _ in range(TURNS):
        for who in SMOKED if SMOKE else TRAINERS:
            if who in absent:
                continue
            answer = run_on_ranks("sharded.py", who, MODEL, STEPS_PER_TURN)
            if isinstance(answer, str):
                absent[who] = answer
            else:
                found.setdefault(who, []).append(Measured(**answer))
    return found, absent


def test_training(ring: Ring, run_on_ranks: Run) -> None:
    found, absent = trained(run_on_ranks)
    elements = next(iter(found.values()))[0].parameters // 4
    for family, field in (("sharded", "seconds"), ("sharded update", "update")):
        times = {
            who: [s for turn in turns for s in getattr(turn, field)] for who, turns in found.items()
        }
        outcome = Outcome(Work(family, MODEL, ((elements,),)), times, order=(*times, *absent))
        outcome.absent.update(absent)
        ring.note(outcome)
    sent = {who: min(turn.sent for turn in turns) / RANKS for who, turns in found.items()}
    peaks = {who: min(turn.peak for turn in turns) / 1e6 for who, turns in found.items()}
    assert all(bytes_ > 0 for bytes_ in sent.values())
    needed = 2 * 4 * elements * (RANKS - 1) / RANKS
    for who in OUR_STAGES:
        if who not in found:
            continue
        what = f"bytes that a rank sends in a step, {who} (DDP: {100 * sent[DDP] / needed:.0f})"
        share = 100 * sent[who] / needed
        ring.figures.append(Figure(what, "% of 2 Psi (N-1)/N", share, 101.0))
        others = {rival: peaks[rival] for rival in RIVALS if rival in peaks}
        listed = "; ".join(f"{rival}: {peak:.0f}" for rival, peak in others.items())
        what = f"peak memory of a rank, {who} ({listed})"
        ring.figures.append(Figure(what, "MB", peaks[who], min(others.values())))


@pytest.mark.parametrize("stage", [1, 2])
def test_volume_and_memory(ring: Ring, run_on_ranks: Run, stage: int) -> None:
    """Beside the table of docs/sharding.md, for states of AdamW."""
    found = Held(**run_on_ranks("volume.py", stage, MODEL))
    needed = 2 * found.parameters * (RANKS - 1)
    for passes, sent in found.sent.items():
        what = f"bytes that a rank sends in a step, stage {stage}, micro-batches: {passes}"
        ring.figures.append(Figure(what, "% of 2 Psi (N-1)/N", 100 * sent / needed, 101.0))
    gradients = 1 if stage == 1 else 1 / RANKS
    formula = (1 + gradients + 2 / RANKS) * found.parameters
    what = f"parameters, gradients and states of a rank between steps, stage {stage}"
    share = 100 * found.memory / formula
    ring.figures.append(Figure(what, "% of the formula", share, 105.0))


def test_a_slow_network(ring: Ring, run_on_ranks: Run) -> None:
    found = Waited(**run_on_ranks("delayed.py", 1 if SMOKE else 20))
    assert min(found) > 0.0
    for what, share, goal in (
        (
            'of the all-gather, that forward waits for with gather="forward"',
            found.in_forward / found.gathering,
            20.0,
        ),
        (
            'of all communication, that a step waits for with gather="forward"',
            found.exposed / found.everything,
            20.0,
        ),
    ):
        ring.figures.append(
            Figure(f"share {what}, collectives delayed by 5 ms", "%", 100 * share, goal)
        )


@pytest.mark.parametrize("label", list(DTENSORS)[: 1 if SMOKE else None])
def test_steps_on_dtensors(ring: Ring, run_on_ranks: Run, label: str) -> None:
    tensors, elements = DTENSORS[label]
    rounds = 2 if SMOKE else 20
    times: dict[str, list[float]] = {who: [] for who in STEPS}
    for _ in range(TURNS):
        for who, seconds in times.items():
            seconds += run_on_ranks("dtensor_steps.py", who, tensors, elements, rounds)
    ring.note(Outcome(Work("dtensors", label, ((elements,),) * tensors), times, order=tuple(times)))
