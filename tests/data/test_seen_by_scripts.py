"""What a script can ask of a loader, its iterators and warnings is what torch's answer."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchsLoader
from torch.utils.data import IterableDataset, TensorDataset, dataloader

from faststep.data import DataLoader
from programs import Programs


class Stream(IterableDataset[int]):
    """Has more samples than it says."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __repr__(self) -> str:
        return "Stream()"


def warned(kind: Any, dataset: Any, **options: Any) -> list[Any]:
    loader = kind(dataset, None, **options)
    len(loader)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        batches = iter(loader)
        next(batches), next(batches)
        for _ in batches:
            pass
    return [(w.category, str(w.message), w.filename, w.lineno) for w in seen]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_longer_than_its_length_warns_of_the_line_that_iterates(workers: int) -> None:
    expected = warned(TorchsLoader, Stream(), num_workers=workers)
    assert len(expected) == 4
    assert expected[0][2] == __file__
    assert warned(DataLoader, Stream(), num_workers=workers) == expected
    with torch.profiler.profile():
        assert warned(DataLoader, Stream(), num_workers=workers) == expected


class Damaged(Stream):
    def __iter__(self) -> Iterator[int]:
        return map(int, "12x")


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"transforms": str}])
def test_the_warning_of_a_skipped_sample_is_of_the_line_that_iterates(options: Any) -> None:
    own = [w for w in warned(DataLoader, Damaged(), skip_errors=True, **options) if "skip" in w[1]]
    assert [w[2] for w in own] == [__file__]


ROWS = TensorDataset(torch.arange(6.0))
KINDS = (
    *(dataloader._BaseDataLoaderIter, dataloader._SingleProcessDataLoaderIter),
    dataloader._MultiProcessingDataLoaderIter,
)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_an_iterator_over_arrays_is_an_instance_of_torchs_classes(options: Any) -> None:
    ours, theirs = (iter(kind(ROWS, 2, **options)) for kind in (DataLoader, TorchsLoader))
    assert [isinstance(ours, kind) for kind in KINDS] == [
        isinstance(theirs, kind) for kind in KINDS
    ]
    assert [batch.tolist() for (batch,) in ours] == [batch.tolist() for (batch,) in theirs]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's
def test_workers_that_a_script_asks_for_late_raise_torchs_error() -> None:
    errors = []
    for kind in (TorchsLoader, DataLoader):
        loader = kind(ROWS, 2)
        loader.num_workers = 1  # prefetch_factor stays None
        with pytest.raises(TypeError) as error:
            iter(loader)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


REPLACED = """
from torch.utils.data import IterableDataset, dataloader
kind, counted = dataloader._BaseDataLoaderIter, []
def counting(torchs):
    def following(self):
        counted.append(1)
        return torchs(self)
    return following
kind.__next__ = counting(kind.__next__)
from faststep.data import DataLoader
class Stream(IterableDataset):
    __len__, __iter__ = lambda self: 4, lambda self: iter(range(4))
loader = DataLoader(Stream(), 2)
print(len(loader), *loader, len(counted))
"""


def test_another_tool_may_have_replaced_torchs_next(programs: Programs) -> None:
    done = programs.run(REPLACED)
    assert (done.stdout, done.returncode) == ("2 tensor([0, 1]) tensor([2, 3]) 3\n", 0), done.stderr
