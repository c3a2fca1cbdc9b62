"""The second half of `shard`, with checked arguments: looks at each parameter, and moves it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..grads.params import params_of
from ..offloading import Offload, offload
from ..optim.base import FusedOptimizer
from ..optim.masters import StateFormats, has_master
from ..optim.state_kinds import options_in
from .admitted import (
    admit,
    device_of,
    fused_class_of,
    line_of,
    named_in,
    refuse_fp16,
    refuse_taken,
    taken_of,
)
from .engine import Engine, Options
from .hooks.wrapper import check_wrapped
from .optimizer import ShardedOptimizer
from .saved.state_dicts import cut_states
from .stage3.blocks import announce, blocks_of
from .stage3.fully_sharded import StepCheck, check_fully, follow_successors, shard_fully
from .step.slice_offload import cores_of
from .step.slice_optimizer import Kind, options_of
from .transport.group import Group, group_of


def build(
    model: nn.Module,
    optimizer: Optimizer,
    asked: Options,
    process_group: Any,
    replicate_group: Any,
    blocks: Sequence[nn.Module] | None,
    timeout: float,
) -> ShardedOptimizer:
    """Shard a model; see :func:`faststep.zero.shard`."""
    kind = fused_class_of(optimizer, asked.kept)
    if asked.max_grad_norm is None:
        asked = asked._replace(max_grad_norm=getattr(optimizer, "_max_grad_norm", None))
    stage = asked.stage
    wrapper = model if isinstance(model, DistributedDataParallel) else None
    if stage == 3 and wrapper is not None:
        raise TypeError(
            "shard(stage=3) takes the module inside DistributedDataParallel (model.module): "
            "fully_shard reduces the gradients by itself"
        )
    if wrapper is not None:
        model = wrapper.module
        process_group = wrapper.process_group if process_group is None else process_group
    if stage == 3:
        follow_successors(optimizer)
    # The parameters that get gradients, last ones first, as backward reaches them.
    named = [pair for pair in named_in(model, params_of(optimizer)) if pair[1].requires_grad]
    refuse_fp16(named, asked.kept)
    group = group_of(process_group, replicate_group, timeout)
    if group is None:
        return _alone(model, optimizer, _fused(kind, optimizer, asked), asked)
    wrapped = "" if wrapper is None else ", inside DistributedDataParallel"
    taken = taken_of(params_of(optimizer))
    group.meet("shard()")
    group.check_alike([str(asked) + wrapped, *_described(model, optimizer, taken)])
    refuse_taken(model.named_parameters(), taken)
    if stage == 3:
        fused = _fused(kind, optimizer, asked)
        return _fully(model, optimizer, fused, asked, group, blocks)
    admit(named, ())
    device = device_of(named or list(model.named_parameters()))
    group.use_device(device)
    if wrapper is not None:
        check_wrapped(wrapper)
    engine = Engine(kind, optimizer.param_groups, model, named, group.alone(), asked, wrapper)
    engine.gradients.reduce_also(model.parameters())
    if asked.gather == "forward":
        engine.wait_in_forward(model)
    own = {id(slot.param) for slot in engine.slots}
    others = [p.detach() for p in (*model.parameters(), *model.buffers()) if id(p) not in own]
    engine.group.broadcast([*(bucket.params.flat for bucket in engine.buckets), *others])
    cut_states(engine, _begun_states(optimizer, asked.kept.masters))
    optimizer.state.clear()
    made = ShardedOptimizer(optimizer, engine.slices.fused, engine, asked.max_grad_norm, group)
    if asked.offload:
        engine.offload()
    return made


def _alone(
    model: nn.Module, optimizer: Optimizer, fused: FusedOptimizer, asked: Options
) -> ShardedOptimizer:
    """In a single process."""
    if asked.offload == "params":
        raise NotImplementedError(
            'shard(offload="params") needs a process group of several ranks: call '
            "faststep.offload(), which keeps the states in host memory; nothing was changed"
        )
    if asked.offload:
        fused._is_asked_to_unscale = True  # as a sharded optimizer is
        offload(fused, model=model if asked.gather == "forward" else None)
    return ShardedOptimizer(optimizer, fused, None, asked.max_grad_norm)


def _fully(
    model: nn.Module,
    optimizer: Optimizer,
    fused: FusedOptimizer,
    asked: Options,
    group: Group,
    blocks: Sequence[nn.Module] | None,
) -> ShardedOptimizer:
    is_default = blocks is None
    blocks = blocks_of(model) if blocks is None else blocks
    check_fully(model, optimizer, blocks)
    sharded = announce(model, blocks, is_default and not group.rank)
    shard_fully(model, fused, group, blocks, asked.offload == "params")
    optimizer.state.clear()
    check = StepCheck(model, blocks, fused, group).check_step
    made = ShardedOptimizer(optimizer, fused, None, asked.max_grad_norm, group, before_step=check)
    made.blocks = sharded
    if asked.offload == "optimizer":
        fused._is_asked_to_unscale = True  # as a sharded optimizer is
        Offload(fused, cores=cores_of(group), by_script=False)
    return made


def _fused(kind: Kind, optimizer: Optimizer, asked: Options) -> FusedOptimizer:
    """The fused optimizer itself, with the groups and states of the one that it replaces."""
    fused = kind([{**options_of(optimizer.param_groups[0]), "params": []}])
    fused.param_groups = optimizer.param_groups
    states = _begun_states(optimizer, asked.kept.masters)
    formats = StateFormats(fused)
    fused.state = defaultdict(dict)
    fused.state.update((param, formats.fitting(state, param)) for param, state in states.items())
    return fused


def _begun_states(optimizer: Optimizer, keeps_masters: bool) -> dict[Tensor, dict[str, Any]]:
    """Its states. Beside masters those are fp32 that torch's Adagrad makes when it is made."""
    first: float = optimizer.defaults.get("initial_accumulator_value", 0.0)
    for param, state in optimizer.state.items():
        sums = state.get("sum")
        is_low = keeps_masters and has_master(param) and isinstance(sums, Tensor)
        if is_low and state.get("step") == 0 and bool((sums == torch.full_like(sums, first)).all()):
            state["sum"] = torch.full_like(sums, first, dtype=torch.float32)
    return optimizer.state


def _described(model: nn.Module, optimizer: Optimizer, taken: set[int]) -> list[str]:
    """A line per parameter and buffer, in which all ranks must agree."""
    where = {
        id(param): f"{number}.{index}"
        for number, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
    }
    lines = [f"faststep {_version()}, torch {torch.__version__}, {type(optimizer).__name__}"]
    for name, param in model.named_parameters():
        lines.append(line_of(name, param, where.get(id(param), "no group"), taken))
    own = [options_in(group) for group in optimizer.param_groups]
    lines += [f"options of states in groups {own}"] if any(own) else []
    for name, buffer in model.named_buffers():
        lines.append(f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}")
    return lines


def _version() -> str:
    try:
        return version("faststep")
    except PackageNotFoundError:
        return "of unknown version"
