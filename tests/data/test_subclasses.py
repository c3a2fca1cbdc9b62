"""Subclasses in users' scripts keep their own attributes, methods and iterators."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data

import faststep.data
from faststep.data import DataLoader

from .test_batches import table
from .torch_and_ours import plain

NEW = [name for name in vars(DataLoader) if not name.startswith("__")]
OPTIONS = ["device", "prefetch_to_device", "transforms", "worker_method"]
OPTIONS += ["snapshot_every_n_steps", "skip_errors"]
USUAL = ["_device", "_epoch", "_workers", "_slots", "_progress", "_resume", "_state", "_transforms"]


NUMBERS: Any = range(7)  # which torch loads


@pytest.mark.parametrize("name", [n for n in (*NEW, *OPTIONS, *USUAL) if n != "_get_iterator"])
@pytest.mark.parametrize("dataset", [table(9), NUMBERS], ids=["arrays", "torch"])
def test_attributes_of_any_name(name: str, dataset: Any) -> None:
    class Own(DataLoader[Any]):
        def __init__(self, late: bool) -> None:
            if not late:
                setattr(self, name, "mine")
            super().__init__(dataset, 4)
            if late:
                setattr(self, name, "mine")

    for late in (True, False):
        loader = Own(late)
        for other in (loader, copy.copy(loader), copy.deepcopy(loader)):
            assert getattr(other, name) == "mine"
            got = plain(list(DataLoader.__iter__(other)))
            assert got == plain(list(torch.utils.data.DataLoader(dataset, 4)))


def test_the_class_tells_about_its_attributes() -> None:
    assert '"arrays": C threads gather them' in (DataLoader.path.__doc__ or "")


def test_a_subclass_that_transforms_by_itself() -> None:
    """Not twice."""
    results = []
    for library in (torch.utils.data, faststep.data):

        class Transforming(library.DataLoader):  # type: ignore[misc, name-defined]
            def __init__(self, dataset: Any, transforms: Any) -> None:
                super().__init__(dataset, 4)
                self.transforms = transforms

            def __iter__(self) -> Iterator[Any]:
                for batch in super().__iter__():
                    yield self.transforms(batch)

        results.append(list(Transforming(NUMBERS, lambda batch: (batch * 2).tolist())))
    assert results[0] == results[1]


def test_what_the_constructor_got_is_shown_and_stays() -> None:
    """As attributes, from which frameworks make another loader with another sampler."""
    loader = DataLoader(table(9), 4, device="cpu", transforms=len, prefetch_to_device=1)
    shown = {name: vars(loader)[name] for name in OPTIONS}
    assert shown == {
        "device": torch.device("cpu"),
        "prefetch_to_device": 1,
        "transforms": len,
        "worker_method": "process",
        "snapshot_every_n_steps": None,
        "skip_errors": False,
    }
    for other in (DataLoader(table(9), 4, **shown), pickle.loads(pickle.dumps(loader))):
        assert list(other) == [2, 2, 2]
        with pytest.raises(ValueError, match="transforms of a DataLoader cannot be changed"):
            other.transforms = None
    plain_loader = DataLoader(table(9), 4)
    plain_loader.device = "anything"  # of a script that does not know it
    assert len(list(plain_loader)) == 3


class Countdown:
    def __init__(self) -> None:
        self._left = 3

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._left


def test_an_iterator_of_its_own() -> None:
    class Other(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return Countdown()

    loader = Other(table(9), 4)
    assert list(loader) == [2, 1, 0]
    assert loader.stats() is None
    with pytest.raises(NotImplementedError, match="the place of a Countdown cannot be kept"):
        loader.state_dict()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_of_another_one_asks_for(persistent: bool) -> None:
    """_get_iterator is what such loaders call to begin anew: it has transforms too."""

    class Endless(DataLoader[Any]):
        def reset(self) -> None:
            self.newest = self._get_iterator()

    workers = {"num_workers": 1, "persistent_workers": True} if persistent else {}
    loader = Endless(table(9), 4, transforms=lambda batch: batch[1].tolist(), **workers)
    loader.reset()
    assert list(loader.newest) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    first = iter(loader)
    assert (iter(loader) is first) is persistent


def repeating(library: Any) -> Any:
    """As of timm and ultralytics: one iterator for all epochs, over a sampler without an end."""

    class Repeat:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from iter(self.sampler)

    class Repeating(library.DataLoader):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return Repeating


@pytest.mark.parametrize("dataset", [table(9), NUMBERS], ids=["arrays", "torch"])
def test_loaders_that_repeat_themselves(dataset: Any) -> None:
    epochs = []
    for library in (torch.utils.data, faststep.data):
        torch.default_generator.manual_seed(3)
        loader = repeating(library)(dataset, 4, shuffle=True)
        epochs.append([plain(list(loader)) for _ in range(3)])
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("part", ["_index_sampler", "_auto_collation"])
def test_a_subclass_that_asks_in_another_way(part: str) -> None:
    """As torch's own loader it follows these properties, which a script may have replaced."""
    results = []
    for library in (torch.utils.data, faststep.data):

        class Asking(library.DataLoader):  # type: ignore[misc, name-defined]
            pass

        setattr(Asking, part, [[3, 1], [2]] if part == "_index_sampler" else False)
        results.append(plain([*Asking(table(9), 4)]))
    assert results[0] == results[1]


@pytest.mark.parametrize("subset", [False, True])
def test_a_dataset_whose_object_has_a_method_for_batches(subset: bool) -> None:
    """torch asks the object, not its class."""
    dataset: Any = torch.utils.data.Subset(table(9), range(5)) if subset else table(9)
    dataset.__getitems__ = lambda indices: [torch.tensor(-index) for index in indices]
    assert plain([*DataLoader(dataset, 4)]) == plain([*torch.utils.data.DataLoader(dataset, 4)])
