"""worker_method="thread": torch's loader with workers, in one process; and get_worker_info()."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as of_worker

from faststep._torch.data_loader import dataset_of_worker, new_worker_info, set_worker_dataset
from faststep.data import DataLoader
from faststep.data.workers import threads
from programs import Programs

from .test_interrupts import WORKERS, within_a_second
from .test_worker_faults import Failing, fail
from .test_workers import Mixed, Wide, list_of
from .torch_and_ours import child, plain


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("faststep-worker")]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    gc.collect()
    assert workers() == []
    assert torch.get_num_threads() == threads


def threaded(dataset: Any, *arguments: Any, **options: Any) -> DataLoader[Any]:
    options.setdefault("num_workers", 2)
    return DataLoader(dataset, *arguments, worker_method="thread", **options)


class Fixed(Mixed):
    """Without random numbers, and with its worker's number."""

    draws = False

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "worker": get_worker_info().id}


class Counting(IterableDataset[Any]):
    """Keeps its place in itself."""

    at = 0

    def __iter__(self) -> Counting:
        self.at = 0
        return self

    def __next__(self) -> Any:
        info = get_worker_info()
        assert info.dataset is self
        if self.at == 5 + 6 * info.id:
            raise StopIteration
        self.at += 1
        time.sleep(0.001)
        return torch.tensor([info.id, self.at]), info.seed


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Fixed(), {"batch_size": 4}),
        (
            Fixed(),
            {"batch_size": 3, "shuffle": True, "drop_last": True, "persistent_workers": True},
        ),
        (Fixed(), {"batch_size": None}),
        (Fixed(), {"batch_sampler": [[3, 1], [2], [0, 5, 7]], "num_workers": 3}),
        (Counting(), {"batch_size": 2, "drop_last": True}),
        (Counting(), {"batch_size": 2, "persistent_workers": True}),
    ],
)
def test_batches_are_torchs(dataset: Any, options: dict[str, Any]) -> None:
    options = {"num_workers": 2, **options}
    want = list_of(torch.utils.data.DataLoader(dataset, **options), 2)
    ours = threaded(dataset, **options)
    assert list_of(ours, 2) == want
    assert ours.path == "threads"
    assert "threads fetch" in ours.explain()
    del ours


def assert_own_generators(info: Any) -> None:
    assert info.rng.random_generator.random() == random.Random(info.seed).random()
    want = torch.rand(1, generator=torch.Generator().manual_seed(info.seed))
    assert torch.equal(torch.rand(1, generator=info.rng.torch_generator), want)
    assert info.rng.numpy_generator.random() == numpy.random.default_rng(info.seed).random()


def test_each_thread_has_its_info() -> None:
    """With the fields that this torch gives it."""
    seen: dict[int, Any] = {}
    fields = torch.utils.data._utils.worker.WorkerInfo.__annotations__

    class Infos(Wide):
        def __getitem__(self, index: int) -> Any:
            info = torch.utils.data.get_worker_info()
            assert info is get_worker_info()
            assert info.dataset is self
            assert "worker_method" not in fields or info.worker_method == "thread"
            assert torch.get_num_threads() == 1
            seen.setdefault(info.id, info)
            assert started[info.id] == threading.get_ident()
            time.sleep(0.002)
            return index

    started: dict[int, int] = {}

    def start(worker: int) -> None:
        assert get_worker_info().id == worker
        started[worker] = threading.get_ident()

    torch.manual_seed(3)
    iterator = iter(threaded(Infos(), 2, num_workers=3, worker_init_fn=start))
    assert plain(list(iterator)) == plain([torch.tensor([i, i + 1]) for i in range(0, 40, 2)])
    assert get_worker_info() is None
    assert sorted(seen) == [0, 1, 2]
    for worker, info in seen.items():
        assert info.num_workers == 3
        assert info.seed == iterator._base_seed + worker
        if "rng" in fields:
            assert_own_generators(info)
    seen.clear()


def test_nothing_is_copied() -> None:
    samples = [torch.ones(3) for _ in range(4)]
    for sample, batch in zip(samples, threaded(samples, None), strict=True):
        assert batch is sample


def test_exceptions_are_wrapped_and_come_in_their_place() -> None:
    iterator = iter(threaded(Failing(), 2))
    next(iterator), next(iterator)
    with pytest.raises(KeyError, match="Caught KeyError in DataLoader worker thread 0"):
        next(iterator)
    assert next(iterator)[1].tolist() == [6, 7]
    del iterator
    for options in ({"collate_fn": fail}, {"worker_init_fn": fail}):
        iterator = iter(threaded(Wide(8), 2, **options))
        for _ in range(4):
            with pytest.raises(OSError, match="it failed"):
                next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
    del iterator


class Exiting(Wide):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            sys.exit("a sample")
        return index


def test_what_would_end_a_thread_comes_in_its_place() -> None:
    """Nothing but torch's look at its workers, each 5 s, would find a thread that is gone."""
    iterator = iter(threaded(Exiting(), 2))
    next(iterator), next(iterator)
    with pytest.raises(SystemExit, match="Caught SystemExit in DataLoader worker thread 0"):
        next(iterator)
    assert next(iterator).tolist() == [6, 7]
    del iterator
    with pytest.raises(SystemExit):
        next(iter(threaded(Wide(8), 2, worker_init_fn=sys.exit)))


class Slow(Wide):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.4 if index >= 4 else 0)
        return index


class Held(Wide):
    """Its samples wait until they may go."""

    def __init__(self) -> None:
        super().__init__(8)
        self.go = threading.Event()

    def __getitem__(self, index: int) -> Any:
        self.go.wait()
        return index


def test_timeout_and_breaking_out() -> None:
    held = Held()
    iterator = iter(threaded(held, 2, timeout=0.2))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        next(iterator)
    held.go.set()
    del iterator
    assert len(list(threaded(held, 2, timeout=300))) == 4
    for _ in threaded(Slow(), 2):
        assert len(workers()) == 2
        break


def break_out() -> float:
    iterator = iter(threaded(Slow(), 2))
    next(iterator), next(iterator)
    start = time.monotonic()
    del iterator
    return time.monotonic() - start


def test_the_end_comes_within_a_second() -> None:
    within_a_second(break_out)


def test_batches_come_as_they_are_ready() -> None:
    first = [int(batch[0]) for batch in threaded(Slow(8), 1, in_order=False, shuffle=False)]
    assert sorted(first) == list(range(8))


def test_a_batch_is_not_kept() -> None:
    ours = threaded(Wide(), 2, prefetch_factor=1, num_workers=1)
    iterator = iter(ours)
    first = weakref.ref(next(iterator)[0])
    for _ in range(3):
        next(iterator)
    assert first() is None
    del iterator


def test_a_forked_child() -> None:
    ours = threaded(Wide(), 2)
    iterator = iter(ours)
    next(iterator)

    def work() -> None:
        with pytest.raises(RuntimeError, match="in the child"):
            next(iterator)
        assert len(list(ours)) == 20

    child(work)
    assert len(list(iterator)) == 19


def test_the_program_ends(programs: Programs) -> None:
    text = WORKERS % True
    text = text.replace("persistent_workers=", "worker_method='thread', persistent_workers=")
    done = programs.run(text)
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments() -> None:
    with pytest.raises(ValueError, match="'process' or 'thread', not 'fibre'"):
        DataLoader([1], worker_method="fibre")
    with pytest.raises(ValueError, match="no multiprocessing_context"):
        threaded([1], multiprocessing_context="fork")
    assert threaded([1], num_workers=0).path == "torch"
    assert [*copy.copy(threaded([1, 2], None))] == [1, 2]


class Closed:
    """As in torch 2.10: any fields, and no assignment."""

    __initialized = False

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)
        self.__initialized = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__initialized:
            raise RuntimeError("Cannot assign attributes to WorkerInfo objects")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [of_worker.WorkerInfo, Closed])
def test_the_dataset_is_replaced(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(of_worker, "WorkerInfo", kind)
    info = new_worker_info(1, 3, 42, "one")
    monkeypatch.setattr(of_worker, "_worker_info", info)
    set_worker_dataset("another")
    seen: Any = of_worker.get_worker_info()
    assert type(seen) is kind
    assert (seen.id, seen.num_workers, seen.seed, seen.dataset) == (1, 3, 42, "another")
    assert info.dataset == "one"
    if kind is Closed:
        with pytest.raises(RuntimeError, match="Cannot assign"):
            seen.dataset = "assigned"


def test_outside_of_a_worker_nothing_is_replaced() -> None:
    set_worker_dataset("another")
    assert of_worker.get_worker_info() is None


@pytest.mark.parametrize("arguments", [{"dataset": "it"}, {"dataset_holder": ["it"]}])
def test_the_dataset_of_a_worker(arguments: dict[str, Any]) -> None:
    assert dataset_of_worker(arguments) == "it"
    assert arguments in ({"dataset": "it"}, {"dataset_holder": []})


def test_threads_take_the_dataset_as_a_later_torch_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.14 gives a list with the dataset to the function that a worker runs."""
    signature = inspect.signature(of_worker._worker_loop)
    renamed = [
        parameter.replace(name="dataset_holder") if name == "dataset" else parameter
        for name, parameter in signature.parameters.items()
    ]

    class Bound(inspect.Signature):
        def bind(self, *args: Any, **kwargs: Any) -> Any:
            values = list(args)
            place = list(self.parameters).index("dataset_holder")
            if not isinstance(values[place], list):
                values[place] = [values[place]]
            return super().bind(*values, **kwargs)

    monkeypatch.setattr(threads.inspect, "signature", lambda target: Bound(renamed))
    loader = DataLoader(range(6), 2, num_workers=2, worker_method="thread")  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
