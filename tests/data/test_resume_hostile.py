"""States that no loader has made: an error that says what is wrong, and the loader as it was."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy.random
import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from faststep.data import DataLoader, KeyedSampler, transforms

from .resumable import KeepsState
from .shapes import Streamed
from .torch_and_ours import seeded


class Stream(KeepsState, IterableDataset[int]):
    """Keeps a state, and an epoch."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.at < 30:
            self.at += 1
            yield self.at
        self.at = 0


class Drawing(Sampler[int]):
    """Draws from all generators."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        numpy.random.permutation(3)
        random.random()
        yield from torch.randperm(30).tolist()


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(range(30), 3),
    "shuffled": lambda: DataLoader(range(30), 3, shuffle=True),
    "generator": lambda: DataLoader(range(30), 3, shuffle=True, generator=seeded()),
    "weighted": lambda: DataLoader(range(30), 3, sampler=WeightedRandomSampler([1.0] * 30, 30)),
    "distributed": lambda: DataLoader(
        range(30),
        3,
        sampler=DistributedSampler(range(30), 2, 1),  # type: ignore[arg-type]
    ),
    "keyed": lambda: DataLoader(range(30), 3, sampler=KeyedSampler(range(30))),
    "drawing": lambda: DataLoader(range(30), 3, sampler=Drawing()),
    "stream": lambda: DataLoader(Stream(), 3),
    "plain stream": lambda: DataLoader(Streamed(int, 30), 3),
    "workers": lambda: DataLoader(Stream(), 3, num_workers=2, worker_method="thread"),
    "transforms": lambda: DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(30, 3, 4, 4, dtype=torch.uint8)),
        3,
        transforms=transforms.Compose([transforms.RandomHorizontalFlip()]),
    ),
}
WRONG: list[Any] = ["x", -1, 1.5, None, [], {}, True, [None], {"x": 1}, 1 << 70, torch.zeros(3)]


def state_of(kind: str, finished: bool) -> Any:
    torch.manual_seed(0)
    loader = LOADERS[kind]()
    iterator = iter(loader)
    next(iterator), next(iterator)
    if finished:
        list(iterator)
    return loader.state_dict()


def paths(state: Any) -> Iterator[tuple[Any, ...]]:
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        yield (key,)
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in paths(value))


def with_value(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    state = copy.deepcopy(state)
    part = state
    for key in path[:-1]:
        part = part[key]
    if value is KeyError:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return state


def values(batches: Any) -> list[Any]:
    first = [batch[0] if isinstance(batch, list) else batch for batch in batches]
    return [batch.tolist() for batch in first]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_wrong_value_anywhere(kind: str, finished: bool) -> None:
    """It is refused, or it is a state: then an epoch of it comes to its end."""
    whole, refused = state_of(kind, finished), 0
    for path in paths(whole):
        if path[-1] in ("at", "object"):
            continue  # the dataset's own
        for value in [*WRONG, KeyError]:
            state = with_value(whole, path, value)
            loader = LOADERS[kind]()
            before = copy.deepcopy(vars(loader.sampler)) if kind == "distributed" else {}
            try:
                loader.load_state_dict(state)
            except ValueError:
                refused += 1
                assert loader._faststep.resume is None
                if kind == "distributed":
                    assert loader.sampler.epoch == before["epoch"]  # type: ignore[union-attr]
                continue
            with contextlib.suppress(ValueError):  # one of an iterator that takes no state
                assert len(values(loader)) <= 20
    assert refused > 40


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("_num_yielded", "x", r"state\['_num_yielded'\] is 'x', expected an int from 0 on"),
        ("_num_yielded", -1, r"state\['_num_yielded'\] is -1, expected an int from 0 on"),
        ("_iterator_finished", 1, r"state\['_iterator_finished'\] is 1, expected a bool"),
        ("_base_seed", 1 << 64, "expected an int of 64 bits from 0 on"),
        ("_sampler_iter_state", "x", "is 'x', expected a dict or None"),
    ],
)
def test_the_message(key: str, value: Any, message: str) -> None:
    state = state_of("shuffled", False)
    loader = LOADERS["shuffled"]()
    iterator = iter(loader)
    torch.manual_seed(1)
    next(iterator)
    with pytest.raises(ValueError, match=f"not a state of this DataLoader: .*{message}"):
        loader.load_state_dict(state | {key: value})
    assert loader.state_dict()["_num_yielded"] == 1
    assert len(values(iterator)) == 9


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        (
            "in order",
            ("_sampler_iter_state", "samples_yielded"),
            10**9,
            "after 1000000000 samples, and there are 30",
        ),
        ("stream", ("_workers",), KeyError, "does not say where its workers were"),
    ],
)
def test_a_position_that_cannot_be(
    kind: str, path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LOADERS[kind]().load_state_dict(with_value(state_of(kind, False), path, value))


@pytest.mark.parametrize(
    ("place", "words"),
    [*((at, None) for at in (-1, 625, 10**9, 2**70)), (1000, torch.zeros(2000).long())],
)
def test_the_generator_of_numpy(place: int, words: Any) -> None:
    """A place behind its words would end the process."""
    state = state_of("drawing", False)
    drawn = state["_sampler_iter_state"]["draws"]["first"]["numpy"]
    assert drawn[0] == "MT19937"
    assert 0 <= drawn[2] <= 624
    drawn[1], drawn[2] = drawn[1] if words is None else words, place
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(ValueError, match="expected random states"):
        LOADERS["drawing"]().load_state_dict(state)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("state", [None, 3, "x", [], {}, {"_num_yielded": 3}])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(ValueError, match="not a state of this DataLoader: it has no"):
        LOADERS["in order"]().load_state_dict(state)
