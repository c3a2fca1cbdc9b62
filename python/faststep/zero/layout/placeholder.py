"""The stand-in for `.grad` of a parameter whose gradient lies in the slices of the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._torch.ddp import current_backward
from ..._torch.tensors import PLAIN_RESULTS, let_foreach_take, new_wrapper, tree_iter, tree_map_only

_aten = torch.ops.aten
_REFUSED = object()

Cut = Callable[[Tensor], Tensor]


class Values(Protocol):
    """Reads and changes the slices; `GradientValues` has the docstrings."""

    def name_of(self, index: int) -> str: ...
    def make_zero(self, held: Placeholder) -> None: ...
    def change(self, held: Placeholder, update: Callable[[Tensor, Cut], object]) -> None: ...
    def whole(self, held: Placeholder) -> Tensor: ...
    def keep(self, held: Placeholder, whole: Tensor) -> None: ...
    def norm(self, held: Placeholder, order: float) -> Tensor: ...
    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> object: ...


class Placeholder(Tensor):
    """A tensor of a parameter's shape and dtype without memory.

    Backward adds to it what the next micro-step gives. What works on each element for itself works
    on the slices. A norm is put together from those of the slices. All other operators get the
    whole gradient, gathered from the ranks.

    It refers to the values weakly: torch cannot collect a circle through `.grad`.
    """

    number: int  # of the parameter
    pending: Tensor | None  # what backward has added
    kept: Any  # what a slot had of the gradient when it was dropped, and a script kept this
    _refer: Callable[[], Values | None]
    _origin: Placeholder | None  # whose `detach()` or `.data` this is

    __torch_function__ = PLAIN_RESULTS

    @property
    def gradients(self) -> Values:
        """The gradients of all parameters."""
        values = self._refer()
        if values is None:
            raise RuntimeError(
                "faststep.zero: the optimizer that had this gradient is gone; set .grad to None"
            )
        return values

    @staticmethod
    def __new__(cls, param: Tensor, values: Values | None, index: int) -> Placeholder:
        """Of the parameter with this number; of nobody if the optimizer is gone."""
        made = new_wrapper(
            cls, param.size(), device=str(param.device), dtype=param.dtype, strides=param.stride()
        )
        assert isinstance(made, Placeholder)
        made.pending = made._origin = made.kept = None
        made._refer = weakref.ref(values) if values is not None else lambda: None
        made.number = index
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def successor(self, kept: Any) -> Placeholder:
        """One for the next gradient; this one, which a script has kept, goes on with the last."""
        self.kept = kept
        return Placeholder(self, self._refer(), self.number)

    def is_same(self, grad: object) -> bool:
        """True if it is this one, or what `detach()` or `.data` made of it."""
        return isinstance(grad, Placeholder) and grad.first is self

    @property
    def first(self) -> Placeholder:
        """The one that `detach()` or `.data` made this of."""
        return self if self._origin is None else self._origin

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        values = self._refer()
        if values is None:
            return "Placeholder(gradient of faststep.zero, whose optimizer is gone)"
        name = values.name_of(self.number)
        return (
            f"Placeholder(gradient of {name!r}, which faststep.zero has spread over the ranks; "
            "clone() on all ranks gathers it)"
        )

    # ---- what torch does not hand to __torch_dispatch__

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def numpy(self, **options: Any) -> Any:
        return self.clone().numpy(**options)

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __array__(self, *args: Any) -> Any:
        return self.clone().__array__(*args)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None and (given := answer(*args, **kwargs)) is not _REFUSED:
            return given
        if _is_elementwise(func) and any(isinstance(one, cls) for one in tree_iter(args[0])):
            _change(func, args, kwargs)
            return args[0] if isinstance(args[0], Tensor) else None
        return _on_wholes(func, args, kwargs)


let_foreach_take(Placeholder)  # torch's clipping works on all gradients at once


def _detach(held: Tensor) -> object:
    if not isinstance(held, Placeholder):
        return _REFUSED
    made = Placeholder(held, held._refer(), held.number)
    made._origin = held.first
    return made


def _add(held: Tensor, more: Tensor, *, alpha: float = 1) -> object:
    """Keep what backward adds, for the hook that follows."""
    if not isinstance(held, Placeholder) or current_backward() < 0 or alpha != 1:
        return _REFUSED
    held.pending = more if held.pending is None else held.pending + more
    return held


def _zero(held: Tensor) -> object:
    if not isinstance(held, Placeholder):
        return _REFUSED
    held.pending = None
    held.gradients.make_zero(held)
    return held


def _zero_all(held: list[Tensor]) -> None:
    for one in held:
        one.zero_()


def _unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    held = {id(one.gradients): one for one in grads if isinstance(one, Placeholder)}
    for one in held.values():
        one.gradients.unscale(one.dtype, inv_scale, found_inf)
    if plain := [one for one in grads if not isinstance(one, Placeholder)]:
        _aten._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)


def _norm(
    held: Tensor,
    order: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> object:
    """A norm of all elements."""
    dims = range(held.dim()) if dim is None else [one % max(1, held.dim()) for one in dim]
    if not isinstance(held, Placeholder) or keepdim or sorted(dims) != list(range(held.dim())):
        return _REFUSED
    norm = held.gradients.norm(held, float(order))
    return norm.to(held.dtype if dtype is None else dtype)


def _norm_all(grads: list[Tensor], order: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    return [torch.linalg.vector_norm(grad, order, dtype=dtype) for grad in grads]


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.add_.Tensor: _add,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero_all,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norm_all,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


# ---- operators on slices


def _is_elementwise(func: Any) -> bool:
    """True if an operator changes its first argument, each element for itself."""
    name, tags = func._schema.name, func.tags
    if not func._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or name.startswith("aten::_foreach_") or name in _ELEMENTWISE


_ELEMENTWISE = {"aten::copy_", "aten::fill_", "aten::masked_fill_"}  # that have no tag


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Apply an elementwise operator to slices, one gradient after another."""
    is_foreach = isinstance(args[0], (list, tuple))
    options = tree_map_only(Placeholder, _whole, (args[1:], kwargs))
    for number, grad in enumerate(args[0] if is_foreach else args[:1]):
        mine, named = options
        if is_foreach:
            mine = [[one[number]] if isinstance(one, (list, tuple)) else one for one in mine]

        def update(part: Tensor, cut: Cut, mine: Any = mine, named: Any = named) -> None:
            others, rest = tree_map_only(Tensor, cut, (mine, named))
            func([part] if is_foreach else part, *others, **rest)

        if isinstance(grad, Placeholder):
            grad.gradients.change(grad, update)
        else:
            update(grad, lambda other: other)


# ---- operators on whole gradients


def _on_wholes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with whole gradients in the place of ours."""
    schema = func._schema
    library, _, name = schema.name.partition("::")
    hides_writes = library == "c10d"  # torch.distributed, whose schemas do not say what is written
    # Shape and dtype are all that these ask for.
    get = _empty if name.endswith("_like") or name.startswith("new_") else _whole
    found = {one: get(one) for one in tree_iter((args, kwargs)) if isinstance(one, Placeholder)}
    result = func(*_replaced(args, found), **_replaced(kwargs, found))
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None and not hides_writes:
            continue  # neither changed nor a part of the result
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for one in tree_iter(value):
            if isinstance(one, Placeholder):
                one.gradients.keep(one, found[one])
    return _replaced(result, {whole: one for one, whole in found.items()})


def _replaced(values: Any, by: dict[Any, Tensor]) -> Any:
    """Values, and those in lists and dicts, with others in the place of some tensors."""
    return tree_map_only(Tensor, lambda one: by.get(one, one), values)


def _whole(held: Placeholder) -> Tensor:
    return held.gradients.whole(held)


def _empty(like: Placeholder) -> Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
