"""Models whose gradients are given, and what one process does with the mean over the ranks."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import faststep
from faststep import zero

NUMBERS = ("step", "eta", "mu", "mu_product")  # states that no element has alone
SHAPES = [(300, 70), (70,), (), (0, 4), (33000,), (5, 4, 3, 3), (16384,), (40, 50), (3,)]


class Given(nn.Module):
    """Parameters with a loss whose gradients are what the test wants."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(7)
        for number, shape in enumerate(shapes):
            value = torch.randn(shape, generator=made).to(dtypes[number % len(dtypes)])
            if len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            self.register_parameter(f"p{number}", nn.Parameter(value))

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        total = torch.zeros(())
        for param, grad in zip(self.parameters(), grads, strict=True):
            if grad is not None:
                total = total + (param * grad).sum().float()
        return total


class Place(NamedTuple):
    """Where a model lies, and how its steps are made there: in host memory, or as said here."""

    moved: Callable[[Any], Any] = lambda model: model
    claimed: Callable[[Tensor], Tensor] = lambda scalar: scalar
    backward: Callable[[Tensor], object] = Tensor.backward
    without_waiting: Callable[[bool], AbstractContextManager[None]] = contextlib.nullcontext


HOST = Place()


def grads_for(model: nn.Module, *seed: int, scale: float = 1.0) -> list[Tensor]:
    """Gradients of one rank in one step."""
    params = list(model.parameters())
    drawn = _drawn(tuple(p.shape for p in params), seed)
    return [(d * scale).to(p.dtype).to(p.device) for d, p in zip(drawn, params, strict=True)]


@functools.lru_cache(16)  # runs that are compared have the same
def _drawn(shapes: tuple[torch.Size, ...], seed: tuple[int, ...]) -> list[Tensor]:
    made = torch.Generator().manual_seed(hash(seed) % 2**31)
    return [torch.randn(shape, generator=made) for shape in shapes]


def mean_of(parts: Sequence[Tensor | None], nodes: int = 1) -> Tensor | None:
    """The mean over ranks in the order in which they add up; None where no rank has a gradient.

    With several nodes their ranks add up first, and then the nodes.
    """
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    rows = [torch.zeros_like(some) if part is None else part * (1.0 / len(parts)) for part in parts]
    size = len(rows) // nodes
    return _sum([_sum(rows[first : first + size]) for first in range(0, len(rows), size)])


def _sum(rows: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(rows[0])
    wide = torch.float64 if total.dtype == torch.float64 else torch.float32
    for first in range(0, len(rows), 2):
        two = [row.to(wide) for row in rows[first : first + 2]]
        exact = two[0] if first == 0 else total.to(wide) + two[0]
        total = (exact + two[1] if len(two) == 2 else exact).to(total.dtype)
    return total


def differences(one: Iterable[Tensor], other: Iterable[Tensor]) -> list[int]:
    """The places where tensors are not equal bit for bit."""
    pairs = enumerate(zip(one, other, strict=True))
    return [place for place, (a, b) in pairs if not torch.equal(a, b)]


def states_differ(sharded: zero.ShardedOptimizer, whole: torch.optim.Optimizer) -> list[str]:
    """What differs between this rank's states and those of a process that has all of them."""
    engine = sharded._engine
    if engine is None:
        return [
            f"{number} {key}"
            for number, (p, q) in enumerate(zip(_params(sharded), _params(whole), strict=True))
            for key, value in whole.state[q].items()
            if not torch.equal(sharded.state[p][key], value)
        ]
    of = dict(zip(map(id, _params(sharded)), _params(whole), strict=True))
    wrong = []
    for slot in engine.slots:
        state = whole.state.get(of[id(slot.param)], {})
        if slot.part is None:
            continue
        mine = sharded.state.get(slot.part.values, {})
        if mine.keys() != state.keys():
            wrong.append(f"{slot.name} has {list(mine)}, not {list(state)}")
            continue
        for key, value in state.items():
            if not torch.equal(mine[key], value if key in NUMBERS else slot.cut(value)):
                wrong.append(f"{slot.name} {key}")
    return wrong


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def optimizer_of(name: str, params: Any) -> torch.optim.Optimizer:
    """An optimizer of faststep by the name of its options."""
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "AdamW": lambda: faststep.optim.AdamW(params, lr=0.01),
        "Adam": lambda: faststep.optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
        "SGD": lambda: faststep.optim.SGD(params, lr=0.1),
        "momentum": lambda: faststep.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
        "Lion": lambda: faststep.optim.Lion(params, lr=0.01),
        "int8": lambda: faststep.optim.AdamW(
            params, lr=0.01, betas=(0.9, 0.95), state_dtype="int8", min_8bit_size=1
        ),
        "torch AdamW": lambda: torch.optim.AdamW(params, lr=0.01),
        "torch SGD": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        **{f"torch {some}": lambda some=some: _other(torch.optim, some, params) for some in OTHERS},
        **{some: lambda some=some: _other(faststep.optim, some, params) for some in OTHERS},
    }
    return made[name]()


OTHERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "maximize": True},
    "Adamax": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "foreach": True},
    "ASGD": {"lr": 0.1, "lambd": 0.01, "alpha": 0.5, "t0": 2, "weight_decay": 0.1},
    "NAdam": {
        "lr": 0.01,
        "momentum_decay": 0.1,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    },
    "RAdam": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True, "eps": 0.1},
    "Rprop": {"lr": 0.01, "etas": (0.4, 1.1), "step_sizes": (1e-4, 0.1)},
}


def _other(module: Any, name: str, params: Any) -> Any:
    return getattr(module, name)(params, **OTHERS[name])


def check_error(work: Callable[[], object], text: str) -> None:
    """A call raises this, in words, or with it in them."""
    said = error_of(work)
    assert text in said, said


def error_of(work: Callable[[], object]) -> str:
    """What a call raises, in words."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
