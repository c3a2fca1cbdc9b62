"""What the array path does not take is torch's own, and the loader says why and copies nothing."""

from __future__ import annotations

from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Subset,
    TensorDataset,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from faststep.data import ArrayDataset, DataLoader, converted
from faststep.data.arrays import gather_plan

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


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every list of indices that was copied."""
    seen: list[int] = []
    copy = gather_plan._as_int64

    def counted(indices: Any, name: str) -> torch.Tensor:
        seen.append(len(indices))
        return copy(indices, name)

    monkeypatch.setattr(gather_plan, "_as_int64", counted)
    return seen


def test_properties_copy_no_indices(copies: list[int]) -> None:
    nested = Subset(ConcatDataset([Subset(DATA, ORDER), Subset(DATA, ORDER)]), list(range(80)))
    loader = DataLoader(nested, 8)
    for _ in range(3):
        assert loader.path == "arrays"
        assert loader.explain().startswith("threads gather the batches from tensors[0]")
        loader.load_state_dict(loader.state_dict())
    assert copies == []
    assert len(list(loader)) == 10
    assert sorted(copies) == [40, 40, 80]  # once for the epoch
    next(iter(loader))
    assert len(copies) == 6


@pytest.mark.parametrize(
    "indices",
    [
        [*ORDER[:-1], 0.5],
        [*ORDER[:-1], torch.tensor(3)],
        [*ORDER[:-1], True],
        [*ORDER[:-1], 1 << 70],
        [None],
        [*range(gather_plan.PIECE), None],
        [*range(gather_plan.PIECE), 3],
        (*range(gather_plan.PIECE), 3.0),
        "12",
        torch.tensor(ORDER, dtype=torch.int32),
        torch.tensor([ORDER]),
        numpy.array(ORDER, dtype=numpy.uint8),
        numpy.array([ORDER]),
        range(3),
        (3, 2, 1),
        tuple(ORDER),
        [-1, -2],
        [],
        torch.tensor(ORDER),
        numpy.array(ORDER, dtype=numpy.int16),
        numpy.array(ORDER),
    ],
    ids=lambda indices: repr(indices)[-30:],
)
def test_a_path_is_that_of_the_epoch(indices: Any) -> None:
    """What is asked of indices without a copy decides as the copy does."""
    subset = Subset(DATA, indices)
    loader = DataLoader(subset, 4)
    reason = None
    try:
        gather_plan.Plan(subset)
    except gather_plan.NotArrays as why:
        reason = str(why)
    assert loader.path == ("arrays" if reason is None else "torch")
    assert (reason or "threads gather") in loader.explain()
