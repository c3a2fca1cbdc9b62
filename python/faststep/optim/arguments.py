"""Arguments of the optimizers: torch's and three of faststep, with their types and docstrings.

At import `composed` gives a class the signature of torch's class, as the torch that is installed
has it, and a docstring that explains each argument. A type checker does not run this. It reads from
`Arguments` how all of them are called and typed. It does not know which class takes which, what
follows `params` by position, and the defaults.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_type_hints

from torch import Tensor
from torch.optim import Optimizer

from .clipping import ClippedOptimizer

__all__ = ["Arguments", "composed"]

_Class = TypeVar("_Class", bound=type[Optimizer])


class Arguments(TypedDict, total=False):
    """Those after `params`, with their lines in a docstring, where a class has none of its own."""

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
        "(float, optional): clip all gradients by their global 2-norm inside the step.",
    ]
    keep_grads: Annotated[
        bool, "(bool): with `max_grad_norm`, write unscaled and clipped gradients back."
    ]
    master_weights: Annotated[
        bool | Literal["fp32"],
        '(bool or "fp32"): keep fp32 masters, and fp32 states, of bfloat16 and float16 parameters. '
        'True is "fp32".',
    ]


_HINTS = get_type_hints(Arguments, include_extras=True)
_TYPES = get_type_hints(Arguments)
_INIT: Any = ClippedOptimizer.__init__
_, *_SET = inspect.signature(ClippedOptimizer._set_options).parameters.values()
_OPTIONS = [p.replace(kind=p.KEYWORD_ONLY, annotation=_TYPES[p.name]) for p in _SET]
_LIKE_TORCHS = """
Arguments, defaults, `param_groups`, `state` and errors are torch's. The last three arguments are
faststep's. Parameters: CPU or CUDA tensors in float32, float64, bfloat16 or float16.
"""


def composed(kind: _Class) -> _Class:
    """Give a class torch's signature, and a docstring with an entry of each argument.

    The signature is that of torch's class among its bases, and has the options of faststep after
    that. Where torch has no such class, it stays that of its own constructor. The docstring may end
    with entries of the class's own.
    """
    torchs: Any = next(base for base in kind.__mro__ if base.__module__.startswith("torch.optim."))
    if torchs is not Optimizer:
        init: Any = vars(kind).get("__init__") or _renamed(kind)
        shown = inspect.signature(torchs.__init__)
        shown = shown.replace(parameters=[*shown.parameters.values(), *_OPTIONS])
        init.__signature__ = shown
        ours = {p.name: p.annotation for p in _OPTIONS}
        init.__annotations__ = {**torchs.__init__.__annotations__, **ours}
        kind.__init__ = init  # type: ignore[method-assign]
    if kind.__doc__:  # there is none under -OO
        shared = "" if torchs is Optimizer else _LIKE_TORCHS
        arguments = [*inspect.signature(kind).parameters.values()][1:]
        kind.__doc__ = _docstring(inspect.cleandoc(kind.__doc__), shared, arguments)
    return kind


def _renamed(kind: type) -> Any:
    """A copy of the options' constructor, whose errors name the class."""
    code, names, cells = _INIT.__code__, _INIT.__globals__, _INIT.__closure__
    init = types.FunctionType(code, names, "__init__", None, cells)
    init.__module__, init.__qualname__ = kind.__module__, f"{kind.__qualname__}.__init__"
    return init


def _docstring(text: str, shared: str, parameters: list[inspect.Parameter]) -> str:
    text, _, entries = text.partition("\n\nArgs:\n")
    own = dict(re.findall(r"^    (\w+) (\(.*(?:\n {8}.*)*)", entries, re.MULTILINE))
    lines = ["    params (iterable): as for torch."]
    for parameter in parameters:
        name = parameter.name
        meaning = own.get(name) or getattr(_HINTS.get(name), "__metadata__", ["as for torch."])[0]
        entry = f"{name} {meaning} Default: {parameter.default!r}."
        lines += textwrap.wrap(entry, 96, initial_indent="    ", subsequent_indent="        ")
    return "\n".join([text, shared, "Args:", *lines]) + "\n"
