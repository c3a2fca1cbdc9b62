"""What a script can observe, as values that JSON holds."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What the rounding of fused kernels may change.
TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2, "float64": 1e-6, "complex64": 1e-4}
# Of a tensor's largest element: what is small beside it may be a difference of such, each rounded
# as a CPU sums them.
SMALL = 0.1
LEAST_NORMAL = {"float16": 2**-14}  # numbers below it are equally far apart


class Library(NamedTuple):
    """The names that a script imports: torch's, or faststep's in their place."""

    optim: Any
    GradScaler: Any
    clip: Any  # clip_grad_norm_ and its like
    DataLoader: Any


class Watch:
    """Notes what happens in a script, in order.

    Attributes:
        events: name and value of each.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __call__(self, name: str, value: Any = None) -> None:
        """Note a value as it is now."""
        self.events.append((name, frozen(value)))

    def model(self, name: str, module: torch.nn.Module) -> None:
        """Note parameters and gradients of a module."""
        self(name, [(p, p.grad) for p in module.parameters()])

    def states(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer's state dict, with the types of what it holds."""
        self(name, optimizer.state_dict())

    def error(self, name: str, call: Callable[[], Any]) -> Any:
        """Note what a call raises, or what it returns, which is returned."""
        try:
            result = call()
        except Exception as error:
            self(name, [f"{type(one).__name__}: {one}" for one in shown(error)])
            return None
        self(name, result)
        return result

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Note warnings among the other events."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, category, *_, **__: self(
                "warning", f"{category.__name__}: {message}"
            )
            yield


def shown(error: BaseException | None) -> Iterator[BaseException]:
    """The errors that a traceback has, the last one first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def frozen(value: Any) -> Any:
    """A value in lists, dictionaries, numbers and strings."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        whole = value.detach().to_dense() if value.is_sparse else value.detach()
        flat = torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
        layout = str(value.layout).removeprefix("torch.")
        return {"tensor": [kind, layout, list(value.shape), flat.double().flatten().tolist()]}
    if isinstance(value, Mapping):
        return {"mapping": [[frozen(key), frozen(value[key])] for key in value]}
    if isinstance(value, (list, tuple)):
        return [frozen(some) for some in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"<{type(value).__name__}>"


def differences(
    theirs: Any, ours: Any, where: str = "", tolerance: float = 1e-4, least: float = 1e-3
) -> Iterator[str]:
    """Where two frozen values differ by more than fused kernels round."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key, value in theirs.items():
            if key == "tensor":
                tolerance = TOLERANCE.get(value[0], tolerance)
                largest = max(filter(math.isfinite, map(abs, value[3])), default=0.0)
                least = max(SMALL * largest, LEAST_NORMAL.get(value[0], 0.0))
            yield from differences(value, ours[key], where, tolerance, least)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for at, (mine, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(mine, other, f"{where}[{at}]", tolerance, least)
    elif type(theirs) is float and type(ours) is float:
        near = abs(theirs - ours) <= tolerance * max(least, abs(theirs))
        if not (near or theirs == ours or (theirs != theirs and ours != ours)):
            yield f"{where}: {theirs} with torch, {ours} with faststep"
    elif type(theirs) is not type(ours) or theirs != ours:
        yield f"{where}: {theirs!r} with torch, {ours!r} with faststep"
