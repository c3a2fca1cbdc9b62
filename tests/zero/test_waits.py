"""gather="forward": what a forward waits for, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumulate.processes import Job
from faststep import zero

from .common import differences

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]


class _Net(nn.Module):
    """Attention uses the weight of a child that it does not call; the last layer is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)
        )
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.never = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.linear(x, self.embedding.weight)


def _train(rank: int, gather: Any, log: list[Any] | None) -> tuple[nn.Module, list[float], Any]:
    torch.manual_seed(1)
    model = _Net()
    optimizer = zero.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=1 / 1024, gather=gather
    )
    losses = []
    for step in range(5):
        tokens = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(step + 9 * rank))
        if step == 3 and log is not None:
            _record(model, optimizer._engine, log)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, optimizer


def _record(model: nn.Module, engine: Any, log: list[Any]) -> None:
    """Log each wait by the names of its parameters, and each module whose forward begins."""
    for number, pending in engine._under_way.items():
        names = [slot.name for slot in engine.buckets[number].slots]

        def wait(inner: Callable[[], None] = pending.wait, names: list[str] = names) -> None:
            log.append(names)
            inner()

        pending.wait = wait
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: log.append(name))


def _waited(rank: int, world: int) -> dict[str, Any]:
    log: list[Any] = []
    model, losses, optimizer = _train(rank, "forward", log)
    under_way = len(optimizer._engine._under_way)
    saved = model.state_dict()
    left = len(optimizer._engine._under_way)
    other, expected, _ = _train(rank, "step", None)
    return {
        "log": log,
        "losses": losses == expected,
        "differ": differences(saved.values(), other.state_dict().values()),
        "under way": under_way > 3,
        "left": left,
    }


def test_each_module_waits_for_what_it_uses(ranks: Ranks) -> None:
    for said in ranks("waited"):
        log = said.pop("log")
        assert said == {"losses": True, "differ": [], "under way": True, "left": 0}
        begun = [entry for entry in log if isinstance(entry, str)]
        assert begun[:3] == ["", "embedding", "blocks.0"]
        for at, entry in enumerate(log):
            if isinstance(entry, list):
                following = next(one for one in log[at:] if isinstance(one, str))
                users = {name.rsplit(".", 1)[0] for name in entry}
                assert any(user.startswith(following) for user in users), (entry, following)
        waited = {
            name: at for at, entry in enumerate(log) if isinstance(entry, list) for name in entry
        }
        assert waited["attention.out_proj.weight"] < log.index("attention")
        assert waited["attention.in_proj_weight"] > log.index("blocks.2")
        assert waited["blocks.1.0.weight"] > log.index("blocks.0.2")


ZERO_JOBS = [Job("waited", 2, _waited)]
