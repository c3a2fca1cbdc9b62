"""One declaration per optimizer; every test that runs over optimizers reads this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import faststep.optim

from . import references


@dataclass(frozen=True, eq=False)
class Declaration:
    """What the runner must know of one optimizer.

    kwargs are the hyper-parameters of the full cross product, other those of a second group,
    variants the further settings that one smaller product goes through.  flags maps a key of
    the state that exists only under an option to that option.
    """

    ours: type[torch.optim.Optimizer]
    torchs: type[torch.optim.Optimizer] | None
    reference: Callable[..., tuple[torch.Tensor, dict[str, Any]]]
    state: tuple[str, ...]
    kwargs: dict[str, Any]
    other: dict[str, Any]
    flags: dict[str, str] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.ours.__name__

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Keys of the state tensors shaped like the parameter, for these hyper-parameters."""
        conditional = tuple(key for key, flag in self.flags.items() if group[flag])
        return tuple(key for key in self.state if key != "step") + conditional


ADAMW = Declaration(
    ours=faststep.optim.AdamW,
    torchs=torch.optim.AdamW,
    reference=references.adam,
    state=("step", "exp_avg", "exp_avg_sq"),
    flags={"max_exp_avg_sq": "amsgrad"},
    kwargs={"lr": 1e-2, "weight_decay": 0.1},
    other={"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0, "amsgrad": True},
    variants={
        "amsgrad": {"amsgrad": True},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
        "tensor_betas": {"betas": tuple(torch.tensor([0.9, 0.99], dtype=torch.float64))},
        "betas_zero": {"betas": (0.0, 0.0)},
        "eps_large": {"eps": 0.5},
        "lr_zero": {"lr": 0.0},
    },
)

ADAM = Declaration(
    ours=faststep.optim.Adam,
    torchs=torch.optim.Adam,
    reference=references.adam,
    state=("step", "exp_avg", "exp_avg_sq"),
    flags={"max_exp_avg_sq": "amsgrad"},
    kwargs={"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    other={"lr": 3e-3, "betas": (0.5, 0.9), "weight_decay": 0.0, "amsgrad": False},
    variants={
        "plain": {},
        "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.2},
        "tensor_lr": {"lr": torch.tensor([1e-2], dtype=torch.float64)},
    },
)

SGD = Declaration(
    ours=faststep.optim.SGD,
    torchs=torch.optim.SGD,
    reference=references.sgd,
    state=(),
    flags={"momentum_buffer": "momentum"},
    kwargs={"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    other={"lr": 3e-2, "momentum": 0.0, "weight_decay": 0.0},
    variants={
        "plain": {},
        "weight_decay": {"weight_decay": 0.5},
        "momentum": {"momentum": 0.5},
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "dampening_one": {"momentum": 0.9, "dampening": 1.0},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64), "momentum": 0.9},
    },
)

LION = Declaration(
    ours=faststep.optim.Lion,
    torchs=None,
    reference=references.lion,
    state=("exp_avg",),
    kwargs={"lr": 1e-2, "weight_decay": 0.1},
    other={"lr": 3e-3, "betas": (0.5, 0.9), "weight_decay": 0.0},
    variants={
        "plain": {},
        "betas_zero": {"betas": (0.0, 0.0)},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    },
)

ALL = (ADAMW, ADAM, SGD, LION)
TORCHS = (ADAMW, ADAM, SGD)
