"""Settings shared by all tests: seeds, threads, and hypothesis without a clock."""

import gc
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from programs import Programs
from ranks import forked, jobs_of, results_of

try:
    import hypothesis
except ImportError:  # missing where nothing but tests/gpu runs
    pass
else:
    hypothesis.settings.register_profile(
        "default", deadline=None, derandomize=True, database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a clock as well
    )  # fmt: skip
    hypothesis.settings.load_profile("default")
forked()  # the workers of loaders that a server forks, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """FASTSTEP_EVERY=n keeps one in n of each test's cases, and no test that is marked as slow.

    A checksum says which: every n-th case would be the same dtype wherever n of them alternate.
    """
    every = int(os.environ.get("FASTSTEP_EVERY", "1"))
    if every == 1:
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for cases in tests.values():
        ranked = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
        fast = [item for item in ranked if item.get_closest_marker("slow") is None]
        kept.update(fast[: -(-len(cases) // every)])
    if left := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Collections leave out what was imported, which takes them half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from one seed and leaves torch's global settings as it found them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks every backend: 3 ms
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """The results of a job by rank; all jobs of a folder's tests are done at once.

    tests/sharding has processes for each file: torch keeps meshes in caches, by their ranks, and
    so would find those of process groups that have ended.
    """
    together: dict[Any, list[pytest.Item]] = {}
    for item in request.session.items:
        folder = item.path.parent
        together.setdefault(item.path if folder.name == "sharding" else folder, []).append(item)
    found: dict[str, list[Any]] = {}
    for items in together.values():
        if jobs := jobs_of(items):
            found.update(results_of(jobs))
    return found.__getitem__


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs in processes of their own, without the time that an import of torch takes."""
    started = Programs()
    yield started
    started.close()
