"""One declaration per optimizer; every test that runs over optimizers reads this table."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import faststep.optim

from . import references
from .common import TOLERANCE


@dataclass(frozen=True, eq=False)
class Declaration:
    """What the runner must know of one optimizer.

    kwargs are the hyper-parameters of the full cross product, other those of a second group,
    variants the further settings that one smaller product goes through.  flags maps a key of
    the state that exists only under an option to that option.  errors are arguments of this class
    that it refuses.  terms is the size of what its states are sums of.  numbers are keys of 0-d
    states beside step, which torch casts to the parameter's dtype when it loads them.  tolerance
    is that of several steps against torch's.
    """

    ours: type[torch.optim.Optimizer]
    torchs: type[torch.optim.Optimizer] | None
    reference: Callable[..., tuple[torch.Tensor, dict[str, Any]]]
    state: tuple[str, ...]
    kwargs: dict[str, Any]
    other: dict[str, Any]
    flags: dict[str, str] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    terms: float = 1.0
    numbers: tuple[str, ...] = ()
    tolerance: dict[torch.dtype, Any] = field(default_factory=lambda: TOLERANCE)

    @property
    def name(self) -> str:
        return self.ours.__name__

    def takes(self, argument: str) -> bool:
        """Whether torch's class has this argument."""
        return argument in inspect.signature((self.torchs or self.ours).__init__).parameters

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Keys of the state tensors shaped like the parameter, for these hyper-parameters."""
        conditional = tuple(key for key, flag in self.flags.items() if group[flag])
        counts = ("step", *self.numbers)
        return tuple(key for key in self.state if key not in counts) + conditional


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

ADAGRAD = Declaration(
    ours=faststep.optim.Adagrad,
    torchs=torch.optim.Adagrad,
    reference=references.adagrad,
    state=("step", "sum"),
    kwargs={"lr": 1e-2, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    other={"lr": 3e-2, "lr_decay": 0.5, "weight_decay": 0.0, "eps": 1e-3},
    variants={
        "plain": {"lr": 1e-2},
        "lr_decay": {"lr_decay": 0.3, "weight_decay": 0.2},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    },
    errors={
        "lr_decay_negative": {"lr_decay": -0.1},
        "initial_accumulator_value_negative": {"initial_accumulator_value": -1.0},
        "eps_negative": {"eps": -1.0},
        "foreach_and_fused": {"foreach": True, "fused": True},
    },
)

RMSPROP = Declaration(
    ours=faststep.optim.RMSprop,
    torchs=torch.optim.RMSprop,
    reference=references.rmsprop,
    state=("step", "square_avg"),
    flags={"momentum_buffer": "momentum", "grad_avg": "centered"},
    kwargs={"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9, "centered": True, "alpha": 0.9},
    terms=10.0,  # g / sqrt(0.01 * g * g)
    other={"lr": 3e-3, "alpha": 0.95, "eps": 1e-3, "momentum": 0.0, "centered": False},
    variants={
        "plain": {"lr": 1e-3},
        "momentum": {"lr": 1e-3, "momentum": 0.5},
        "centered": {"lr": 1e-3, "centered": True, "eps": 1e-4},
        "tensor_lr": {"lr": torch.tensor(1e-3, dtype=torch.float64)},
    },
    errors={
        "momentum_negative": {"momentum": -0.5},
        "alpha_negative": {"alpha": -0.5},
        "eps_negative": {"eps": -1.0},
    },
)

ADAMAX = Declaration(
    ours=faststep.optim.Adamax,
    torchs=torch.optim.Adamax,
    reference=references.adamax,
    state=("step", "exp_avg", "exp_inf"),
    kwargs={"lr": 1e-2, "weight_decay": 0.1},
    other={"lr": 3e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    variants={
        "plain": {},
        "betas_zero": {"betas": (0.0, 0.0)},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    },
    errors={
        "beta1_one": {"betas": (1.0, 0.9)},
        "beta2_negative": {"betas": (0.9, -0.1)},
        "eps_negative": {"eps": -1.0},
    },
)

ADADELTA = Declaration(
    ours=faststep.optim.Adadelta,
    torchs=torch.optim.Adadelta,
    reference=references.adadelta,
    state=("step", "square_avg", "acc_delta"),
    kwargs={"lr": 0.5, "weight_decay": 0.1},
    other={"lr": 1.0, "rho": 0.5, "eps": 1e-3, "weight_decay": 0.0},
    variants={
        "plain": {},
        "rho_zero": {"rho": 0.0},
        "tensor_lr": {"lr": torch.tensor(0.5, dtype=torch.float64)},
    },
    errors={"rho_above_one": {"rho": 1.1}, "eps_negative": {"eps": -1.0}},
)

RADAM = Declaration(
    ours=faststep.optim.RAdam,
    torchs=torch.optim.RAdam,
    reference=references.radam,
    state=("step", "exp_avg", "exp_avg_sq"),
    kwargs={"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True},
    other={"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": False},
    variants={
        "plain": {},
        "decay": {"weight_decay": 0.2},
        "betas_zero": {"betas": (0.0, 0.0)},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    },
    errors={
        "beta1_one": {"betas": (1.0, 0.9)},
        "beta2_negative": {"betas": (0.9, -0.1)},
        "eps_negative": {"eps": -1.0},
    },
)

RPROP = Declaration(
    ours=faststep.optim.Rprop,
    torchs=torch.optim.Rprop,
    reference=references.rprop,
    state=("step", "prev", "step_size"),
    kwargs={"lr": 2.0**-7},  # the first state in every dtype
    other={"lr": 2.0**-8, "etas": (0.25, 2.0), "step_sizes": (2.0**-9, 2.0**-6)},
    variants={
        "etas": {"lr": 2.0**-7, "etas": (0.25, 1.5)},
        "clamped": {"lr": 2.0**-7, "step_sizes": (2.0**-8, 2.0**-6)},
        "tensor_lr": {"lr": torch.tensor(2.0**-7, dtype=torch.float64)},
    },
    errors={"etas_above_one": {"etas": (1.1, 1.2)}, "etas_zero": {"etas": (0.0, 1.2)}},
)

NADAM = Declaration(
    ours=faststep.optim.NAdam,
    torchs=torch.optim.NAdam,
    reference=references.nadam,
    state=("step", "mu_product", "exp_avg", "exp_avg_sq"),
    numbers=("mu_product",),
    kwargs={"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    other={"lr": 3e-3, "betas": (0.5, 0.9), "momentum_decay": 0.3, "decoupled_weight_decay": False},
    variants={
        "plain": {"lr": 1e-2},
        "decay": {"weight_decay": 0.2, "eps": 1e-3},
        "betas_zero": {"betas": (0.0, 0.0)},
        "whole_powers": {"momentum_decay": 1.0},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    },
    errors={
        "beta1_one": {"betas": (1.0, 0.9)},
        "beta2_negative": {"betas": (0.9, -0.1)},
        "eps_negative": {"eps": -1.0},
        "momentum_decay_negative": {"momentum_decay": -1.0},
    },
)

ASGD = Declaration(
    ours=faststep.optim.ASGD,
    torchs=torch.optim.ASGD,
    reference=references.asgd,
    state=("step", "eta", "mu", "ax"),
    numbers=("eta", "mu"),
    tolerance={  # with foreach torch computes eta in fp32, and it rounds a bf16 parameter twice
        **TOLERANCE,
        torch.float64: TOLERANCE[torch.float32],
        torch.bfloat16: {"rtol": 2.4e-2, "atol": 5e-3},
    },
    kwargs={"lr": 1e-2, "lambd": 0.5, "t0": 0.5, "weight_decay": 0.1},
    other={"lr": 3e-2, "alpha": 0.5, "t0": 1e6, "weight_decay": 0.0},
    variants={
        "plain": {"lr": 1e-2},
        "averages": {"lr": 0.1, "lambd": 0.3, "alpha": 1.5, "t0": -1.0},
        "whole_power": {"alpha": 1.0, "lambd": 0.3},
        "tensor_lr": {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    },
)

# Those that take every test. What the others share with them is not tested again for each.
ALL = (ADAMW, ADAM, SGD, LION)
TORCHS = (ADAMW, ADAM, SGD)

# Those that take the tests of what a rule computes, and of what torch's class has.
OTHERS = (ADAGRAD, RMSPROP, ADAMAX, ADADELTA, RADAM, RPROP, NADAM, ASGD)
