"""Collects what the CUDA benchmarks measure, prints it, and writes it as Markdown, JSON and PNG."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_contest import Budget, CudaOutcome, free_all
from cuda_report import cuda_goals, cuda_introduction, cuda_json, cuda_tables
from cuda_timing import CudaTimer, HostTimer, Timer
from cuda_works import REHEARSAL
from faststep import _C
from plots import draw

RESULTS = Path(__file__).parents[1] / "results"
OUTCOMES: list[CudaOutcome] = []
TEXT = pytest.StashKey[str]()


def _why_not() -> str | None:
    if REHEARSAL:
        return None
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not _C.has_kernels():
        return "this build of faststep has no CUDA kernels: FASTSTEP_CUDA=1 builds them"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if reason is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    if REHEARSAL and config.getoption("save"):
        raise pytest.UsageError("--save keeps figures; those of a rehearsal mean nothing")


@pytest.fixture(scope="session")
def timer() -> Timer:
    return HostTimer() if REHEARSAL else CudaTimer()


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest) -> Budget:
    works = sum("budget" in getattr(item, "fixturenames", ()) for item in request.session.items)
    return Budget(request.config.getoption("seconds"), works)


@pytest.fixture
def outcomes() -> Any:
    yield OUTCOMES
    free_all()


def _base(config: pytest.Config) -> Path:
    """Where the run goes, without a suffix; never over what the CPU's benchmarks wrote."""
    name, files = config.getoption("save"), config.getoption("files")
    if files:
        return Path(files)
    stamp = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-cuda"
    base = RESULTS / name if name else RESULTS / "local" / stamp
    if name and "benchmarks/gpu" not in " ".join(config.args):
        base = base.with_name(f"{base.name}-cuda")
    base.parent.mkdir(parents=True, exist_ok=True)
    return base


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not any(outcome.seconds for outcome in OUTCOMES):
        return
    base = _base(session.config)
    introduction = f"{datetime.now(timezone.utc):%Y-%m-%d}; {cuda_introduction()}"
    markdown, saved = (base.with_name(base.name + suffix) for suffix in (".md", ".json"))
    markdown.write_text(
        f"# Benchmarks on CUDA\n\n{introduction}\n\n## What it must show\n\n"
        f"{cuda_goals(OUTCOMES, markdown=True)}\n\n## All rows\n\n"
        f"{cuda_tables(OUTCOMES, markdown=True)}\n"
    )
    saved.write_text(json.dumps(cuda_json(OUTCOMES), indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        plot = str(draw(saved))
    else:
        plot = f"no plot without matplotlib; later: python benchmarks/plots.py {saved}"
    session.config.stash[TEXT] = (
        f"{introduction}\n\n{cuda_tables(OUTCOMES)}\n\n{cuda_goals(OUTCOMES)}\n\n"
        f"Written: {markdown}, {saved}; {plot}"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if TEXT in config.stash:
        terminalreporter.section("faststep against the others on CUDA")
        terminalreporter.write_line(config.stash[TEXT])
