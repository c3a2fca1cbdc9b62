"""gather="forward": what a forward waits for, and when."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from faststep import zero
from ranks import on_ranks

from .common import differences


class _Net(nn.Module):
    """Attention uses the weight of a child that it does not call; the last layer is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)
        )
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.never = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.linear(x, self.embedding.weight)


def _train(rank: int, gather: Any, log: list[Any] | None) -> tuple[nn.Module, list[float], Any]:
    torch.manual_seed(1)
    model = _Net()
    optimizer = zero.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=1 / 1024, gather=gather
    )
    losses = []
    for step in range(5):
        tokens = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(step + 9 * rank))
        if step == 3 and log is not None:
            _record(model, optimizer._engine, log)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, optimizer


def _record(model: nn.Module, engine: Any, log: list[Any]) -> None:
    """Log each wait by the names of its parameters, and each module whose forward begins."""
    for number, pending in engine._under_way.items():
        names = [slot.name for slot in engine.buckets[number].slots]

        def wait(inner: Callable[[], None] = pending.wait, names: list[str] = names) -> None:
            log.append(names)
            inner()

        pending.wait = wait
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: log.append(name))


@on_ranks(2)
def test_each_module_waits_for_what_it_uses(rank: int, world: int) -> None:
    log: list[Any] = []
    model, losses, optimizer = _train(rank, "forward", log)
    under_way = len(optimizer._engine._under_way)
    saved = model.state_dict()
    left = len(optimizer._engine._under_way)
    other, expected, _ = _train(rank, "step", None)
    assert losses == expected
    assert differences(saved.values(), other.state_dict().values()) == []
    assert under_way > 3
    assert left == 0
    begun = [entry for entry in log if isinstance(entry, str)]
    assert begun[:3] == ["", "embedding", "blocks.0"]
    for at, entry in enumerate(log):
        if isinstance(entry, list):
            # By the hook before a forward, or inside of one.
            following = [one for one in log[at:] if isinstance(one, str)][:1]
            near = [*following, [one for one in log[:at] if isinstance(one, str)][-1]]
            users = {name.rsplit(".", 1)[0] for name in entry}
            assert any(user.startswith(one) for one in near if one for user in users), entry
    waited = {name: at for at, entry in enumerate(log) if isinstance(entry, list) for name in entry}
    assert waited["attention.out_proj.weight"] > log.index("blocks.2")
    assert waited["attention.in_proj_weight"] > log.index("blocks.2")
    assert waited["blocks.1.0.weight"] > log.index("blocks.0.2")


def _read(model: nn.Module, how: str) -> Any:
    """Values of parameters, read in one of the ways of torch."""
    module: Any = model
    if how == "named_parameters":
        found = [p.detach().clone() for _, p in model.named_parameters()]
    elif how == "attribute":
        found = [module.blocks[2][0].weight.detach().clone(), module.attention.in_proj_weight * 1]
    elif how == "deepcopy":
        found = list(copy.deepcopy(model).parameters())
    elif how == "pickle":
        found = list(pickle.loads(pickle.dumps(module.never._parameters)).values())
    elif how == "dict":
        found = [
            p * 1
            for one in model.modules()
            for p in dict(one._parameters).values()
            if p is not None
        ]
    elif how == "get_parameter":
        found = [model.get_parameter("blocks.1.2.bias") * 1]
    elif how == "average":
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        found = list(average.parameters())
    else:
        tokens = torch.arange(8)[None]
        found = [torch.func.functional_call(model, {"never.bias": torch.ones(2)}, tokens)]
    return [one.detach() for one in found]


READS = (
    "named_parameters", "attribute", "deepcopy", "pickle", "dict", "get_parameter", "average",
    "functional_call",
)  # fmt: skip


@on_ranks(2)
def test_reading_through_the_modules_waits(rank: int, world: int) -> None:
    """Right after a step whose messages come late, beside gather="step"."""
    plain = {name: getattr(dist, name) for name in ("isend", "irecv")}
    for how in READS:
        values = []
        for gather in ("step", "forward"):
            model, _, optimizer = _train(rank, gather, None)
            optimizer.wait()
            model(torch.arange(8)[None]).square().sum().backward()
            dist.isend, dist.irecv = plain["isend"], _late(plain["irecv"])
            optimizer.step()
            under_way = len(optimizer._engine._under_way)
            values.append(_read(model, how))
            dist.irecv = plain["irecv"]
            assert (under_way > 3) == (gather == "forward")
            optimizer.wait()
            dicts = [type(vars(one)["_parameters"]) for one in model.modules()]
            assert dicts == [dict] * len(dicts)
        assert differences(values[0], values[1]) == [], how


def _late(receive: Any) -> Any:
    """Puts what arrives where it belongs only when it is waited for."""

    def irecv(tensor: Tensor, *args: Any) -> Any:
        apart = torch.empty_like(tensor)
        work = receive(apart, *args)
        return _Late(work, tensor, apart)

    return irecv


class _Late:
    def __init__(self, work: Any, tensor: Tensor, apart: Tensor) -> None:
        self._all = work, tensor, apart

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        work, tensor, apart = self._all
        work.wait()
        tensor.data.copy_(apart)


@on_ranks(2)
def test_changes_of_a_module_meanwhile_stay(rank: int, world: int) -> None:
    """What is put into a module meanwhile stays there."""
    model, _, optimizer = _train(rank, "forward", None)
    module: Any = model
    new = nn.Parameter(torch.ones(2))
    module.never.bias = new
    module.never.register_parameter("more", nn.Parameter(torch.ones(1)))
    del module.never.weight
    optimizer.wait()
    kept = dict(model.never.named_parameters())
    assert list(kept) == ["bias", "more"]
    assert kept["bias"] is new
