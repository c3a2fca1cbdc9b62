"""The hooks of `release_gradients`, which update parameters and free gradients."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from .._torch.ddp import after_backward, current_backward
from .._torch.dtensor import is_dtensor
from .._torch.library import address_of
from .._torch.modes import is_watched, watched_by
from ..amp.protocol import AskedToUnscale
from ..grads.buckets import Reduced, reducing_model
from ..grads.hooks import Hooked, weakly
from ..grads.owners import refuse_clipping, refuse_shared, releasing
from ..grads.params import name_of, params_of
from ..optim.base import FusedOptimizer
from ..optim.masters import begin_state, keys_for
from ..optim.param_shards import Shards
from ..optim.plan_step import PlanStep, refuse_half_state
from ..optim.request import Rule, StepRequest
from ..optim.step import Stepper
from .before_step import refuse_code_before_step
from .clip_modes import Clip, Clipping, check_clipping
from .tied import give_rows, tied_embeddings

_MODE_DEPTH = address_of("mode_depth")
_TOGETHER = 64 << 20  # bytes of gradients on a CUDA device for which a step begins


class _Place:
    """Where a parameter is in the optimizer, and what its hook needs."""

    def __init__(self, hook: _C.ReleaseHook) -> None:
        self.stepper = Stepper(hook.plan)
        self.hook = hook  # has the group, and whether there was an update since the last step
        self.index = 0
        self.tied = False  # the weight of an embedding and of another module


class Release:
    """The hooks that `release_gradients` has set; `remove()` takes them away."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        clip: Clip | None,
        reduced: Reduced | None,
        model: nn.Module,
    ) -> None:
        self._clipping = Clipping(clip)
        self._reduced = reduced
        self._places: Hooked[_Place] = Hooked()
        self._rules: dict[int, Rule] = {}  # of this step, by group; the hooks read it too
        self._found: list[Shards | None] = []  # in this step: see FusedOptimizer._rules
        self._ids: list[list[int]] = []  # of the parameters, group by group
        self._model_checked = False
        self._used: list[Tensor] = []  # parameters whose reduced gradient can be freed
        self._waiting: deque[Tensor] = deque()  # what the next step on a device will update
        self._waiting_bytes = [0]  # of their gradients
        self._steppers: list[Stepper] = []  # of the first of these steps, the second, and so on
        self._turn = 0  # which of them comes next
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._optimizer = weakref.ref(optimizer)
        check_clipping(optimizer, clip)
        self._otherwise = weakly(self.hooked)
        self._before = weakly(self._check_step)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(weakly(self._finish_step)),
            AskedToUnscale(optimizer),
        ]
        weakref.finalize(self, _undo, self._handles).atexit = False
        self._attach(optimizer)
        if reduced is not None:
            reduced.user = self
            return
        for module in tied_embeddings(model):
            if (place := self._places.of(module.weight)) is not None:
                place.tied, place.hook.plain = True, False
                self._handles.append(give_rows(module))

    def _attach(self, optimizer: FusedOptimizer) -> None:
        """Hook parameters that are new or were unfrozen, and drop those that left the optimizer.

        The others may have moved to another group or index.
        """
        ids = _ids_of(optimizer)
        found: list[Shards | None] = []
        moved = ids != self._ids
        if moved:
            self._places.keep_only(params_of(optimizer))
        for group, entry in enumerate(optimizer.param_groups):
            known = self._places.of_each(entry["params"])
            if moved or not all(known):
                self._attach_group(optimizer, group, known, found)
        self._ids = ids

    def _attach_group(
        self,
        optimizer: FusedOptimizer,
        group: int,
        known: list[_Place | None],
        found: list[Shards | None],
    ) -> None:
        """`known` are the places that the group's parameters have, None for those without."""
        params = optimizer.param_groups[group]["params"]
        if any(
            not place and param.requires_grad for param, place in zip(params, known, strict=True)
        ):
            refuse_shared(optimizer)
        for index, (param, place) in enumerate(zip(params, known, strict=True)):
            if place is None and param.requires_grad:
                place = self._places.of(param)  # it is in the optimizer twice
                if place is None:
                    _make_state(optimizer, group, index, found)
                    place = self._new_place(param)
            if place is not None:
                place.hook.group, place.index = group, index

    def _new_place(self, param: Tensor) -> _Place:
        """Hook a parameter; its place is not known yet."""
        hook = _C.ReleaseHook(self._otherwise, self._optimizer, self._rules, _MODE_DEPTH)
        self._clipping.prepare(hook)
        hook.plain = self._reduced is None and _MODE_DEPTH != 0 and not is_dtensor(param)
        if hook.plain and self._may_wait(param):
            hook.together = (self._waiting.append, self._waiting_bytes, _TOGETHER)
            hook.bytes = param.numel() * param.element_size()
        place = _Place(hook)
        self._places.add(param, place, hook)
        return place

    def hooked(self, param: Tensor) -> None:
        """Called by the hook of a parameter whose step C cannot do alone."""
        place = self._places.of(param)
        if place is None:
            return
        if place.tied and param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()  # only the embedding was used in this forward
        if self._reduced is None or param not in self._reduced:
            self._check_model()
            self._update(place, param)

    def reduced(self, param: Tensor, values: Tensor) -> None:
        """Update by a gradient that was reduced; it is freed in `ended`."""
        place = self._places.of(param)
        if place is not None:
            param.grad = values
            self._update(place, param)
            self._used.append(param)

    def ended(self) -> None:
        """Free the gradients."""
        for param in self._used:
            param.grad = None
        self._used.clear()

    def _update(self, place: _Place, param: Tensor) -> None:
        """Step one parameter, or let it wait for others on its device."""
        optimizer = self._optimizer()
        if optimizer is None or param.grad is None:
            return
        if not self._rules:  # the first gradient since the last step
            self._found.clear()
            refuse_code_before_step(optimizer, self._before)
            if self._ids != _ids_of(optimizer):
                self._attach(optimizer)
                if self._places.of(param) is not place:
                    return
        if place.hook.updated:
            name = name_of(optimizer, place.hook.group, place.index)
            raise RuntimeError(
                f"a second gradient of {name} before optimizer.step(): with "
                "release_gradients() it was updated with the first one. Gradients cannot be "
                "accumulated; remove() the release for that"
            )
        check_clipping(optimizer, self._clipping.way)
        reduced = self._reduced is not None and param in self._reduced
        if not reduced and self._may_wait(param) and current_backward() >= 0:
            self._wait(optimizer, place, param, param.grad)
            return
        self._update_alone(optimizer, place, param, param.grad)
        if not reduced:
            param.grad = None

    def _may_wait(self, param: Tensor) -> bool:
        """Gradients of FSDP2 may not: they are made on a stream that is FSDP2's."""
        return param.is_cuda and self._clipping.way is None and not is_dtensor(param)

    def _wait(self, optimizer: FusedOptimizer, place: _Place, param: Tensor, grad: Tensor) -> None:
        """On a device the launches of a small step take longer than its update."""
        self._rule_of(optimizer, place)  # what is wrong with it is said here
        place.hook.updated = True
        if not self._waiting:
            after_backward(weakly(self._step_together))
        self._waiting.append(param)
        self._waiting_bytes[0] += max(1, grad.numel() * grad.element_size())
        if self._waiting_bytes[0] >= _TOGETHER:
            self._step_together()

    def _step_together(self) -> None:
        """Step those that wait, and free their gradients."""
        with self._lock:
            self._waiting_bytes[0] = 0
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._step_these(waiting)

    def _step_these(self, waiting: list[Tensor]) -> None:
        optimizer = self._optimizer()
        places = [
            (place, param)
            for param, place in zip(waiting, self._places.of_each(waiting), strict=True)
            if place is not None and param.grad is not None
        ]
        if optimizer is None or not places:
            return
        try:
            as_one = self._step_as_one(optimizer, places)
            for place, param in places:
                if not as_one and param.grad is not None:
                    self._update_alone(optimizer, place, param, param.grad)
                param.grad = None
        except BaseException:
            for place, param in places:
                place.hook.updated = param.grad is None
            raise

    def _step_as_one(self, optimizer: FusedOptimizer, places: list[tuple[_Place, Tensor]]) -> bool:
        """False, and nothing is done, if one of them is not for C."""
        if is_watched():
            return False
        if self._turn == len(self._steppers):
            self._steppers.append(Stepper())
        stepper, self._turn = self._steppers[self._turn], self._turn + 1
        lists: dict[int, list[Tensor]] = {}
        for place, param in places:
            lists.setdefault(place.hook.group, []).append(param)
        rules = [self._rules[group] for group in lists]
        unchanged = "no parameter was updated"
        plan_step = PlanStep(
            optimizer, [*lists.values()], lambda: rules, [*lists], False, unchanged
        )
        try:
            stepper.step(plan_step, StepRequest())
        except _C.TensorError:
            return False
        return True

    def _update_alone(
        self, optimizer: FusedOptimizer, place: _Place, param: Tensor, grad: Tensor
    ) -> None:
        rule, groups = self._rule_of(optimizer, place), [place.hook.group]
        max_norm = self._clipping.limit_of(grad, optimizer._max_grad_norm, place.hook)
        request = StepRequest(self._clipping.scale, max_norm=max_norm)
        unchanged = "the parameter was not updated"
        step = PlanStep(optimizer, [[param]], lambda: [rule], groups, False, unchanged)
        reason = watched_by()
        if reason is None:
            try:
                place.stepper.step(step, request)
            except _C.TensorError as error:
                what = (place.hook.group, place.index, *error.args[2:])
                explained = optimizer._explained(*what)
                if not optimizer._is_for_torch(*what):
                    raise explained from None
                reason = str(explained)
        if reason is not None:
            _step_by_torch(optimizer, place, param, request, reason)
        place.hook.updated = True

    def _check_model(self) -> None:
        """Raise if an unknown DistributedDataParallel reduces the gradients; looks only once."""
        if self._model_checked:
            return
        known = () if self._reduced is None else self._reduced
        if reducing_model(param for param, _ in self._places if param not in known):
            raise RuntimeError(
                "a DistributedDataParallel model reduces these gradients after their hooks, and "
                "release_gradients() was not given it, so that each rank would use its own: pass "
                "the DistributedDataParallel itself, after it was made, not the module inside"
            )
        self._model_checked = True

    def _rule_of(self, optimizer: FusedOptimizer, place: _Place) -> Rule:
        rule = self._rules.get(place.hook.group)
        if rule is None:
            [rule] = optimizer._rules([optimizer.param_groups[place.hook.group]], self._found)
            self._rules[place.hook.group] = rule
        return rule

    def _check_step(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        """Raise if the script asks the step for something that backward had to know."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "release_gradients() cannot skip a step for an overflow or unscale before it: "
                "parameters were updated in backward already. Train in bfloat16 without a "
                "GradScaler, or remove() the release"
            )
        refuse_code_before_step(optimizer, self._before)
        if optimizer._asked.get("max_norm") is not None:
            refuse_clipping(params_of(optimizer))
        found: list[Shards | None] = []
        for number, group in enumerate(optimizer.param_groups):
            rule = self._rules.get(number)
            if rule is None:
                continue
            # Without learning rates on devices: reading those would wait.
            [now] = optimizer._rules([group], found)
            if rule._replace(lr=None) != now._replace(lr=None):
                raise RuntimeError(
                    f"the learning rate or another number of group {number} was changed between "
                    "backward and optimizer.step(): with release_gradients() backward has updated "
                    "the parameters already, with the number of before. Change it before backward"
                )

    def _finish_step(self, optimizer: FusedOptimizer, args: Any, kwargs: Any) -> None:
        """Begin a new step: each parameter may be updated again."""
        updated = [place for place in self._places.entries() if place.hook.updated]
        if updated and self._clipping.way == "lagged":
            hooks = [place.hook for place in self._places.entries()]
            optimizer._last_norm = self._clipping.end_step(hooks)
        for place in updated:
            place.hook.updated = False
        self._clipping.scale = None
        self._waiting.clear()  # after a backward that failed: the step has used them
        self._waiting_bytes[0] = 0
        self._turn = 0
        self._rules.clear()
        self._attach(optimizer)

    def remove(self) -> None:
        """Undo the release: gradients stay in `.grad` again, and `optimizer.step` uses them."""
        self._places.remove()
        _undo(self._handles)
        self._handles.clear()
        if self._reduced is not None and self._reduced.user is self:
            self._reduced.user = None
        optimizer = self._optimizer()
        if optimizer is not None:
            releasing.pop(optimizer)


def _undo(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _ids_of(optimizer: FusedOptimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _make_state(
    optimizer: FusedOptimizer, group: int, index: int, found: list[Shards | None]
) -> None:
    """Make the state of a parameter, unless a state of zeros would change the next step.

    States that are made in backward lie between gradients. The gaps that freed gradients leave
    there are too small for the next ones, so malloc keeps most of the memory that release saves.
    """
    entry = optimizer.param_groups[group]
    param = entry["params"][index]
    [rule] = optimizer._rules([entry], found)
    keys = keys_for(rule, param)
    known = optimizer.state.get(param, {})
    if optimizer._zeros_differ(entry) or all(known.get(key) is not None for key in keys):
        return
    try:
        refuse_half_state(optimizer, rule, group, index)
    except _C.TensorError as error:
        raise optimizer._explained(*error.args) from None
    with torch.no_grad():
        begin_state(optimizer, entry, rule, param)


def _step_by_torch(
    optimizer: FusedOptimizer, place: _Place, param: Tensor, request: StepRequest, reason: str
) -> None:
    """The step of one parameter by operators of torch."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[place.hook.group], "params": [param]}]
    try:
        optimizer._step_by_torch(request, reason)
    finally:
        optimizer.param_groups = groups
