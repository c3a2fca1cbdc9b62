"""Compiled models, at stages 1 and 2."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import faststep
from faststep import zero
from ranks import on_ranks

from .common import differences


class _Net(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpoints:
                x = checkpoint(layer, x, use_reentrant=False).tanh()
            else:
                x = layer(x).tanh()
        return x


CASES: dict[str, dict[str, Any]] = {
    "aot_eager": {"backend": "aot_eager"},
    "forward": {"backend": "aot_eager", "gather": "forward"},
    "whole": {"backend": "aot_eager", "passes": "compiled", "stage": 1},
    "checkpoints": {"backend": "aot_eager", "checkpoints": True},
    "wrapped": {"backend": "aot_eager", "wrapped": True},
    "in place": {"backend": "eager", "in place": True},
}


def _losses(rank: int, options: dict[str, Any]) -> tuple[list[float], nn.Module]:
    torch.compiler.reset()
    inside = _Net(options.get("checkpoints", False))
    optimizer: Any = faststep.optim.AdamW(inside.parameters(), lr=0.01, max_grad_norm=0.1)
    called: Any = DistributedDataParallel(inside) if options.get("wrapped") else inside
    backend = options.get("backend")
    compiled = called
    if options.get("in place"):
        inside.compile(backend=backend)
    elif backend:
        compiled = torch.compile(called, backend=backend)
    optimizer = zero.shard(
        compiled if options.get("passes") else called, optimizer, bucket_mb=1e-3,
        stage=options.get("stage", 2), gather=options.get("gather", "step"),
    )  # fmt: skip
    losses = []
    for step in range(4):
        made = torch.Generator().manual_seed(10 * step + rank)
        loss = compiled(torch.randn(4, 16, generator=made)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.wait()
    return losses, inside


@on_ranks(2)
def test_compiled_models_have_the_bits_of_plain_ones(rank: int, world: int) -> None:
    expected, plain = _losses(rank, {})
    said = {}
    for case, options in CASES.items():
        losses, model = _losses(rank, options)
        said[case] = losses == expected, differences(plain.parameters(), model.parameters())
    assert said == dict.fromkeys(CASES, (True, []))
