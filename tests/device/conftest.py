from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import fake


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake.Machine]:
    """A fake CUDA machine; the test fails if its driver has something to complain about."""
    started = fake.start(monkeypatch)
    assert started.complaint() is None
    yield started
    started.lag(0)
    started.synchronize()
    fake.free_allocated()
    assert started.complaint() is None
