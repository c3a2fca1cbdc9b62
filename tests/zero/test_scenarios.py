"""Gradients that a script clips, keeps and hooks, and what no stage can do, in every way of
`beside_ddp`; and the refusals of all its scripts."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ranks import on_cases

from . import test_beside_ddp, test_groups, test_scripts
from .beside_ddp import Run, Script, Table

GUIDE = Path(__file__).parents[2] / "docs" / "sharding.md"


class _Net(nn.Module):
    """Blocks of one shape, of which some may be used, in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(10, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(24, 2)
        self.use = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        for number in self.use:
            x = self.blocks[number](x)
        return self.head(x)  # type: ignore[no-any-return]


class _Loop:
    def __init__(self, run: Run) -> None:
        self.run, self.net = run, _Net()
        self.model = run.wrap(self.net)
        adam = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.optimizer = run.shard(self.model, adam)
        self.params = list(self.net.parameters())

    def rows(self, step: int) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + self.run.rank)
        return torch.randn(6, 10, generator=made)

    def backward(self, step: int) -> None:
        self.model(self.rows(step)).square().mean().backward()

    def fresh(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)

    def train(self, steps: range) -> None:
        for step in steps:
            self.fresh(step)
            self.optimizer.step()

    def keep(self, *values: Any) -> None:
        self.run.kept += [torch.as_tensor(value) for value in values]


def _clipped(run: Run) -> None:
    loop = _Loop(run)
    net = loop.net
    for step in range(4):
        loop.fresh(step)
        loop.keep(clip_grad_norm_(net.body.parameters(), 0.01))
        loop.keep(clip_grad_norm_(net.blocks.parameters(), 0.01, norm_type=float("inf")))
        loop.keep(clip_grad_norm_(net.head.weight, 0.01, norm_type=1.0))
        clip_grad_value_(net.head.bias, 0.001)
        loop.keep(clip_grad_norm_(loop.params, 0.01))
        loop.optimizer.step()


def _read(run: Run) -> None:
    loop = _Loop(run)
    for step in range(3):
        loop.fresh(step)
        loop.keep(*(param.grad.norm() for param in loop.params))  # type: ignore[union-attr]
        loop.keep(loop.net.head.weight.grad.abs().sum())  # type: ignore[union-attr]
        loop.optimizer.step()
        loop.keep(loop.net.head.weight.grad.clone())  # type: ignore[union-attr]


def _kept(run: Run) -> None:
    """Gradients are kept as they are, without a copy, when others come."""
    loop = _Loop(run)
    last: list[Any] = []
    for step in range(0, 15, 5):
        loop.fresh(step)
        one = [param.grad for param in loop.params]
        loop.fresh(step + 1)
        two = [param.grad.data for param in loop.params]  # type: ignore[union-attr]
        loop.net.zero_grad()
        loop.backward(step + 2)
        three = [param.grad for param in loop.params]  # these are replaced
        for param, first, second in zip(loop.params, one, two, strict=True):
            param.grad.add_(second)  # type: ignore[union-attr]
            param.grad = param.grad + 2 * first
            first.mul_(3)  # type: ignore[union-attr]
        if last:
            loop.keep(*((a * b).sum() for a, b in zip(one, last, strict=True)))  # type: ignore[operator]
        last = [param.grad for param in loop.params]
        loop.optimizer.step()
        loop.keep(*(grad.norm() for grad in (*one, *three)))  # type: ignore[union-attr]


def _in_no_sync(run: Run) -> None:
    """Gradients of this rank are used on top of those of a pass that was reduced."""
    loop = _Loop(run)
    for step in range(0, 30, 10):
        loop.fresh(step)
        with run.no_sync(loop.model, loop.optimizer):
            loop.net.use = [2, 0]
            loop.backward(step + 1)
            loop.keep(clip_grad_norm_(loop.params, 0.05))
            loop.backward(step + 2)
            loop.net.body.weight.grad.mul_(0.5)  # type: ignore[union-attr]
            last = loop.net.head.weight.grad
            if step == 10:
                loop.net.zero_grad()
            loop.net.use = [0, 1, 2]
        loop.backward(step + 3)
        loop.keep(clip_grad_norm_(loop.params, 0.05), last.norm())  # type: ignore[union-attr]
        loop.optimizer.step()


def _hooked(run: Run) -> None:
    """A hook gets the gradient of this rank; one after backward is called when all is reduced."""
    loop = _Loop(run)
    calls: list[int] = []
    factor = 0.5 + run.rank
    handles = [p.register_hook(lambda grad: grad * factor) for p in loop.net.head.parameters()]
    loop.net.body.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))  # type: ignore[no-untyped-call]
    for step in range(5):
        if step == 2:
            handles[0].remove()
        if step == 3:
            loop.net.blocks[1][0].bias.register_hook(lambda grad: grad * factor)  # type: ignore[index]
        loop.train(range(step, step + 1))
    loop.keep(len(calls))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        raise MemoryError


def _failed(run: Run) -> None:
    """A pass fails at its end on all ranks; DistributedDataParallel itself could not go on."""
    loop = _Loop(run)
    for step in range(6):
        if step % 2:
            x = loop.rows(step).requires_grad_()
            with contextlib.suppress(MemoryError):
                if run.kind != "ddp":
                    loop.model(_Fails.apply(x)).square().mean().backward()
            loop.net.zero_grad()
        else:
            loop.train(range(step, step + 1))


def _other_branches(run: Run) -> None:
    loop = _Loop(run)
    for step in range(3):
        loop.net.use = [(step + run.rank) % 3]
        loop.train(range(step, step + 1))


def _other_order(run: Run) -> None:
    loop = _Loop(run)
    for step in range(3):
        loop.net.use = [0, 1, 2] if (step + run.rank) % 2 else [1, 0, 2]
        loop.train(range(step, step + 1))


def _state_of_one(run: Run) -> None:
    loop = _Loop(run)
    loop.train(range(2))
    loop.fresh(2)  # all parameters are there
    loop.keep(loop.optimizer.state[loop.net.head.weight]["exp_avg"])


def _copied(run: Run) -> None:
    loop = _Loop(run)
    loop.train(range(2))
    loop.fresh(2)
    copy.deepcopy(loop.optimizer)


SCRIPTS: dict[str, Script] = {
    "clipped": _clipped,
    "read": _read,
    "kept": _kept,
    "in no_sync": _in_no_sync,
    "hooked": _hooked,
    "failed": _failed,
    "other branches": _other_branches,
    "other order": _other_order,
    "state of one": _state_of_one,
    "copied": _copied,
}
COPIED = "a sharded optimizer cannot be pickled or copied"
TABLE = Table(
    SCRIPTS,
    refused={
        "other branches": "the ranks differ",
        "other order": "the ranks differ",
        "copied": COPIED,
    },
    refused_below={
        "state of one": "optimizer.state has this rank's parts",
        "copied": COPIED,
    },
    left_out={"in no_sync": "stage 3 reduces what no_sync() leaves on a rank"},
    as_torch=["failed"],
)
TABLES = [TABLE, test_beside_ddp.TABLE, test_groups.TABLE, test_scripts.TABLE]


@on_cases(TABLE.cases())
def test_the_parameters_of_ddp(rank: int, world: int, name: str) -> None:
    TABLE.check(rank, world, name)


def test_the_refusals_of_all_scripts() -> None:
    """The guide has a sentence on each."""
    assert sum(len(table.scripts) for table in TABLES) >= 36
    refused = {t for table in TABLES for t in table.refused.values()}
    refused |= {t for table in TABLES for t in table.refused_below.values()}
    guide = " ".join(GUIDE.read_text().split())
    in_guide = {
        "Join does not support shard(stage=3)": "`Join` at stage 3",
        "was given values by .data =, which fully_shard ignores": "`param.data = values`",
        "a parameter group cannot be added at stage 3 if its parameters are new": (
            "at stage 3 groups with parameters that the model got after `shard`"
        ),
        "the ranks differ": "If ranks call different blocks, or in different orders",
        "optimizer.state has this rank's parts": "which has this rank's parts",
        COPIED: "A copy of the optimizer",
    }
    assert refused == in_guide.keys()
    for sentence in in_guide.values():
        assert sentence in guide, sentence
