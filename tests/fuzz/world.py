"""What one case of the fuzzer works on, what its hostile objects do to it, and what is checked."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from . import hostile
from .effects import EFFECTS, ON_GRADIENTS, ON_LISTS
from .hostile import Bomb, plain

Check = Callable[[Any], None]
MOST_ACTS = 12  # of hostile objects in one call


# Up to CPython 3.11 finalizers run wherever a container is made. There tuple(some_list), which is
# what becomes of lists elsewhere, crashes if a finalizer changes the list; and `param.grad` crashes
# in torch, which makes the Python object of the gradient, if a finalizer drops the gradient.
READ_IN_PLACE = ("Plan", "ReleaseHook")


READS_RECORDS = ("Plan.step", "ReleaseHook.__call__", "unscale_grads", "clip_grads")


class FaultError(Exception):
    """The extension did what it never may."""


class World:
    """The objects of a case.

    Tensors are not held here: whoever drops them is to free them, so that the extension is seen to
    use what is gone.

    Args:
        rng: draws everything.
        log: is told each call before it is made.
    """

    def __init__(self, rng: Random, log: Callable[[str], None]) -> None:
        self.rng = rng
        self.log = log
        self.containers: list[Any] = []  # lists and dictionaries that are being passed
        self.objects: dict[str, list[Any]] = {}  # plans, gatherers and so on by type
        self.params: list[weakref.ref[torch.Tensor]] = []
        self.tracked: list[weakref.ref[torch.Tensor]] = []
        self.again: Callable[[World], None] | None = None  # makes any call
        self.counts: Counter[tuple[str, bool]] = Counter()
        # Whether a hostile object has written or moved values itself, or changed what is passed.
        self.touched = self.changed = False
        self.acts = self.depth = 0
        self.names: list[str] = []  # of the calls that run, the outermost first
        self.finalizing = False  # whether a finalizer made one of them
        self.threaded = False
        self.held: list[torch.Tensor] = []  # gradients, while there are two threads

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def track(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tracked.append(weakref.ref(tensor))
        return tensor

    def set_grad(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """torch crashes if a gradient is freed in one thread and asked for in another one."""
        if self.threaded and grad is not None:
            self.held.append(grad)
        param.grad = grad

    def contain(self, container: Any) -> Any:
        """Hostile objects may clear it."""
        self.containers.append(container)
        return container

    # What hostile objects do.

    def act(self, finalizer: bool) -> None:
        if self.acts >= MOST_ACTS:
            return
        self.acts += 1
        before, was_finalizing = hostile.use(None), self.finalizing
        self.finalizing |= finalizer
        try:
            effect = self.rng.choice(EFFECTS)
            if not (self.finalizing and self._is_fault_of_others(effect)):
                self.changed |= effect in ON_LISTS
                self.log(f"  {effect.__name__}")
                effect(self)
        finally:
            self.finalizing = was_finalizing
            hostile.use(before)

    def _is_fault_of_others(self, effect: Callable[[World], None]) -> bool:
        """Whether CPython up to 3.11 or torch crash where a finalizer does this."""
        if effect in ON_LISTS:
            return not all(name.startswith(READ_IN_PLACE) for name in self.names)
        return effect in ON_GRADIENTS and not set(self.names) <= set(READS_RECORDS)

    # Calls.

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        kept: list[torch.Tensor] = [],  # noqa: B006
        nothing_done: Callable[[Any], bool] = lambda result: False,
        check: Check | None = None,
    ) -> Any:
        """Calls the extension: what is `kept` must not change where it raises.

        Returns its result, or None.
        """
        before = _Values(kept)
        del kept
        self.log(f"{name}{plain(args)}")
        if not self.depth:
            self.touched = self.changed = False
            self.acts = 0
        self.names.append(name)
        bombs = [Bomb() for _ in range(self.rng.choice((0, 0, 1, 3)))]
        error: BaseException | None = None
        result = None
        try:
            with self._armed():
                bombs.clear()
                result = function(*args)
        except FaultError:
            raise
        except BaseException as raised:
            error = raised
        self.names.pop()
        self.counts[name, error is None] += 1
        if error is not None:
            self._look_at(error)
        if (error is not None or nothing_done(result)) and not (self.touched or self.threaded):
            before.must_be_now(name, error)
        elif error is None and check and not (self.touched or self.changed or self.threaded):
            check(result)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        return result

    @contextmanager
    def _armed(self) -> Iterator[None]:
        """Hostile objects act, and garbage is collected at the n-th container that is made."""
        before = hostile.use(self.act)
        self.depth += 1
        gc.set_threshold(self.rng.choice((1, 2, 4, 8, 30)), 10_000, 10_000)
        gc.enable()
        try:
            yield
        finally:
            if self.depth == 1 and not self.threaded:
                gc.disable()
            self.depth -= 1
            hostile.use(before)

    def _look_at(self, error: BaseException | None) -> None:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            if isinstance(error, SystemError):
                raise FaultError(f"SystemError: {error}") from error
            error = error.__cause__ or error.__context__

    def close(self) -> None:
        """Drops all, and looks whether the extension kept something."""
        for container in self.containers:
            base = dict if isinstance(container, dict) else list
            base.clear(container)
        self.containers.clear()
        self.objects.clear()
        self.again = None
        gc.collect()
        left = [tensor for ref in self.tracked if (tensor := ref()) is not None]
        if left:
            raise FaultError(f"kept alive: {[plain(tensor) for tensor in left]}")


class _Values:
    """What tensors hold, without keeping them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.pairs = []
        for tensor in tensors:
            values = _values_of(tensor)
            if values is not None:
                self.pairs.append((weakref.ref(tensor), values))

    def must_be_now(self, name: str, error: BaseException | None) -> None:
        for ref, values in self.pairs:
            tensor = ref()
            now = None if tensor is None else _values_of(tensor)
            if now is not None and (now.shape != values.shape or not same(now, values)):
                raise FaultError(f"{name} changed {plain(tensor)}, but said {error!r}") from error


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            return None
        if tensor.untyped_storage().nbytes() == 0:
            return None
        return tensor.detach().as_subclass(torch.Tensor).clone().resolve_neg()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        return None
