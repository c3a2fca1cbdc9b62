"""state_dtype at each stage: the bits of one process with the same gradients."""

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import faststep
from faststep import zero
from faststep._torch.dtensor import full_tensor
from faststep.optim.masters import MASTER
from ranks import on_ranks


class _Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def _adam(model: nn.Module, **options: Any) -> Any:
    return faststep.optim.AdamW(model.parameters(), lr=0.01, state_dtype="bf16", **options)


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """All ranks have the same batches, and so the mean of their gradients is exact."""
    for step in steps:
        x = torch.randn(4, 33, generator=torch.Generator().manual_seed(step))
        model(x.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, full_tensor(its.detach()))


def _types(optimizer: Any) -> set[torch.dtype]:
    return {
        value.dtype
        for state in optimizer.state_dict()["state"].values()
        for key, value in state.items()
        if key not in ("step", MASTER)
    }


@on_ranks(2)
def test_the_bits_of_one_process(rank: int, world: int) -> None:
    """Saved there and here, and loaded on the other side."""
    for stage, dtype, masters in (
        (1, torch.float32, False),
        (2, torch.float32, False),
        (2, torch.bfloat16, True),
    ):
        models = [_Net(dtype) for _ in range(4)]
        alone, model, later, again = models
        plain = _adam(alone, master_weights=masters)
        sharded = zero.shard(model, _adam(model, master_weights=masters), stage=stage)
        _train(alone, plain, range(3))
        _train(model, sharded, range(3))
        _assert_same(alone, model)
        assert _types(sharded) == ({torch.bfloat16} if rank == 0 else set())
        saved = [sharded.state_dict()]  # rank 0 has the states
        dist.broadcast_object_list(saved)
        for one in (later, again):
            one.load_state_dict(copy.deepcopy(alone.state_dict()))
        resumed = _adam(later, master_weights=masters)
        resumed.load_state_dict(saved[0])
        taken = zero.shard(again, _adam(again, master_weights=masters), stage=stage)
        taken.load_state_dict(copy.deepcopy(plain.state_dict()))
        for one, optimizer in ((alone, plain), (later, resumed), (again, taken)):
            _train(one, optimizer, range(3, 5))
            _assert_same(alone, one)
        assert _types(taken) <= {torch.bfloat16}


@on_ranks(2)
def test_stage_3(rank: int, world: int) -> None:
    alone, model = _Net(torch.float32), _Net(torch.float32)
    plain = _adam(alone)
    sharded = zero.shard(model, _adam(model), stage=3)
    _train(alone, plain, range(3))
    _train(model, sharded, range(3))
    _assert_same(alone, model)
    assert _types(sharded) == {torch.bfloat16}


def test_estimate_counts_them() -> None:
    """Two bytes less for each of two states."""
    model = _Net(torch.float32)
    count = sum(param.numel() for param in model.parameters())
    kinds = torch.optim.AdamW, functools.partial(faststep.optim.AdamW, state_dtype="bf16")
    wide, narrow = (zero.estimate(model, kind, ranks=1, stage=1).stages[1] for kind in kinds)
    assert wide.states - narrow.states == 4 * count


@on_ranks(2)
def test_states_that_a_script_has_made(rank: int, world: int) -> None:
    """In bfloat16, without the option: they stay so in shards, and where they are loaded."""
    for stage in (1, 2, 3):
        model = _Net(torch.float32)
        plain = faststep.optim.AdamW(model.parameters(), lr=0.01)
        _train(model, plain, range(2))
        for state in plain.state.values():
            state.update({k: v.bfloat16() for k, v in state.items() if k != "step"})
        alone, optimizer = copy.deepcopy((model, plain))
        sharded = zero.shard(model, plain, stage=stage)
        for step in (2, 3):
            _train(alone, optimizer, range(step, step + 1))
            _train(model, sharded, range(step, step + 1))
            _assert_same(alone, model)
            saved = [sharded.state_dict()]
            assert _types(sharded) == ({torch.bfloat16} if rank == 0 or stage == 3 else set())
            if stage < 3:
                dist.broadcast_object_list(saved)
            sharded.load_state_dict(saved[0])
