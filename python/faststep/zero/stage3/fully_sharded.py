"""Stage 3: torch's fully_shard on the blocks of a model, under an optimizer that exists already.

fully_shard puts a DTensor in the place of each parameter. The optimizer's groups and states have to
follow, so that hyper-parameters, schedulers and what was trained before stay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch.tensors import storage_records_of
from ...grads.hooks import weakly
from ...grads.params import name_of
from ...optim.codes import with_scales_of
from ...optim.param_shards import shard_of
from ..admitted import taken_by_another
from ..transport.group import Group
from .blocks import has_forward, homes_of

# What has been sharded here, for other optimizers of the same model that are sharded later.
_successors: Any = WeakTensorKeyDictionary()  # of each parameter that fully_shard has replaced
_sharded: Any = WeakTensorKeyDictionary()  # the optimizer of each of these, weakly, or None


def check_fully(model: nn.Module, optimizer: Optimizer, blocks: Sequence[nn.Module]) -> None:
    """Raise for what fully_shard would refuse when a part of the model is sharded already."""
    _refuse_blocks(model, blocks)
    for name, param in model.named_parameters():
        problem = ""
        if param in _sharded:
            continue
        if type(param) is not nn.Parameter:
            problem = f"is a {type(param).__name__}"
        elif not param.dim():
            problem = "is 0-d, which fully_shard does not support: make it a tensor of one element"
        elif not param.numel() and param.requires_grad:
            problem = "has no elements, which fully_shard cannot reduce: freeze it"
        elif not param.is_contiguous():
            problem = "is not contiguous, which fully_shard does not support"
        if problem:
            raise TypeError(f"shard(stage=3): parameter {name!r} {problem}; nothing was changed")
    _refuse_ties(model, blocks)
    for tensor, name in _named_params(optimizer):
        if tensor in _sharded:
            if _owner_of(tensor) is not None:
                gc.collect()  # it may be gone
            if _owner_of(tensor) is not None:
                raise taken_by_another(f"shard(stage=3): {name}")
            continue
        if tensor.grad is not None:
            raise RuntimeError(f"{name} has a gradient: call zero_grad() before shard()")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(f"{name} has hooks: shard the model before they are set")


def _refuse_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    known = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for number, block in enumerate(blocks):
        kind, problem = type(block).__name__, ""
        error: type[Exception] = ValueError
        if not isinstance(block, nn.Module):
            error, problem = TypeError, f"must be a torch.nn.Module, not {kind}"
        elif not has_forward(block):
            error, problem = TypeError, f"is a {kind}, which has no forward: pass what is in it"
        elif block is model:
            problem = "is the model itself, which is sharded last anyway"
        elif id(block) not in known:
            problem = "is not in the model"
        elif id(block) in seen:
            problem = "is there twice"
        if problem:
            raise error(f"shard(): blocks[{number}] {problem}; nothing was changed")
        seen.add(id(block))


def shard_fully(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group,
    blocks: Sequence[nn.Module],
    offloads: bool,
) -> None:
    """Shard the blocks, then the rest of the model, and let the optimizer have the new parameters.

    All parameters of the optimizer are the model's, and `check_fully` has found nothing. What was
    sharded before, for another optimizer, stays as it is. With `offloads` the shards, their
    gradients and states lie in host memory.

    All ranks get the parameters and buffers of the group's first rank, as from
    DistributedDataParallel. States are cut as their parameters are, without communication.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    places = [
        (param, module, name)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if param not in _sharded
    ]
    if places:
        group.broadcast([*(param.detach() for param, *_ in places), *model.buffers()])
        device = places[0][0].device.type
        mesh = DeviceMesh.from_group(group.process_group, device)
        policy = CPUOffloadPolicy(pin_memory=device == "cuda") if offloads else OffloadPolicy()
        inner_first = sorted(blocks, key=lambda block: sum(1 for _ in block.modules()))
        for module in (*inner_first, model):
            if any(param not in _sharded for param in module.parameters()):
                fully_shard(module, mesh=mesh, offload_policy=policy)
    for param, module, name in places:
        _successors[param] = after = getattr(module, name)
        _sharded[after] = None
    follow_successors(optimizer)
    for mine, _ in _named_params(optimizer):
        _sharded[mine] = weakref.ref(optimizer)


def _owner_of(param: Tensor) -> Optimizer | None:
    """The optimizer for which a parameter was sharded, if it lives."""
    owner = _sharded.get(param)
    return None if owner is None else owner()


def adopt(optimizer: Optimizer, params: list[Tensor]) -> None:
    """Let the optimizer have the parameters of a new group, which were sharded with the model."""
    params[:] = [_successors.get(param, param) for param in params]
    for param in params:
        if param not in _sharded:
            raise RuntimeError(
                "faststep.zero: a parameter group cannot be added at stage 3 if its parameters "
                "are new: let the model have them before shard()"
            )
        if _owner_of(param) is not None:
            raise taken_by_another("a parameter of the new group")
    for param in params:
        _sharded[param] = weakref.ref(optimizer)


def _refuse_ties(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise for a parameter that fully_shard would replace by one DTensor in each of two places."""
    for places in homes_of(model, blocks).values():
        for name, home in places:
            if home != places[0][1]:
                raise TypeError(
                    f"shard(stage=3): {places[0][0]!r} and {name!r} are one parameter, in "
                    "different blocks, and fully_shard would make it two: leave these blocks out "
                    "of blocks=; nothing was changed"
                )


def _named_params(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            yield param, name_of(optimizer, number, index)


def follow_successors(optimizer: Optimizer) -> None:
    """Put sharded parameters into the groups where they have replaced others, and cut states."""
    from torch.distributed.tensor import distribute_tensor

    def cut(value: Any, before: Tensor, after: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != before.shape or value.dim() == 0:
            return value  # a step counter
        mesh, placements = after.device_mesh, after.placements
        return distribute_tensor(value, mesh, placements, src_data_rank=None).to(after.device)

    for group in optimizer.param_groups:
        group["params"][:] = [_successors.get(param, param) for param in group["params"]]
    for param, state in list(optimizer.state.items()):
        if (after := _successors.get(param)) is not None:
            del optimizer.state[param]
            count = after.to_local().numel()
            state = with_scales_of(state, shard_of(optimizer, after), count)
            optimizer.state[after] = {key: cut(value, param, after) for key, value in state.items()}


class StepCheck:
    """Looks at the model in each forward, and at all ranks before each step.

    fully_shard does not call hooks of `register_hook()`, and ignores values of `.data =`. It
    reduces those gradients of a block that a rank has, side by side, and gathers the parameters of
    whatever block a rank calls. So ranks that use different parameters, or blocks in different
    orders, get a mixture where the sizes happen to fit.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], optimizer: Optimizer, group: Group
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._params: dict[str, Any] = dict(model.named_parameters())
        self._records = storage_records_of(self._params.values())
        self._number = {id(module): number for number, module in enumerate((model, *blocks))}
        # By block: its parameters, and where fully_shard puts the gathered ones.
        self._places: list[list[tuple[nn.Module, str, Any]]] = [[] for _ in self._number]
        homes = homes_of(model, blocks)
        for path, param in self._params.items():
            owner, _, name = path.rpartition(".")
            number = self._number.get(homes[id(param)][0][1], 0)
            self._places[number].append((model.get_submodule(owner), name, param))
        self._order = 0  # made of the numbers of the blocks that were called since the last step
        model.register_forward_pre_hook(weakly(self._refuse_data), prepend=True)
        note = weakly(self._note)
        for module in (model, *blocks):
            module.register_forward_pre_hook(note)

    def _note(self, module: nn.Module, *_: Any) -> None:
        """When a block has its parameters: let these have the hooks of `register_hook()`."""
        number = self._number[id(module)]
        self._order = hash((self._order, number))
        for owner, name, param in self._places[number]:
            if param._backward_hooks:
                getattr(owner, name)._backward_hooks = param._backward_hooks

    def _refuse_data(self, *_: Any) -> None:
        """Raise RuntimeError for values that have no effect with fully_shard."""
        now = storage_records_of(self._params.values())
        if now == self._records:
            return
        all_records = zip(self._params, now, self._records, strict=True)
        name = next(name for name, one, before in all_records if one != before)
        raise RuntimeError(
            f"faststep.zero: {name!r} was given values by .data =, which fully_shard ignores: use "
            "param.to_local().copy_(part), or load a state dict"
        )

    def check_step(self) -> None:
        """Raise RuntimeError on every rank if ranks differ in what they used; a collective."""
        self._refuse_data()
        names = {id(param): name for name, param in self._params.items()}
        lines = [
            f"{names.get(id(param))!r} with{'out' if param.grad is None else ''} a gradient, "
            f"in group {number}"
            for number, members in enumerate(self._optimizer.param_groups)
            for param in members["params"]
        ]
        lines.append(f"called its blocks in the order with the code {self._order & 0xFFFFFFFF:x}")
        self._order = 0
        caller = (
            "faststep.zero: nothing was updated, as fully_shard adds up gradients wrongly where "
            "ranks use different parameters (model.set_reduce_scatter_unused_params(True) of newer "
            "versions of torch has it send zeros)"
        )
        self._group.check_alike(lines, caller)
