"""Collects what the benchmarks measure, prints it, and writes it as Markdown, JSON and PNG."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from bench_rows import SMOKE
from contest import BLOCK_SECONDS, BLOCKS_IN_PLACE, MOST_ROUNDS, Ring
from figures import figures_text
from goals import goals_text
from plots import plot_outcomes
from regressions import compared, kind_of_machine, published, regressions_text
from report import as_json, as_text, machine
from workloads import MAX_NORM

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from programs import SCRIPT, Programs

RESULTS = Path(__file__).parent / "results"

RING = pytest.StashKey[Ring]()
TEXT = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faststep")
    group.addoption(
        "--save",
        metavar="NAME",
        help="write benchmarks/results/NAME.{md,json,png}, which git keeps; "
        "default: a new name in benchmarks/results/local",
    )
    group.addoption(
        "--files",
        metavar="PREFIX",
        help="on a GPU: write PREFIX.{md,json,png} instead",
    )
    group.addoption(
        "--seconds",
        type=float,
        default=330.0,
        metavar="N",
        help="on a GPU: how long all works may take together; default: 330",
    )
    group.addoption(
        "--elements",
        type=float,
        default=1e8,
        metavar="N",
        help="the largest tensor of the sweep over elements; default: 1e8",
    )


def pytest_configure(config: pytest.Config) -> None:
    if SMOKE and config.getoption("save"):
        raise pytest.UsageError("--save keeps figures; those of FASTSTEP_BENCH_SMOKE mean nothing")
    config.stash[RING] = Ring()
    # pytest-benchmark lists every block by itself; the tables below join them.
    config.option.benchmark_quiet = True


@pytest.fixture(scope="session")
def ring(request: pytest.FixtureRequest) -> Ring:
    """The session's only ring."""
    if SMOKE:  # what is there by now would be looked through after each work, for 0.2 s
        gc.freeze()
    return request.config.stash[RING]


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    started = Programs()
    yield started
    started.close()


@pytest.fixture(scope="session")
def answer_of(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What a script of this folder prints. In a smoke run it is a fork: imports take longest."""

    def run(script: str, *words: object) -> Any:
        given = (str(Path(__file__).with_name(script)), *map(str, words))
        if SMOKE:
            done = request.getfixturevalue("programs").run(SCRIPT, *given)
        else:
            command = [sys.executable, *given]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def _introduction() -> str:
    smoke = " SMOKE RUN on tiny tensors: the figures mean nothing." if SMOKE else ""
    return (
        f"{machine()}; {datetime.now(timezone.utc):%Y-%m-%d}.{smoke}\n\n"
        "fp32 on the CPU. Contenders share parameters and gradients and take turns in blocks of "
        f"one to six rounds, or as many, up to {MOST_ROUNDS}, as take {BLOCK_SECONDS:g} s; medians "
        f"over all blocks. Every {BLOCKS_IN_PLACE} blocks all tensors are made anew. The gradients "
        "are restored before every round, untimed, from the last to the first, as backward makes "
        "them. Their "
        f"global norm is 4 and the limit {MAX_NORM:g}, so clipping acts, unless a row says "
        "otherwise. GB/s is the least traffic of the work over the median; copy_ counts 8 bytes "
        "per fp32 element. torch default is the for-loop: on a CPU torch chooses foreach only "
        "when asked. Python samples of 1.7 ms: faststep and the best of torch were measured again, "
        "in slices of time."
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    ring = session.config.stash[RING]
    ring.leave()
    if not any(outcome.seconds for outcome in ring.outcomes) and not ring.figures:
        return
    name = session.config.getoption("save")
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    base = RESULTS / name if name else RESULTS / "local" / stamp
    base.parent.mkdir(parents=True, exist_ok=True)
    outcomes, introduction = ring.outcomes, _introduction()
    goals = goals_text(outcomes, markdown=True)
    if ring.figures:
        goals = f"{goals}\n\n{figures_text(ring.figures, markdown=True)}".lstrip()
    tables = as_text(outcomes, markdown=True)
    base.with_name(f"{base.name}.md").write_text(
        f"# Benchmarks\n\n{introduction}\n\n## What it must show\n\n{goals}\n\n"
        f"## All rows\n\n{tables}\n"
    )
    results = as_json(outcomes)
    lost = _regressions(session, results)
    base.with_name(f"{base.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    plot_outcomes(base.with_name(f"{base.name}.png"), machine(), outcomes)
    session.config.stash[TEXT] = (
        f"{introduction}\n\n{as_text(outcomes)}\n\n{goals_text(outcomes)}\n\n"
        f"{figures_text(ring.figures)}\n\n{lost}\n\n"
        f"Written: {base}.md, .json and .png"
    )


def _regressions(session: pytest.Session, results: dict[str, Any]) -> str:
    """Compares with what is published, and fails the session where a row has lost too much."""
    if SMOKE:
        return "Not compared with published results: smoke run."
    rows = compared(results, published(results, RESULTS))
    if any(row.lost for row in rows):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return regressions_text(rows, kind_of_machine(results))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if TEXT in config.stash:
        terminalreporter.section("faststep against the others")
        terminalreporter.write_line(config.stash[TEXT])
