"""A model inside DistributedDataParallel, which says when gradients are reduced, and reduces none.

Each forward decides for the backward that follows, by `no_sync()` or by a
`require_backward_grad_sync` that the script has set. A hook before forward notes that, and lets
DistributedDataParallel see False while it runs: so it leaves gradients alone. It goes on
broadcasting buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...grads.hooks import weakly
from .gradients import Gradients


def check_wrapped(model: DistributedDataParallel) -> None:
    """Raise TypeError for a model whose gradients cannot be taken over."""
    taken = {
        "a communication hook": getattr(model, "_comm_hooks", None),
        "mixed_precision": model.mixed_precision,
        "delay_all_reduce_named_params": model._delay_all_reduce_params,
        "torch._dynamo's python_reducer": model._use_python_reducer,
    }
    for what, is_there in taken.items():
        if is_there:
            raise TypeError(
                f"shard(): the DistributedDataParallel model has {what}, which changes what it "
                "reduces, and shard() reduces in its place: leave that out"
            )


_wrappers: weakref.WeakKeyDictionary[DistributedDataParallel, Wrapper]
_wrappers = weakref.WeakKeyDictionary()


class Wrapper:
    """The hooks of a model, which all sharded optimizers of its parameters share."""

    @staticmethod
    def of(model: DistributedDataParallel, gradients: Gradients) -> Wrapper:
        """Let these gradients be reduced when the model's would be."""
        wrapper = _wrappers.get(model) or Wrapper(model)
        gradients.is_wrapped, gradients.expects_backward = True, False
        wrapper._gradients.add(gradients)
        return wrapper

    def __init__(self, model: DistributedDataParallel) -> None:
        _wrappers[model] = self
        self._model = weakref.ref(model)
        self._gradients: weakref.WeakSet[Gradients] = weakref.WeakSet()
        self._wants_sync = False  # of the forward that runs
        self.on_forward: Callable[[DistributedDataParallel, bool], object] = lambda *_: None
        if model.static_graph:  # else its first backward reduces
            model._static_graph_delay_allreduce_enqueued = True
        model.register_forward_pre_hook(weakly(self._before), prepend=True)
        model.register_forward_hook(weakly(self._after), always_call=True)

    def _before(self, model: DistributedDataParallel, *_: Any) -> None:
        if not self._gradients or model is not self._model():
            return  # their optimizers are gone, or it is a copy: the model reduces by itself
        self._wants_sync = torch.is_grad_enabled() and model.require_backward_grad_sync
        if not torch.is_grad_enabled():
            return
        model.require_backward_grad_sync = False
        for gradients in sorted(self._gradients, key=lambda one: one.made):  # a collective, perhaps
            gradients.note_failure()
            if self._wants_sync:
                gradients.expects_backward = True
            elif not gradients.expects_backward:
                gradients.keep_local()

    def _after(self, model: DistributedDataParallel, *_: Any) -> None:
        if model is not self._model():
            return
        if torch.is_grad_enabled() and self._gradients:
            model.require_backward_grad_sync = self._wants_sync
            model.require_forward_param_sync = self._wants_sync
        self.on_forward(model, self._wants_sync)

    def note_others(self, is_reduced: bool) -> None:
        """On a rank without data: whether the others' pass is reduced, as their forward does."""
        if (model := self._model()) is not None:
            model.require_forward_param_sync = is_reduced
