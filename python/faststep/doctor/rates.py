"""The most that a machine does in a second, and how much of a step its matrix products need."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from .._torch.modes import TorchDispatchMode

COPIED = 64 << 20  # bytes
SECONDS = 0.05  # of one measurement
LARGEST = 3  # shapes that are measured
Shape = tuple[int, int, int]  # rows, columns that are summed over, columns


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of matrix products and convolutions while it is entered.

    Attributes:
        operations: by the shape of the product; that of a convolution is the one it amounts to.
        convolutions: the part of them that convolutions are.
        devices: where so many of them were done.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[Shape] = Counter()
        self.convolutions = 0
        self.devices: Counter[torch.device] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator, and count what it did."""
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet.__name__.startswith("mkldnn_rnn_layer"):
            count: Any = _recurrent
        else:
            count = flop_registry.get(packet)
        if count is not None:
            done = count(*args, **(kwargs or {}), out_val=result)
            self.operations[_shape(packet.__name__, args, result)] += int(done)
            self.devices[_first(result).device] += int(done)
            if packet.__name__.startswith("convolution"):
                self.convolutions += int(done)
        return result


def _first(result: Any) -> torch.Tensor:
    """The tensor, or the first of several, of which the others may be None."""
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return next(one for one in tensors if isinstance(one, torch.Tensor))


def _recurrent(text: Any, of_input: Any, of_state: Any, *others: Any, out_val: Any) -> int:
    """The operations of one layer of oneDNN; its backward has further results, and two products."""
    places, weights = math.prod(text.shape[:2]), of_input.numel() + of_state.numel()
    return int((4 if len(out_val) > 4 else 2) * places * weights)


def _shape(name: str, args: Any, result: Any) -> Shape:
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    if name.startswith("convolution"):
        made = tensors[0] if name == "convolution_backward" else result
        weight = tensors[2] if name == "convolution_backward" else tensors[1]
        places = made.shape[0] * math.prod(made.shape[2:])
        return places, math.prod(weight.shape[1:]), weight.shape[0]
    if name.startswith("mkldnn_rnn_layer"):
        return math.prod(tensors[0].shape[:2]), tensors[0].shape[-1], tensors[1].shape[0]
    if "attention" in name:
        length, size = tensors[0].shape[-2:]
        return length, size, length
    first, second = tensors[-2:]
    return first.shape[-2], first.shape[-1], second.shape[-1]


def measured(products: Products) -> dict[str, float]:
    """The rates of the device that does most of the products, for a step that does so much.

    Returns:
        `copy` in bytes per second; `operations` of a step, and `convolutions`, a part of them;
        `fp32` and `bf16`, in operations per second, for products of the step's shapes.
    """
    operations = products.operations
    best = products.devices.most_common(1)
    with best[0][0] if best else torch.device("cpu"):
        return _rates(operations, products.convolutions)


def _rates(operations: Counter[Shape], convolutions: int) -> dict[str, float]:
    """On torch's default device."""
    return {
        "copy": _copy_rate(),
        "operations": operations.total(),
        "convolutions": convolutions,
        "fp32": _product_rate(operations, torch.float32),
        "bf16": _product_rate(operations, torch.bfloat16),
    }


def _product_rate(operations: Counter[Shape], dtype: torch.dtype) -> float:
    """Operations per second of products of the largest shapes, weighed by what each does."""
    seconds = done = 0.0
    for (rows, summed, columns), count in operations.most_common(LARGEST):
        one, other = torch.ones(rows, summed, dtype=dtype), torch.ones(summed, columns, dtype=dtype)
        made = torch.empty(rows, columns, dtype=dtype)
        taken = _seconds(functools.partial(torch.mm, one, other, out=made))
        seconds += count * taken / (2 * rows * summed * columns)
        done += count
    return done / seconds if seconds else 0.0


def _copy_rate() -> float:
    """Bytes per second that are read and written by a copy of memory."""
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    return 2 * COPIED / _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], Any]) -> float:
    """The least that a call takes."""
    wait = torch.cuda.synchronize if torch.get_default_device().type == "cuda" else int
    least = float("inf")
    call()
    wait()
    begun = time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        before = time.perf_counter()
        call()
        wait()
        least = min(least, time.perf_counter() - before)
    return least
