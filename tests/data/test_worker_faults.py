"""Whatever goes wrong with worker processes is an error or a clean end soon, and leaves nothing."""

import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from faststep import _C
from faststep.data import DataLoader
from faststep.data.workers import packed_batch, processes
from programs import Programs

from .test_interrupts import within_a_second
from .test_workers import Custom, Wide, arena_of, counts
from .torch_and_ours import child, plain


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    gc.collect()
    before, files = children(), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    for _ in range(500):  # the threads that feed torch's queues close them when they come to it
        if len(os.listdir("/proc/self/fd")) <= files:
            break
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= files
    assert children() <= before
    assert not [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name]


class Failing(Wide):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("a sample")
        return super().__getitem__(index)


def test_an_exception_in_a_sample_comes_in_its_place() -> None:
    iterator = iter(DataLoader(Failing(), 2, num_workers=2))
    next(iterator), next(iterator)
    with pytest.raises(KeyError, match="DataLoader worker process 0"):
        next(iterator)
    assert next(iterator)[1].tolist() == [6, 7]
    del iterator


def fail(*arguments: Any) -> Any:
    raise OSError("it failed")


def test_an_exception_in_collate_or_at_the_start() -> None:
    for options in ({"collate_fn": fail}, {"worker_init_fn": fail}):
        with pytest.raises(OSError, match="it failed"):
            next(iter(DataLoader(Wide(), 2, num_workers=1, **options)))


class Local:
    """Its errors are of a class that no other process can find."""

    Error = type("Error", (LookupError,), {"__module__": __name__})

    def __iter__(self) -> Iterator[int]:
        yield 1
        raise self.Error("a stream")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise self.Error("a sample")
        return index

    def begin(self, worker: int) -> None:
        raise self.Error("a start")


class LocalStream(Local, IterableDataset[int]):
    pass


def test_an_exception_of_a_class_that_cannot_be_pickled() -> None:
    """Torch's loader loses it: it waits for ever, or the stream ends without an error."""
    for dataset, options, place, error in (
        (Local(), {}, 1, "Error: a sample"),
        (LocalStream(), {}, 1, "Error: a stream"),
        (Local(), {"worker_init_fn": Local().begin}, 0, "Error: a start"),
    ):
        iterator = iter(DataLoader(dataset, 1, num_workers=1, timeout=20, **options))
        for _ in range(place):
            next(iterator)
        with pytest.raises(LookupError, match=f"(?s)Caught LookupError in DataLoader.*{error}"):
            next(iterator)


def unpicklable(samples: Any) -> Any:
    return [default_collate(samples), torch.ones(3), lambda: None]


def test_a_batch_that_cannot_be_pickled_is_an_error() -> None:
    """With torch's loader the program waits for it for ever."""
    ours = DataLoader(Wide(4), 2, num_workers=1, collate_fn=unpicklable)
    for _ in range(2):
        with pytest.raises(AttributeError, match="lambda"):
            next(iter(ours))
    assert counts(ours)["taken"] == counts(ours)["held"] == 0


class Slow(Wide):
    def __getitem__(self, index: int) -> Any:
        if index >= 4:
            time.sleep(30)
        return super().__getitem__(index)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_killed_worker_is_an_error(worker: int) -> None:
    ours = DataLoader(Slow(), 2, num_workers=2)
    iterator = iter(ours)
    batch, _ = next(iterator)
    next(iterator)
    os.kill(iterator._workers[worker].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        next(iterator)
    for process in iterator._workers:
        process.kill()  # the other one sleeps, and torch would wait for it
    del iterator, process
    assert counts(ours)["taken"] == 0
    assert batch[:, 0].tolist() == [0.0, 1.0]


def test_breaking_out_leaves_nothing() -> None:
    ours = DataLoader(Wide(), 2, num_workers=2, persistent_workers=True)
    for _ in range(3):
        for _ in ours:
            break
    assert len(list(ours)) == 20
    del ours, _


def break_out() -> float:
    iterator = iter(DataLoader(Wide(), 2, num_workers=2))
    next(iterator)
    start = time.monotonic()
    del iterator
    return time.monotonic() - start


def kill() -> float:
    iterator = iter(DataLoader(Slow(), 2, num_workers=1))
    next(iterator), next(iterator)
    start = time.monotonic()
    iterator._workers[0].kill()
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        next(iterator)
    del iterator
    return time.monotonic() - start


def fail_at_the_start() -> float:
    iterator = iter(DataLoader(Wide(), 2, num_workers=2, worker_init_fn=fail))
    with pytest.raises(OSError, match="it failed"):
        next(iterator)
    start = time.monotonic()
    del iterator
    return time.monotonic() - start


@pytest.mark.parametrize("end", [break_out, kill, fail_at_the_start])
def test_the_end_comes_within_a_second(end: Callable[[], float]) -> None:
    within_a_second(end)


def test_timeout() -> None:
    assert len(list(DataLoader(Wide(4), 2, num_workers=1, timeout=300))) == 2
    iterator = iter(DataLoader(Slow(), 2, sampler=range(4, 8), num_workers=1, timeout=0.5))
    with pytest.raises(RuntimeError, match="timed out after"):
        next(iterator)
    iterator._workers[0].kill()
    with pytest.raises(RuntimeError):
        next(iterator)
    del iterator


def few_bytes(worker: int) -> None:
    """Stands for memory that has run out."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))


def test_without_memory_a_tensor_goes_torchs_way() -> None:
    ours = DataLoader(Wide(12), 2, num_workers=1, worker_init_fn=few_bytes)
    kept = list(ours)
    assert [labels.tolist() for _, labels in kept] == [[i, i + 1] for i in range(0, 12, 2)]
    assert all((batch[0] == labels[0]).all() for batch, labels in kept)
    assert "no shared memory" in ours.explain()
    assert arena_of(ours).in_blocks > 0


LIMITED = """
import resource, torch
from pathlib import Path
from faststep.data import DataLoader

size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), -1))
for _ in range(3):
    loader = DataLoader(range(40), 4, num_workers=1)
    assert torch.cat(list(loader)).tolist() == list(range(40)) and loader.path == "workers"
torch.empty(1 << 30, dtype=torch.uint8)
"""


def test_a_limit_of_addresses_leaves_them_to_the_script(programs: Programs) -> None:
    done = programs.run(LIMITED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_an_arena_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise MemoryError("no shared memory: no arena for batches: Operation not permitted")

    monkeypatch.setattr(_C, "Arena", none)
    ours = DataLoader([0, 1, 2, 3], 2, num_workers=1, collate_fn=list)
    assert list(ours) == [[0, 1], [2, 3]]
    assert ours.path == "torch"
    assert "Operation not permitted" in ours.explain()


def test_a_forked_child_sees_its_batch_unchanged() -> None:
    ours = DataLoader(Wide(), 2, num_workers=1)
    iterator = iter(ours)
    batch, _ = next(iterator)
    told, tell = os.pipe()

    number = os.fork()
    if not number:
        status = 1
        try:
            assert os.read(told, 1) == b"x"
            assert batch[:, ::5000].tolist() == [[0.0] * 10, [1.0] * 10]
            with pytest.raises(RuntimeError, match="in the child"):
                next(iterator)
            assert len([labels.tolist() for _, labels in ours]) == 20
            status = 0
        finally:
            os._exit(status)
    place = batch.data_ptr()
    del batch, _
    for other, _ in iterator:
        assert other.data_ptr() != place
    os.write(tell, b"x")
    assert os.waitpid(number, 0)[1] == 0
    os.close(told)
    os.close(tell)
    del other, _, iterator
    assert counts(ours)["held"] == 0


@pytest.mark.parametrize("options", [{}, {"worker_method": "thread"}, {"device": "cpu"}])
def test_a_forked_child_starts_anew_with_persistent_workers(options: Any) -> None:
    ours = DataLoader(Wide(), 2, num_workers=1, persistent_workers=True, **options)
    iterator = iter(ours)
    next(iterator)

    def work() -> None:
        for _ in range(2):
            assert [labels.tolist() for _, labels in ours] == [[i, i + 1] for i in range(0, 40, 2)]

    child(work)
    assert len(list(iterator)) == 19
    assert len(list(ours)) == 20


def test_a_child_may_drop_everything() -> None:
    held: list[Any] = [iter(DataLoader(Wide(), 2, num_workers=1))]
    held.append(next(held[0]))
    child(held.clear)
    assert len(list(held[0])) == 19
    held.clear()


def test_a_batch_that_fails_to_open_leaves_no_block() -> None:
    ours = DataLoader([0, 1, 2, 3], 2, num_workers=1, collate_fn=lambda s: [torch.ones(9), Bad()])
    with pytest.raises(ValueError, match="cannot be opened"):
        next(iter(ours))
    assert counts(ours)["held"] == counts(ours)["taken"] == 0


class Bad(Custom):
    def __init__(self) -> None:
        super().__init__(None)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be opened")


class Full:
    """An arena that has no block for a copy after so many."""

    def __init__(self, memory: _C.Arena, copies: int) -> None:
        self.memory, self.copies = memory, copies

    def put(self, address: int, size: int) -> int:
        self.copies -= 1
        if self.copies < 0:
            raise MemoryError("no shared memory: a batch")
        return self.memory.put(address, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


@pytest.mark.parametrize("kept", [[0], [3], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("copies", [1, 2])
def test_no_block_is_lost_where_memory_runs_out_for_a_copy(kept: list[int], copies: int) -> None:
    """Of tensors that somebody kept in the worker; one more tensor was copied before."""
    memory = _C.Arena()
    own = processes.Packer(default_collate, SimpleNamespace(memory=memory, key=1))  # type: ignore[arg-type]
    batch = [own._stack([torch.full((100,), float(i))] * 3) for i in range(4)]
    held = [batch[i] for i in kept]
    contents = [{"stacked": batch, "other": torch.ones(50)}]
    del batch
    if copies > len(kept):
        packed_batch.pack(1, Full(memory, copies), contents, own._blocks)  # type: ignore[arg-type]
        assert memory.counts()["taken"] == 5 + len(kept)
        return
    with pytest.raises(MemoryError, match="a batch"):
        packed_batch.pack(1, Full(memory, copies), contents, own._blocks)  # type: ignore[arg-type]
    assert memory.counts()["taken"] == len(kept)
    assert [tensor[0, 0].item() for tensor in held] == kept
    del held
    assert memory.counts()["taken"] == 0


def test_a_fork_without_a_descriptor_keeps_what_the_child_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaders = [DataLoader(Wide(8), 2, num_workers=1) for _ in range(2)]
    batches = [next(iter(loader)) for loader in loaders]
    gc.collect()

    def none_left() -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", none_left)
        child(lambda: None)
    del batches
    for loader in loaders:
        assert counts(loader)["held"] == 2
        assert "2 blocks stay unused, as a fork found no free descriptor" in loader.explain()
    child(lambda: None)  # one with a descriptor does not let go of them
    for loader in loaders:
        assert counts(loader)["held"] == 2


def test_an_arena_that_cannot_be_attached_closes_its_file() -> None:
    ends = os.pipe()
    with pytest.raises(MemoryError, match="cannot be mapped"):
        _C.Arena(ends[0], 1 << 26)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(ends[0])
    os.close(ends[1])


def test_a_worker_that_collects_a_dataset_of_batches() -> None:
    """A dataset that holds batches of another epoch: the workers see them as they were."""

    class Holder(Dataset[Any]):
        held: Any = None

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(float(index)) if self.held is None else self.held[0].mean()

    dataset = Holder()
    ours = DataLoader(dataset, 2, num_workers=1)
    dataset.held = next(iter(DataLoader(Wide(), 2, num_workers=1)))
    assert plain(list(ours)) == plain([torch.full((2,), 0.5)] * 6)
