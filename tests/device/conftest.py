import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from faststep import _C
from faststep._torch.streams import lasts
from faststep.data.deliver import copies
from ranks import jobs_of, results_of

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
    _C.use_streams(lasts)
    assert started.complaint() is None


@pytest.fixture(scope="session")
def cuda_ranks(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """The results by rank of a job of `on_cuda_ranks`, in processes with a fake machine each."""
    fake.build(fake.LIBRARY)
    return results_of(jobs_of(request.session.items, "CUDA_JOBS")).__getitem__


@pytest.fixture
def device(machine: fake.Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[late.Late]:
    """torch.cuda as a late device; the test fails if copies keep pinned memory."""
    monkeypatch.setattr(copies, "_copiers", {})
    sums, flag = fake.claim(torch.zeros(1, dtype=torch.float64)), fake.claim(torch.zeros(()))
    _C.device_chunk_squares(
        [fake.claim(torch.ones(1))], None, sums, flag
    )  # keeps memory for tables
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
