"""accumulate and release_gradients on sharded parameters: right, or an error that names one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import faststep
import faststep.optim

from .common import backward, fully_sharded, jobs_of, whole

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")

MICRO = 3
LIMIT = 0.2


def windows(rank: int, world: int) -> None:
    """A window without model= gives the mean of gradients that FSDP2 has reduced each time."""
    for clip in ("", "inside", "window", "function"):
        for cls in (faststep.optim.AdamW, torch.optim.AdamW):
            if clip == "inside" and cls is torch.optim.AdamW:
                continue
            model, other = fully_sharded(), fully_sharded()
            inside = {"max_grad_norm": LIMIT} if clip == "inside" else {}
            optimizer: Any = cls(model.parameters(), lr=0.1, **inside)
            reference = torch.optim.AdamW(other.parameters(), lr=0.1)
            accum = faststep.accumulate(optimizer, MICRO)
            for step in range(2 * MICRO):
                with accum:
                    backward(model, rank, step, 2.0)
                backward(other, rank, step, 2.0 / MICRO)
                if not accum.ready:
                    continue
                if clip == "window":
                    accum.clip_grad_norm_(LIMIT)
                elif clip == "function":
                    faststep.clip_grad_norm_(model.parameters(), LIMIT)
                if clip:
                    torch.nn.utils.clip_grad_norm_(other.parameters(), LIMIT)
                for one in (optimizer, reference):
                    one.step()
                    one.zero_grad()
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(
                    whole(mine), whole(theirs), rtol=1e-3, atol=1e-5, msg=f"{clip} {cls}"
                )
            accum.remove()


def refused(rank: int, world: int) -> None:
    model = fully_sharded()
    optimizer = faststep.optim.AdamW(model.named_parameters(), lr=0.1)
    with pytest.raises(TypeError, match="accumulate"):
        faststep.accumulate(optimizer, 2, model=model)
    for in_pairs in (False, True):
        half: Any = nn.Parameter(next(iter(model.parameters())).detach().bfloat16())
        low = faststep.optim.SGD([("half", half)], lr=0.1)
        with pytest.raises(TypeError, match=r"'half'.*DTensor"):
            faststep.accumulate(low, 2, dtype=torch.float32, in_pairs=in_pairs)
    with pytest.raises(TypeError, match=re.escape("'0.weight'")):
        faststep.release_gradients(model, optimizer)
    optimizer.norm_in_backward = True
    optimizer.max_grad_norm = LIMIT
    backward(model, rank, 0)
    with pytest.warns(UserWarning, match="ranks"):
        optimizer.step()
    assert optimizer.norm_fallbacks == {"distributed": 1}
    grads = [param.grad for param in model.parameters()]
    assert all(isinstance(grad, DTensor) for grad in grads)
    norm = torch.cat([whole(grad).flatten() for grad in grads]).norm()
    torch.testing.assert_close(optimizer.last_grad_norm, norm)


SHARDED = jobs_of(2, windows, refused)


@pytest.mark.parametrize("job", [job.name for job in SHARDED])
def test_accumulation(job: str, on_ranks: Callable[[str], list[str]]) -> None:
    for failure in on_ranks(job):
        assert not failure, failure
