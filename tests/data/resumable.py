"""Datasets and samplers of every kind, and whether a loader goes on with them where it was."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from faststep.data import DataLoader, KeyedSampler

from .torch_and_ours import plain, saved, seeded

ROWS = 23


class Rows(Dataset[Any]):
    """Map-style, of a kind that is not gathered from arrays."""

    def __getitem__(self, index: int) -> Any:
        return index, str(index)

    def __len__(self) -> int:
        return ROWS


class Noisy(Rows):
    """With random numbers, whose state it keeps."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1)

    def state_dict(self) -> Any:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: Any) -> None:
        torch.set_rng_state(state["rng"])


class Shuffled(Sampler[int]):
    """Draws its order at its start, as most samplers do, from one of the global generators."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[int]:
        indices = list(range(ROWS))
        if self.by == "torch":
            indices = torch.randperm(ROWS).tolist()
        elif self.by == "numpy":
            numpy.random.shuffle(indices)
        else:
            random.shuffle(indices)
        yield from indices

    def __len__(self) -> int:
        return ROWS


class Lazy(Sampler[int]):
    """Draws as it goes, and has no length."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, ()))


class Epochs(Sampler[int]):
    """Shuffles by its epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(ROWS), ROWS))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stateful(Sampler[int]):
    """Keeps its own state, which goes on from epoch to epoch; counts what is skipped."""

    def __init__(self) -> None:
        self.random = random.Random(5)
        self.at = 0
        self.loaded = False

    def __iter__(self) -> Iterator[int]:
        while self.at < ROWS:
            self.at += 1
            yield self.random.randrange(ROWS)
        self.at = 0

    def state_dict(self) -> Any:
        version, words, gauss = self.random.getstate()
        return {"at": self.at, "random": [version, list(words), gauss]}

    def load_state_dict(self, state: Any) -> None:
        version, words, gauss = state["random"]
        self.random.setstate((version, tuple(words), gauss))
        self.at = state["at"]
        self.loaded = True


class KeepsState:
    """Its state is what some attributes are."""

    kept: tuple[str, ...] = ("at",)

    def state_dict(self) -> Any:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


class Walk(KeepsState):
    """An iterator that keeps a state."""

    def __init__(self, start: int, stop: int) -> None:
        self.at, self.stop = start, stop

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> int:
        if self.at >= self.stop:
            raise StopIteration
        self.at += 1
        return self.at - 1


class Walking(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return Walk(0, ROWS)


class Pairs(Sampler[list[int]]):
    """A batch sampler, which draws when `iter` is called."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(ROWS), ROWS)
        return iter([order[i : i + 2] for i in range(0, ROWS, 2)])


def share(rows: int = ROWS) -> tuple[int, range]:
    """Of this worker: the first ones have more."""
    info = get_worker_info()
    if info is None:
        return 0, range(rows)
    start = rows // 2 if info.num_workers > 1 and info.id else 0
    stop = rows // 2 + 3 if info.num_workers > 1 and not info.id else rows
    return info.id, range(start, stop)


class Stream(IterableDataset[Any]):
    """Reads."""

    def __iter__(self) -> Iterator[Any]:
        worker, mine = share()
        for row in mine:
            yield worker, row


class ShuffledStream(IterableDataset[Any]):
    """Draws its order at the start, and more for each sample."""

    def __init__(self, lazy: bool) -> None:
        self.lazy = lazy

    def __iter__(self) -> Iterator[Any]:
        worker, mine = share()
        order = random.sample(mine, len(mine))
        for row in order:
            yield worker, row, torch.rand(1) if self.lazy else 0


class StatefulStream(IterableDataset[Any]):
    """As in the README of torchdata: begins anew at its end. Its random numbers go on."""

    at = 0

    def __init__(self) -> None:
        self.generator = seeded()

    def __iter__(self) -> Iterator[Any]:
        worker, mine = share()
        while self.at < len(mine):
            self.at += 1
            yield worker, mine[self.at - 1], torch.rand(1, generator=self.generator)
        self.at = 0

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a dataset is not copied")

    def state_dict(self) -> Any:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class BegunStream(KeepsState, IterableDataset[Any]):
    """Begins anew at its begin, unless a state was loaded."""

    at = 0
    loaded = False

    def __iter__(self) -> Iterator[Any]:
        worker, mine = share()
        self.at = self.at if self.loaded else 0
        self.loaded = False
        while self.at < len(mine):
            self.at += 1
            yield worker, mine[self.at - 1]

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.loaded = True


class OwnIterator(KeepsState, IterableDataset[Any]):
    """Is its own iterator, and made ready by `iter`."""

    def __iter__(self) -> OwnIterator:
        self.worker, self.mine = share()
        self.at = 0
        return self

    def __next__(self) -> Any:
        if self.at == len(self.mine):
            raise StopIteration
        self.at += 1
        return self.worker, self.mine[self.at - 1]


class WalkingStream(IterableDataset[Any]):
    """Its iterators keep a state."""

    def __iter__(self) -> Iterator[Any]:
        _, mine = share()
        return Walk(mine.start, mine.stop)


def rows(**options: Any) -> Any:
    return Rows(), options


# options of a loader, by its dataset; the first are of orders that are known ahead
KNOWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda d: {},
    "random": lambda d: {"shuffle": True},
    "generator": lambda d: {"shuffle": True, "generator": seeded()},
    "own generator": lambda d: {"sampler": RandomSampler(d, generator=seeded())},
    "few": lambda d: {"sampler": RandomSampler(d, num_samples=16, generator=seeded())},
    "replacement": lambda d: {"sampler": RandomSampler(d, True, 31)},
    "passes": lambda d: {"sampler": RandomSampler(d, False, 50)},
    "distributed": lambda d: {"sampler": DistributedSampler(d, 3, 1, seed=3)},
    "short": lambda d: {"sampler": DistributedSampler(range(21), 2, 1, drop_last=True)},  # type: ignore[arg-type]
    "keyed": lambda d: {"sampler": KeyedSampler(d, seed=4)},
    "keyed, shared": lambda d: {"sampler": KeyedSampler(d, num_replicas=3, rank=2)},
    "subset": lambda d: {"sampler": SubsetRandomSampler(range(3, 20))},
    "subset, own": lambda d: {"sampler": SubsetRandomSampler(range(3, 20), seeded())},
    "weighted": lambda d: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 17)},
    "weighted, own": lambda d: {
        "sampler": WeightedRandomSampler([1.0] * 20, 17, False, generator=seeded())
    },
}
ASKED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "replacement, own": lambda d: {"sampler": RandomSampler(d, True, 70, generator=seeded())},
    "several": lambda d: {"sampler": RandomSampler(d, False, 50, generator=seeded())},
    "list": lambda d: {"sampler": list(range(5, 20))},
    "torch": lambda d: {"sampler": Shuffled("torch")},
    "python": lambda d: {"sampler": Shuffled("python")},
    "numpy": lambda d: {"sampler": Shuffled("numpy")},
    "epochs": lambda d: {"sampler": Epochs()},
    "stateful": lambda d: {"sampler": Stateful()},
    "iterator": lambda d: {"sampler": Walking()},
    "batches": lambda d: {"batch_sampler": Pairs()},
    "list of batches": lambda d: {"batch_sampler": [[1], [2, 3], [5, 4]]},
}


def of(make: Callable[[], Any], options: Callable[[Any], dict[str, Any]]) -> Callable[[], Any]:
    def made() -> tuple[Any, dict[str, Any]]:
        dataset = make()
        return dataset, options(dataset)

    return made


def arrays() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS))


MAPS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    **{name: of(Rows, options) for name, options in {**KNOWN, **ASKED}.items()},
    **{f"arrays, {name}": of(arrays, options) for name, options in {**KNOWN, **ASKED}.items()},
    "unbatched": lambda: rows(shuffle=True, batch_size=None),
    "unbatched, asked": lambda: rows(sampler=Shuffled("torch"), batch_size=None),
    "noisy": lambda: (Noisy(), {"shuffle": True}),
}
STREAMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "stream": lambda: (Stream(), {}),
    "stream, unbatched": lambda: (Stream(), {"batch_size": None}),
    "shuffled stream": lambda: (ShuffledStream(False), {}),
    "lazy stream": lambda: (ShuffledStream(True), {}),
    "stateful stream": lambda: (StatefulStream(), {}),
    "stateful stream, unbatched": lambda: (StatefulStream(), {"batch_size": None}),
    "begun stream": lambda: (BegunStream(), {}),
    "own iterator": lambda: (OwnIterator(), {}),
    "walking stream": lambda: (WalkingStream(), {}),
}


def random_states() -> Any:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def plain_random_states() -> Any:
    ours, pythons, numpys = random_states()
    return ours.tolist(), pythons, [numpys[0], numpys[1].tolist(), *numpys[2:]]


def set_random_states(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def loader_of(
    make: Callable[[], Any], options: dict[str, Any], library: Any = DataLoader
) -> DataLoader[Any]:
    dataset, own = make()
    options = {"batch_size": 3, **options, **own}
    if "batch_sampler" in own or options["batch_size"] is None:
        options.pop("drop_last", None)
    if "batch_sampler" in own:
        del options["batch_size"]
    loader: DataLoader[Any] = library(dataset, **options)
    return loader


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    if isinstance(loader.sampler, (DistributedSampler, Epochs)):
        loader.sampler.set_epoch(epoch)


class Run:
    """Some epochs without interruption: all batches, and what was saved between them."""

    def __init__(self, make: Callable[[], Any], options: dict[str, Any], epochs: int) -> None:
        set_random_states(START)
        self.make, self.options, self.epochs = make, options, epochs
        self.batches: list[Any] = []
        self.places: list[Any] = []  # (epoch, batches before, state, random states)
        loader = loader_of(make, options)
        self._save(loader, 0)
        for epoch in range(epochs):
            set_epoch(loader, epoch)
            for batch in loader:
                self.batches.append(plain(batch))
                self._save(loader, epoch)
            self._save(loader, epoch + 1)
        self.after = random_states()

    def _save(self, loader: DataLoader[Any], epoch: int) -> None:
        self.places.append((epoch, len(self.batches), loader.state_dict(), random_states()))

    def check(self, place: int, breaks: Sequence[int] = (), **options: Any) -> None:
        """A new loader that goes on at that place gives the rest.

        Also if it is broken off after so many batches, and others go on from there.
        """
        epoch, number, state, states = self.places[place]
        got: list[Any] = []
        for count in (*breaks, None):
            loader = loader_of(self.make, {**self.options, **options})
            loader.load_state_dict(saved(state))
            set_random_states(states)
            assert plain(loader.state_dict()) == plain(saved(state))
            while epoch < self.epochs:
                set_epoch(loader, epoch)
                iterator = iter(loader)
                batches = [plain(batch) for batch in itertools.islice(iterator, count)]
                got += batches
                if count is not None and len(batches) == count:
                    break
                epoch += 1
                if count is not None:
                    break
            state, states = loader.state_dict(), random_states()
        assert got == self.batches[number:], (place, number, breaks)


def goes_on(make: Callable[[], Any], batches: int, epochs: int = 1) -> tuple[Any, list[Any]]:
    """A loader that gets the state after so many batches gives what is left, of these epochs.

    Returns the state, and what was left; random states are then as when the state was saved.
    """
    loader, other = make(), make()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state, numbers = saved(loader.state_dict()), random_states()
    rest = [plain(batch) for batch in iterator]
    rest += [plain(batch) for _ in range(1, epochs) for batch in loader]
    other.load_state_dict(state)
    set_random_states(numbers)
    assert plain(other.state_dict()) == plain(state)
    assert [plain(batch) for _ in range(epochs) for batch in other] == rest
    set_random_states(numbers)
    return state, rest


set_random_states((seeded().get_state(), random.Random(1).getstate(), numpy.random.get_state()))
START = random_states()
