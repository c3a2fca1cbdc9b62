"""Models inside DistributedDataParallel, with its options, against what it does alone."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import faststep
from faststep import zero
from ranks import assert_alike, on_ranks

from .common import differences


class _Routes(nn.Module):
    """Each rank takes a route of its own in each step; the last one is taken by nobody."""

    def __init__(self, changes: bool, checkpoints: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(12, 12)
        self.routes = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.changes, self.checkpoints = changes, checkpoints

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.first(x).tanh()
        route = self.routes[number % 3 if self.changes else 1]
        if self.checkpoints:
            y: Tensor = checkpoint(route, x, use_reentrant=self.checkpoints == "reentrant")
        else:
            y = route(x)
        return y + route(x * 0.5) if not self.changes else y


CASES: dict[str, tuple[dict[str, bool], str, int]] = {
    "unused": ({"find_unused_parameters": True}, "", 1),
    "unused, accumulated": ({"find_unused_parameters": True}, "", 3),
    "unused, checkpoints": ({"find_unused_parameters": True}, "not reentrant", 1),
    "static": ({"static_graph": True}, "", 1),
    "static, accumulated": ({"static_graph": True}, "", 3),
    "static, views": ({"static_graph": True, "gradient_as_bucket_view": True}, "", 1),
    "static, checkpoints": ({"static_graph": True}, "not reentrant", 1),
    "static, reentrant": ({"static_graph": True}, "reentrant", 1),
}


@on_ranks(2, case=CASES)
def test_the_bits_of_ddp(rank: int, world: int, case: str) -> None:
    options, checkpoints, micro = CASES[case]
    found, values = [], []
    for stage in (0, 1, 2):
        inside = _Routes("find_unused_parameters" in options, checkpoints)
        model = DistributedDataParallel(inside, bucket_cap_mb=1e-3, **options)
        optimizer: Any = faststep.optim.AdamW(
            inside.parameters(), lr=0.01, weight_decay=0.5, max_grad_norm=1.0
        )
        if stage:
            optimizer = zero.shard(model, optimizer, stage=stage, bucket_mb=1e-3)  # type: ignore[arg-type]
        losses = []
        for step in range(5):
            for number in range(micro):
                made = torch.Generator().manual_seed(100 * step + 10 * number + rank)
                x = torch.randn(4, 12, generator=made)
                quiet = number + 1 < micro and ("static" not in case or step > 0)
                with model.no_sync() if quiet else torch.enable_grad():
                    loss = model(x, rank + step + number).square().mean()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        values.append([p.detach().clone() for p in inside.parameters()])
        if "unused" in case:
            never = _Routes(True, "").routes[3].parameters()
            assert differences(never, inside.routes[3].parameters()) == []
    pairs = [pair for other in values[1:] for pair in zip(values[0], other, strict=True)]
    one, *others = found
    if case == "static, accumulated":  # DDP reduces the sums of the first window's passes
        assert [one, one] == [pytest.approx(other, rel=1e-6) for other in others]
        assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-6
    else:
        assert [one, one] == others
        assert differences(*zip(*pairs, strict=True)) == []


@on_ranks(2, how=("saved", "copied"))
def test_a_copy_of_the_model_reduces_by_itself(rank: int, world: int, how: str) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=0.1))
    if how == "copied":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    for one in (other, model):
        one(torch.full((1, 3), 1.0 + rank)).sum().backward()
    assert torch.equal(other.module.weight.grad, torch.full((2, 3), 1.5))
    optimizer.step()
    assert_alike(list(model.parameters()))
