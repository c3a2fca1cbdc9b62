"""What a wrapper, several optimizers, hooks and Join do, in every way of `beside_ddp`."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ranks import on_cases

from .beside_ddp import UNEVEN, Run, Script, Table


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


def _loss(run: Run, model: Any, step: int, branch: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + run.rank)
    return model(torch.randn(6, 10, generator=made), branch).square().mean()  # type: ignore[no-any-return]


def _zeros_and_unused(run: Run) -> None:
    net = _Net()
    model = run.wrap(net)
    net.train(False)
    optimizer = run.shard(model, torch.optim.AdamW(net.parameters(), lr=0.05))
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        _loss(run, model, step, (step + run.rank) % 3).backward()
        optimizer.step()


def _flag_set_by_hand(run: Run) -> None:
    net = _Net()
    model = run.wrap(net)
    optimizer = run.shard(model, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        for micro in range(3):
            if run.has_ddp:
                model.require_backward_grad_sync = micro == 2
                _loss(run, model, 10 * step + micro).backward()
                continue
            with optimizer.no_sync() if micro < 2 else contextlib.nullcontext():
                _loss(run, model, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def _buffers(run: Run) -> None:
    """Ranks evaluate in between, with other numbers of batches."""
    net = _Net()
    model = run.wrap(net)
    optimizer = run.shard(model, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(4):
        _loss(run, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.train(False)
        with torch.no_grad():
            for _ in range(1 + run.rank):
                net(torch.ones(3, 10))
        net.train(True)


def _rest_of_the_model(run: Run, steps: int = 6) -> None:
    """An optimizer of torch has the head, and nobody the branch."""
    net = _Net()
    model = run.wrap(net)
    net.train(False)
    body = [*net.body.parameters(), *net.norm.parameters()]
    optimizer = run.shard(model, torch.optim.AdamW(body, lr=0.05))
    second = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        with run.no_sync(model, optimizer, step % 2 == 1):
            _loss(run, model, step, 0 if step % 3 else 1).backward()
        if step % 2 == 0:
            for one in (optimizer, second):
                one.step()
                one.zero_grad()
    branch = net.branches[0].weight
    assert branch.grad is not None
    with torch.no_grad():
        branch -= branch.grad


def _two_optimizers(run: Run) -> None:
    net = _Net()
    model = run.wrap(net)
    net.train(False)
    head = [*net.head.parameters()]
    rest = [p for name, p in net.named_parameters() if not name.startswith("head")]
    clip: dict[str, Any] = {} if run.kind == "ddp" else {"max_grad_norm": 0.05}
    one = run.shard(model, torch.optim.AdamW(rest, lr=0.05), **clip)
    two = run.shard(model, torch.optim.SGD(head, lr=0.1))
    for step in range(5):
        _loss(run, model, step).backward()
        if run.kind == "ddp":
            nn.utils.clip_grad_norm_(rest, 0.05)
        one.step()
        if step % 2:
            two.step()
        one.zero_grad()
        two.zero_grad()


def _hooks(run: Run) -> None:
    net = _Net()
    model = run.wrap(net)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    calls: list[str] = []

    def before(optimizer: Any, *_: Any) -> None:
        calls.append("before")
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    plain.register_step_pre_hook(before)
    plain.register_step_post_hook(lambda *_: calls.append("after"))
    gone = plain.register_step_post_hook(lambda *_: calls.append("gone"))
    plain.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer = run.shard(model, plain)
    gone.remove()
    for step in range(3):
        _loss(run, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == ["before", "after"] * 3
    assert optimizer.state_dict()["note"] == 1


def _join(run: Run) -> None:
    """zero_grad() comes first, so a rank without data has gradients of its last step."""
    net = _Net()
    model = run.wrap(net)
    optimizer = run.shard(model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5))
    joined = {"ddp": [model], "wrapped": [model, optimizer]}.get(run.kind, [optimizer])
    net.train(False)
    with Join(joined):
        for step in range(3 if run.rank == 0 else 6):
            optimizer.zero_grad()
            _loss(run, model, step).backward()
            optimizer.step()


SCRIPTS: dict[str, Script] = {
    "zeros and unused": _zeros_and_unused,
    "flag set by hand": _flag_set_by_hand,
    "buffers": _buffers,
    "rest of the model": _rest_of_the_model,
    "rest of the model, all reduced": functools.partial(_rest_of_the_model, steps=5),
    "two optimizers": _two_optimizers,
    "hooks": _hooks,
    "join": _join,
}
TABLE = Table(
    SCRIPTS,
    refused={"join": "Join does not support shard(stage=3)"},
    left_out={
        "buffers": UNEVEN,
        "zeros and unused": UNEVEN,
        "rest of the model": "stage 3 reduces what no_sync() leaves on a rank at the end",
    },
)


@on_cases(TABLE.cases())
def test_the_parameters_of_ddp(rank: int, world: int, name: str) -> None:
    TABLE.check(rank, world, name)
