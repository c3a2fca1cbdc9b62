"""What the array path does not take is torch's own, and the loader says why and copies nothing."""

from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from faststep.data import ArrayDataset, DataLoader, converted
from faststep.data.arrays.array_iterator import ArrayIterator

from .test_batches import table
from .torch_and_ours import assert_same


class Odd(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return (index,)


def without_tensors() -> TensorDataset:
    """Some versions of torch refuse to make one."""
    dataset = TensorDataset(torch.ones(1))
    dataset.tensors = ()
    return dataset


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dataset": (range(10), {}, "dataset is a range"),
    "in a subset": (Subset([2, 3], [1]), {}, "dataset.dataset is a list"),  # type: ignore[arg-type]
    "subclass": (Odd(torch.ones(3)), {}, "dataset is a Odd"),
    "gradient": (TensorDataset(torch.ones(3, requires_grad=True)), {}, "requires a gradient"),
    "strides": (TensorDataset(torch.ones(5, 3, 4).transpose(1, 2)), {}, "not contiguous"),
    "numpy": (ArrayDataset(np.arange(60).reshape(3, 4, 5)[:, :, ::2]), {}, "not contiguous"),
    "bits": (TensorDataset(torch.zeros(4, 2).byte().view(torch.bits8)), {}, "of the type bits8"),
    "parts of bytes": (TensorDataset(torch.zeros(4, 2).byte().view(torch.int4)), {}, "type int4"),
    "no tensors": (without_tensors(), {"sampler": [0]}, "tensors is empty"),
    "sparse": (TensorDataset(torch.eye(4).to_sparse()), {"collate_fn": list}, "not a dense"),
    "conjugate": (TensorDataset(torch.ones(4, dtype=torch.complex64).conj()), {}, "conjugated"),
    "negated": (TensorDataset(torch._neg_view(torch.arange(4.0))), {}, "negated"),
    "imaginary": (TensorDataset(torch.eye(3, dtype=torch.complex64).conj().imag), {}, "negated"),
    "converted": (
        ArrayDataset(converted(torch._neg_view(torch.arange(4).byte()), torch.float32)),
        {},
        "negated",
    ),
    "different": (ConcatDataset([table(2), TensorDataset(torch.ones(2))]), {}, "structure"),
    "other types": (
        ConcatDataset([ArrayDataset(torch.ones(2)), ArrayDataset(torch.ones(2).int())]),
        {},
        "another shape or type",
    ),
    "indices": (Subset(table(), [True, False]), {}, "plain integers"),
    "collate": (table(), {"collate_fn": len}, "collate_fn is not torch's default"),
    "no batches": (table(), {"batch_size": None}, "batch_size is None"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_torchs(name: str) -> None:
    dataset, options, reason = OTHERS[name]
    loader = DataLoader(dataset, **options)
    assert reason in loader.explain()
    assert_same(lambda: (dataset, dict(options)), path="torch")


def test_batches_of_negated_indices() -> None:
    batches = [torch._neg_view(torch.tensor(rows)) for rows in ([-3, -1], [-2, 0])]
    assert_same(lambda: (table(), {"batch_sampler": batches}), path="arrays")


def test_worker_init_fn_runs_in_workers() -> None:
    loader = DataLoader(table(), num_workers=1, worker_init_fn=print)
    assert "worker_init_fn" in loader.explain()
    assert DataLoader(table(), worker_init_fn=print).path == "arrays"


def test_a_registered_collate_function_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: "mine")
    assert next(iter(DataLoader(table()))) == "mine"
    assert DataLoader(ArrayDataset(torch.ones(3))).path == "arrays"
    monkeypatch.setitem(
        default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: "tensors"
    )
    assert next(iter(DataLoader(ArrayDataset(torch.ones(3))))) == "tensors"


def test_each_field_is_named() -> None:
    data = {"image": torch.zeros(8, 3, 2), "labels": [torch.zeros(8, dtype=torch.int64)]}
    text = DataLoader(ArrayDataset(data)).explain()
    assert "data['image'] (torch.float32, (3, 2)), data['labels'][0] (torch.int64, ())" in text


DATA = TensorDataset(torch.arange(40), torch.arange(40.0))
ORDER = list(range(39, -1, -1))


WRONG: list[Any] = [
    [*ORDER[:-1], 0.5],
    [*ORDER[:-1], torch.tensor(3)],
    [*ORDER[:-1], True],
    [*ORDER[:-1], 1 << 70],
    [None],
    (*range(40), 3.0),
    "12",
    torch.tensor(ORDER, dtype=torch.int32),
    torch.tensor([ORDER]),
    numpy.array(ORDER, dtype=numpy.uint8),
    numpy.array([ORDER]),
]
RIGHT: list[Any] = [
    range(3),
    (3, 2, 1),
    tuple(ORDER),
    [-1, -2],
    [],
    torch.tensor(ORDER),
    numpy.array(ORDER, dtype=numpy.int16),
    numpy.array(ORDER),
]


@pytest.mark.parametrize("indices", [*WRONG, *RIGHT], ids=lambda indices: repr(indices)[-30:])
def test_a_path_is_that_of_the_epoch(indices: Any) -> None:
    loader = DataLoader(Subset(DATA, indices), 4)
    is_right = any(indices is one for one in RIGHT)
    assert loader.path == ("arrays" if is_right else "torch")
    said = (
        "threads gather" if is_right else "dataset.indices are not a list, range, tensor or array"
    )
    assert said in loader.explain()
    assert isinstance(iter(loader), ArrayIterator) == is_right
