"""The optimizer that `shard` returns."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch.compiler import disable_dynamo
from .._torch.ranks import is_first_in_join, is_in_join
from ..clip import clip_grad_norm_
from ..grads import divide as division
from ..grads.hooks import weakly
from ..grads.params import params_of
from ..optim.base import FusedOptimizer
from ..optim.checks import refuse_group_options
from ..optim.request import ScalerRequest, StepAnswer, check_limit, request_of
from ..optim.state_kinds import kinds_in
from ..optim.step import loss_of, wait_for_states
from ..optim.wrapped import PassesOn
from .engine import Engine
from .saved.state_dicts import StateDicts
from .stage3.fully_sharded import adopt
from .transport.group import Group

HOOKS = [
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


def _refuse_use(optimizer: Optimizer, *_: Any) -> None:
    raise RuntimeError(
        f"this {type(optimizer).__name__} was replaced by what faststep.zero.shard() returned: "
        "step, save and load that one"
    )


class ShardedOptimizer(PassesOn, StateDicts, Joinable):
    """An optimizer whose states, and updates, are spread over the ranks; made by :func:`shard`.

    It has the parameter groups of the optimizer that it was made of: the same list and the same
    dicts. `state` is what this rank owns. Every rank must call `step`, `clip_grad_norm_`,
    `state_dict` and `load_state_dict`, in the same order.
    """

    _step_supports_amp_scaling = True  # a scaler leaves the gradients to the step
    blocks: tuple[str, ...] = ()  # stage 3: the modules that were sharded before the rest
    not_honoured: tuple[str, ...] = ()  # keys of a configuration of DeepSpeed
    loop: Any = None  # what that leaves to the script
    _max_grad_norm: float | None
    _asked: ScalerRequest = ScalerRequest()  # set by faststep.amp.GradScaler around a step
    _has_joined = False  # in Join: whether this rank has no more data
    _is_noted = False  # in Join: whether others know of the backward pass before the next step

    def __init__(
        self,
        optimizer: Optimizer,
        owned: FusedOptimizer,
        engine: Engine | None,
        max_grad_norm: float | None,
        group: Group | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._before_step = before_step
        Joinable.__init__(self)
        if engine is not None:
            engine.script_groups = weakly(self._script_groups)
            engine.gradients.on_begin = weakly(self._note_backward)
            engine.gradients.before_exchange = weakly(self._refuse_in_join)
            if engine.wrapper is not None:
                engine.wrapper.on_forward = weakly(self._say_in_join)
        self._owned = owned
        self._replaced = optimizer
        self.max_grad_norm = max_grad_norm
        self._last_norm: float | Tensor | None = None  # a tensor on the device of the parameters
        self._skipped: bool | Tensor = False
        for hooks in HOOKS:  # the script's go on here, and its handles remove them
            vars(self)[hooks] = vars(optimizer)[hooks]
            vars(optimizer)[hooks] = OrderedDict()
        optimizer.register_step_pre_hook(_refuse_use)
        optimizer.register_state_dict_pre_hook(_refuse_use)
        optimizer.register_load_state_dict_pre_hook(_refuse_use)
        super().__setstate__(
            {
                "defaults": optimizer.defaults,
                "state": owned.state,
                "param_groups": optimizer.param_groups,
            }
        )

    @property
    def max_grad_norm(self) -> float | None:
        """The global 2-norm to which every step clips the gradients of all ranks; may be set."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, limit: float | None) -> None:
        check_limit("max_grad_norm", limit)
        self._max_grad_norm = None if limit is None else float(limit)

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global 2-norm of the unscaled gradients before clipping, from the last step.

        A 0-d float32 tensor where the parameters are; None before the first step that measured it.
        """
        if self._engine is None:
            return self._owned.last_grad_norm
        return None if self._last_norm is None else torch.as_tensor(self._last_norm).float()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step left everything as it was, as a gradient was not finite.

        Waits for a CUDA device.
        """
        return self._owned.step_was_skipped if self._engine is None else bool(self._skipped)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters on all ranks.

        Args:
            closure (Callable, optional): reevaluates the model and returns the loss.

        Raises:
            RuntimeError: a rank does not answer; a gradient was set by hand.
        """
        loss = None if closure is None else loss_of(closure)
        self._step_uncompiled()
        return loss

    @disable_dynamo
    def _step_uncompiled(self) -> None:
        self._consolidated = None
        if hasattr(self._replaced.step, "_wrapped_by_lr_sched"):
            # Schedulers of the optimizer that this one replaces look for a step of that one.
            self._replaced._opt_called = True  # type: ignore[attr-defined]
        if self._engine is None:
            self._owned.param_groups = self.param_groups  # the script may have set others
        if self._before_step is not None:
            self._before_step()
        request = request_of(self, self.max_grad_norm, keep_grads=False, **self._asked)
        if self._engine is None:
            self._owned._fused_step(request)
            return
        with torch.no_grad():
            if request.grad_scale is not None or request.looks_for_inf:
                self._refuse_in_join("a step with a scaler")
            self._note_backward(False)
            try:
                answer: StepAnswer = self._engine.step(request)
            finally:
                self._is_noted = False
        self._skipped = answer.skipped
        if answer.norm is not None:
            self._last_norm = answer.norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero. As torch's."""
        if self._engine is None:
            super().zero_grad(set_to_none)
            return
        self._engine.gradients.begin_drop()
        super().zero_grad(set_to_none)
        self._engine.gradients.drop(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their global norm, over all ranks, is at most `max_norm`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: order of the norm; may be `inf`. Default: 2.0.
            error_if_nonfinite: raise if the norm is NaN or infinite. Default: False.

        Returns:
            The norm before clipping, 0-d, the same on every rank.

        Raises:
            ValueError: a negative `max_norm`.
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        check_limit("max_norm", max_norm)
        division.divide(self)
        if self._engine is None or float(norm_type) != 2.0:
            return clip_grad_norm_(params_of(self), max_norm, norm_type, error_if_nonfinite)
        with torch.no_grad():
            return self._engine.clip(float(max_norm), error_if_nonfinite)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context send nothing; the next one sends the sums of all.

        For accumulation with a single reduction per step, as DistributedDataParallel.no_sync().
        Whole gradients stay in memory until then. At stage 3 they would not fit, so each pass sends
        its own there, with the same sums. `faststep.accumulate(..., model=model)` sends once.
        """
        if self._engine is None:
            yield
            return
        with self._engine.gradients.no_sync():
            yield

    def add_up(self, numbers: Tensor) -> int:
        """Replace numbers by their sums over all ranks, a collective; returns how many there are.

        Nothing is sent for an empty tensor.
        """
        if self._group is None:
            return 1
        if numbers.numel():
            group = self._group if self._engine is None else self._engine.group
            group.add_up(numbers, "adding up numbers")
        return self._group.total

    def reduce(self) -> None:
        """Reduce the gradients that `no_sync` has left on the ranks; a collective.

        `step`, `clip_grad_norm_` and scalers do that too.
        """
        if self._engine is not None:
            self._engine.gradients.settle()

    @property
    def sums_in_fp32(self) -> bool:
        """True if the ranks' gradients of low-precision parameters are added up in fp32."""
        return self._owned._keeps_masters and (self._engine is not None or self._group is None)

    @classmethod
    def _has_own_step(cls) -> bool:
        """That of faststep's optimizers: the step divides by `grad_scale`."""
        return False

    @property
    def _devices(self) -> tuple[int, ...]:
        return self._owned._devices

    def wait(self) -> None:
        """Return when all parameters have the values of the last step.

        With gather="forward", call it before you read parameters that you took from their modules
        before the step.
        """
        if self._engine is not None:
            self._engine.wait(None)
        else:
            wait_for_states(self._owned)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's; its parameters get buckets of their own.

        A collective: every rank must call it. The new parameters get the values of rank 0.

        Raises:
            TypeError, ValueError: torch's errors; a parameter that is not the model's, or cannot be
                sharded.
            RuntimeError: ranks differ in the parameters; a backward pass runs, or has failed; at
                stage 3 a parameter that was not sharded with the model.
        """
        if isinstance(param_group, dict):
            refuse_group_options(param_group)
            kinds_in(self._owned, param_group)  # raises for those that it may have
        super().add_param_group(param_group)
        try:
            if self._engine is not None:
                self._engine.follow_groups()
            elif self._group is not None:
                adopt(self._owned, self.param_groups[-1]["params"])
        except BaseException:
            del self.param_groups[-1]
            raise

    # ---- what torch.distributed.algorithms.Join asks: ranks whose data end at other times

    def join_hook(self, **_: Any) -> JoinHook:
        """Of Join; steps along with ranks that still have data."""
        engine = self._engine
        if self._group is not None and engine is None:
            raise RuntimeError(
                "Join does not support shard(stage=3): fully_shard communicates in forward"
            )
        if engine is not None and engine.group.replicas is not None:
            raise RuntimeError("Join does not support replicate_group=")
        if engine is not None and engine.group.device.type == "cuda":
            raise RuntimeError("Join does not support shard() of parameters on a CUDA device")
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where the messages of Join are."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The ranks, as the script has passed them."""
        return dist.group.WORLD if self._group is None else self._group.process_group

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


class _Shadow(JoinHook):
    """The part of a rank without more data in each step of the others."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

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
