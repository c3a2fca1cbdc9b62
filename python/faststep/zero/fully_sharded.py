"""Stage 3: torch's fully_shard on the blocks of a model, under an optimizer that exists already.

fully_shard puts a DTensor in the place of each parameter. The optimizer's groups and states have to
follow, so that hyper-parameters, schedulers and what was trained before stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..grads.params import name_of
from .group import Group

__all__ = ["blocks_of", "shard_fully"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated part of a model: the children of the longest ModuleList; none without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def shard_fully(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group,
    blocks: Sequence[nn.Module],
) -> None:
    """Shard the blocks, then the rest of the model, and let the optimizer have the new parameters.

    All parameters of the optimizer are the model's.

    All ranks get the parameters and buffers of the group's first rank, as from
    DistributedDataParallel. States are cut as their parameters are, without communication.

    Raises:
        TypeError: a parameter is used inside of a block and outside of it.
        RuntimeError: a parameter has a gradient, or hooks that its successor would not have.
    """
    from torch.distributed.fsdp import fully_shard

    places = _places_of(model)
    _refuse_ties(model, blocks)
    for param, name in _named_params(optimizer):
        if param.grad is not None:
            raise RuntimeError(f"{name} has a gradient: call zero_grad() before shard()")
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(f"{name} has hooks: shard the model before they are set")
    group.broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
    mesh = group.mesh(next(model.parameters()).device.type)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    _replace(optimizer, places)


def _refuse_ties(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise for a parameter that fully_shard would replace by one DTensor in each of two places."""
    home: dict[int, object] = {}  # the innermost block of each module
    for block in sorted(blocks, key=lambda one: -sum(1 for _ in one.modules())):
        home.update((id(module), block) for module in block.modules())
    seen: dict[int, tuple[object, str]] = {}
    for path, module in model.named_modules():
        here = home.get(id(module))
        for name, param in module.named_parameters(path, recurse=False):
            other, first = seen.setdefault(id(param), (here, name))
            if other is not here:
                raise TypeError(
                    f"shard(stage=3): {first!r} and {name!r} are one parameter, in different "
                    "blocks, and fully_shard would make it two: leave these blocks out of blocks=; "
                    "nothing was changed"
                )


def _named_params(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            yield param, name_of(optimizer, number, index)


def _places_of(model: nn.Module) -> dict[int, tuple[Tensor, nn.Module, str]]:
    """Each parameter by its id, with a module that has it and its name there."""
    return {
        id(param): (param, module, name)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    }


def _replace(optimizer: Optimizer, places: dict[int, tuple[Tensor, nn.Module, str]]) -> None:
    """Put the sharded parameters into the groups, and shards of the states under them."""
    from torch.distributed.tensor import distribute_tensor

    def successor(param: Tensor) -> Any:
        _, module, name = places[id(param)]
        return getattr(module, name)

    def cut(value: Any, before: Tensor, after: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != before.shape or value.dim() == 0:
            return value  # a step counter
        return distribute_tensor(value, after.device_mesh, after.placements, src_data_rank=None)

    for param, state in list(optimizer.state.items()):
        after = successor(param)
        del optimizer.state[param]
        optimizer.state[after] = {key: cut(value, param, after) for key, value in state.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [successor(param) for param in group["params"]]
