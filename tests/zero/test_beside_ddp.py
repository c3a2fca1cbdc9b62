"""Scripts as people write them, run by torch's optimizer inside DistributedDataParallel, and
sharded: plain, and inside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accumulate.processes import Job
from faststep import zero

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]
KINDS = ("ddp", "stage 1", "stage 2", "wrapped")


class _Net(nn.Module):
    """A branch that some ranks use, one that nobody uses, a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(10, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = self.norm(self.body(x)).tanh()
        if branch < 2:
            x = self.branches[branch](x)
        return self.head(x)  # type: ignore[no-any-return]


class _Run:
    """A model of one kind."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank
        self.inside = _Net()
        self.model: Any = self.inside
        if kind in ("ddp", "wrapped"):
            self.model = DistributedDataParallel(self.inside, find_unused_parameters=True)

    def shard(self, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        if self.kind == "ddp":
            return optimizer
        stage = 1 if self.kind == "stage 1" else 2
        return zero.shard(self.model, optimizer, stage=stage, bucket_mb=0.001, **options)  # type: ignore[arg-type]

    def loss(self, step: int, branch: int = 0) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + self.rank)
        return self.model(torch.randn(6, 10, generator=made), branch).square().mean()  # type: ignore[no-any-return]

    def values(self) -> list[Tensor]:
        # The buffers of a plain model are the rank's own.
        tensors = [*self.inside.parameters()]
        if self.kind in ("ddp", "wrapped"):
            tensors += self.inside.buffers()
        return [tensor.detach().clone() for tensor in tensors]


def _zeros_and_unused(run: _Run) -> None:
    run.inside.train(False)
    optimizer = run.shard(torch.optim.AdamW(run.inside.parameters(), lr=0.05))
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        run.loss(step, (step + run.rank) % 3).backward()
        optimizer.step()


def _flag_set_by_hand(run: _Run) -> None:
    optimizer = run.shard(torch.optim.SGD(run.inside.parameters(), lr=0.1))
    for step in range(3):
        for micro in range(3):
            if run.kind in ("ddp", "wrapped"):
                run.model.require_backward_grad_sync = micro == 2
                run.loss(10 * step + micro).backward()
                continue
            with optimizer.no_sync() if micro < 2 else contextlib.nullcontext():
                run.loss(10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def _buffers(run: _Run) -> None:
    """Ranks evaluate in between, with other numbers of batches."""
    optimizer = run.shard(torch.optim.SGD(run.inside.parameters(), lr=0.1))
    for step in range(4):
        run.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.inside.train(False)
        with torch.no_grad():
            for _ in range(1 + run.rank):
                run.inside(torch.ones(3, 10))
        run.inside.train(True)


def _rest_of_the_model(run: _Run) -> None:
    """An optimizer of torch has the head, and nobody the branch."""
    run.inside.train(False)
    body = [*run.inside.body.parameters(), *run.inside.norm.parameters()]
    optimizer = run.shard(torch.optim.AdamW(body, lr=0.05))
    second = torch.optim.SGD(run.inside.head.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        quiet = run.model if run.kind in ("ddp", "wrapped") else optimizer
        with quiet.no_sync() if step % 2 else contextlib.nullcontext():
            run.loss(step, 0 if step % 3 else 1).backward()
        if step % 2 == 0:
            for one in (optimizer, second):
                one.step()
                one.zero_grad()
    branch = run.inside.branches[0].weight
    assert branch.grad is not None
    with torch.no_grad():
        branch -= branch.grad


def _two_optimizers(run: _Run) -> None:
    run.inside.train(False)
    head = [*run.inside.head.parameters()]
    rest = [p for name, p in run.inside.named_parameters() if not name.startswith("head")]
    clip: dict[str, Any] = {} if run.kind == "ddp" else {"max_grad_norm": 0.05}
    one = run.shard(torch.optim.AdamW(rest, lr=0.05), **clip)
    two = run.shard(torch.optim.SGD(head, lr=0.1))
    for step in range(5):
        run.loss(step).backward()
        if run.kind == "ddp":
            nn.utils.clip_grad_norm_(rest, 0.05)
        one.step()
        if step % 2:
            two.step()
        one.zero_grad()
        two.zero_grad()


def _hooks(run: _Run) -> None:
    plain = torch.optim.SGD(run.inside.parameters(), lr=0.1)
    calls: list[str] = []

    def before(optimizer: Any, *_: Any) -> None:
        calls.append("before")
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    plain.register_step_pre_hook(before)
    plain.register_step_post_hook(lambda *_: calls.append("after"))
    gone = plain.register_step_post_hook(lambda *_: calls.append("gone"))
    plain.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer = run.shard(plain)
    gone.remove()
    for step in range(3):
        run.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == ["before", "after"] * 3
    assert optimizer.state_dict()["note"] == 1


def _join(run: _Run) -> None:
    """zero_grad() comes first, so a rank without data has gradients of its last step."""
    optimizer = run.shard(torch.optim.SGD(run.inside.parameters(), lr=0.1, momentum=0.5))
    joined = {"ddp": [run.model], "wrapped": [run.model, optimizer]}.get(run.kind, [optimizer])
    run.inside.train(False)
    with Join(joined):
        for step in range(3 if run.rank == 0 else 6):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()


SCRIPTS: dict[str, Callable[[_Run], None]] = {
    "zeros and unused": _zeros_and_unused,
    "flag set by hand": _flag_set_by_hand,
    "buffers": _buffers,
    "rest of the model": _rest_of_the_model,
    "two optimizers": _two_optimizers,
    "hooks": _hooks,
    "join": _join,
}


def _compared(rank: int, world: int, name: str) -> dict[str, float]:
    found = {}
    expected: list[Tensor] = []
    for kind in KINDS:
        run = _Run(kind, rank)
        SCRIPTS[name](run)
        values = run.values()
        expected = expected or values
        pairs = zip(values, expected, strict=False)
        found[kind] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_parameters_of_ddp(name: str, ranks: Ranks) -> None:
    for said in ranks(f"beside ddp: {name}"):
        assert set(said) == set(KINDS)
        assert max(said.values()) < 1e-5, said


ZERO_JOBS = [Job(f"beside ddp: {name}", 2, _compared, (name,)) for name in SCRIPTS]
