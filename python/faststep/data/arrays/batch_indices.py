"""Indices of batches, in the form in which threads take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..order.orders import Order, Run

__all__ = ["NO_RUN", "RunOfBatches", "is_submittable", "run_of_batches"]

BATCHES_AT_ONCE = 64  # whose indices are asked of an order


class RunOfBatches(NamedTuple):
    """The indices of consecutive batches of a known order."""

    first: int  # batch
    run: Run
    submits: bool  # whether they can be handed to the threads


NO_RUN = RunOfBatches(0, ((), 0, 0), False)


def run_of_batches(order: Order, first: int) -> RunOfBatches:
    """The indices of some batches from number `first` on."""
    run = order.run(first, 1 if order.in_lists else BATCHES_AT_ONCE)  # a list is complete
    return RunOfBatches(first, run, is_submittable(run[0]))


def is_submittable(indices: object) -> bool:
    """True if a batch of indices can be handed to the threads; a tensor must be packed int64."""
    if type(indices) is not torch.Tensor:
        return type(indices) in (list, tuple)
    return (
        indices.dtype == torch.int64
        and indices.dim() == 1
        and indices.device.type == "cpu"
        and indices.is_contiguous()
        and not indices.is_neg()
    )
