"""Batches ahead on a device, where the device is the CPU: their order, and what is asked when.

tests/device/test_prefetch.py has the order of what a CUDA device does.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler, TensorDataset

from faststep.data import DataLoader
from programs import Programs

from .shapes import Streamed
from .test_lifetime import data_threads
from .torch_and_ours import plain, run, seeded

ROWS, BATCH = 23, 3
STEPS = 8


def table() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS * 2).view(ROWS, 2), torch.arange(ROWS))


class Samples(Dataset[Any]):
    """What only torch's way takes; some samples are bad."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        if index in self.bad:
            raise KeyError(index)
        return index

    def __len__(self) -> int:
        return ROWS


class Logged(Sampler[int]):
    """Says when it is asked."""

    def __init__(self) -> None:
        self.epochs = self.given = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        for index in range(ROWS):
            self.given += 1
            yield index

    def __len__(self) -> int:
        return ROWS


def all_of(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


KINDS: dict[str, Any] = {
    "arrays": lambda: (table(), {}),
    "shuffled": lambda: (table(), {"shuffle": True}),
    "generator": lambda: (table(), {"shuffle": True, "generator": seeded()}),
    "sampler": lambda: (table(), {"sampler": Logged(), "drop_last": True}),
    "torch": lambda: (Samples(), {"shuffle": True}),
    "bad": lambda: (Samples(0, 9, 10, 22), {}),
    "iterable": lambda: (Streamed(int, ROWS), {}),
    "empty": lambda: (TensorDataset(torch.ones(0)), {}),
}


@pytest.mark.parametrize("ahead", [0, 1, 2, 50])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, 3])
def test_batches_errors_and_draws_are_those_of_torch(
    kind: str, ahead: int, stop: int | None
) -> None:
    outcomes = []
    # what RandomSampler draws at its end from a generator of its own is drawn so much earlier
    epochs = 1 if (kind, ahead, stop) == ("generator", 50, 3) else 2
    for options in (None, {"device": "cpu", "prefetch_to_device": ahead}):
        torch.default_generator.manual_seed(5)
        data, more = KINDS[kind]()
        kind_of_loader = torch.utils.data.DataLoader if options is None else DataLoader
        loader = kind_of_loader(data, BATCH, **more, **(options or {}))
        outcomes.append(run(loader, [torch.default_generator], epochs, stop))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("data", [table(), Samples()], ids=["arrays", "torch"])
def test_workers(data: Any, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": persistent}
    loader = DataLoader(data, BATCH, **options, device="cpu")
    first = iter(loader)
    assert len(first) == len(loader) == STEPS
    want = all_of(torch.utils.data.DataLoader(data, BATCH))
    assert [plain(next(first)) for _ in range(2)] == want[:2]
    second = iter(loader)
    assert (second is first) == persistent
    assert all_of(second) == want
    if not persistent:
        assert all_of(first) == want[2:]
    assert all_of(loader) == want


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_sampler_is_asked_so_far_ahead_and_not_for_the_next_epoch(ahead: int) -> None:
    sampler = Logged()
    loader = DataLoader(table(), BATCH, sampler=sampler, device="cpu", prefetch_to_device=ahead)
    for epoch in range(1, 3):
        iterator = iter(loader)
        assert sampler.given == (epoch - 1) * ROWS
        for number, _ in enumerate(iterator, 1):
            assert sampler.given == (epoch - 1) * ROWS + min(ROWS, (number + ahead) * BATCH)
        assert sampler.epochs == epoch
        with pytest.raises(StopIteration):
            next(iterator)


def test_nothing_is_asked_beyond_an_error_before_it_is_raised() -> None:
    data = Samples(4)
    iterator = iter(DataLoader(data, BATCH, device="cpu", prefetch_to_device=5))
    next(iterator)
    assert data.asked == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        next(iterator)
    assert next(iterator).tolist() == [6, 7, 8]


def test_an_interrupt_comes_at_once_and_loses_nothing_that_was_fetched() -> None:
    class Interrupted(Samples):
        def __getitem__(self, index: int) -> Any:
            if index == 7 and 7 not in self.asked:
                self.asked.append(7)
                raise KeyboardInterrupt
            return super().__getitem__(index)

    iterator = iter(DataLoader(Interrupted(), BATCH, device="cpu", prefetch_to_device=2))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_errors_count_as_delivered() -> None:
    bad = [0, 1, 2, 3, 99, 4, 5, 6, 7, 8, 9, 10]
    loader = DataLoader(table(), BATCH, sampler=bad, device="cpu")
    iterator = iter(loader)
    next(iterator)
    progress = loader._faststep.progress
    assert progress is not None
    assert progress.delivered == 1
    with pytest.raises(IndexError):
        next(iterator)
    assert progress.delivered == 2
    assert len(list(iterator)) == 2
    assert (progress.delivered, progress.finished) == (4, True)


def test_objects_move_by_themselves_when_they_are_delivered() -> None:
    class Own:
        asked = 0

        def to(self, device: torch.device) -> Own:
            assert device == torch.device("cpu")
            self.asked += 1
            return self

    made: list[Own] = []

    def collate(samples: Any) -> Any:
        made.append(Own())
        return samples, made[-1]

    for number, (_, own) in enumerate(
        DataLoader(Samples(), BATCH, collate_fn=collate, device="cpu")
    ):
        assert own is made[number]
        assert [other.asked > 0 for other in made] == [i <= number for i in range(len(made))]
        assert own.asked == 1


@pytest.mark.parametrize("bad", [False, True])
def test_threads_end_with_an_iterator_that_is_dropped(bad: bool) -> None:
    """Without the garbage collector's help."""
    indices = [0, 1, 99, 2, 3, 99] if bad else range(6)
    data = TensorDataset(torch.ones(10, 50_000))
    gc.collect()
    gc.disable()
    try:
        iterator = iter(DataLoader(data, 2, sampler=indices, device="cpu", prefetch_to_device=1))
        next(iterator)
        assert data_threads() > 0
        with contextlib.suppress(IndexError):
            next(iterator)
        del iterator
        assert data_threads() == 0
    finally:
        gc.enable()


FORKED_WHILE_IT_COPIES = """
import os
import sys
import torch
from faststep.data.deliver import copies

class Locked(torch.Tensor):
    def __del__(self):
        if os.getpid() != parent:
            os.write(1, b"a child has freed page-locked memory")

class Event:
    passed = False
    def query(self):
        return self.passed

class Streams(copies.HostStreams):
    device = torch.device("cuda")
    def allocate(self, tensor):
        return torch.empty_like(tensor), tensor.clone().as_subclass(Locked)
    def mark(self, stream):
        return Event()

parent = os.getpid()
copier = copies._copiers[torch.device("cuda")] = copies.Copier(Streams())
queue = [copier.start([torch.ones(3)]) for _ in range(3)]
queue[0].event.passed = queue[1].event.passed = True  # of which one is delivered
copier.finish(queue.pop(0))
child = os.fork()
if child == 0:
    del copier, queue
    sys.exit()
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_frees_no_page_locked_memory(programs: Programs) -> None:
    result = programs.run(FORKED_WHILE_IT_COPIES)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "meta"}, "device must be a CUDA device or the CPU, not 'meta'"),
        ({"device": "cpu", "prefetch_to_device": -1}, "an int from 0 on, not -1"),
        ({"device": "cpu", "prefetch_to_device": 1.0}, "an int from 0 on, not 1.0"),
        ({"prefetch_to_device": True}, "an int from 0 on, not True"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(table(), BATCH, **options)


def test_a_device_that_is_not_there_is_an_error_before_anything_is_drawn() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    before = torch.get_rng_state()
    loader = DataLoader(table(), BATCH, device="cuda", shuffle=True)
    with pytest.raises(RuntimeError, match="device='cuda', but torch finds no CUDA device"):
        iter(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loader_says_where_its_batches_are() -> None:
    loader = DataLoader(table(), BATCH, device="cpu", prefetch_to_device=7)
    assert loader.explain().endswith("; up to 7 more are on cpu, or on their way")
    assert "on their way" not in DataLoader(table()).explain()
