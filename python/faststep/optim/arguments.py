"""Signatures and docstrings of the optimizers, made at import.

`composed` gives a class the signature of torch's class, as the torch that is installed has it, and
a docstring that explains each argument. A type checker does not run this: it reads `Arguments`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from typing import Any, TypeVar, get_type_hints

from torch.optim import Optimizer

from .step_options import Arguments, ClippedOptimizer

_Class = TypeVar("_Class", bound=type[Optimizer])


_HINTS = get_type_hints(Arguments, include_extras=True)
_TYPES = get_type_hints(Arguments)
_INIT: Any = ClippedOptimizer.__init__
_, *_SET = inspect.signature(ClippedOptimizer._set_options).parameters.values()
_OPTIONS = [p.replace(kind=p.KEYWORD_ONLY, annotation=_TYPES[p.name]) for p in _SET]
_LIKE_TORCHS = """
Arguments, defaults, `param_groups`, `state` and errors are torch's. The last seven arguments are
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
