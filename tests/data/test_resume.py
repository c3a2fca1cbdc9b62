"""An epoch that is taken up again gives the rest of its batches, and the epochs after it."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from faststep.data import DataLoader, KeyedSampler

from .resumable import KNOWN, MAPS, ROWS, Run, arrays, goes_on, loader_of
from .torch_and_ours import plain, saved

BATCH, EPOCHS = 3, 3
WORKERS: dict[str, Any] = {"num_workers": 2}
PERSISTENT = WORKERS | {"persistent_workers": True}
PLACES: list[dict[str, Any]] = [
    *(
        {**options, "drop_last": drop}
        for options in ({}, WORKERS, PERSISTENT)
        for drop in (False, True)
    ),
    *({"device": "cpu", "prefetch_to_device": ahead} for ahead in (1, 3)),
]


def make(order: str, **options: Any) -> DataLoader[Any]:
    return loader_of(MAPS[f"arrays, {order}"], {"batch_size": BATCH, **options})


@pytest.mark.parametrize("order", KNOWN)
@pytest.mark.parametrize("options", PLACES, ids=str)
def test_every_place(order: str, options: dict[str, Any]) -> None:
    run = Run(MAPS[f"arrays, {order}"], options, EPOCHS)
    batches = len(run.batches) // EPOCHS
    assert batches > 1
    states = [state for _, _, state, _ in run.places]
    yielded = [0, *[*range(1, batches + 1), batches] * EPOCHS]
    assert [state["_num_yielded"] for state in states] == yielded
    finished = [True, *[*[False] * batches, True] * EPOCHS]
    assert [state["_iterator_finished"] for state in states] == finished
    for place in range(len(run.places)):
        run.check(place)


@pytest.mark.parametrize("order", KNOWN)
@pytest.mark.parametrize("persistent", [False, True])
def test_before_the_first_batch_of_an_iterator(order: str, persistent: bool) -> None:
    options = {"num_workers": int(persistent), "persistent_workers": persistent}
    goes_on(lambda: make(order, **options), 0, epochs=2)


def test_what_was_delivered_counts() -> None:
    loader = make("sequential", num_workers=2, prefetch_factor=3)
    iterator = iter(loader)
    assert loader.state_dict()["_num_yielded"] == 0
    next(iterator)
    assert loader.state_dict()["_num_yielded"] == 1
    del iterator
    assert loader.state_dict()["_sampler_iter_yielded"] == 1


def test_another_batch_size() -> None:
    loader = make("random")
    iterator = iter(loader)
    had = [next(iterator)[0] for _ in range(3)]
    other = DataLoader(arrays(), 8, shuffle=True)
    other.load_state_dict(loader.state_dict())
    rest = [batch for (batch,) in other]
    assert len(rest[0]) == 8
    assert sorted(torch.cat(had + rest).tolist()) == list(range(ROWS))


def on_all_ranks(
    ranks: int, shared: Any, rows: int, state: Any, batches: int | None = None
) -> tuple[list[int], Any]:
    """What all ranks deliver, and the state of the last one after so many batches of each."""
    seen: list[int] = []
    data = TensorDataset(torch.arange(rows))
    for rank in range(ranks):
        loader = DataLoader(data, 4, sampler=shared(data, num_replicas=ranks, rank=rank))
        if state is not None:
            loader.load_state_dict(state)
        for (batch,) in itertools.islice(loader, batches):
            seen += batch.tolist()
    return seen, saved(loader.state_dict())


@pytest.mark.parametrize("ranks", [(1, 3, 2), (3, 1, 5), (2, 4, 1), (4, 2, 3)])
@pytest.mark.parametrize("shared", [KeyedSampler, DistributedSampler])
def test_another_number_of_ranks(shared: Any, ranks: tuple[int, int, int]) -> None:
    """All ranks together go on where all ranks together were."""
    first, state = on_all_ranks(ranks[0], shared, 121, None, batches=3)
    assert len(set(first)) == 12 * ranks[0]
    second, state = on_all_ranks(ranks[1], shared, 121, state, batches=2)
    assert len(set(first + second)) == 12 * ranks[0] + 8 * ranks[1]
    rest, _ = on_all_ranks(ranks[2], shared, 121, state)
    assert set(first + second + rest) == set(range(121))
    more = len(first + second + rest) - 121  # so that all have the same number
    assert more == -(121 - len(first + second)) % ranks[2]


@pytest.mark.parametrize("key", ["_snapshot", "fetcher_state"])
@pytest.mark.parametrize("rest", ["", "whole"])
def test_a_state_of_torchdata_is_named(key: str, rest: str) -> None:
    loader = make("random")
    state = {**(loader.state_dict() if rest else {}), key: {}, "_iterator_finished": False}
    with pytest.raises(ValueError, match=f"'{key}', is of torchdata's StatefulDataLoader"):
        loader.load_state_dict(state)
    assert loader._faststep.resume is None


@pytest.mark.parametrize("order", ["distributed", "keyed", "epochs"])
def test_another_epoch_than_the_states_is_an_error(order: str) -> None:
    loader = make(order)
    loader.sampler.set_epoch(2)
    next(iter(loader))
    other = make(order)
    other.load_state_dict(loader.state_dict())
    assert other.sampler.epoch == 2
    other.sampler.set_epoch(3)
    with pytest.raises(ValueError, match="in the middle of epoch 2, but the sampler was set to"):
        next(iter(other))


def test_a_state_fits_another_path() -> None:
    """What was saved on arrays goes on where the dataset cannot be gathered any more."""
    loader = make("random")
    iterator = iter(loader)
    next(iterator)
    other = make("random", collate_fn=list)
    other.load_state_dict(saved(loader.state_dict()))
    assert (loader.path, other.path) == ("arrays", "torch")
    rest = [[row[0].item() for row in batch] for batch in other]
    assert rest == [batch[0].tolist() for batch in iterator]


class Unready(SequentialSampler):
    ready = False

    def __iter__(self) -> Iterator[int]:
        if not self.ready:
            raise OSError("not yet")
        return super().__iter__()


def test_a_loaded_state_is_not_lost_if_no_iterator_can_be_made() -> None:
    data = arrays()
    loader = DataLoader(data, batch_size=None, sampler=Unready(data))
    loader.sampler.ready = True
    next(iter(loader))
    state = loader.state_dict()
    loader.sampler.ready = False
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="not yet"):
        iter(loader)
    loader.sampler.ready = True
    assert next(iter(loader))[0].item() == 1


def test_subsets_and_persistent_workers() -> None:
    data = Subset(arrays(), range(1, ROWS))
    loaders = [DataLoader(data, BATCH, True, **PERSISTENT) for _ in range(2)]
    state, want = goes_on(loaders.pop, 1)
    other = DataLoader(data, BATCH, True, **PERSISTENT)
    for _ in range(2):
        other.load_state_dict(state)
        assert [plain(batch) for batch in other] == want
        assert len(list(other)) == 8
    assert BatchSampler is type(other.batch_sampler)
