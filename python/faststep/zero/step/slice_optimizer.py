"""The optimizer of one rank: a fused step over its slices, as all ranks agree.

What the ranks agree on lies in tensors beside the slices. In CPU memory the host looks at them
before anything is written. On a CUDA device it waits for nothing: an overflow is skipped there, and
what is wrong is raised by the next step.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ..._devices import HOST, devices_of
from ..._torch.checkpoint import wanted_states
from ..._torch.optim import increment_version
from ...clip import clip_grads_with_norm_
from ...grads.params import params_of
from ...grads.total import returned
from ...optim.base import FusedOptimizer
from ...optim.codes import SCALES
from ...optim.masters import begin_state, keys_for
from ...optim.param_shards import Shard, Shards, has_codes, row_of
from ...optim.plan_step import PlanStep, on_device
from ...optim.request import Rule, StepAnswer, StepRequest
from ...optim.state_kinds import all_kinds, kinds_in
from ...optim.step import Stepper
from ..layout.slots import Part, Slot
from ..transport.group import Group, Late, refuse_capture
from .norm import ChunkSums, Measured
from .slice_offload import SliceOffload

Kind = Callable[[list[dict[str, Any]]], FusedOptimizer]


def _of_parts(name: str) -> Any:
    """A method of dict, for parts of parameters."""
    plain = getattr(dict, name)

    def method(self: SliceStates, key: Tensor, *values: Any) -> Any:
        self._refuse_whole(self._keys_for(key))
        return plain(self, key, *values)

    return method


class SliceStates(defaultdict[Tensor, dict[str, Any]]):
    """The states of this rank's parts of parameters.

    torch.distributed.checkpoint asks two things of an optimizer's states. It makes a step with
    gradients of zero if there are none; a sharded optimizer gives it new states without one, so
    there always are some. And it asks which states a parameter has. A script that asks so raises
    an error, as it would go on without its states.
    """

    get, pop, __contains__, __setitem__ = map(
        _of_parts, ("get", "pop", "__contains__", "__setitem__")
    )

    def __init__(self, keys_of: Callable[[Tensor], tuple[str, ...] | None]) -> None:
        super().__init__(dict)
        self._keys_of = weakref.WeakMethod(keys_of)  # its owner has these states

    def __bool__(self) -> bool:
        return True

    def __missing__(self, key: Tensor) -> dict[str, Any]:
        keys = self._keys_for(key)
        if wanted_states() is None:
            self._refuse_whole(keys)
        return super().__missing__(key) if keys is None else dict.fromkeys(keys)

    def _keys_for(self, key: Tensor) -> tuple[str, ...] | None:
        keys_of = self._keys_of()
        return None if keys_of is None else keys_of(key)

    def _refuse_whole(self, keys: tuple[str, ...] | None) -> None:
        if keys is not None:
            raise RuntimeError(
                "faststep.zero: the state of a parameter is spread over the ranks, and "
                "optimizer.state has this rank's parts: read and change states by state_dict() "
                "and load_state_dict() on all ranks"
            )


class SliceOptimizer:
    """Steps what this rank owns, with the options of the script's parameter groups."""

    def __init__(self, kind: Kind, group: Group) -> None:
        self.fused = kind([{"params": []}])  # has the states
        self.fused.state = SliceStates(self.keys_of)
        self._stepper = self.fused._stepper = Stepper()
        self._group = group
        self._on_host = group.device.type == "cpu"
        self._here = HOST if self._on_host else group.device.index
        self._differ: Late | None = None  # whether ranks did in the step before
        self._offload: SliceOffload | None = None
        self.follow([], [])

    def follow(self, groups: list[dict[str, Any]], grouped: list[list[Slot]]) -> None:
        """Let the script's groups have other parameters: these of each are sharded."""
        self.end()
        self.groups = groups
        self.slots = list(chain.from_iterable(grouped))  # all that are stepped
        self._sums = ChunkSums(self.slots, self._group)
        self._names = [[slot.name for slot, _ in _owned(members)] for members in grouped]
        self.fused.param_groups = [
            {**options_of(group), "params": [part.values for _, part in _owned(members)]}
            for group, members in zip(groups, grouped, strict=True)
        ]
        self._group_of = {
            id(slot.param): number for number, members in enumerate(grouped) for slot in members
        }
        if self._offload is None:  # else the stepper has those of the copies on the host
            self._stepper.devices = devices_of(params_of(self.fused))
        self.fused._shards = self._shards_of(groups)
        self.forget()
        if self._offload is not None:
            self._offload.follow(self.slots)

    def _shards_of(self, groups: list[dict[str, Any]]) -> Shards | None:
        """What this rank has of whole parameters, if something counts their elements."""
        if not any(kinds.codes_from or kinds.is_noisy for kinds in all_kinds(self.fused)):
            return None
        params = chain.from_iterable(group["params"] for group in groups)
        number = {id(param): place for place, param in enumerate(params)}
        smallest = [kinds_in(self.fused, group).codes_from for group in groups]
        shards = {}
        for slot, part in _owned(self.slots):
            row, own = row_of(slot.param), smallest[self._group_of[id(slot.param)]]
            coded = has_codes(own, None, slot.param)
            shards[id(part.values)] = Shard(number[id(slot.param)], part.begin, row, coded)
        return shards

    def forget(self) -> None:
        """Let go of states that were replaced."""
        self._stepper.forget()

    def take_options(self) -> list[Rule]:
        """The rules of all groups, by what the script's groups say now."""
        fused = self.fused
        for group, script, names in zip(fused.param_groups, self.groups, self._names, strict=True):
            group.update(options_of(script))
            group["param_names"] = names
        return fused._rules()

    # ---- offload

    def offload(self, cores: list[int]) -> None:
        """Keep states in host memory, by threads on these cores, from the next `follow` on."""
        self._offload = SliceOffload(self.fused, cores)
        assert self.fused._stepper is not None
        self._stepper = self.fused._stepper

    def bring(self, slots: Iterable[Slot]) -> None:
        """Begin to copy gradients of a bucket to the host, once they are those of all ranks."""
        if self._offload is not None:
            self._offload.arrived(slots)

    def return_all(self, slots: Iterable[Slot]) -> None:
        """Return when the slices of a bucket have the values of the step."""
        if self._offload is not None:
            self._offload.return_all(slots)

    def finish(self) -> None:
        """End a step of which all parameters are there, or on their way from other ranks."""
        if self._offload is not None:
            self._offload.finish(self.slots)

    # ---- states

    def keys_of(self, param: Tensor) -> tuple[str, ...] | None:
        """The names of the states of a parameter that is sharded; None for another tensor."""
        number = self._group_of.get(id(param))
        if number is None:
            return None
        keys = keys_for(self.take_options()[number], param)
        return tuple(key for key in keys if key != SCALES)

    def new_states(self) -> dict[Tensor, dict[str, Any]]:
        """The states that the parts have before their first step, which get none by this."""
        rules, fused = self.take_options(), self.fused
        kept, fused.state = fused.state, defaultdict(dict)
        try:
            for group, rule in zip(fused.param_groups, rules, strict=True):
                for values in group["params"]:
                    if keys_for(rule, values):
                        begin_state(fused, group, rule, values)
            return dict(fused.state)
        finally:
            fused.state = kept

    # ---- steps

    def step(self, request: StepRequest) -> tuple[StepAnswer, bool]:
        """Update this rank's slices; returns whether they may have changed too. A collective."""
        if not self._on_host:
            refuse_capture()
        self.end()
        found, scale, norm = request.found_inf, request.grad_scale, None
        flag = on_device(found, self._here)
        if not request.looks_for_inf and self._is_seen(flag):
            return StepAnswer(True, None), False
        present = self._present()
        if request.measures:
            norm, found_inf, differ = self._measure(present, scale)
            if request.looks_for_inf:
                flag = found_inf
                if found is not None:
                    found.copy_(flag, non_blocking=True)
            if self._is_seen(flag):
                return StepAnswer(True, norm.item()), False
            flag = differ if flag is None else torch.maximum(flag.float(), differ)
        self._set_grads(self.slots, present)
        scale = on_device(scale, self._here)
        self._update(
            request._replace(grad_scale=scale, found_inf=flag, looks_for_inf=False, norm=norm)
        )
        if self._on_host:
            return StepAnswer(False, None if norm is None else norm.item()), True
        return StepAnswer(False if flag is None else flag, norm), True

    def _update(self, request: StepRequest) -> None:
        fused = self.fused
        self.take_options()
        params = [group["params"] for group in fused.param_groups]
        if not any(params):
            return
        if self._offload is not None:
            self._offload.note_writes(self.slots)
        try:
            self._stepper.step(PlanStep(fused, params, fused._rules), request)
        except _C.TensorError as error:
            raise fused._explained(*error.args) from None

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the common norm, and return it. A collective."""
        self.end()
        present = self._present()
        norm = self._measure(present, None).norm
        dtypes = [slot.param.dtype for slot in compress(self.slots, present)]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        if error_if_nonfinite:  # before anything is written; waits for a device
            returned(norm, dtype, 2.0, True)
        clip_grads_with_norm_(self._set_grads(self.slots, present), max_norm, norm)
        return returned(norm, dtype, 2.0, False)

    def unscale(self, dtype: torch.dtype, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the gradients of a dtype, and look for infinities on all ranks; a collective."""
        alike = [slot for slot in self.slots if slot.param.dtype == dtype and slot.is_present]
        grads = [part.grad for _, part in _owned(alike)]
        flag = torch.zeros((), dtype=torch.float32, device=self._group.device)
        if self._on_host:
            parts = self._set_grads(alike, [True] * len(alike))
            _, overflow, grads = _C.unscale_grads(parts, inv_scale.item(), True)
            flag.fill_(overflow)
        elif grads:
            _C.device_unscale(grads, on_device(inv_scale, self._here), flag, True)
        increment_version(grads)
        self._group.add_up(flag, "agreeing on an overflow")
        flag = (flag != 0.0).to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)), non_blocking=True)

    def end(self) -> None:
        """Raise on all ranks if they differed in the step before, which a CUDA device has done."""
        noted, self._differ = self._differ, None
        if noted is not None:  # of a step whose successor's backward is queued already
            _refuse(noted.read())

    def _present(self) -> list[bool]:
        return [slot.is_present for slot in self.slots]

    def _set_grads(self, slots: Iterable[Slot], present: Iterable[bool]) -> list[Tensor]:
        """Let C see the gradients of these parameters only; returns this rank's parts of all."""
        parts = []
        for slot, is_present in zip(slots, present, strict=True):
            if slot.part is not None:
                slot.part.values.grad = slot.part.grad if is_present else None
                parts.append(slot.part.values)
        return parts

    def _is_seen(self, flag: Tensor | None) -> bool:
        """True if the host knows of an overflow before the step."""
        return self._on_host and flag is not None and bool(flag)

    def _measure(self, present: list[bool], scale: Tensor | None) -> Measured:
        """The norm, with an error if the ranks differ in their gradients; the next step's error on
        a CUDA device.
        """
        measured = self._sums.measure(present, scale)
        if self._on_host:
            _refuse(measured.differ)
        else:
            self._differ = Late(measured.differ)
        return measured


def _refuse(differ: Tensor) -> None:
    if differ.item():
        raise RuntimeError(
            "faststep.zero: the ranks had gradients of different parameters when they measured "
            "the norm: some have set a .grad to None by themselves. That step was skipped on "
            "all ranks; set .grad to None on all of them or on none"
        )


def _owned(slots: Iterable[Slot]) -> list[tuple[Slot, Part]]:
    """Those with a part on this rank."""
    return [(slot, slot.part) for slot in slots if slot.part is not None]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
