"""Parameter groups that a script changes while it trains, and parameters that it freezes and
unfreezes: by torch's optimizer inside DistributedDataParallel, and sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumulate.processes import Job
from faststep import zero

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "wrapped": {"stage": 2},
    "in forward": {"gather": "forward"},
}


class _Net(nn.Module):
    """Blocks, with an adapter beside each once they are there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.head = nn.Linear(40, 2)
        self.adapters = nn.ModuleList()

    def adapt(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.adapters.extend(nn.Linear(40, 40, bias=False) for _ in self.blocks)

    def forward(self, x: Tensor, adapted: bool = False) -> Tensor:
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = (y + self.adapters[number](x) if adapted else y).tanh()
        return self.head(x)  # type: ignore[no-any-return]


class _Run:
    """A model of one kind. DistributedDataParallel reduces what was trained when it was made."""

    def __init__(self, kind: str, rank: int, world: int, adapted: bool) -> None:
        self.kind, self.rank, self.world, self.adapted = kind, rank, world, adapted
        self.inside = _Net()
        self.model: Any = self.inside
        if kind == "ddp" and adapted:
            self.inside.adapt()
        if kind in ("ddp", "wrapped"):
            self.model = DistributedDataParallel(self.inside, find_unused_parameters=True)

    def shard(self, optimizer: Any, **options: Any) -> Any:
        if self.kind == "ddp":
            return optimizer
        return zero.shard(self.model, optimizer, bucket_mb=0.002, **KINDS[self.kind], **options)  # type: ignore[arg-type]

    def adapt(self) -> None:
        """Ranks begin with other values, and go on with those of rank 0."""
        if self.kind != "ddp":
            self.inside.adapt(3 + self.rank)

    def loss(self, step: int, adapted: bool = False) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + self.rank)
        return self.model(torch.randn(6, 40, generator=made), adapted).square().mean()  # type: ignore[no-any-return]

    def train(self, optimizer: Any, steps: range, adapted: bool = False) -> None:
        for step in steps:
            self.loss(step, adapted).backward()
            optimizer.step()
            optimizer.zero_grad()


def _adam(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def _gradual(run: _Run) -> Any:
    """All parameters are in the optimizer; more and more are trained, and then fewer."""
    run.inside.blocks.requires_grad_(False)
    optimizer = run.shard(_adam(run.inside.parameters()))
    for number in (3, 1, 0):
        run.train(optimizer, range(number, number + 2))
        run.inside.blocks[number].requires_grad_(True)
    run.train(optimizer, range(10, 12))
    run.inside.head.requires_grad_(False)
    run.inside.blocks[3].weight.requires_grad_(False)
    run.train(optimizer, range(12, 14))
    run.inside.requires_grad_(True)
    run.train(optimizer, range(14, 17))
    return optimizer


def _all_frozen(run: _Run) -> Any:
    run.inside.requires_grad_(False)
    optimizer = run.shard(_adam(run.inside.parameters()))
    run.inside.head.requires_grad_(True)
    run.train(optimizer, range(3))
    return optimizer


def _added(run: _Run) -> Any:
    """As fine-tuning callbacks unfreeze: by a group."""
    run.inside.blocks.requires_grad_(False)
    optimizer = run.shard(_adam(run.inside.head.parameters()))
    run.train(optimizer, range(2))
    for number in (3, 2):
        run.inside.blocks[number].requires_grad_(True)
        more = run.inside.blocks[number].parameters()
        optimizer.add_param_group({"params": more, "lr": 0.005})
        run.train(optimizer, range(number, number + 2))
    run.inside.blocks[3].requires_grad_(False)
    run.train(optimizer, range(5, 7))
    return optimizer


def _adapters(run: _Run) -> Any:
    optimizer = run.shard(_adam([*run.inside.blocks.parameters(), *run.inside.head.parameters()]))
    run.train(optimizer, range(2))
    run.adapt()
    optimizer.add_param_group({"params": run.inside.adapters.parameters(), "betas": (0.5, 0.9)})
    run.inside.blocks.requires_grad_(False)
    run.train(optimizer, range(2, 6), adapted=True)
    return optimizer


def _by_hand(run: _Run) -> Any:
    """Lists that are changed without the optimizer."""
    head = [*run.inside.head.parameters()]
    blocks = [*run.inside.blocks.parameters()]
    optimizer = run.shard(_adam([{"params": blocks}, {"params": head, "lr": 0.001}]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.train(optimizer, range(2))
    first, second = optimizer.param_groups
    gone = first["params"][3]
    del first["params"][3]
    run.train(optimizer, range(2, 4))
    second["params"].append(first["params"].pop(0))
    scheduler.step()
    run.train(optimizer, range(4, 6))
    gone.grad = None
    optimizer.param_groups = [{**second, "lr": 0.03}]
    run.train(optimizer, range(6, 8))
    for param in blocks:
        param.grad = None
    optimizer.param_groups = [first, second]
    second["params"] = (*second["params"], gone)
    run.train(optimizer, range(8, 10))
    second["params"] = list(second["params"])
    return optimizer


def _unfrozen_in_a_list(run: _Run) -> Any:
    """Of a frozen parameter that the optimizer gets by hand, after its first gradient."""
    run.inside.blocks[2].requires_grad_(False)
    optimizer = run.shard(_adam([p for p in run.inside.parameters() if p.requires_grad]))
    run.train(optimizer, range(2))
    run.inside.blocks[2].requires_grad_(True)
    run.loss(2).backward()
    optimizer.param_groups[0]["params"].extend(run.inside.blocks[2].parameters())
    optimizer.step()
    return optimizer


def _accumulated(run: _Run) -> Any:
    """Unfrozen inside of a window, whose gradients are summed on the ranks."""
    run.inside.blocks[1].requires_grad_(False)
    optimizer = run.shard(_adam(run.inside.parameters()))
    quiet = run.model if run.kind in ("ddp", "wrapped") else optimizer
    for step in range(4):
        with quiet.no_sync():
            run.loss(step).backward()
            run.inside.blocks[1].requires_grad_(True)
            run.loss(step + 10).backward()
        with quiet.no_sync() if step == 2 else contextlib.nullcontext():
            run.loss(step + 20).backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def _clipped(run: _Run) -> Any:
    run.inside.blocks[1].requires_grad_(False)
    optimizer = run.shard(_adam(run.inside.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        scaler.scale(run.loss(step)).backward()
        if step == 1:
            run.inside.blocks[1].requires_grad_(True)
        scaler.unscale_(optimizer)
        if run.kind == "ddp":
            nn.utils.clip_grad_norm_(run.inside.parameters(), 0.05)
        else:
            optimizer.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer


def _saved(run: _Run) -> Any:
    """Saved while parameters are frozen, loaded where they are, unfrozen, and saved again."""
    optimizer = _gradual(run)
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box)
    again = _Run(run.kind, run.rank, run.world, False)
    again.inside.load_state_dict(run.inside.state_dict())
    again.inside.blocks.requires_grad_(False)
    other = again.shard(_adam(again.inside.parameters()))
    other.load_state_dict(box[0])
    again.train(other, range(2))
    again.inside.requires_grad_(True)
    again.train(other, range(2, 5))
    run.inside.load_state_dict(again.inside.state_dict())
    return other


SCRIPTS: dict[str, Callable[[_Run], Any]] = {
    "gradual": _gradual,
    "all frozen": _all_frozen,
    "added": _added,
    "adapters": _adapters,
    "by hand": _by_hand,
    "unfrozen in a list": _unfrozen_in_a_list,
    "accumulated": _accumulated,
    "clipped": _clipped,
    "saved": _saved,
}


def _compared(rank: int, world: int, name: str) -> dict[str, float]:
    found = {}
    expected: list[Tensor] = []
    for kind in KINDS:
        run = _Run(kind, rank, world, name == "adapters")
        optimizer = SCRIPTS[name](run)
        if kind != "ddp":
            optimizer.wait()
        values = [param.detach().clone() for param in run.inside.parameters()]
        if kind == "ddp" and name == "by hand":  # torch's raises for states of no group
            known = {id(p) for g in optimizer.param_groups for p in g["params"]}
            for param in [p for p in optimizer.state if id(p) not in known]:
                del optimizer.state[param]
        state = optimizer.state_dict()
        if rank == 0:
            for _, entries in sorted(state["state"].items()):
                values += [entries["step"], entries["exp_avg"], entries["exp_avg_sq"]]
        expected = expected or values
        pairs = zip(values, expected, strict=True)
        found[kind] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


WORLDS = {"saved": 3, "added": 3}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_parameters_of_ddp(name: str, ranks: Ranks) -> None:
    for said in ranks(f"groups: {name}"):
        assert set(said) == set(KINDS)
        assert max(said.values()) < 1e-5, said


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _refused(rank: int, world: int) -> dict[str, Any]:
    said: dict[str, Any] = {}

    def fresh(**options: Any) -> tuple[_Net, Any]:
        model = _Net()
        model.blocks.requires_grad_(False)
        return model, zero.shard(model, _adam(model.head.parameters()), **options)

    model, optimizer = fresh()
    group = {"params": [model.head.weight]}
    said["twice"] = _error(lambda: optimizer.add_param_group(group))
    plain = _adam(model.head.parameters())
    said["twice by torch"] = _error(lambda: plain.add_param_group({**group}))
    other = nn.Parameter(torch.ones(3))
    said["not in the model"] = _error(lambda: optimizer.add_param_group({"params": [other]}))
    model.blocks[0].requires_grad_(rank == 0)
    more = {"params": list(model.blocks[0].parameters())}
    said["differ"] = _error(lambda: optimizer.add_param_group(more if rank == 0 else {**more}))
    said["groups"] = len(optimizer.param_groups)
    model, optimizer = fresh()
    optimizer.param_groups[0]["params"].extend(model.blocks[0].parameters())
    model.blocks[0].requires_grad_(rank == 0)
    said["unfrozen on one"] = _error(lambda: model(torch.ones(2, 40)).sum().backward())
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    for said in ranks("groups: refused"):
        assert said["twice"] == said["twice by torch"]
        assert "not in the model" in said["not in the model"]
        assert said["groups"] == 1
        for name in ("differ", "unfrozen on one"):
            assert "new parameters: the ranks differ" in said[name], said[name]


ZERO_JOBS = [
    *(Job(f"groups: {name}", WORLDS.get(name, 2), _compared, (name,)) for name in SCRIPTS),
    Job("groups: refused", 2, _refused),
]
