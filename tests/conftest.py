"""Settings shared by all tests: seeds, threads, and hypothesis without a clock."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

try:
    import hypothesis
except ImportError:  # missing where nothing but tests/gpu runs
    pass
else:
    hypothesis.settings.register_profile("default", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """FASTSTEP_EVERY=n keeps every n-th case of each test with many, for where all run slowly."""
    every = int(os.environ.get("FASTSTEP_EVERY", "1"))
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        test = item.nodeid.split("[")[0]
        (left if seen[test] % every else kept).append(item)
        seen[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from one seed and leaves torch's global settings as it found them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks every backend: 3 ms
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
