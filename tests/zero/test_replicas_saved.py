"""Checkpoints of two nodes of two ranks, loaded at other numbers of ranks."""

import copy
import warnings
from typing import Any

import torch.distributed as dist

from faststep import zero
from ranks import on_ranks

from .checkpoints import load, remove, save, shared_folder
from .common import SHAPES, Given, grads_for, optimizer_of
from .rounded import DTYPES, step_whole, unlike, wide_of
from .test_exact import _groups


def _made(groups: dict[str, Any]) -> tuple[Given, Any]:
    model = Given(SHAPES, DTYPES)
    optimizer = optimizer_of("AdamW", model.parameters())
    return model, zero.shard(model, optimizer, bucket_mb=0.1, master_weights=True, **groups)


def _step(sharded: Any, model: Given, whole: Any, reference: Any, seed: int) -> None:
    """A step in which all ranks have the same gradients."""
    nodes, world = 1, 1
    if sharded._engine is not None:
        group = sharded._engine.group
        world, nodes = group.total, group.total // group.world
    model(grads_for(model, seed)).backward()
    sharded.step()
    sharded.zero_grad()
    step_whole(whole, reference, [grads_for(model, seed)] * world, nodes)


@on_ranks(4)
def test_two_nodes_are_loaded_on_any_number_of_ranks(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    replicated = _groups(rank, world, 2)
    pair, alone = dist.new_group([0, 1]), dist.new_group([0])
    others: dict[str, tuple[int, dict[str, Any]]] = {
        "1 rank": (1, {"process_group": alone}),
        "2 ranks": (2, {"process_group": pair}),
        "4 ranks": (4, {}),
        "2 nodes": (4, replicated),
    }
    path = shared_folder()
    model, sharded = _made(replicated)
    whole = wide_of(model)
    reference = optimizer_of("AdamW", whole.parameters())
    for seed in (1, 2):
        _step(sharded, model, whole, reference, seed)
    wrong = unlike(sharded, model, whole, reference)
    sent = [sharded.state_dict()]
    dist.broadcast_object_list(sent, 0)
    save(model, sharded, path / "replicated")
    for how in ("dict", "torch"):
        for name, (count, groups) in others.items():
            if rank >= count:
                continue
            new, other = _made(groups)
            new.load_state_dict(model.state_dict())
            if how == "dict":
                other.load_state_dict(copy.deepcopy(sent[0]))
            else:
                inside = groups.get("process_group") if count < world else None
                load(new, other, path / "replicated", process_group=inside)
            wide, theirs = copy.deepcopy((whole, reference))
            found = unlike(other, new, wide, theirs)
            _step(other, new, wide, theirs, 3)
            found += unlike(other, new, wide, theirs)
            wrong += [f"{how} on {name}: {text}" for text in found]
    remove(path)
    assert not wrong, wrong
