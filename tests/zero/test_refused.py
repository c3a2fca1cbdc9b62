"""What `shard` refuses before it changes anything, and what ranks have in common after it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import faststep
from faststep import zero
from faststep._torch.dtensor import full_tensor
from ranks import on_ranks

from .common import Given, check_error, differences, grads_for

SHAPES = [(300, 70), (70,), (5, 5)]


@on_ranks(2)
def test_parameters_that_are_sharded_already(rank: int, world: int) -> None:
    """Parameters that are sharded already, of which only some are in the second optimizer."""
    model = Given(SHAPES, [torch.float32])
    first = zero.shard(model, faststep.optim.SGD(model.parameters(), lr=1.0))
    second = torch.optim.SGD([model.p1, model.p2], lr=1.0)
    where = [p.data_ptr() for p in model.parameters()]
    wrapper = nn.parallel.DistributedDataParallel(model)
    for one, stage in ((model, 2), (model, 3), (wrapper, 2)):
        text = "TypeError: shard(): parameter 'p1' is sharded"
        check_error(lambda m=one, s=stage: zero.shard(m, second, stage=s), text)  # type: ignore[misc]
    assert where == [p.data_ptr() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    model(grads_for(model, 1)).backward()
    first.step()
    expected = [b - g for b, g in zip(before, grads_for(model, 1), strict=True)]
    assert differences(expected, model.parameters()) == []
    assert second.state_dict()["param_groups"][0]["lr"] == 1.0
    kept = first if rank else None  # one rank alone still has the first optimizer
    del first
    gc.collect()
    third = torch.optim.SGD(model.parameters(), lr=1.0)
    text = "rank 1 has 'p0' (300, 70) torch.float32 (0.0, sharded)"
    check_error(lambda: zero.shard(model, third), text)
    del kept
    gc.collect()
    zero.shard(model, third)


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3)
        )
        self.scalar = nn.Parameter(torch.ones(1))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.pairs:
            x = second(first(x).tanh())
        return self.head(x) * self.scalar  # type: ignore[no-any-return]


@on_ranks(2)
def test_blocks_of_stage_3(rank: int, world: int) -> None:
    """Blocks that fully_shard refuses, or would take in another order."""
    model = _Blocks()

    def refuse(text: str, *blocks: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        check_error(lambda: zero.shard(model, optimizer, stage=3, blocks=blocks), text)
        assert optimizer.state_dict()["param_groups"], "it was replaced"
        assert not any(isinstance(param, DTensor) for param in model.parameters())

    for block, text in (
        (model.pairs[0], "TypeError: shard(): blocks[1] is a ModuleList, which has no forward"),
        (model, "ValueError: shard(): blocks[1] is the model itself"),
        (model.head, "ValueError: shard(): blocks[1] is there twice"),
        (nn.Linear(1, 1), "ValueError: shard(): blocks[1] is not in the model"),
        ("head", "TypeError: shard(): blocks[1] must be a torch.nn.Module, not str"),
    ):
        refuse(text, model.head, block)
    model.scalar.data = torch.ones(())
    refuse("TypeError: shard(stage=3): parameter 'scalar' is 0-d", model.head)
    model.scalar.data = torch.ones(1)
    model.head[0].weight.data = torch.ones(4, 4, 2)[:, :, 0]
    refuse("TypeError: shard(stage=3): parameter 'head.0.weight' is not contiguous", model.head)
    model.head[0].weight.data = torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = zero.shard(model, optimizer, stage=3)
    model(torch.ones(2, 4)).sum().backward()
    made.step()
    # The six in the lists, the two of the head, and the model.
    assert sum(isinstance(one, FSDPModule) for one in model.modules()) == 9
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    text = "TypeError: shard(): parameter 'head.1.bias' is a DTensor"
    check_error(lambda: zero.shard(model, other), text)
    text = "TypeError: shard(stage=3): parameter 0 of group 0 is sharded already"
    check_error(lambda: zero.shard(model, other, stage=3), text)
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    outer, inner = nested[0], nested[0][0]
    one = torch.optim.SGD(nested.parameters(), lr=0.1)
    zero.shard(nested, one, stage=3, blocks=[outer, inner])
    nested(torch.ones(1, 4)).sum().backward()


class _Buffers(nn.Module):
    def __init__(self, rank: int, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(rank)))
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean += rank
        self.register_buffer("flags", torch.tensor([rank > 0, False]))
        self.register_buffer("hidden", torch.full((size,), rank), persistent=False)
        self.register_buffer("turned", torch.full((2, 3), float(rank)).t())


@on_ranks(2)
def test_buffers_are_those_of_rank_0(rank: int, world: int) -> None:
    """After shard() ranks have what DistributedDataParallel gives them."""
    found: dict[str, Any] = {}
    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "ddp": nn.parallel.DistributedDataParallel,
        "stage 1": lambda m: zero.shard(m, torch.optim.SGD(m.parameters()), stage=1),
        "stage 3": lambda m: zero.shard(m, torch.optim.SGD(m.parameters()), stage=3),
    }
    for kind, made in kinds.items():
        model = _Buffers(rank)
        kept = made(model)
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found[kind] = {name: full_tensor(v).tolist() for name, v in values.items()}
        del kept
    odd = _Buffers(0, 3 + rank)
    text = r"^shard\(\): the ranks differ.*buffer 'hidden' \(4,\)"
    with pytest.raises(RuntimeError, match=text):
        zero.shard(odd, torch.optim.SGD(odd.parameters()))
    dist.broadcast_object_list(of_first := [found["ddp"]])
    assert found["stage 1"] == found["ddp"] == found["stage 3"] == of_first[0]


@on_ranks(2)
def test_a_placeholder_can_always_be_printed(rank: int, world: int) -> None:
    model = Given(SHAPES, [torch.float32])
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(grads_for(model, 1)).backward()
    grad = model.p0.grad
    alive = repr(grad)
    del optimizer
    gc.collect()
    assert "gradient of 'p0'" in alive
    assert repr(grad) == str(grad) == repr(grad.detach())
    assert "is gone" in repr(grad)
    check_error(grad.norm, "RuntimeError: faststep.zero: the optimizer that had this gradient")
