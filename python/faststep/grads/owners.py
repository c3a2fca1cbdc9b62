"""Registry: which object handles an optimizer's gradients before the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from .params import name_of, params_of

_Value = TypeVar("_Value")


class ByOptimizer(Generic[_Value]):
    """One value per optimizer; keeps no optimizer alive, and no value if `weakly`.

    Attributes:
        known: the optimizers, and how to get their values; empty where none has one.
    """

    def __init__(self, *, weakly: bool) -> None:
        self._weakly = weakly
        # By `id`, as a script's class may compare its objects and so have no hash.
        self.known: dict[int, tuple[weakref.ref[Optimizer], Callable[[], _Value | None]]] = {}

    def __contains__(self, optimizer: Optimizer) -> bool:
        return self.of(optimizer) is not None

    def of(self, optimizer: Optimizer) -> _Value | None:
        """The value, if the optimizer has one that lives."""
        known = self.known.get(id(optimizer))
        return None if known is None else known[1]()

    def set(self, optimizer: Optimizer, value: _Value) -> None:
        """Give the optimizer a value in place of the one before."""
        key = id(optimizer)
        owner = weakref.ref(optimizer, lambda _: self.known.pop(key, None))
        self.known[key] = owner, weakref.ref(value) if self._weakly else lambda: value

    def pop(self, optimizer: Optimizer) -> _Value | None:
        """Take the value away and return it."""
        known = self.known.pop(id(optimizer), None)
        return None if known is None else known[1]()

    def others(self, optimizer: Optimizer) -> list[Optimizer]:
        """The optimizers with a value that are not this one."""
        return [one for one in self._all() if one is not optimizer]

    def having(
        self, tensors: Iterable[Tensor], tensors_of: Callable[[Optimizer], list[Tensor]] = params_of
    ) -> list[Optimizer]:
        """The optimizers with a value to which one of these tensors belongs.

        Looks at no tensor where no optimizer has a value.
        """
        if not self.known:
            return []
        wanted = set(map(id, tensors))
        return [
            one for one in self._all() if any(id(tensor) in wanted for tensor in tensors_of(one))
        ]

    def _all(self) -> list[Optimizer]:
        """The optimizers with a value."""
        found = [owner() for owner, _ in list(self.known.values())]
        return [one for one in found if one is not None and one in self]


accumulating: ByOptimizer[object] = ByOptimizer(weakly=True)
"""Optimizers whose gradients `faststep.accumulate` sums up."""

releasing: ByOptimizer[object] = ByOptimizer(weakly=True)
"""Optimizers whose parameters `faststep.release_gradients` updates in backward."""

offloading: ByOptimizer[object] = ByOptimizer(weakly=True)
"""Optimizers whose states `faststep.offload` keeps in host memory."""

unscaling: ByOptimizer[object] = ByOptimizer(weakly=True)
"""Optimizers whose step unscales because one of these needs it; a copy of one does not."""


def refuse_clipping(parameters: Iterable[Tensor]) -> None:
    """Raise if a parameter's gradient was already used in backward, by release_gradients."""
    if releasing.having(parameters):
        raise RuntimeError(
            "these gradients cannot be clipped: release_gradients() has used and freed them in "
            "backward. Set max_grad_norm of the optimizer, and release with "
            'clip="per_parameter" or clip="lagged"; or remove() the release'
        )


def refuse_shared(optimizer: Optimizer) -> None:
    """Raise if another optimizer, whose gradients are released, trains one of the parameters."""
    for other in releasing.others(optimizer):
        theirs = {id(param) for param in params_of(other) if param.requires_grad}
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if id(param) in theirs:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} would find no gradient of "
                        f"{name_of(optimizer, number, index)}: release_gradients() of another "
                        f"optimizer ({type(other).__name__}) uses and frees it in backward. Give "
                        "each parameter to one optimizer, or remove() the release"
                    )
