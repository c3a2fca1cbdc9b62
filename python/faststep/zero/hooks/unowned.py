"""Parameters of a model that no sharded optimizer has, or that are frozen.

As with DistributedDataParallel, backward leaves the mean over all ranks in the `.grad` of those
that are trained, for whatever optimizer the script has for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...grads.hooks import Hooked, weakly
from ..transport.group import Group


class Unowned:
    """The hooks of these parameters, which are in one order on all ranks; each calls `arrived`."""

    def __init__(
        self, params: Iterable[Tensor], group: Group, arrived: Callable[[], object]
    ) -> None:
        self._group = group
        self._arrived = arrived
        self._hooked: Hooked[None] = Hooked()
        self.touched: set[int] = set()  # since they were reduced, on this rank, by `id`
        touch = weakly(self._touch)
        for param in params:
            self._hooked.add(param, None, touch)

    def _touch(self, param: Tensor) -> None:
        if param in self._hooked:
            self.touched.add(id(param))
            self._arrived()

    def ids(self) -> set[int]:
        return {id(param) for param, _ in self._hooked}

    def __bool__(self) -> bool:
        return len(self._hooked) > 0

    def leave(self, params: Iterable[Tensor]) -> None:
        """Let a sharded optimizer have some of them."""
        gone = {id(param) for param in params}
        self.touched -= gone
        self._hooked.keep_only([param for param, _ in self._hooked if id(param) not in gone])

    def are_trained(self) -> bool:
        """True if one of them is not frozen now."""
        return any(param.requires_grad for param, _ in self._hooked)

    def reduce(self, params: Sequence[Tensor] | None = None) -> None:
        """Put the means of all ranks into `.grad`, of all or of `params`; a collective.

        Those that have no hook here have a gradient of this rank.
        """
        if params is None:
            params = [param for param, _ in self._hooked]
        mine = [
            param.grad is not None and (param not in self._hooked or id(param) in self.touched)
            for param in params
        ]
        self.touched.difference_update(map(id, params))
        used = torch.tensor(mine, dtype=torch.int32)
        self._group.add_up(used, "counting the parameters without a sharded optimizer")
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for param, count in zip(params, used.tolist(), strict=True):
            if count:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                alike[param.dtype].append(param.grad)
        for grads in alike.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self._group.total)
            self._group.add_up(flat, "reducing the gradients without a sharded optimizer")
            parts = torch.split(flat, [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view(grad.shape))


def can_be_trained(param: Tensor) -> bool:
    """True if a parameter may get a gradient, now or when a script unfreezes it."""
    is_plain = type(param) in (Tensor, nn.Parameter) and not param.is_inference()
    return param.requires_grad or (is_plain and param.is_floating_point())
