"""Parameter groups that a script changes while it trains, and parameters that it freezes and
unfreezes, in every way of `beside_ddp`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from faststep import zero
from faststep._torch.dtensor import full_tensor
from faststep.zero.hooks.unowned import Unowned
from ranks import on_cases, on_ranks

from .beside_ddp import Run, Table
from .common import check_error, error_of


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


class _Loop:
    """DistributedDataParallel reduces what was trained when it was made."""

    def __init__(self, run: Run, adapted: bool = False) -> None:
        self.run, self.inside = run, _Net()
        if run.kind == "ddp" and adapted:
            self.inside.adapt()
        self.model = run.wrap(self.inside)

    def shard(self, optimizer: Any) -> Any:
        return self.run.shard(self.model, optimizer)

    def adapt(self) -> None:
        """Ranks begin with other values, and go on with those of rank 0."""
        if self.run.kind != "ddp":
            self.inside.adapt(3 + self.run.rank)

    def loss(self, step: int, adapted: bool = False) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + self.run.rank)
        return self.model(torch.randn(6, 40, generator=made), adapted).square().mean()  # type: ignore[no-any-return]

    def train(self, optimizer: Any, steps: range, adapted: bool = False) -> None:
        for step in steps:
            self.loss(step, adapted).backward()
            optimizer.step()
            optimizer.zero_grad()


def _adam(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def _gradual(loop: _Loop) -> Any:
    """All parameters are in the optimizer; more and more are trained, and then fewer."""
    loop.inside.blocks.requires_grad_(False)
    optimizer = loop.shard(_adam(loop.inside.parameters()))
    for number in (3, 1, 0):
        loop.train(optimizer, range(number, number + 2))
        loop.inside.blocks[number].requires_grad_(True)
    loop.train(optimizer, range(10, 12))
    loop.inside.head.requires_grad_(False)
    loop.inside.blocks[3].weight.requires_grad_(False)
    loop.train(optimizer, range(12, 14))
    loop.inside.requires_grad_(True)
    loop.train(optimizer, range(14, 17))
    return optimizer


def _all_frozen(loop: _Loop) -> Any:
    loop.inside.requires_grad_(False)
    optimizer = loop.shard(_adam(loop.inside.parameters()))
    loop.inside.head.requires_grad_(True)
    loop.train(optimizer, range(3))
    return optimizer


def _added(loop: _Loop) -> Any:
    """As fine-tuning callbacks unfreeze: by a group."""
    loop.inside.blocks.requires_grad_(False)
    optimizer = loop.shard(_adam(loop.inside.head.parameters()))
    loop.train(optimizer, range(2))
    for number in (3, 2):
        loop.inside.blocks[number].requires_grad_(True)
        more = loop.inside.blocks[number].parameters()
        optimizer.add_param_group({"params": more, "lr": 0.005})
        loop.train(optimizer, range(number, number + 2))
    loop.inside.blocks[3].requires_grad_(False)
    loop.train(optimizer, range(5, 7))
    return optimizer


def _adapters(loop: _Loop) -> Any:
    optimizer = loop.shard(
        _adam([*loop.inside.blocks.parameters(), *loop.inside.head.parameters()])
    )
    loop.train(optimizer, range(2))
    loop.adapt()
    optimizer.add_param_group({"params": loop.inside.adapters.parameters(), "betas": (0.5, 0.9)})
    loop.inside.blocks.requires_grad_(False)
    loop.train(optimizer, range(2, 6), adapted=True)
    return optimizer


def _by_hand(loop: _Loop) -> Any:
    """Lists that are changed without the optimizer."""
    head = [*loop.inside.head.parameters()]
    blocks = [*loop.inside.blocks.parameters()]
    optimizer = loop.shard(_adam([{"params": blocks}, {"params": head, "lr": 0.001}]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loop.train(optimizer, range(2))
    first, second = optimizer.param_groups
    gone = first["params"][3]
    del first["params"][3]
    loop.train(optimizer, range(2, 4))
    second["params"].append(first["params"].pop(0))
    scheduler.step()
    loop.train(optimizer, range(4, 6))
    gone.grad = None
    optimizer.param_groups = [{**second, "lr": 0.03}]
    loop.train(optimizer, range(6, 8))
    for param in blocks:
        param.grad = None
    optimizer.param_groups = [first, second]
    second["params"] = (*second["params"], gone)
    loop.train(optimizer, range(8, 10))
    second["params"] = list(second["params"])
    return optimizer


def _unfrozen_in_a_list(loop: _Loop) -> Any:
    """Of a frozen parameter that the optimizer gets by hand, after its first gradient."""
    loop.inside.blocks[2].requires_grad_(False)
    optimizer = loop.shard(_adam([p for p in loop.inside.parameters() if p.requires_grad]))
    loop.train(optimizer, range(2))
    loop.inside.blocks[2].requires_grad_(True)
    loop.loss(2).backward()
    optimizer.param_groups[0]["params"].extend(loop.inside.blocks[2].parameters())
    optimizer.step()
    return optimizer


def _accumulated(loop: _Loop) -> Any:
    """Unfrozen inside of a window, whose gradients are summed on the ranks."""
    loop.inside.blocks[1].requires_grad_(False)
    optimizer = loop.shard(_adam(loop.inside.parameters()))
    for step in range(4):
        with loop.run.no_sync(loop.model, optimizer):
            loop.loss(step).backward()
            loop.inside.blocks[1].requires_grad_(True)
            loop.loss(step + 10).backward()
        with loop.run.no_sync(loop.model, optimizer, step == 2):
            loop.loss(step + 20).backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def _clipped(loop: _Loop) -> Any:
    loop.inside.blocks[1].requires_grad_(False)
    optimizer = loop.shard(_adam(loop.inside.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        scaler.scale(loop.loss(step)).backward()
        if step == 1:
            loop.inside.blocks[1].requires_grad_(True)
        scaler.unscale_(optimizer)
        if loop.run.kind == "ddp":
            nn.utils.clip_grad_norm_(loop.inside.parameters(), 0.05)
        else:
            optimizer.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer


def _saved(loop: _Loop) -> Any:
    """Saved while parameters are frozen, loaded where they are, unfrozen, and saved again."""
    optimizer = _gradual(loop)
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box)
    again = _Loop(loop.run)
    again.inside.load_state_dict(loop.inside.state_dict())
    again.inside.blocks.requires_grad_(False)
    other = again.shard(_adam(again.inside.parameters()))
    other.load_state_dict(box[0])
    again.train(other, range(2))
    again.inside.requires_grad_(True)
    again.train(other, range(2, 5))
    loop.inside.load_state_dict(again.inside.state_dict())
    return other


def _second_phase(loop: _Loop) -> Any:
    """Another optimizer, made while gradients of the first one are there, and then a group."""
    first = [loop.shard(torch.optim.SGD(loop.inside.parameters(), lr=0.1))]
    loop.loss(0).backward()
    first.pop().step()
    loop.run.optimizers.clear()
    optimizer = loop.shard(_adam(loop.inside.head.parameters()))
    optimizer.add_param_group({"params": loop.inside.blocks.parameters()})
    loop.inside.zero_grad()
    loop.train(optimizer, range(1, 3))
    return optimizer


SCRIPTS: dict[str, Callable[[_Loop], Any]] = {
    "gradual": _gradual,
    "all frozen": _all_frozen,
    "added": _added,
    "adapters": _adapters,
    "by hand": _by_hand,
    "unfrozen in a list": _unfrozen_in_a_list,
    "accumulated": _accumulated,
    "clipped": _clipped,
    "saved": _saved,
    "second phase": _second_phase,
}


def _script(name: str, run: Run) -> None:
    """The script, and then the states: rank 0 keeps them beside the parameters."""
    optimizer = SCRIPTS[name](_Loop(run, name == "adapters"))
    if run.kind == "ddp" and name == "by hand":  # torch's raises for states of no group
        known = {id(p) for g in optimizer.param_groups for p in g["params"]}
        for param in [p for p in optimizer.state if id(p) not in known]:
            del optimizer.state[param]
    state = optimizer.state_dict()
    for _, entries in sorted(state["state"].items()):
        kept = [full_tensor(entries[key]) for key in ("step", "exp_avg", "exp_avg_sq")]
        run.kept += kept if run.rank == 0 else []


TABLE = Table(
    {name: functools.partial(_script, name) for name in SCRIPTS},
    refused={"adapters": "a parameter group cannot be added at stage 3 if its parameters are new"},
    as_torch=["by hand", "saved"],
    on_three=["added", "saved"],
)


@on_cases(TABLE.cases())
def test_the_parameters_of_ddp(rank: int, world: int, name: str) -> None:
    TABLE.check(rank, world, name)


@on_ranks(2)
def test_what_is_refused(rank: int, world: int) -> None:
    def fresh(**options: Any) -> tuple[_Net, Any]:
        model = _Net()
        model.blocks.requires_grad_(False)
        return model, zero.shard(model, _adam(model.head.parameters()), **options)

    model, optimizer = fresh()
    group = {"params": [model.head.weight]}
    plain = _adam(model.head.parameters())
    by_torch = error_of(lambda: plain.add_param_group({**group}))
    assert error_of(lambda: optimizer.add_param_group(group)) == by_torch
    other = nn.Parameter(torch.ones(3))
    check_error(lambda: optimizer.add_param_group({"params": [other]}), "not in the model")
    model.blocks[0].requires_grad_(rank == 0)
    more = {"params": list(model.blocks[0].parameters())}
    differ = "new parameters: the ranks differ"
    check_error(lambda: optimizer.add_param_group(more), differ)
    assert len(optimizer.param_groups) == 1
    model, optimizer = fresh()
    optimizer.param_groups[0]["params"].extend(model.blocks[0].parameters())
    model.blocks[0].requires_grad_(rank == 0)
    check_error(model(torch.ones(2, 40)).sum().backward, differ)


def test_a_parameter_that_is_taken_over_leaves_no_mark() -> None:
    """Else each later pass would reduce gradients of parameters without an optimizer."""
    stays, leaves = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    arrived: Any = []
    group: Any = None  # nothing is sent
    unowned = Unowned([stays, leaves], group, lambda: arrived.append(1))
    (stays * leaves).sum().backward()
    assert len(arrived) == 2
    unowned.leave([leaves])
    assert unowned.touched == {id(stays)}
    assert unowned.ids() == {id(stays)}
