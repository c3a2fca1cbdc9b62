"""replicate_group: slices inside a node, and equal slices in every node."""

import pytest
import torch
import torch.distributed as dist

import faststep
from faststep import zero
from ranks import on_ranks

from .common import SHAPES, Given, differences, grads_for, mean_of, states_differ


def _set_means(model: Given, whole: Given, world: int, scale: float, *seeds: int) -> None:
    """Give one process the gradients that two nodes add up."""
    rows = [[grads_for(model, rank, seed) for rank in range(world)] for seed in seeds]
    if seeds == (2,):
        rows[0][3][4].view(-1)[7] = float("inf")
    for number, param in enumerate(whole.parameters()):
        sums = [mean_of([grads[number] * scale for grads in row], 2) for row in rows]
        total = sums[0] if len(sums) == 1 else sums[0] + sums[1]
        param.grad = torch.empty_like(param).copy_(total)


@on_ranks(4)
def test_two_nodes_of_two_ranks(rank: int, world: int) -> None:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = {"process_group": inside[rank // 2], "replicate_group": across[rank % 2]}
    wrong: list[str] = []
    model, whole = Given(SHAPES, [torch.float32]), Given(SHAPES, [torch.float32])
    if rank == 3:
        with torch.no_grad():
            model.p0.add_(1.0)  # rank 0's values are those that count
    optimizer = zero.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), bucket_mb=0.1, **groups
    )
    reference = faststep.optim.AdamW(whole.parameters(), lr=0.01)
    scaler, other = (faststep.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2))
    for step in range(5):  # in step 2 a rank of the second node has an inf; step 4 has two backward
        scale = other.scale(torch.ones(())).item()
        seeds = (step, 9) if step == 4 else (step,)
        for seed in seeds:
            grads = grads_for(model, rank, seed)
            if seed == 2 and rank == 3:
                grads[4].view(-1)[7] = float("inf")
            scaler.scale(model(grads)).backward()
        _set_means(model, whole, world, scale, *seeds)
        for one, opt in ((scaler, optimizer), (other, reference)):
            one.step(opt, max_norm=1.0)
            one.update()
            opt.zero_grad()
        assert optimizer.step_was_skipped == (step == 2)
        differ = differences(model.parameters(), whole.parameters())
        wrong += [f"step {step}, p{number}" for number in differ]
    wrong += states_differ(optimizer, reference)
    assert optimizer.add_up(torch.ones(1)) == 4
    sent = [optimizer.state_dict()]
    assert len(sent[0]["state"]) == (0 if rank else len(SHAPES))
    dist.broadcast_object_list(sent, 0)
    fresh = Given(SHAPES, [torch.float32])
    loaded = zero.shard(fresh, torch.optim.AdamW(fresh.parameters(), lr=0.01), **groups)
    loaded.load_state_dict(sent[0])
    wrong += states_differ(loaded, reference)
    assert not wrong, wrong
    sgd, group = torch.optim.SGD(fresh.parameters()), inside[rank // 2]
    with pytest.raises(ValueError, match="must have this rank alone in common"):
        zero.shard(fresh, sgd, process_group=group, replicate_group=group)
    with pytest.raises(ValueError, match=r"^shard\(\): replicate_group needs process_group"):
        zero.shard(fresh, sgd, replicate_group=across[rank % 2])
    odd = Given([(3, 4), (6,) if rank == 2 else (5,)], [torch.float32])
    text = r"^shard\(\): the ranks differ.*rank 2 has 'p1' \(6,\)"
    with pytest.raises(RuntimeError, match=text):
        zero.shard(odd, torch.optim.SGD(odd.parameters()), **groups)
