"""What get_worker_info() returns, in every form that torch has given it."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data._utils import worker

from faststep._torch import new_worker_info, set_worker_dataset


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
