"""What the benchmarks rest on: shapes, refills, medians, and contenders that do the work."""

import json
import math
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import faststep
from bench_rows import Plan, turns_of
from contenders import CONTENDERS, OURS, Contender, Round, UnavailableError
from contest import Ring
from programs import SCRIPT, Programs
from report import as_text
from timing import Contest, CopyMeter, Outcome
from workloads import FAMILIES, INIT_SCALE, SHAPES, Arena, Work, count_elements


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("2000 x 64", 2000, 128_000),
        ("16 x 1M", 16, 16 << 20),
        ("ResNet-50", 161, 25_557_032),
        ("GPT-2 small", 148, 124_439_808),
    ],
)
def test_shapes_are_those_of_the_models(name: str, tensors: int, elements: int) -> None:
    shapes = SHAPES[name]()
    assert len(shapes) == tensors
    assert count_elements(shapes) == elements


@pytest.mark.parametrize("family", CONTENDERS)
@pytest.mark.parametrize("fresh", [False, True])
def test_refill_restores_gradients_of_the_stated_norm(family: str, fresh: bool) -> None:
    arena = Arena(Work(family, "", ((7, 5), (64,), ()), true_norm=3.0, fresh_gradients=fresh))
    before = [p.grad for p in arena.parameters]
    for gradient in before:
        assert gradient is not None
        gradient.zero_()
    arena.refill()
    after = [p.grad for p in arena.parameters if p.grad is not None]
    scale = INIT_SCALE if FAMILIES[family].scaled else 1.0
    norm = torch.cat([g.flatten() for g in after]).norm().item()
    assert norm == pytest.approx(3.0 * scale, rel=1e-5)
    assert all((a is b) is not fresh for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "contender", [pytest.param(contender, id=contender.name) for contender in CONTENDERS["chain"]]
)
def test_every_chain_does_the_same_step(contender: Contender) -> None:
    work = Work("chain", "", ((33,), (4, 5)))
    expected, arena = Arena(work), Arena(work)
    gradients = [p.grad for p in expected.parameters]
    for gradient in gradients:
        assert gradient is not None
        gradient.div_(INIT_SCALE)
    torch.nn.utils.clip_grad_norm_(expected.parameters, 1.0)
    torch.optim.AdamW(expected.parameters, lr=1e-4).step()
    try:
        contender.build(arena.parameters)()
    except UnavailableError as error:
        pytest.skip(str(error))
    for p, q in zip(expected.parameters, arena.parameters, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-8)


def test_a_contender_that_does_nothing_is_refused() -> None:
    def build(_: object) -> Round:
        return lambda: None

    with pytest.raises(RuntimeError, match="idle did not do the work"):
        Contest(Work("adamw", "tiny", ((4,),))).round_of(Contender("idle", build))


class _Benchmark:
    """pytest-benchmark's fixture, as far as a ring uses it."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}
        self.stats: Any = None

    def pedantic(self, round_: Round, setup: Round, rounds: int, iterations: int) -> None:
        for _ in range(rounds):
            setup()
            round_()
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[1.0] * rounds))


def test_contenders_move_every_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was made last is made first, in other memory, and what was measured is kept."""
    monkeypatch.setattr("contest.BLOCK_SECONDS", 0.0)
    monkeypatch.setattr("contest.CopyMeter", lambda _: CopyMeter(16))
    work, made, alive = Work("lion", "tiny", ((4,), (3, 2))), [], []

    def build(name: str, parameters: Sequence[Parameter]) -> Round:
        assert all(ref() is None for ref in alive if ref() is not parameters[0])
        made.append(name)
        alive.append(weakref.ref(parameters[0]))
        return faststep.optim.Lion(parameters).step

    ring, blocks = Ring(), []
    monkeypatch.setattr(
        "bench_rows.contenders_of", lambda _: [Contender(n, partial(build, n)) for n in "ab"]
    )
    for block, contender in turns_of(work):
        ring.measure(_Benchmark(), work, block, contender, Plan(7, 2))
        blocks.append(block)
    assert blocks == [block for block in range(7) for _ in "ab"]
    assert made == ["a", "b", "b", "a", "a", "b"]
    [outcome] = ring.outcomes
    assert {name: len(times) for name, times in outcome.seconds.items()} == {"a": 14, "b": 14}
    ring.leave()
    assert all(ref() is None for ref in alive)


def test_work_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timing.available_bytes", lambda: 1 << 30)
    contest = Contest(Work("chain", "huge", ((1 << 30,),)))
    assert contest.round_of(CONTENDERS["chain"][0]) is None
    assert contest.outcome.absent[OURS] == "needs 68 GiB of memory, 1 GiB are free"


def test_outcome_takes_medians_and_ratios() -> None:
    outcome = Outcome(Work("chain", "", ((1000,),)), {OURS: [1.0, 2.0, 9.0], "rival": [5.0, 7.0]})
    assert outcome.median("rival") == 6.0
    assert outcome.ratio("rival") == 3.0
    assert outcome.rate(OURS) == 32 * 1000 / 2.0
    assert math.isnan(outcome.ratio("missing"))


def test_a_busy_machine_is_reported() -> None:
    outcome = Outcome(Work("chain", "", ((1000,),)), {OURS: [1.0]}, load=0.0)
    assert "not to be relied on" not in as_text([outcome])
    outcome.load = 1e3
    assert "load 1000.0" in as_text([outcome])
    assert "not to be relied on" in as_text([outcome])


def test_copy_meter_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 1.0, 3.0, 4.0, 5.0])
    meter = CopyMeter(1000)
    monkeypatch.setattr("timing.time.perf_counter", lambda: next(clock))
    for _ in range(3):
        meter.measure()
    assert meter.take() == 8 * 1000 / 1.0
    assert math.isnan(meter.take())


def test_outcome_of_contenders_that_are_measured_elsewhere() -> None:
    outcome = Outcome(
        Work("host", "3 x 1", ((1,),) * 3), {OURS: [0.001], "rival": [0.03]}, order=("rival", OURS)
    )
    lines = as_text([outcome]).splitlines()
    assert lines[3].split() == ["3", "x", "1", "rival", "30", "30x", "-", "-"]
    assert lines[4].split() == ["3", "x", "1", OURS, "1", "-", "-"]


def test_half_the_bytes_in_half_the_precision() -> None:
    work = Work("cuda chain", "", ((10, 10),), dtype=torch.bfloat16)
    assert work.least_bytes == 16 * 100
    assert work.bytes_needed(3) == 2 * 100 * (3 + 2 * 3 + 2)
    assert Arena(work).parameters[0].grad.dtype == torch.bfloat16


def test_host_benchmark_measures_both(programs: Programs) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "host.py"
    done = programs.run(SCRIPT, str(script), "5", "2", "3")
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout)
    assert {name: len(seconds) for name, seconds in times.items()} == {OURS: 6, "torch fused": 6}
