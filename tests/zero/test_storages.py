"""What copies, saves, sends or resizes parameters finds one in each Storage, beside torch's own."""

import copy
import gc
import io
import math
import pickle
import tempfile
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from faststep import zero
from ranks import on_ranks

from .common import SHAPES, Given, grads_for, optimizer_of
from .rounded import DTYPES


def _bytes(saved: object) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return len(file.getvalue())


def _differ(one: Any, other: Any) -> list[str]:
    return [
        name
        for (name, a), b in zip(one.items(), other.values(), strict=True)
        if not torch.equal(a, b)
    ]


def _train(rank: int, model: Given, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(grads_for(model, rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_saved_copied_and_resized(rank: int, world: int) -> None:
    model, plain = Given(SHAPES, DTYPES), Given(SHAPES, DTYPES)
    with torch.device("meta"):
        sharded = zero.shard(model, optimizer_of("AdamW", model.parameters()), bucket_mb=math.inf)
    _train(rank, model, sharded, 0)
    pairs = [*zip(model.parameters(), plain.parameters(), strict=True)]
    for p, q in pairs:
        assert p.untyped_storage().nbytes() == p.nbytes
        assert p.stride() == q.stride()
        assert p.data_ptr() % 64 == 0
        assert _bytes(p) == _bytes(q)
        assert len(pickle.dumps(p)) == len(pickle.dumps(q))
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = model.p0.detach()
    for p, _ in pairs:
        with pytest.raises(RuntimeError, match="not resizable"):
            p.data.resize_(2 * p.numel() + 2)
        with pytest.raises(RuntimeError, match="not resizable"):
            p.untyped_storage().resize_(0)
    _train(rank, model, sharded, 1)
    assert _differ(before, copied.state_dict()) == _differ(before, loaded.state_dict()) == []
    assert torch.equal(seen, model.p0)
    assert not torch.equal(seen, before["p0"])
    after = model.p0.detach().clone()
    del model, sharded, pairs, p, q
    gc.collect()
    torch.full((10**6,), 7.0)
    assert torch.equal(seen, after)


@pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors")
@on_ranks(2)
def test_safetensors(rank: int, world: int) -> None:
    """safetensors' functions for models, which look for tensors that share a Storage."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    net = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 9))
    net[3].weight = net[0].weight
    sharded = zero.shard(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    net(torch.arange(9)).sum().backward()
    sharded.step()
    with tempfile.NamedTemporaryFile() as file:
        save_model(net, file.name)
        fresh = copy.deepcopy(net)
        for param in fresh.parameters():
            param.data.zero_()
        load_model(fresh, file.name)
        save_file(net[1].state_dict(), file.name)
        assert _differ(net.state_dict(), fresh.state_dict()) == []
        kept = dict(sorted(net[1].state_dict().items()))
        assert _differ(kept, load_file(file.name)) == []


@on_ranks(2)
def test_another_process_sees_new_values(rank: int, world: int) -> None:
    """What another process sees of the parameters that it was sent, and this one."""
    model = Given([(40, 50), (3,)], [torch.float32])
    sharded = zero.shard(model, optimizer_of("AdamW", model.parameters()))
    fork = torch.multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    model.share_memory()  # type: ignore[no-untyped-call]
    reader = fork.Process(target=_read, args=(model, there))
    reader.start()
    sums = []
    for step in range(3):
        _train(rank, model, sharded, step)
        here.send(step)
        sums.append((here.recv(), sum(float(p.detach().sum()) for p in model.parameters())))
    here.send(None)
    reader.join(300)
    assert all(theirs == mine for theirs, mine in sums)
    assert len({mine for _, mine in sums}) == 3


def _read(model: nn.Module, pipe: Any) -> None:
    while pipe.recv() is not None:
        pipe.send(sum(float(p.detach().sum()) for p in model.parameters()))


@on_ranks(2)
def test_values_in_memory_of_the_script_are_refused_where_two_share_it(
    rank: int, world: int
) -> None:
    model = Given([(4, 4), (4, 4)], [torch.float32])
    sharded = zero.shard(model, optimizer_of("AdamW", model.parameters()))
    model(grads_for(model, rank, 0)).backward()
    model.p0.data = model.p1.data
    text = r"^faststep\.zero: parameters 'p0' and 'p1' share memory but are.*nothing was updated$"
    with pytest.raises(TypeError, match=text):
        sharded.step()
