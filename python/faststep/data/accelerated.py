"""Loaders for Hugging Face accelerate, which wraps a DataLoader in one of its own."""

from __future__ import annotations

import copy
from typing import Any

from .loader import DataLoader
from .options import OPTIONS, Extras

__all__ = ["prepare_loader"]


def prepare_loader(accelerator: Any, loader: DataLoader[object]) -> Any:
    """`accelerator.prepare(loader)`, with a loader of faststep inside instead of torch's.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: a faststep.data.DataLoader, with any of its arguments.

    Returns:
        accelerate's loader. Its batches are those of `loader`, transformed and on their device; on
        several processes each has its part. To go on in an epoch use its `load_state_dict`:
        `accelerator.skip_first_batches` makes a loader of torch's.

    Raises:
        TypeError: `loader` is no DataLoader of faststep, or accelerate gives a loader that none can
            be put into, as for XLA.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare_loader takes a faststep.data.DataLoader, not {loader!r}")
    plain: object = copy.copy(loader)
    vars(plain)["_faststep"] = Extras(**OPTIONS)  # type: ignore[arg-type]
    prepared = accelerator.prepare_data_loader(plain)
    if "base_dataloader" not in vars(prepared):
        raise TypeError(f"accelerate made a {type(prepared).__name__}, which takes no other loader")
    ours = copy.copy(loader)
    vars(ours).update(vars(prepared.base_dataloader))  # its samplers, split among processes
    prepared.base_dataloader = ours
    prepared.dl_state_dict = ours.state_dict()
    prepared._is_accelerate_prepared = True
    return prepared
