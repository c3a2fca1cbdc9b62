"""Every path and every kind of sampler and dataset goes on with the rest of an epoch, and the next.

Runs without interruption are compared with what new loaders make of the states in their middle.
"""

import copy
import functools
import gc
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.datapipes.iter import IterableWrapper

from faststep import _C
from faststep.data import DataLoader, KeyedSampler
from faststep.data.resume.batch_states import BatchWithStates

from .resumable import (
    MAPS,
    ROWS,
    START,
    STREAMS,
    BegunStream,
    Epochs,
    Lazy,
    Noisy,
    Rows,
    Run,
    Shuffled,
    Stateful,
    StatefulStream,
    Stream,
    Walk,
    Walking,
    WalkingStream,
    arrays,
    goes_on,
    loader_of,
    plain_random_states,
    rows,
    set_epoch,
    set_random_states,
)
from .torch_and_ours import outcomes, plain, saved, without_texts

KINDS = {**MAPS, **STREAMS}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop_last": {"drop_last": True},
    "ahead on a device": {"device": "cpu"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "persistent": {"num_workers": 2, "worker_method": "thread", "persistent_workers": True},
    "rarely": {"num_workers": 2, "worker_method": "thread", "snapshot_every_n_steps": 3},
}
# what draws from generators that are drawn from ahead, or by several threads, is not repeatable
WITH_AHEAD = sorted(KINDS.keys() - {"lazy stream"})
WITH_THREADS = sorted(
    name
    for name in WITH_AHEAD
    if name not in ("noisy", "shuffled stream") and not name.startswith("stateful stream")
)


@functools.cache
def run_of(kind: str, options: str) -> Run:
    return Run(KINDS[kind], OPTIONS[options], 3)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_kind_at_any_place(data: st.DataObject) -> None:
    options = data.draw(st.sampled_from(list(OPTIONS)), "options")
    kinds = sorted(KINDS)
    if options == "ahead on a device":
        kinds = WITH_AHEAD
    elif "num_workers" in OPTIONS[options]:
        kinds = WITH_THREADS
    run = run_of(data.draw(st.sampled_from(kinds), "kind"), options)
    place = data.draw(st.integers(0, len(run.places) - 1), "place")
    run.check(place, data.draw(st.lists(st.integers(0, 9), max_size=2), "breaks"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_torchs(kind: str) -> None:
    """The same batches, and the same random states after each: who keeps a place draws nothing."""
    outcomes = []
    for library in (TorchLoader, DataLoader):
        set_random_states(START)
        loader = loader_of(KINDS[kind], {}, library)
        outcomes.append([])
        for epoch in range(2):
            set_epoch(loader, epoch)
            for batch in loader:
                outcomes[-1].append((plain(batch), plain_random_states()))
            outcomes[-1].append(plain_random_states())
    assert outcomes[0] == outcomes[1]


class Pinned:
    def pin_memory(self) -> str:
        return "pinned"


def test_a_batch_with_states_is_pinned() -> None:
    """By torch's function, as its thread for that does it."""
    stated = pin_memory(BatchWithStates([Pinned()], b"states", None), None)
    assert (stated.batch, stated.states, stated.draws) == (["pinned"], b"states", None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_the_borders_of_epochs(kind: str) -> None:
    run = run_of(kind, "plain")
    epoch = (len(run.places) - 1) // 3
    assert len(run.batches) == 3 * (epoch - 1)
    for place in (0, 1, epoch - 1, epoch, epoch + 1, len(run.places) - 1):
        run.check(place)


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        ("torch", False),
        ("stateful", False),
        ("noisy", False),
        ("stateful stream", True),
        ("begun stream", False),
        ("walking stream", False),
        ("lazy stream", True),
    ],
)
def test_worker_processes(kind: str, persistent: bool) -> None:
    run = Run(KINDS[kind], {"num_workers": 2, "persistent_workers": persistent}, 2)
    last = len(run.places) - 1
    # of a persistent worker, its random state between two epochs is not known
    for place in (2, last // 2 - 1, last - 3 if persistent else last // 2 + 1):
        run.check(place)


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise MemoryError("no shared memory")

    monkeypatch.setattr(_C, "Arena", none)
    run = Run(STREAMS["begun stream"], {"num_workers": 1, "snapshot_every_n_steps": 1}, 1)
    assert run.places[4][2]["_workers"][0]["states"]["object"] == {"at": 12}
    run.check(4)


@pytest.mark.parametrize("kind", ["random", "torch", "stateful", "arrays, torch"])
def test_another_number_of_workers(kind: str) -> None:
    """The order is the main process's."""
    run = run_of(kind, "plain")
    run.check(4, num_workers=2, worker_method="thread")
    run.check(4, num_workers=1, worker_method="thread", device="cpu")
    run_of(kind, "threads").check(4, num_workers=0, worker_method="process")


class Slow(Rows):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02 if index % 6 == 0 else 0)
        return super().__getitem__(index)


@pytest.mark.parametrize("sampler", [lambda: Shuffled("torch"), Stateful, lambda: None])
def test_out_of_order(sampler: Any) -> None:
    """Nothing is lost and nothing comes twice, also where that is resumed again."""
    options = {"batch_size": 1, "num_workers": 2, "worker_method": "thread", "in_order": False}
    torch.default_generator.manual_seed(1)
    loader = DataLoader(Slow(), sampler=sampler(), **options)
    batches, states = [], []
    for batch in loader:
        batches.append(plain(batch))
        states.append(saved(loader.state_dict()))
    assert any("_beyond" in state for state in states)
    first = next(i for i, state in enumerate(states) if "_beyond" in state)
    got: list[Any] = []
    state = states[first]
    changes: tuple[Any, ...] = ({}, {"in_order": True}, {"num_workers": 0}, {})
    for change, count in zip(changes, (2, 2, 2, ROWS), strict=True):
        if change.get("num_workers") == 0:
            change = {**change, "worker_method": "process", "in_order": True}
        other = DataLoader(Slow(), sampler=sampler(), **{**options, **change})
        other.load_state_dict(state)
        got += [plain(batch) for _, batch in zip(range(count), other, strict=False)]
        state = saved(other.state_dict())
    assert sorted(map(str, got)) == sorted(map(str, batches[first + 1 :]))
    with pytest.raises(ValueError, match="same dataset and batch_size, 1, not 4"):
        DataLoader(Slow(), 4, sampler=sampler()).load_state_dict(states[first])


def test_an_interrupted_epoch_reads_no_sample_again() -> None:
    read: list[int] = []

    class Counted(Rows):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return index

    run = run_of("torch", "plain")
    loader = DataLoader(Counted(), 3, sampler=Shuffled("torch"))
    loader.load_state_dict(run.places[5][2])
    assert len(list(loader)) == 3
    assert len(read) == ROWS - 5 * 3


def test_a_sampler_that_keeps_a_state_is_not_asked_again() -> None:
    sampler = Stateful()
    loader = DataLoader(Rows(), 3, sampler=sampler)
    loader.load_state_dict(run_of("stateful", "plain").places[5][2])
    iterator = iter(loader)
    next(iterator)
    assert sampler.loaded
    assert sampler.at == 5 * 3 + 3


def test_states_are_taken_as_rarely_as_asked_for() -> None:
    asked = 0

    class Costly(StatefulStream):
        def state_dict(self) -> Any:
            nonlocal asked
            asked += 1
            return super().state_dict()

    options: dict[str, Any] = {"num_workers": 1, "worker_method": "thread"}
    for every, count in ((1, 8), (4, 3), (0, 1)):  # the first, and once in four
        asked = 0
        assert len(list(DataLoader(Costly(), 3, snapshot_every_n_steps=every, **options))) == 8
        assert asked == count
    for every in (-1, 1.5, True):
        with pytest.raises(ValueError, match="snapshot_every_n_steps must be an int from 0 on"):
            DataLoader(Rows(), snapshot_every_n_steps=every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"num_workers": 1, "worker_method": "thread"}, {"device": "cpu"}]
)
def test_states_that_take_long_take_no_more_than_a_share_of_the_time(
    options: dict[str, Any],
) -> None:
    asked = 0

    class Costly(BegunStream):
        def state_dict(self) -> Any:
            nonlocal asked
            asked += 1
            time.sleep(0.03)
            return super().state_dict()

    loader = DataLoader(Costly(), 1, collate_fn=list, **options)
    assert len(list(loader)) == ROWS
    assert asked < 4
    state, rest = goes_on(lambda: DataLoader(Costly(), 1, collate_fn=list, **options), 8)
    assert state["_workers"][0]["samples"] >= 7
    assert len(rest) == ROWS - 8


class Failing(Stream):
    def state_dict(self) -> Any:
        return lambda: None

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class Other(Stream):
    def state_dict(self, num_samples: int) -> Any:
        raise AssertionError

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class Module(torch.nn.Module, Rows):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "worker_method": "thread"}, {"device": "cpu"}]
)
def test_methods_of_that_name_that_do_not_serve(options: dict[str, Any]) -> None:
    """They harm nobody who does not ask for a state."""
    loader = DataLoader(Failing(), 3, **options)
    assert len(list(loader)) == 8
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"state_dict of a dataset .* cannot be kept: .*lambda"):
        loader.state_dict()
    for dataset in (Other(), Module()):
        loader = DataLoader(dataset, 3, **options)
        next(iter(loader))
        assert "states" not in str(loader.state_dict())


def test_a_state_is_of_its_moment() -> None:
    """Not of what the dataset does with it later."""

    class Aliasing(BegunStream):
        def state_dict(self) -> Any:
            return vars(self)

    for options in ({}, {"num_workers": 1, "worker_method": "thread"}):
        loader = DataLoader(Aliasing(), 3, **options)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        next(iterator)
        assert state["_workers"][0]["states"]["object"]["at"] == 3


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", ["random", "torch", "stream", "arrays, random"])
def test_a_loaded_state_goes_along_with_copies(how: Any, kind: str) -> None:
    run = run_of(kind, "plain")
    loader = loader_of(KINDS[kind], {})
    loader.load_state_dict(run.places[3][2])
    for other in (how(loader), loader):
        assert plain(other.state_dict()) == plain(run.places[3][2])
        assert plain(next(iter(other))) == run.batches[3]


def test_a_loaded_state_is_a_copy() -> None:
    state = copy.deepcopy(run_of("stateful", "plain").places[5][2])
    loader = DataLoader(Rows(), 3, sampler=Stateful())
    loader.load_state_dict(state)
    state["_sampler_iter_state"]["states"]["object"]["at"] = 0
    loader.state_dict()["_sampler_iter_state"].clear()
    assert plain(next(iter(loader))) == run_of("stateful", "plain").batches[5]


def test_states_are_small_and_some_are_json() -> None:
    for options in ({}, {"num_workers": 1, "worker_method": "thread"}):
        for more in ({}, {"shuffle": True}, {"sampler": Epochs()}, {"sampler": list(range(9))}):
            loader = DataLoader(Rows(), 3, **options, **more)
            next(iter(loader))
            state = loader.state_dict()
            assert len(pickle.dumps(state)) < 500
            assert json.loads(json.dumps(state)) == state
        for make in (STREAMS["stream"], MAPS["arrays, distributed"], MAPS["arrays, keyed"]):
            loader = loader_of(make, dict(options))
            next(iter(loader))
            assert len(pickle.dumps(loader.state_dict())) < 500


class Opened(IterableDataset[int]):
    closed = 0

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            self.closed += 1


def test_an_iterator_that_is_dropped_closes_what_it_reads() -> None:
    for library in (TorchLoader, DataLoader):
        data = Opened()
        loader = library(data, 2)
        for _ in loader:
            break
        gc.collect()
        assert data.closed == 1
    assert loader.state_dict()["_workers"] == [{"samples": 2}]


def test_where_the_sampler_ends_too_early() -> None:
    loader = DataLoader(Rows(), 3, sampler=Lazy())
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    short = Lazy()
    short.__class__ = type("Lazy", (Lazy,), {"__iter__": lambda self: iter([1, 2])})
    other = DataLoader(Rows(), 3, sampler=short)
    other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Lazy ended within the first 6 items"):
        next(iter(other))


def place(kind: str, options: str = "plain") -> Any:
    return copy.deepcopy(run_of(kind, options).places[2][2])


def test_states_of_other_loaders() -> None:
    threads: dict[str, Any] = {"worker_method": "thread"}
    few = arrays(), {"sampler": RandomSampler(arrays(), num_samples=3)}
    cases: list[tuple[Any, Any, str]] = [
        (place("stream"), rows(), "is of an iterable dataset, the loader has a map-style"),
        (place("random"), (Stream(), {}), "is of a map-style dataset, the loader has an iterable"),
        (
            place("stream", "threads"),
            (Stream(), {"num_workers": 1, **threads}),
            "num_workers=2, .*num_workers=1",
        ),
        (place("stream"), (Stream(), {"num_workers": 1}), "num_workers=0, .*num_workers=1"),
        (place("stateful stream"), (Stream(), {}), "a Stream has no load_state_dict"),
        (place("noisy"), rows(shuffle=True), "a Rows has no load_state_dict"),
        (place("noisy"), (Noisy(), {"shuffle": True, "num_workers": 1}), "num_workers=0, "),
        (place("stateful"), rows(sampler=Lazy()), "of a Stateful, the loader has a Lazy"),
        (place("torch"), rows(sampler=list(range(ROWS))), "of a Shuffled, the loader has a list"),
        (place("list"), rows(sampler=[1, 2]), "a list of length 15, the loader's has 2"),
        (place("random"), ([1, 2], {"shuffle": True}), "samples of 23, and the loader's is 2"),
        (place("random"), rows(), "of a RandomSampler, the loader has a SequentialSampler"),
        (place("arrays, random"), few, "num_samples"),
        (
            place("keyed"),
            rows(sampler=KeyedSampler(Rows(), seed=5)),
            "seed 4, and the loader's is 5",
        ),
        (place("replacement, own"), rows(sampler=RandomSampler(Rows(), True)), "known ahead"),
        (
            place("random")
            | {"_sampler_iter_state": {"sampler": "RandomSampler", "samples_yielded": 2}},
            rows(shuffle=True),
            "of a number of samples of None",
        ),
        (
            place("distributed")
            | {
                "_sampler_iter_state": {
                    k: v
                    for k, v in place("distributed")["_sampler_iter_state"].items()
                    if k != "epoch"
                }
            },
            MAPS["distributed"](),
            "it has no 'epoch'",
        ),
    ]
    for state, (dataset, options), message in cases:
        loader = DataLoader(dataset, 3, **options)
        before = plain(loader.state_dict())
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)
        assert plain(loader.state_dict()) == before
    walking = DataLoader(Stream(), 3)
    walking.load_state_dict(place("walking stream"))
    with pytest.raises(ValueError, match="has one for a generator, which has no load_state_dict"):
        iter(walking)


def test_another_batch_size_where_samples_are_counted() -> None:
    for kind in ("torch", "stream", "begun stream"):
        run = run_of(kind, "plain")
        dataset, options = KINDS[kind]()
        loader = DataLoader(dataset, 5, collate_fn=list, **options)
        loader.load_state_dict(run.places[4][2])
        sizes = [len(batch) for batch in loader]
        assert sizes == [5, 5, 1]


def test_a_data_pipe_says_that_it_cannot() -> None:
    pipe = IterableWrapper(range(5))
    loader = DataLoader(pipe, 2)
    assert "place cannot be kept" in loader.explain()
    assert len(list(loader)) == 3
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(NotImplementedError, match="make it an IterableDataset"):
            call()


class Unsized(Rows):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (Unsized(), {}, "is asked again"),
        (TensorDataset(torch.ones(3)), {}, "has the place in an order that can be known"),
        (Rows(), {"sampler": Lazy()}, "the Lazy is asked again for the indices before"),
        (Rows(), {"sampler": Stateful()}, "has the Stateful's own"),
        (Noisy(), {}, "can be known, and the dataset's own, of each worker"),
        (Noisy(), {"num_workers": 1, "worker_method": "thread"}, "which threads share"),
        (Stream(), {}, "samples are read again and dropped, unless"),
        (StatefulStream(), {"num_workers": 1}, "has the dataset's own, of each worker"),
    ],
)
def test_explain(dataset: Any, options: dict[str, Any], text: str) -> None:
    assert text in DataLoader(dataset, **options).explain()


def test_a_finished_iterator_of_its_own() -> None:
    """The state of an iterator is not loaded into the next epoch's."""
    loader = DataLoader(WalkingStream(), 3)
    assert len(list(loader)) == 8
    other = DataLoader(WalkingStream(), 3)
    other.load_state_dict(saved(loader.state_dict()))
    assert len(list(other)) == len(list(other)) == 8
    assert isinstance(iter(WalkingStream()), Walk)


class Nested(Rows):
    """Reads a stream of its own in a worker."""

    def __getitem__(self, index: int) -> Any:
        loader = DataLoader(Stream(), 5)
        next(iter(loader))
        again = DataLoader(Stream(), 5)
        again.load_state_dict(loader.state_dict())
        return next(iter(again))


def test_a_loader_in_a_worker() -> None:
    options: dict[str, Any] = {"num_workers": 1, "worker_method": "thread"}
    loader = DataLoader(Nested(), 1, sampler=[0], collate_fn=list, **options)
    assert next(iter(loader))[0][1].tolist() == [5, 6, 7, 8, 9]


class Sized(Walk):
    """An iterator that says how much is left, at first nothing."""

    def __len__(self) -> int:
        return 0


def test_an_iterator_with_a_length() -> None:
    sampler = Walking()
    sampler.__class__ = type("Sizing", (Walking,), {"__iter__": lambda self: Sized(0, ROWS)})
    assert len(list(DataLoader(Rows(), 3, sampler=sampler))) == 8


def test_the_generator_of_a_batch_samplers_sampler() -> None:
    """And its epoch: what a batch sampler asks is looked at, too."""

    class Grouped(BatchSampler):
        pass

    def make() -> Any:
        sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(3))
        return rows(batch_sampler=Grouped(sampler, 4, False))

    run = Run(make, {}, 3)
    for place in (2, 7, 10):
        run.check(place)
    loader = DataLoader(Rows(), batch_sampler=Grouped(Epochs(), 4, False))
    loader.batch_sampler.sampler.set_epoch(5)
    next(iter(loader))
    other = DataLoader(Rows(), batch_sampler=Grouped(Epochs(), 4, False))
    other.load_state_dict(loader.state_dict())
    assert other.batch_sampler.sampler.epoch == 5


@pytest.mark.parametrize("sampler", [RandomSampler, SubsetRandomSampler])
def test_the_global_generator_as_a_samplers_own(sampler: Any) -> None:
    """It goes on from where the script has it, not from where the epoch began."""

    def make() -> Any:
        return rows(sampler=sampler(range(ROWS), generator=torch.default_generator))

    run = Run(make, {}, 2)
    run.check(3)
    other = loader_of(make, {})
    other.load_state_dict(run.places[1][2])
    before = torch.get_rng_state()
    next(iter(other))
    assert torch.equal(torch.get_rng_state(), before)


class Bad(Rows):
    def __getitem__(self, index: int) -> Any:
        if index in (7, 12, 13):
            raise KeyError(index)
        return index


@pytest.mark.parametrize("options", ["plain", "ahead on a device", "threads"])
def test_a_batch_that_cannot_be_read_counts(options: str) -> None:
    states: list[Any] = []
    loader = DataLoader(Bad(), 3, **OPTIONS[options])
    want = without_texts(outcomes(loader, lambda: states.append(loader.state_dict())))
    assert [i for i, batch in enumerate(want) if batch is KeyError] == [2, 4]
    for place, state in enumerate(states):
        other = DataLoader(Bad(), 3, **OPTIONS[options])
        other.load_state_dict(state)
        assert without_texts(outcomes(other)) == want[place + 1 :]


def test_another_bit_generator_of_numpy() -> None:
    if not hasattr(numpy.random, "set_bit_generator"):
        pytest.skip("this numpy has one only")
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        loader, other = (loader_of(MAPS["torch"], {}) for _ in range(2))
        iterator = iter(loader)
        next(iterator)
        other.load_state_dict(saved(loader.state_dict()))
        assert [plain(batch) for batch in other] == [plain(batch) for batch in iterator]
    finally:
        numpy.random.set_bit_generator(before)
