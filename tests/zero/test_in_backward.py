"""update="backward": buckets are updated and gathered while backward goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import faststep
from accumulate.processes import Job
from faststep import zero
from faststep.zero.hooks.gradient_buckets import GradientBucket

from .common import differences

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let every hook wait for the buckets under way: the earliest that an update can be."""
    before = GradientBucket.is_there
    GradientBucket.is_there = lambda _: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradientBucket.is_there = before  # type: ignore[method-assign]


class _Net(nn.Module):
    """Tied embedding, an unused layer, blocks under activation checkpointing of either kind."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(16)
        self.never = nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def _train(rank: int, update: Any, case: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    net = _Net(case.get("reentrant"))
    model: nn.Module = net
    if case.get("wrapped"):
        net.never.requires_grad_(False)  # DistributedDataParallel wants all to be used
        model = DistributedDataParallel(net)
    optimizer: Any = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer = zero.shard(
        model, optimizer, stage=case.get("stage", 2), bucket_mb=1 / 1024, update=update,
        gather=case.get("gather", "step"),
    )  # fmt: skip
    for step in range(4):
        for micro in range(case.get("micro", 1)):
            made = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            tokens = torch.randint(40, (4, 8), generator=made)
            last = micro == case.get("micro", 1) - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                out = model(tokens).flatten(0, 1)
                nn.functional.cross_entropy(out, tokens.flatten()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=case.get("to_none", True))
    optimizer.wait()
    return [p.detach().clone() for p in net.parameters()]


TRAINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage 1, zeros": {"stage": 1, "to_none": False},
    "gathered in forward": {"gather": "forward"},
    "micro-steps": {"micro": 3},
    "wrapped": {"wrapped": True, "micro": 2},
    "checkpointed": {"reentrant": False},
    "checkpointed, reentrant": {"reentrant": True},
}


def _trained(rank: int, world: int) -> dict[str, Any]:
    said = {}
    for name, case in TRAINED.items():
        expected = _train(rank, "step", case)
        said[name] = differences(_train(rank, "backward", case), expected)
        with at_once():
            said[f"{name}, at once"] = differences(_train(rank, "backward", case), expected)
    return said


def test_training_has_the_bits_of_updates_in_the_step(ranks: Ranks) -> None:
    for said in ranks("trained in backward"):
        assert said == {f"{name}{how}": [] for name in TRAINED for how in ("", ", at once")}


def _when(rank: int, world: int) -> dict[str, Any]:
    """The order of gradients, and of the updates of buckets, in a backward pass."""
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 40), nn.Linear(40, 8))
    optimizer = zero.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=1e-5, update="backward"
    )
    engine = optimizer._engine
    log: list[str] = []
    for slot in engine.slots:
        slot.param.register_hook(lambda _, name=slot.name: log.append(f"gradient of {name}"))
    gather = engine.start_gather

    def start(number: int) -> None:
        log.append(f"update of {engine.buckets[number].slots[0].name}")
        gather(number)

    engine.start_gather = start
    with at_once():
        model(torch.randn(4, 8)).sum().backward()
    under_way = len(engine._under_way)
    optimizer.step()
    return {"log": log, "left": under_way}


def test_updates_run_while_backward_goes_on(ranks: Ranks) -> None:
    for said in ranks("when"):
        assert said["left"] == 0
        log = said["log"]
        for name in ("2.bias", "1.bias"):
            assert log.index(f"update of {name}") < log.index("gradient of 0.weight"), log
        assert len([entry for entry in log if entry.startswith("update")]) == 3


# ---- what must not be


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class _Reads(nn.Module):
    """The first layer also reads the weight of the last one, which backward updates before."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.how = how

    def _early(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "detached":
            return x @ self.last.weight.detach()
        with torch.no_grad():
            scale = self.last(x.detach())  # not differentiable, but recomputed
        return x * scale

    def forward(self, x: Tensor) -> Tensor:
        early = (
            checkpoint(self._early, x, use_reentrant=False)
            if self.how == "recomputed"
            else self._early(x)
        )
        return self.last(early)


def _made(how: str = "detached", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = _Reads(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, zero.shard(model, optimizer, bucket_mb=1e-5, **{"update": "backward", **options})


def _unsafe(rank: int, world: int) -> dict[str, str]:
    said = {}
    x = torch.randn(3, 6)
    with at_once():
        for how in ("detached", "recomputed"):
            model, _ = _made(how)
            said[how] = _error(lambda m=model: m(x).sum().backward())
            model, _ = _made(how, update="step")
            said[f"{how} in step"] = _error(lambda m=model: m(x).sum().backward())
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = zero.shard(
        plain, torch.optim.AdamW(plain.parameters()), bucket_mb=1e-5, update="backward"
    )
    total = plain(x).sum()
    total.backward(retain_graph=True)
    optimizer.step()
    said["retained"] = _error(total.backward)
    return said


def test_values_that_backward_still_needs_are_found(ranks: Ranks) -> None:
    for said in ranks("unsafe"):
        for how in ("detached", "retained"):
            assert said[how].startswith("RuntimeError: one of the variables needed"), said[how]
        assert said["recomputed"].startswith("RuntimeError: 'last.weight' is used by a forward")
        assert said["detached in step"] == said["recomputed in step"] == "no error"


HOOKS: dict[str, Any] = {  # what a hook before the step may do to the gradient of a parameter
    "scale": lambda param: param.grad.mul_(0.5),
    "scale data": lambda param: param.grad.data.mul_(0.5),
    "set": lambda param: setattr(param, "grad", torch.ones_like(param)),
    "drop": lambda param: setattr(param, "grad", None),
}


def _refused(rank: int, world: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    x = torch.randn(3, 6)

    def fresh() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, zero.shard(model, optimizer, update="backward")

    model, optimizer = fresh()
    said["clip"] = _error(lambda: optimizer.clip_grad_norm_(1.0))
    said["limit"] = _error(lambda: setattr(optimizer, "max_grad_norm", 1.0))
    said["mean"] = _error(lambda: faststep.accumulate(optimizer, 2))
    model(x).sum().backward()
    said["torch clip"] = _error(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    said["divided"] = _error(lambda: model[0].weight.grad.div_(2.0))
    said["twice"] = _error(lambda: model(x).sum().backward())
    for name, change in HOOKS.items():
        hook = optimizer.register_step_pre_hook(
            lambda o, *_, c=change: c(o.param_groups[0]["params"][0])
        )
        said[f"hook: {name}"] = _error(optimizer.step)
        hook.remove()
        model, optimizer = fresh()
        model(x).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.5
    said["rate"] = _error(optimizer.step)
    for ours in (True, False):
        model, optimizer = fresh()
        kind = faststep.amp.GradScaler if ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(model(x).sum()).backward()
        said[f"scaler {ours}"] = _error(lambda s=scaler, o=optimizer: s.step(o))
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        said[f"unscale {ours}"] = _error(lambda s=scaler, o=optimizer: s.unscale_(o))
    model, optimizer = fresh()
    model[0].weight.requires_grad_(False)
    again, optimizer = fresh()
    planted = again[1].weight.register_hook(lambda _: 1 / 0)
    said["failed"] = _error(lambda: again(x).sum().backward())
    planted.remove()
    optimizer.zero_grad()
    again(x).sum().backward()
    said["after"] = _error(optimizer.step)
    model = nn.Linear(2, 2)
    for options in ({"max_grad_norm": 1.0}, {"stage": 3}, {"update": "later"}):
        adam = torch.optim.AdamW(model.parameters())
        said[str(options)] = _error(
            lambda o=options, a=adam: zero.shard(model, a, **{"update": "backward", **o})
        )
    return said


EXPECTED = {
    "clip": 'RuntimeError: update="backward" cannot clip by the global norm',
    "limit": 'ValueError: update="backward" cannot clip by the global norm',
    "mean": 'TypeError: accumulate() of an optimizer with update="backward"',
    "torch clip": "RuntimeError: ",
    "divided": "RuntimeError: faststep.zero: the gradient of '0.weight' cannot be changed",
    "twice": "RuntimeError: a second backward before optimizer.step()",
    "hook: scale": "RuntimeError: faststep.zero: the gradient of '0.weight' cannot be changed",
    "hook: scale data": "RuntimeError: faststep.zero: the gradient of '0.weight' cannot be changed",
    "hook: set": "RuntimeError: faststep.zero: the gradient of '0.weight' cannot be changed",
    "hook: drop": "RuntimeError: faststep.zero: the gradient of '0.weight' was taken away",
    "rate": "RuntimeError: the learning rate or another number of group 0 was changed",
    "scaler True": 'RuntimeError: update="backward" cannot work with a GradScaler',
    "scaler False": 'RuntimeError: update="backward" cannot work with a GradScaler',
    "unscale True": 'RuntimeError: update="backward" cannot work with a GradScaler',
    "unscale False": 'RuntimeError: update="backward" cannot work with a GradScaler',
    "failed": "ZeroDivisionError",
    "after": "no error",
    "{'max_grad_norm': 1.0}": 'ValueError: update="backward" cannot clip by the global norm',
    "{'stage': 3}": 'ValueError: update="backward" is for stages 1 and 2',
    "{'update': 'later'}": "ValueError: update must be",
}


@pytest.mark.parametrize("world", [1, 2])
def test_what_needs_all_gradients_is_refused(world: int, ranks: Ranks) -> None:
    alone = {"torch clip", "divided", "twice", "rate"}  # as without shard()
    for said in ranks(f"refused on {world}"):
        for name, start in EXPECTED.items():
            if world == 1 and (name in alone or name.startswith(("unscale", "hook"))):
                continue
            assert said[name].startswith(start), (name, said[name])


ZERO_JOBS = [
    Job("trained in backward", 2, _trained),
    Job("when", 2, _when),
    Job("unsafe", 2, _unsafe),
    *(Job(f"refused on {world}", world, _refused) for world in (1, 2)),
]
