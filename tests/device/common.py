"""A GradScaler on a fake device."""

from typing import Any

import torch

import faststep


def scaler_on(device: int | None, **kwargs: Any) -> Any:
    """One of ours whose scale is on a fake device, or on the CPU for None."""
    scaler = faststep.amp.GradScaler("cpu", **kwargs)
    if device is not None:
        scaler._lazy_init_scale_growth_tracker(torch.device("cuda", device))
    else:
        scaler.scale(torch.ones(()))
    return scaler
