"""Trained parameters of a model that no sharded optimizer has.

As with DistributedDataParallel, backward leaves the mean over all ranks in their `.grad`, for
whatever optimizer the script has for them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._torch.compiler import disable_dynamo
from ..grads.hooks import Hooked
from .group import Group

__all__ = ["Unowned"]


class Unowned:
    """The hooks of these parameters.

    Args:
        params: the parameters, in one order on all ranks.
        group: the ranks.
        arrived: called by each hook; refers to its owner weakly.
    """

    def __init__(self, params: Iterable[Tensor], group: Group, arrived: Callable[[], None]) -> None:
        self._group = group
        self._numbers: Hooked[int] = Hooked()
        self._touched: set[int] = set()  # since they were reduced, on this rank
        mine = weakref.ref(self)
        for number, param in enumerate(params):
            self._numbers.add(param, number, _hook(mine, number, arrived))

    def ids(self) -> set[int]:
        """The parameters by `id`."""
        return {id(param) for param, _ in self._numbers}

    def __bool__(self) -> bool:
        return len(self._numbers) > 0

    def leave(self, params: Iterable[Tensor]) -> None:
        """Let a sharded optimizer have some of them."""
        gone = {id(param) for param in params}
        self._numbers.keep_only([param for param, _ in self._numbers if id(param) not in gone])

    def reduce(self) -> None:
        """Put the means of all ranks into `.grad`; a collective."""
        named = list(self._numbers)
        used = torch.tensor([number in self._touched for _, number in named], dtype=torch.int32)
        self._touched.clear()
        self._group.add_up(used, "counting the parameters without a sharded optimizer")
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for (param, _), count in zip(named, used.tolist(), strict=True):
            if count:
                alike[param.dtype].append(param)
        for params in alike.values():
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            grads = [param.grad for param in params if param.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self._group.total)
            self._group.add_up(flat, "reducing the gradients without a sharded optimizer")
            parts = torch.split(flat, [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view(grad.shape))


def _hook(
    owner: Callable[[], Unowned | None], number: int, arrived: Callable[[], None]
) -> Callable[[Tensor], None]:
    @disable_dynamo
    def touched(_: Tensor) -> None:
        if (unowned := owner()) is not None:
            unowned._touched.add(number)
            arrived()

    return touched
