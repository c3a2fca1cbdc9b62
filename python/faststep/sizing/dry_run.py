"""Forward and backward on tensors without memory: what they would take, and how much they compute.

The trackers of `torch.distributed._tools` find one peak for a pass. Gradients and messages of ranks
come and go during backward, so a plan needs a peak for each parameter instead.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .._torch.modes import TorchDispatchMode


@dataclass
class DryRun:
    """One forward and backward.

    Attributes:
        live: the most bytes of activations, and of this gradient, from the gradient before to that
            of a parameter, by the parameter's `id`.
        forward: the most bytes of activations until backward reaches the first parameter.
        kept: bytes that forward leaves for backward.
        flops: floating-point operations of both, of matrix products and convolutions.
    """

    live: dict[int, int] = field(default_factory=dict)
    forward: int = 0
    kept: int = 0
    flops: int = 0


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operators make, until they are freed."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._add(made)
        return made

    def _add(self, made: Any) -> None:
        if isinstance(made, (tuple, list)):
            for one in made:
                self._add(one)
        elif isinstance(made, Tensor) and made.untyped_storage() not in self._known:
            storage = made.untyped_storage()
            self._known.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, size: int) -> None:
        self.now -= size

    def since(self) -> int:
        """The peak since the last call."""
        peak, self.peak = self.peak, self.now
        return peak


def dry_run(model: nn.Module, loss: Callable[[], Tensor]) -> DryRun:
    """Run forward and backward of a model whose parameters are fake, inside of NoMemory."""
    found = DryRun()
    meter = _Meter([*model.parameters(), *model.buffers()])

    def arrived(param: Tensor) -> None:
        peak = meter.since()
        found.forward = found.forward if found.live else peak
        found.live[id(param)] = max(found.live.get(id(param), 0), peak)
        param.grad = None  # whoever reduces it takes it over
        gc.collect()  # without memory, what a checkpoint has repeated is in cycles

    trained = [param for param in model.parameters() if param.requires_grad]
    hook: Callable[..., Any] = nn.Parameter.register_post_accumulate_grad_hook
    handles = [hook(param, arrived) for param in trained]
    freezes = not gc.get_freeze_count()  # unfreeze() would let go of what others have frozen
    if freezes:
        gc.freeze()  # so that collecting takes no time
    try:
        with FlopCounterMode(display=False) as counter, meter:
            value = loss()
            found.kept = meter.now
            value.backward()  # type: ignore[no-untyped-call]
    finally:
        if freezes:
            gc.unfreeze()
        for handle in handles:
            handle.remove()
    found.flops = counter.get_total_flops()
    return found
