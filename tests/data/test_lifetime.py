"""Batches live as long as somebody has them, and threads no longer than the epoch."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from faststep.data import ArrayDataset, DataLoader
from programs import Programs

from .torch_and_ours import plain, side_by_side

ROWS, BATCH = 64, 4
TASKS = Path("/proc/self/task")


def dataset(width: int = 3) -> TensorDataset:
    return TensorDataset(torch.arange(ROWS * width).view(ROWS, width).float(), torch.arange(ROWS))


def loader(width: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(width), BATCH, **options)


def wide() -> DataLoader[Any]:
    """Batches large enough that threads are woken for them."""
    return loader(50_000)


def data_threads() -> int:
    if not TASKS.is_dir():
        pytest.skip("threads cannot be counted here")
    return sum(name_of(task).startswith("faststep-data") for task in TASKS.iterdir())


def name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return ""


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    if TASKS.is_dir():
        assert data_threads() == 0


def counts(of: DataLoader[Any]) -> tuple[int, int, int]:
    assert of._faststep.slots is not None
    return of._faststep.slots.counts()


DEVICE = {"device": "cpu", "prefetch_to_device": 3}


@pytest.mark.parametrize("options", [{}, DEVICE], ids=str)
def test_batches_may_be_kept(options: dict[str, Any]) -> None:
    ours = loader(**options)
    kept = list(ours)
    assert counts(ours) == (2 * len(kept), 0, 2 * len(kept))
    want = [batch.clone() for batch, _ in torch.utils.data.DataLoader(dataset(), BATCH)]
    for _ in range(3):
        list(ours)
    assert all(torch.equal(got, batch) for (got, _), batch in zip(kept, want, strict=True))


def test_a_batch_is_an_ordinary_tensor() -> None:
    data = torch.arange(24.0).view(8, 3)
    (batch,) = next(iter(DataLoader(TensorDataset(data), 4)))
    assert type(batch) is torch.Tensor
    assert batch.is_contiguous()
    assert batch.data_ptr() % 64 == 0
    assert batch.untyped_storage().nbytes() == 48
    assert not batch.requires_grad
    assert batch.is_leaf
    assert batch._version == 0
    batch.requires_grad_(True)
    (batch * 2).sum().backward()
    assert torch.equal(batch.grad, torch.full((4, 3), 2.0))
    with torch.inference_mode():
        (batch,) = next(iter(DataLoader(TensorDataset(data), 4)))
        assert batch.is_inference()
    assert torch.equal(torch.save(batch, "/dev/null") or batch.share_memory_(), data[:4])


@pytest.mark.parametrize(("options", "most"), [({}, 7), (DEVICE, 10)], ids=str)
def test_memory_is_used_again(options: dict[str, Any], most: int) -> None:
    ours = loader(**options)
    places = {batch.data_ptr() for batch, _ in ours}
    first, *_ = counts(ours)
    places |= {batch.data_ptr() for _ in range(4) for batch, _ in ours}
    made, _, held = counts(ours)
    assert made == first <= 2 * most  # no memory comes from the system any more
    assert len(places) <= most
    assert held == 0


@pytest.mark.parametrize("also", ["view", "detached", "numpy", "thread", "graph"])
def test_a_slot_is_free_when_the_last_tensor_over_it_is_gone(also: str) -> None:
    ours = loader()
    iterator = iter(ours)
    batch, labels = next(iterator)
    kept: list[Any] = []
    if also == "view":
        kept.append(batch[1:2].t())
    elif also == "detached":
        kept.append(batch.detach())
    elif also == "numpy":
        kept.append(batch.numpy()[::2])
    elif also == "thread":
        side_by_side(1, lambda b=batch: kept.append(b.view(-1)))  # type: ignore[misc]
    else:
        kept.append((torch.ones(3, requires_grad=True) * batch).sum())
    place = batch.data_ptr()
    want = batch.clone()
    del iterator, batch, labels
    gc.collect()
    assert counts(ours)[2] == 1
    for other, _ in ours:
        assert other.data_ptr() != place
    del other, _
    if also == "view":
        assert torch.equal(kept[0], want[1:2].t())
    kept.clear()
    gc.collect()
    assert counts(ours)[2] == 0


def test_fields_are_kept_one_by_one() -> None:
    """Keeping the labels of an epoch does not keep its images."""
    ours = loader()
    labels = [label for _, label in ours]
    assert counts(ours)[2] == len(labels)
    assert torch.equal(torch.cat(labels), torch.arange(ROWS))


def test_changing_a_batch_changes_nothing_else() -> None:
    ours = loader()
    want = plain(list(ours))
    for batch, labels in ours:
        batch.fill_(-1)
        labels.add_(1)
    assert plain(list(ours)) == want


def test_batches_may_be_dropped_by_another_thread() -> None:
    ours = loader()
    queue: list[Any] = []
    done = threading.Event()

    def drop() -> None:
        while not done.is_set() or queue:
            if queue:
                queue.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    for _ in range(20):
        for batch in ours:
            queue.append(batch)
    done.set()
    thread.join()
    del batch
    assert counts(ours)[2] == 0


def test_surplus_memory_goes_back() -> None:
    ours = loader()
    kept = [batch for _ in range(5) for batch in ours]
    assert counts(ours)[2] == 2 * 5 * ROWS // BATCH
    kept.clear()
    _, free, held = counts(ours)
    assert held == 0
    assert free <= 14


def test_batches_outlive_the_loader() -> None:
    ours = wide()
    batch, _ = next(iter(ours))
    del ours
    gc.collect()
    assert torch.equal(batch, dataset(50_000).tensors[0][:BATCH])


def fail(iterator: Any) -> None:
    for _ in iterator:
        raise ZeroDivisionError


def test_breaking_out_ends_the_threads() -> None:
    ours = wide()
    for _ in ours:
        assert data_threads() > 0
        break
    assert data_threads() == 0
    iterator = iter(ours)
    next(iterator)
    with pytest.raises(ZeroDivisionError):
        fail(iterator)
    del iterator


def test_the_end_of_an_epoch_ends_the_threads() -> None:
    iterator = iter(wide())
    assert len(list(iterator)) == ROWS // BATCH
    assert data_threads() == 0


@pytest.mark.parametrize(
    ("cores", "workers", "in_memory", "mapped"),
    [(1, 0, 1, 1), (2, 0, 1, 2), (2, 2, 1, 2), (4, 2, 2, 2), (4, 9, 3, 4), (16, 0, 4, 4)],
)
def test_who_waits_has_a_core(
    cores: int,
    workers: int,
    in_memory: int,
    mapped: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads beyond the cores only take turns, unless they wait for a file."""
    rows = np.zeros((ROWS, 100_000), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    file = np.load(tmp_path / "rows.npy", mmap_mode="r")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    for array, threads in ((rows, in_memory), (file, mapped)):
        for _ in DataLoader(ArrayDataset(array), BATCH, num_workers=workers):
            assert data_threads() == threads


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=str)
def test_several_threads_may_share_an_iterator(options: dict[str, Any]) -> None:
    iterator = iter(loader(50_000, **options))
    seen: list[int] = []

    def consume() -> None:
        for _, labels in iterator:
            seen.extend(labels.tolist())

    side_by_side(4, consume)
    assert sorted(seen) == list(range(ROWS))


CUT = """
import faulthandler, os, sys, time, torch
from faststep import _C
faulthandler.enable()
data = torch.from_file(sys.argv[1], shared=True, size=1 << 20)
os.truncate(sys.argv[1], 0)
fields, rows = ((torch.empty(0, 1 << 18), 0),), (0, 4, ((data.data_ptr(), 1 << 20),))
gather = _C.Gather(_C.Slots(), fields, (rows,), 1, False, data)
batch = gather.submit([0, 1, 2, 3])
time.sleep(60)
"""


def test_python_tells_of_a_fault_in_a_thread(programs: Programs, tmp_path: Path) -> None:
    """The file that it reads was cut off."""
    (tmp_path / "rows").write_bytes(bytes(4 << 20))
    ran = programs.run(CUT, str(tmp_path / "rows"))
    assert "Fatal Python error: Bus error" in ran.stderr
    # AddressSanitizer's own handler, which comes after Python's, exits.
    assert ran.returncode == 1 if "asan" in os.environ.get("LD_PRELOAD", "") else ran.returncode < 0
