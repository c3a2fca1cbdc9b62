"""Loading states beside fp32 masters, where torch would give them the dtype of their parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..grads.params import params_of
from .masters import fitting, has_master


class _Boxed(Tensor):
    """A box around a state, which torch then leaves as it is."""

    value: Tensor

    def to(self, *_: Any, **__: Any) -> Tensor:
        """Itself."""
        return self


def _boxed(value: Tensor) -> _Boxed:
    boxed = _Boxed()  # an empty tensor: some classes of torch replace states that are no tensors
    boxed.value = value
    return boxed


class _Loading(NamedTuple):
    keeps_masters: bool

    def wrap(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before torch's load_state_dict(), and after the hooks of the script."""
        if not self.keeps_masters:
            return state_dict
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        with_master = {key for key, param in zip(saved, params_of(optimizer)) if has_master(param)}  # noqa: B905 - torch says what does not fit
        states = {
            key: {name: _wrapped(name, value) for name, value in state.items()}
            if key in with_master
            else state
            for key, state in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    def unwrap(self, optimizer: Optimizer) -> None:
        """After it, and before the hooks of the script."""
        states = {
            param: fitting(_unwrapped(state, param), param, self.keeps_masters)
            if isinstance(param, Tensor)
            else state
            for param, state in optimizer.state.items()
        }
        optimizer.state = defaultdict(dict, states)


@contextlib.contextmanager
def loading_masters(optimizer: Optimizer, keeps_masters: bool) -> Iterator[None]:
    """Inside, torch's load_state_dict() loads masters and fp32 states, or drops masters."""
    loading = _Loading(keeps_masters)
    handles = [
        optimizer.register_load_state_dict_pre_hook(loading.wrap),
        optimizer.register_load_state_dict_post_hook(loading.unwrap, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wrapped(name: str, value: Any) -> Any:
    return _boxed(value) if isinstance(value, Tensor) and name != "step" else value


def _unwrapped(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    return {
        name: _on_device(value.value, param) if isinstance(value, _Boxed) else value
        for name, value in state.items()
    }


def _on_device(value: Tensor, param: Tensor) -> Tensor:
    return value if value.device == param.device else value.to(param.device)
