"""torch.distributed.algorithms.Join for sharded optimizers: ranks whose data end at other times."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from .._torch.ranks import is_first_in_join, is_in_join
from ..grads.hooks import weakly
from .engine import Engine
from .transport.group import Group


class _Shadow(JoinHook):
    """The part of a rank without more data in each step of the others."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer  # a ShardedOptimizer

    def main_hook(self) -> None:
        """Take part in a backward pass with gradients of zero, or those that no_sync() has left."""
        optimizer = self._optimizer
        if optimizer._engine is None:
            return
        if (wrapper := optimizer._engine.wrapper) is not None:
            is_reduced = optimizer._exchange_sync(False)
            wrapper.note_others(is_reduced)
            if not is_reduced:
                return
        optimizer._engine.gradients.begin_without_data()
        optimizer._has_joined = True
        try:
            optimizer.step()
            optimizer.zero_grad()
        finally:
            optimizer._has_joined = False


class JoinableSteps(Joinable):
    """The part of a sharded optimizer that torch.distributed.algorithms.Join asks."""

    _group: Group | None
    _engine: Engine | None
    param_groups: list[dict[str, Any]]
    _has_joined = False  # whether this rank has no more data
    _is_noted = False  # whether the others know of the backward pass before the next step

    def join_hook(self, **_: Any) -> JoinHook:
        """For Join: steps along with ranks that still have data."""
        optimizer: Any = self
        if self._group is not None and optimizer._engine is None:
            raise RuntimeError(
                "Join does not support shard(stage=3): fully_shard communicates in forward"
            )
        engine = self._engine
        if engine is not None and engine.group.replicas is not None:
            raise RuntimeError("Join does not support replicate_group=")
        if engine is not None and engine.group.device.type == "cuda":
            raise RuntimeError("Join does not support shard() of parameters on a CUDA device")
        return _Shadow(optimizer)

    @property
    def join_device(self) -> torch.device:
        """For Join: where its messages are."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """For Join: the ranks, as the script has passed them."""
        return dist.group.WORLD if self._group is None else self._group.process_group

    def _attach_to(self, engine: Engine) -> None:
        """Hear of what is sent."""
        engine.script_groups = weakly(self._script_groups)
        engine.gradients.on_begin = weakly(self._note_backward)
        engine.gradients.before_exchange = weakly(self._refuse_in_join)
        if engine.wrapper is not None:
            engine.wrapper.on_forward = weakly(self._say_in_join)

    def _script_groups(self) -> list[dict[str, Any]]:
        return self.param_groups

    def _say_in_join(self, model: DistributedDataParallel, wants_sync: bool) -> None:
        """After a forward of the model: tell ranks without data whether backward communicates."""
        if is_in_join(model) and not is_in_join(self):
            raise RuntimeError(
                "faststep.zero: give torch.distributed.algorithms.Join the optimizer too, after "
                "the DistributedDataParallel model: Join([model, optimizer])"
            )
        if is_in_join(self) and not is_first_in_join(self):
            self._exchange_sync(wants_sync)

    def _exchange_sync(self, wants_sync: bool) -> bool:
        """True if the backward of a rank communicates; a collective."""
        assert self._engine is not None
        flag = torch.tensor([float(wants_sync)])
        self._engine.group.add_up(flag, "telling ranks without data of a backward pass")
        return bool(flag.item())

    def _note_backward(self, is_backward: bool) -> None:
        """Called before a backward pass communicates, and by a step, which may be without one."""
        if not is_in_join(self) or self._has_joined:
            return
        if self._is_noted and not is_backward:
            return
        if self._is_noted:
            raise RuntimeError(
                "faststep.zero: inside of torch.distributed.algorithms.Join only one backward pass "
                "per step may communicate: call the others in optimizer.no_sync()"
            )
        engine = self._engine
        if is_first_in_join(self) and engine and engine.wrapper is not None:
            raise RuntimeError(
                "faststep.zero: give torch.distributed.algorithms.Join the DistributedDataParallel "
                "model before the optimizer: Join([model, optimizer])"
            )
        if not is_backward and engine and not engine.gradients.is_collecting:
            raise RuntimeError(
                "faststep.zero: a step without a backward pass inside of "
                "torch.distributed.algorithms.Join, where ranks without data take part in both"
            )
        self._is_noted = True
        Join.notify_join_context(self)

    def _refuse_in_join(self, what: str) -> None:
        """Raise for a message that ranks without data would not take part in."""
        if is_in_join(self) and not self._has_joined:
            raise RuntimeError(
                f"faststep.zero: {what} inside of torch.distributed.algorithms.Join, where ranks "
                "without data take part in backward and step alone: clip with max_grad_norm="
            )
