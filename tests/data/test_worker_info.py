"""What get_worker_info() returns, in every form that torch has given it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.utils.data._utils import worker

from faststep._torch.data_loader import dataset_of_worker, new_worker_info, set_worker_dataset
from faststep.data import DataLoader
from faststep.data.workers import threads


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


@pytest.mark.parametrize("kind", [worker.WorkerInfo, Closed])
def test_the_dataset_is_replaced(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(worker, "WorkerInfo", kind)
    info = new_worker_info(1, 3, 42, "one")
    monkeypatch.setattr(worker, "_worker_info", info)
    set_worker_dataset("another")
    seen: Any = worker.get_worker_info()
    assert type(seen) is kind
    assert (seen.id, seen.num_workers, seen.seed, seen.dataset) == (1, 3, 42, "another")
    assert info.dataset == "one"
    if kind is Closed:
        with pytest.raises(RuntimeError, match="Cannot assign"):
            seen.dataset = "assigned"


def test_outside_of_a_worker_nothing_is_replaced() -> None:
    set_worker_dataset("another")
    assert worker.get_worker_info() is None


@pytest.mark.parametrize("arguments", [{"dataset": "it"}, {"dataset_holder": ["it"]}])
def test_the_dataset_of_a_worker(arguments: dict[str, Any]) -> None:
    assert dataset_of_worker(arguments) == "it"
    assert arguments in ({"dataset": "it"}, {"dataset_holder": []})


def test_threads_take_the_dataset_as_a_later_torch_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.14 gives a list with the dataset to the function that a worker runs."""
    signature = inspect.signature(worker._worker_loop)
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
