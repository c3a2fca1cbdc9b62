"""The options of the fused optimizers beside torch's, and what their last step found."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # torch depends on it

from .checks import OPTIONS
from .masters import has_remainders, keeps_masters
from .param_shards import Shards
from .request import Formula, check_limit
from .state_kinds import AS_TORCH, StateKinds, kinds_by
from .wrapped import PassesOn

StateDtype = Literal["fp32", "bf16", "int8"]


class Arguments(TypedDict, total=False):
    """Those after `params`: torch's and seven of faststep, with their lines in docstrings.

    A type checker reads here how all of them are called and typed. It does not know which class
    takes which, what follows `params` by position, and the defaults.
    """

    lr: Annotated[float | Tensor, "(float or Tensor): learning rate."]
    betas: Annotated[
        tuple[float | Tensor, float | Tensor],
        "(tuple of two floats): decay of the first and the second moment.",
    ]
    eps: Annotated[float, "(float): added to the denominator."]
    weight_decay: Annotated[float | Tensor, "(float): L2 penalty."]
    decoupled_weight_decay: Annotated[bool, "(bool): decay as in AdamW, not as an L2 penalty."]
    amsgrad: Annotated[bool, "(bool): keep the largest second moment (Reddi et al. 2018)."]
    momentum: Annotated[float, "(float): decay of the momentum buffer; with 0 there is none."]
    dampening: float
    nesterov: bool
    momentum_decay: float
    rho: float
    alpha: float
    lambd: float
    t0: float
    centered: bool
    lr_decay: float
    initial_accumulator_value: float
    etas: tuple[float, float]
    step_sizes: tuple[float, float]
    maximize: Annotated[bool, "(bool): maximize instead of minimize."]
    foreach: Annotated[bool | None, "(bool, optional): changes nothing."]
    capturable: Annotated[bool, "(bool): as for torch."]
    differentiable: Annotated[bool, "(bool): as for torch, whose class then makes the step."]
    fused: Annotated[
        bool | None,
        "(bool, optional): changes only that torch.amp.GradScaler leaves unscaling to the step, "
        "as in torch.",
    ]
    max_grad_norm: Annotated[
        float | None,
        "(float, optional): clip all gradients by their global 2-norm inside the step, with the "
        "formula of :func:`torch.nn.utils.clip_grad_norm_`.",
    ]
    keep_grads: Annotated[
        bool,
        "(bool): with `max_grad_norm`, write the unscaled and clipped gradients back to `.grad`, "
        "which else stays as backward left it.",
    ]
    master_weights: Annotated[
        bool | Literal["fp32", "remainder16"],
        '(bool, "fp32" or "remainder16"): keep fp32 masters, as the state "master_weights", and '
        "fp32 states of bfloat16 and float16 parameters. The step updates the master, and the "
        "parameter is the master rounded to the nearest; where a script has written the parameter "
        'the step begins with it. True is "fp32". With "remainder16" a bfloat16 parameter has the '
        "other 16 bits of its master beside it, in int16; ValueError for a float16 parameter.",
    ]
    state_dtype: Annotated[
        StateDtype | Mapping[str, StateDtype | None] | None,
        '("fp32", "bf16", "int8" or None): the type of all states of a parameter\'s shape but '
        'masters, rounded to the nearest; "int8" is for Adam, AdamW, Lion and SGD. None is '
        "torch's, that of the parameter, and float32 beside masters. A dict has the types of "
        "single states by name; a group may have its own.",
    ]
    min_8bit_size: Annotated[
        int, '(int): with state_dtype="int8", states of fewer elements, and of one, are float32.'
    ]
    rounding: Annotated[
        Literal["nearest", "stochastic"],
        '("nearest" or "stochastic"): how states in bf16 are rounded; "stochastic" takes either '
        "neighbour, so that the mean is right.",
    ]
    rounding_seed: Annotated[
        int, "(int): of the random bits, which differ by parameter, element and step too."
    ]


class ClippedOptimizer(PassesOn, torch.optim.Optimizer):
    """The options, and the norm that the last step found. Masters are masters.py's."""

    # Class attributes stand in where pickle and deepcopy restore an optimizer without __init__.
    _max_grad_norm: float | None = None
    _keep_grads: bool = False
    _last_norm: float | Tensor | None = None
    _skipped: bool | Tensor = False
    _keeps_masters: bool = False  # of bf16 and fp16 parameters: see masters.py
    _has_remainders: bool = False  # which are remainders
    _kinds: StateKinds = AS_TORCH  # of states in groups without options of their own
    _shards: Shards | None = None  # of the slices of faststep.zero
    _divided_shards: tuple[list[Tensor], list[Any], Shards] | None = None  # of DTensors

    # Names of 0-d states beside `step`, and whether torch keeps both on the parameter's device.
    _numbers: ClassVar[tuple[str, ...]] = ()
    _counts_on_device: ClassVar[bool] = False

    # The states that a class can keep in codes of 8 bits, in the rule's order: int8 with signs,
    # uint8 without.
    _code_dtypes: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType({})

    def __init__(self, params: ParamsT, *args: Any, **arguments: Unpack[Arguments]) -> None:
        torchs: dict[str, Any] = {**arguments}
        self._set_options(**{name: torchs.pop(name) for name in OPTIONS if name in torchs})
        super().__init__(params, *args, **torchs)

    def _set_options(
        self,
        max_grad_norm: float | None = None,
        keep_grads: bool = False,
        master_weights: bool | Literal["fp32", "remainder16"] = False,
        state_dtype: StateDtype | Mapping[str, StateDtype | None] | None = None,
        min_8bit_size: int = 4096,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        rounding_seed: int = 0,
    ) -> None:
        check_limit("max_grad_norm", max_grad_norm)
        self._max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self._keep_grads = bool(keep_grads)
        self._keeps_masters = keeps_masters(master_weights)
        self._has_remainders = has_remainders(master_weights)
        if rounding is None:
            raise ValueError('rounding must be "nearest" or "stochastic", not None')
        numbers = StateKinds(smallest=min_8bit_size, seed=rounding_seed)
        asked = {"state_dtype": state_dtype, "rounding": rounding}
        self._kinds = kinds_by(type(self), numbers, **asked)

    @classmethod
    @functools.cache
    def _state_names(cls) -> tuple[str, ...]:
        """The states of a parameter's shape that the class may have."""
        parts = [value for kind in cls.__mro__ for value in vars(kind).values()]
        parts += [value for part in parts if isinstance(part, dict) for value in part.values()]
        names = [key for one in parts if isinstance(one, Formula) for key in one.state_keys]
        return tuple(name for name in dict.fromkeys(names) if name not in ("step", *cls._numbers))

    @property
    def max_grad_norm(self) -> float | None:
        """The global 2-norm to which every step clips the gradients; None, or may be set."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, limit: float | None) -> None:
        self._max_grad_norm = limit

    @property
    def keep_grads(self) -> bool:
        """True if a step that clips writes unscaled and clipped gradients back; may be set."""
        return self._keep_grads

    @keep_grads.setter
    def keep_grads(self, kept: bool) -> None:
        self._keep_grads = kept

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global 2-norm of the unscaled gradients before clipping, from the last step.

        A 0-d float32 tensor; None before the first step that measured (one with `max_grad_norm`, or
        under :class:`faststep.amp.GradScaler`), NaN after a step that did not measure because it
        was skipped. For CUDA parameters it lies on their device; nothing waits for that.
        """
        if isinstance(self._last_norm, Tensor):
            return self._last_norm.to(torch.float32, copy=True)
        if self._last_norm is None:
            return None
        return torch.tensor(self._last_norm, dtype=torch.float32, device="cpu")

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step left everything as it was because a gradient was not finite.

        torch.amp.GradScaler does not call the step then, unless the optimizer is `fused=True` or
        clips. For CUDA parameters this waits for the device.
        """
        if isinstance(self._skipped, Tensor):
            return bool(self._skipped.item() != 0.0)  # not kept: a graph may be replayed
        return self._skipped
