from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from faststep.data.deliver import copies

from . import fake, late


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


@pytest.fixture
def device(machine: fake.Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[late.Late]:
    """torch.cuda as a late device; the test fails if copies keep pinned memory."""
    monkeypatch.setattr(copies, "_copiers", {})
    started = late.start(monkeypatch, machine)
    before = started.living().pinned, started.living().registered
    yield started
    machine.lag(0)
    machine.synchronize()
    for copier in copies._copiers.values():
        copier.forget_passed()
        assert not copier._pending
    gc.collect()
    assert (started.living().pinned, started.living().registered) == before
