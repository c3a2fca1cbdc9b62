"""Tensors of all kinds: those that the extension takes, and those that it must refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from .hostile import act

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((3,), (3,), (1,), (5, 7), (2, 3, 4), (17,), (300,), (1, 9, 1), (2, 2, 2, 2, 2))


class Mine(torch.Tensor):
    """A subclass that computes as torch does."""


class Watched(torch.Tensor):
    """A subclass whose functions and whose `grad` run hostile code."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        act()
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def grad(self) -> Any:
        act()
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        torch.Tensor.grad.__set__(self, value)


class Meta(type(torch.Tensor)):  # type: ignore[misc]
    """A type of types whose attributes run hostile code, also where the extension learns them."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__dlpack_c_exchange_api__", "__torch_dispatch__", "grad", "__name__"):
            act()
        return super().__getattribute__(name)


class OfMeta(torch.Tensor, metaclass=Meta):
    pass


class Dispatched(torch.Tensor):
    """A wrapper with a dispatch of its own, and no memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        act()
        return NotImplemented


def new_type() -> type:
    """A subclass that the extension has not met: it remembers some, and forgets the oldest."""
    return type("Fresh", (torch.Tensor,), {})


def shape_of(rng: Random) -> tuple[int, ...]:
    return rng.choice(SHAPES)


def packed(rng: Random, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.randn(shape_of(rng) if shape is None else shape).to(rng.choice(FLOATS))


def _strided(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    shape = shape_of(rng) if shape is None else shape
    few = len(shape) <= 5  # of many, the product would be too large
    wide = packed(rng, tuple(2 * n + 1 if few or n > 1 else 1 for n in shape))
    return wide[tuple(slice(1, 2 * n + 1, 2) if few or n > 1 else slice(1) for n in shape)]


def _transposed(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    shape = shape_of(rng) if shape is None else shape
    order = list(range(len(shape)))
    rng.shuffle(order)
    inner = packed(rng, tuple(shape[d] for d in order))
    return inner.permute([order.index(d) for d in range(len(shape))])


def _expanded(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    shape = shape_of(rng) if shape is None else shape
    return packed(rng, tuple(rng.choice((1, n)) for n in shape)).expand(shape)


def _overlapping(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    shape = shape_of(rng) if shape is None else shape
    strides = [rng.choice((0, 1, 1, 2)) for _ in shape]
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return packed(rng, (size,)).as_strided(shape, strides)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def _moved(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    tensor = packed(rng, shape)
    tensor.data = tensor.clone()
    return tensor


def _shared(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    return packed(rng, shape).share_memory_()


def _inference(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    with torch.inference_mode():
        return packed(rng, shape)


def _of_vmap(rng: Random, shape: tuple[int, ...] | None) -> torch.Tensor:
    escaped: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        escaped.append(x)
        return x

    torch.func.vmap(keep)(packed(rng, (2, *(shape_of(rng) if shape is None else shape))))
    return escaped[0]


def _as(kind: type) -> Maker:
    return lambda rng, shape: packed(rng, shape).as_subclass(kind)


def _to(change: Callable[[torch.Tensor], torch.Tensor]) -> Maker:
    return lambda rng, shape: change(packed(rng, shape))


Maker = Callable[[Random, "tuple[int, ...] | None"], torch.Tensor]

# What the functions on tensors take, some of it only where it is not written.
USABLE: dict[str, Maker] = {
    "packed": packed,
    "strided": _strided,
    "transposed": _transposed,
    "expanded": _expanded,
    "overlapping": _overlapping,
    "negated": _to(torch._neg_view),
    "strided and negated": lambda rng, shape: torch._neg_view(_strided(rng, shape)),
    "moved": _moved,
    "shared": _shared,
    "inference": _inference,
    "requires grad": _to(lambda t: t.requires_grad_()),
    "not a leaf": _to(lambda t: t.requires_grad_() * 2),
    "subclass": _as(Mine),
    "watched": _as(Watched),
    "of a hostile metaclass": _as(OfMeta),
    "of a new type": lambda rng, shape: packed(rng, shape).as_subclass(new_type()),
    "parameter": _to(torch.nn.Parameter),
    "scalar": lambda rng, shape: packed(rng, ()),
    "empty": lambda rng, shape: packed(rng, (0, 3)),
    "nan and infinite": _to(lambda t: t.div_(0)),
    "many dimensions": lambda rng, shape: packed(rng, (1,) * 20 + (3,)),
    "odd address": _to(lambda t: torch.cat([t.flatten()] * 2)[1 : 1 + t.numel()].view(t.shape)),
}

UNUSABLE: dict[str, Maker] = {
    "meta": _to(lambda t: t.to("meta")),
    "sparse": _to(lambda t: t.float().to_sparse()),
    "compressed": lambda rng, shape: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda rng, shape: torch.ones(3, 3).to_mkldnn(),
    "nested": lambda rng, shape: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex": _to(lambda t: t.double() * 1j),
    "conjugated": _to(lambda t: (t.double() * 1j).conj()),
    "int32": _to(lambda t: t.int()),
    "int64": _to(lambda t: t.long()),
    "uint8": _to(lambda t: t.byte()),
    "bool": _to(lambda t: t.bool()),
    "float8": _to(lambda t: t.float().to(torch.float8_e4m3fn)),
    "quantized": lambda rng, shape: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "dispatched": _to(Dispatched),
    "without memory": _to(_emptied),
    "int64 without memory": _to(lambda t: _emptied(t.long())),
    "uninitialized": lambda rng, shape: torch.nn.UninitializedParameter(),
    "escaped from vmap": _of_vmap,
    "too many dimensions": lambda rng, shape: packed(rng, (2,) + (1,) * 62),
}

warnings.filterwarnings("ignore", category=UserWarning)  # about prototypes


def usable(rng: Random, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Mostly ordinary."""
    kind = "packed" if rng.random() < 0.5 else rng.choice(list(USABLE))
    return USABLE[kind](rng, shape)


def unusable(rng: Random, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    return UNUSABLE[rng.choice(list(UNUSABLE))](rng, shape)


def any_tensor(rng: Random, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    return usable(rng, shape) if rng.random() < 0.8 else unusable(rng, shape)
