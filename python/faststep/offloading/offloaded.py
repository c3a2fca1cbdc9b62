"""The step of an offloaded optimizer, and the hooks that bring gradients to the host.

The step is that of the optimizer's class, over a list in which each offloaded parameter is replaced
by its copy on the host. csrc/core/offload.c copies gradients in, updates the copies, and copies
them back.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._torch.dtensor import any_dtensor, is_dtensor, part_of
from .._torch.optim import dtypes_of, increment_version
from .._torch.ranks import world_size
from ..grads.buckets import reducing_model
from ..grads.hooks import weakly
from ..grads.owners import offloading, releasing
from ..grads.params import grads_of, params_of
from ..optim.base import FusedOptimizer
from ..optim.plan_step import PlanStep, all_on_host
from ..optim.request import Rule, StepAnswer, StepRequest
from ..optim.step import Stepper
from .early import EarlyUpdates
from .host_stepper import HostStepper
from .memory import Copies
from .places import (
    Place,
    begins,
    exchange,
    fits,
    inverse_of,
    is_aligned,
    is_dense,
    mark,
    strides_of,
)
from .scaled import Scaled, unscale
from .unfit import refuse_capture, unfit


class Offload:
    """An optimizer's states in host memory; `remove()` gives them memory of their own again."""

    _has_hooks = True  # which bring the gradients of parameters, and under a scaler

    def __init__(
        self,
        optimizer: FusedOptimizer,
        fraction: float = 1.0,
        in_backward: bool = False,
        threads: int | None = None,
        cores: Collection[int] = (),
        by_script: bool | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        arrived = weakly(self._arrived) if self._has_hooks else None
        self._copies = Copies(fraction, arrived, threads, cores)
        self._copies.attach(optimizer)
        self._inner: Any = object.__new__(type(optimizer))  # the same with the host's parameters
        self._inner.state = defaultdict(dict)
        self._steppers: list[Stepper] = []  # of a step; then of the first update in backward, ...
        self._turn = 0  # which of them comes next
        self._factor = math.nan if optimizer._max_grad_norm is None else 1.0  # of the step before
        self._by_script = by_script  # ranks meet in its own code; None: not known
        self._has_begun = False  # a gradient was copied since the step
        self._early = EarlyUpdates() if in_backward else None
        self._scaled = Scaled(optimizer) if self._has_hooks else None
        if in_backward:
            releasing.set(optimizer, self)
        optimizer._stepper = HostStepper(self)
        offloading.set(optimizer, self)

    # ---- gradients

    def _arrived(self, param: Tensor) -> None:
        """The hook of a parameter: its gradient is in `.grad`, and maybe not the last one."""
        place, grad, optimizer = self._copies.places.of(param), param.grad, self._optimizer()
        if place is None or grad is None or optimizer is None or grad.layout != torch.strided:
            return
        is_last = place.count(grad)
        # reduced after this hook; torch's foreach functions write DTensors, and count no version
        if world_size() > 1 or is_dtensor(param):
            if self._by_script is None:
                self._by_script = reducing_model(p for p, _ in self._copies.places) is None
            if self._by_script:  # collectives move no version counters
                place.written = (-1, 0)
            return
        if not is_last or not fits(place, param, grad):
            return
        if self._early is not None and optimizer._max_grad_norm is None:
            self._early.update(self, optimizer, place, param, grad)
        else:
            self.bring(place, grad)

    def bring(self, place: Place, grad: Tensor) -> None:
        """Begin to copy a gradient to the host."""
        refuse_capture()
        if not self._has_begun:
            self._copies.begin()
            self._has_begun = True
        factor = self._factor
        if not self._copies.arrive(place, grad, factor):
            raise RuntimeError("a parameter of the step before could not be returned")
        place.seen = (grad, *mark(grad))
        place.factor = None if math.isnan(factor) else factor

    def _bring_rest(self, optimizer: FusedOptimizer, measures: bool) -> bool:
        """Copy gradients that are not on the host as they are now; False if one cannot be."""
        pairs = [(param, self._copies.places.of(param)) for param in params_of(optimizer)]
        divided = any_dtensor([*params_of(optimizer), *grads_of(optimizer)])
        if divided and not all(is_aligned(param) for param, _ in pairs):
            return False  # the step without offload says why
        for param, place in pairs:
            grad = param.grad
            if grad is None:
                continue
            if place is None:
                if (link := self._copies.link) is not None:
                    there = self._copies.stays(param) and grad.layout == torch.strided
                    if there and _C.fusable([part_of(grad)], link.device.index):
                        continue
                    raise unfit(param, grad)
                if measures and not is_dense(part_of(grad), strides_of(part_of(param))):
                    return False
                continue
            known = place.values.dtype, torch.float32
            if grad.dtype in known and grad.dtype != place.grad.dtype:
                place.make_room(grad.dtype, self._copies.link)
                self._copies.tell_threads()
            if not fits(place, param, grad):
                if self._copies.link is not None:
                    raise unfit(param, grad)
                return False
        self._copies.follow()
        for param, place in pairs:
            if place is not None and param.grad is not None:
                late = place.number >= 0 and not place.has(param.grad)
                place.arrivals += late  # its hooks were too early
                place.wanted = place.arrivals
                if late:
                    self.bring(place, param.grad)
        return True

    # ---- steps

    def step(self, request: StepRequest) -> StepAnswer | None:
        """The step; None if it is not for the host, and nothing was done."""
        optimizer = self._optimizer()
        assert optimizer is not None
        refuse_capture()
        try:
            if self._early is not None:
                self._early.end(self, optimizer, request)
            with torch.no_grad():
                answer = self._step(optimizer, request)
        except BaseException:
            self.wait()
            raise
        finally:
            self.end_pass()
        if answer is None:
            self.wait()
        return answer

    def end_pass(self) -> None:
        """Forget which gradients are on the host."""
        self._turn, self._has_begun = 0, False
        for place in self._copies.places.entries():
            place.seen, place.arrivals = None, 0

    def prepare(self, request: StepRequest) -> StepRequest | None:
        """Have all gradients on the host; None if one cannot be there.

        The request that it returns may be prepared again.
        """
        optimizer, scaled, request = self._optimizer(), self._scaled, all_on_host(request)
        assert optimizer is not None
        self._copies.attach(optimizer)
        if scaled is not None and request.found_inf is not None and not request.looks_for_inf:
            for one in self._copies.places.entries() if request.grad_scale is None else ():
                one.seen = None  # the scaler has unscaled them
        if request.refuses_fp16 and torch.float16 in dtypes_of(grads_of(optimizer)):
            raise ValueError("Attempting to unscale FP16 gradients.")  # torch's
        if scaled is not None and scaled.rounds(optimizer, request):
            unscale([param for param in params_of(optimizer) if param.grad is not None], request)
            request = request._replace(grad_scale=None, write_grads=False)
        return request if self._bring_rest(optimizer, request.measures) else None

    def _step(self, optimizer: FusedOptimizer, asked: StepRequest) -> StepAnswer | None:
        params = [param for param in params_of(optimizer) if param.grad is not None]
        found, norm, request = asked.found_inf, None, all_on_host(asked)
        skips = request.found_inf is not None and bool(request.found_inf != 0.0)
        if skips and not request.looks_for_inf:
            return self._skipped(params, request, None)
        ready = self.prepare(request)
        if ready is None:
            return None
        request = ready
        if request.measures and request.norm is None:
            norm, is_finite = self.measure(params, request)
            if request.looks_for_inf and found is not None and not is_finite:
                found.fill_(1.0)
                return self._skipped(params, request, norm)
            wide = torch.tensor(norm, dtype=torch.float64, device="cpu")
            request = request._replace(norm=wide, looks_for_inf=False)
        elif request.norm is None:
            self._factor = math.nan
        if params:
            self.update(optimizer, optimizer._rules(), request, dict.fromkeys(params))
        self._end(params, request)
        return StepAnswer(False, norm)

    def _skipped(
        self, params: list[Tensor], request: StepRequest, norm: float | None
    ) -> StepAnswer:
        if self._scaled is not None:
            self._scaled.unscale_skipped(params, request)
        return StepAnswer(True, norm)

    def _end(self, params: list[Tensor], request: StepRequest) -> None:
        """After all updates were allowed: wait for them, if nobody else does."""
        link = self._copies.link
        if request.write_grads:
            self.wait()
            for param in params:
                if (place := self._copies.places.of(param)) is None or param.grad is None:
                    continue
                if link is None:
                    part_of(param.grad).copy_(place.grad)
                else:
                    link.send(place.grad, part_of(param.grad))
        if self._copies.waits is None:
            self.wait()
        self._copies.spare_grads()

    def measure(self, params: list[Tensor], request: StepRequest) -> tuple[float, bool]:
        """The norm of the gradients on this rank, and whether they are finite."""
        self._factor = inverse_of(request.grad_scale)
        return self._copies.measure(params, self._factor, request.grad_scale)

    def update(
        self,
        optimizer: FusedOptimizer,
        rules: list[Rule],
        request: StepRequest,
        only: dict[Tensor, None],
    ) -> None:
        """Allow the update of these, and update others where they lie."""
        begun: list[Tensor] = []
        if self._copies.link is not None:
            self._copies.link.follow()
        stepper = self._next_stepper()
        before = stepper.applied
        known, pairs, groups = self._inner.state, [], []
        try:
            for group, rule in zip(optimizer.param_groups, rules, strict=True):
                for param in group["params"]:
                    place = self._copies.places.of(param)
                    if place is not None and param in only:
                        self._copies.refresh(param, place)
                    if begins(optimizer, group, rule, param, place, param in only):
                        begun.append(param)
                hosts = [self._on_host(param, param in only) for param in group["params"]]
                shards = rule.shards or {}
                for host, param in zip(hosts, group["params"], strict=True):
                    if id(param) in shards:
                        shards[id(host)] = shards[id(param)]
                pairs += list(zip(hosts, group["params"], strict=True))
                groups.append({**group, "params": hosts})
            state = {host: optimizer.state[p] for host, p in pairs if p in optimizer.state}
            if [*map(id, known)] != [*map(id, state)] or any(
                known[host] is not state[host] for host in state
            ):
                known.clear()
                known.update(state)
            now = {**vars(optimizer), "state": known, "param_groups": groups, "_stepper": None}
            vars(self._inner).update(now)
            lists = [group["params"] for group in groups]
            if self._early is not None:  # not what stays on the device, until the step
                chosen = {id(host) for host, param in pairs if param in only}
                lists = [[host for host in hosts if id(host) in chosen] for hosts in lists]
            step = PlanStep(self._inner, lists, lambda: rules, [*range(len(lists))])
            stepper.step(step, request)
            self._note_updates(optimizer, pairs, only)
        except BaseException:
            if stepper.applied > before:  # a signal came during the update
                self._note_updates(optimizer, pairs, only)
            else:
                for param in begun:
                    del optimizer.state[param]
            raise

    def _note_updates(
        self,
        optimizer: FusedOptimizer,
        pairs: list[tuple[Tensor, Tensor]],
        only: dict[Tensor, None],
    ) -> None:
        """Note whose update was allowed, and take states that the step has made."""
        known, updated = self._inner.state, []
        are_kept = True  # the states whose update may be under way
        for param in only:
            place = self._copies.places.of(param)
            if place is None:
                continue
            updated.append(param)
            self._copies.goes(place)
            are_kept = are_kept and place.has_states(known.get(place.host, {}))
        increment_version([*map(part_of, updated), *filter(is_dtensor, updated)])
        for host, param in pairs:
            place = self._copies.places.of(param)
            if place is not None and param in only:
                place.written = mark(param)
            if host in known and param not in optimizer.state:  # made by the step itself
                optimizer.state[param] = known[host]
                if place is not None:
                    self.wait()
                    place.adopt(known[host])
        if not are_kept:
            self.wait()

    def _next_stepper(self) -> Stepper:
        if self._turn == len(self._steppers):
            plan = _C.Plan()
            plan.offload(self._copies.pipe)
            self._steppers.append(Stepper(plan))
        self._turn += 1
        return self._steppers[self._turn - 1]

    def _on_host(self, param: Tensor, is_updated: bool) -> Tensor:
        """The parameter as the host has it, with its gradient."""
        place = self._copies.places.of(param)
        if place is None:
            return param
        place.host.grad = place.host_grad if is_updated else None
        return place.host

    def wait(self) -> None:
        """Return when all parameters are back on their device."""
        self._copies.wait()

    def leave_to_torch(self) -> None:
        """Return when torch's operators can make the step, and raise if they cannot."""
        optimizer = self._optimizer()
        if self._early is not None and optimizer is not None:
            try:  # their gradients are gone
                self._early.end(self, optimizer, StepRequest())
            finally:
                self.end_pass()
        self.wait()
        if self._copies.link is not None:
            raise NotImplementedError(
                "torch's operators cannot make the step of CUDA parameters that are offloaded so "
                "far (a TorchDispatchMode, a step with code of the script, `differentiable`)"
            )

    @contextlib.contextmanager
    def on_host(self, optimizer: FusedOptimizer) -> Iterator[None]:
        """Inside, CUDA parameters are their copies, which are on the host as their states are."""
        self.wait()
        pairs = list(self._copies.places) if self._copies.link is not None else []
        for param, place in pairs:
            self._copies.refresh(param, place)
        exchange(optimizer, {param: place.host for param, place in pairs})
        try:
            yield
        finally:
            exchange(optimizer, {place.host: param for param, place in pairs})

    def remove(self) -> None:
        """Undo the offload: the optimizer steps on the device, with states of their own memory."""
        self.wait()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._stepper = None
            offloading.pop(optimizer)
            if self._early is not None:
                releasing.pop(optimizer)
            for param, place in self._copies.places:
                state = optimizer.state.get(param, {})
                for key, room in place.rooms.items():
                    if state.get(key) is room:
                        state[key] = room.to(param.device, copy=True)
        self._copies.remove()
        if self._scaled is not None:
            self._scaled.remove()
