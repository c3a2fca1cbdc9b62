"""Sharded models, and plain tensors that an optimizer must treat in the same way."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def net(seed: int = 3) -> nn.Sequential:
    """Rows that 2 ranks or 4 cannot share evenly: 5, 3, and 1, of which most ranks have none."""
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    return nn.Sequential(*layers)


def fully_sharded(seed: int = 3, **options: Any) -> nn.Sequential:
    """The first layer is gathered by itself, and the others together."""
    model = net(seed)
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def backward(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> None:
    source = torch.Generator().manual_seed(100 * rank + step)
    loss = model(torch.randn(4, 6, generator=source)).square().mean() * factor
    loss.backward()


def local(tensor: Any) -> Tensor:
    """This rank's part, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def locals_of(tensors: Iterable[Any]) -> list[Tensor]:
    return [local(tensor).detach().clone() for tensor in tensors]


@torch.no_grad()
def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def check_close(one: Any, other: Any, what: str = "") -> None:
    """Each rank compares its parts where both are divided alike: no rank waits for another."""
    alike = getattr(one, "placements", None) == getattr(other, "placements", None)
    parts = [(local if alike else whole)(some).detach() for some in (one, other)]
    torch.testing.assert_close(*parts, rtol=1e-4, atol=1e-5, msg=lambda said: what + said)


class Twins:
    """Plain parameters with the values of local shards, under an optimizer of the same class."""

    def __init__(self, params: Iterable[Tensor], cls: Any, **options: Any) -> None:
        self.params = list(params)
        self.plain = [nn.Parameter(part) for part in locals_of(self.params)]
        self.optimizer = cls(self.plain, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients over, and step."""
        for param, plain in zip(self.params, self.plain, strict=True):
            plain.grad = None
            if param.grad is not None:
                grad: Any = param.grad
                if isinstance(grad, DTensor) and isinstance(param, DTensor):
                    grad = grad.redistribute(placements=param.placements)
                plain.grad = local(grad).clone()
        self.optimizer.step()

    def check(self, optimizer: Any) -> None:
        """Parameters and states of the sharded optimizer have the same bits."""
        for param, plain in zip(self.params, self.plain, strict=True):
            assert torch.equal(locals_of([param])[0], plain), (param, plain)
            mine, theirs = optimizer.state.get(param, {}), self.optimizer.state.get(plain, {})
            assert list(mine) == list(theirs)
            for key, value in mine.items():
                if key not in ("step", "mu_product", "eta", "mu"):  # which all ranks have
                    assert isinstance(value, DTensor) is isinstance(param, DTensor)
                assert torch.equal(local(value), theirs[key]), key
