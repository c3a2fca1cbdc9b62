"""release_gradients() under DistributedDataParallel with gloo, over loopback."""

import copy
import gc
import io
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import faststep
from ranks import assert_alike, on_ranks

from .collectives import Collectives
from .common import OddLayouts, assert_equal, batches, loss_of, make_model, values

SMALL = 0.0005  # MiB: several buckets


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values()]


def _train(rank: int, case: dict[str, Any], released: bool) -> list[Tensor]:
    net = make_model(case["dtype"])
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL, gradient_as_bucket_view=case["views"])
    clip = case["clip"] if released else None
    optimizer = faststep.optim.AdamW(net.parameters(), lr=0.01, max_grad_norm=0.2 if clip else None)
    release = faststep.release_gradients(model, optimizer, clip=clip) if released else None
    for number, (x, y) in enumerate(batches([3 + rank] * 8, 10 * rank, case["dtype"])):
        if number % 4 == 3:  # added up before
            with model.no_sync():
                loss_of(model, (x, y)).backward()
        before = values(net)
        loss_of(model, (x, y)).backward()
        if released:
            assert all(p.grad is None for p in net.parameters())
            assert not any(map(torch.equal, values(net), before))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    if release is not None:
        release.remove()
        loss_of(model, (x, y)).backward()
        assert all(p.grad is not None for p in net.parameters())
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    else:
        loss_of(model, (x, y)).backward()
    return values(net) + _states(optimizer) + [p.grad.clone() for p in net.parameters()]


CASES = {
    "plain": {"views": False, "dtype": torch.float32, "clip": None},
    "views": {"views": True, "dtype": torch.bfloat16, "clip": None},
}


@on_ranks(3, case=CASES)
def test_the_bits_of_the_step_after_backward(rank: int, world: int, case: str) -> None:
    """And those of the gradients after remove(), which the hook that stays has reduced."""
    released, plain = (_train(rank, CASES[case], released) for released in (True, False))
    assert_equal(released, plain)
    assert_alike(released[:6])


@on_ranks(3, clip=("per_parameter", "lagged"))
def test_ranks_stay_alike(rank: int, world: int, clip: str) -> None:
    case = {"views": True, "dtype": torch.float32, "clip": clip}
    assert_alike(_train(rank, case, True)[:6])


@on_ranks(3)
def test_gradients_of_other_optimizers_stay(rank: int, world: int) -> None:
    net = make_model()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    optimizer = faststep.optim.SGD(net[0].parameters(), lr=0.1)
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, batches([4])[0]).backward()
    assert [param.grad is None for param in net.parameters()] == [True] * 2 + [False] * 4
    release.remove()


@on_ranks(3)
def test_what_is_refused(rank: int, world: int) -> None:
    net = make_model()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    optimizer = faststep.optim.AdamW(net.parameters(), lr=0.01)
    release = faststep.release_gradients(model, optimizer)

    second = faststep.optim.SGD([net[0].weight])
    with pytest.raises(RuntimeError, match="released already"):
        faststep.release_gradients(model, second)
    for option in ("find_unused_parameters", "static_graph"):
        other = DistributedDataParallel(make_model(), **{option: True})
        with pytest.raises(TypeError, match=f"{option}=True"):
            faststep.release_gradients(other, second)
    other = DistributedDataParallel(make_model())
    Collectives(other).stop()  # it has a hook of another by now
    with pytest.raises(TypeError, match="has one already"):
        faststep.release_gradients(other, second)
    loss_of(model, batches([4])[0]).backward()
    optimizer.step()
    release.remove()
    # Gradients that come twice before a step: the error of the hook comes out of backward.
    again = faststep.release_gradients(model, optimizer)
    loss_of(model, batches([4])[0]).backward()
    with pytest.raises(RuntimeError, match="a second gradient of parameter"):
        loss_of(model, batches([4])[0]).backward()
    dead = weakref.ref(again)
    del again
    assert _dies(dead)


def _dies(reference: weakref.ref[Any]) -> bool:
    """Within a while: threads that reduce may hold the hook until all buckets are through."""
    deadline = time.monotonic() + 20.0
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return reference() is None


@on_ranks(2)
def test_updates_do_not_wait_for_the_end_of_backward(rank: int, world: int) -> None:
    """What has been updated when the gradient of the first layer comes, which comes last."""
    net = make_model()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    optimizer = faststep.optim.SGD(net.parameters(), lr=0.1)
    release = faststep.release_gradients(model, optimizer)
    loss_of(model, batches([4], rank)[0]).backward()  # the model makes its buckets after the first
    optimizer.step()
    before, seen = values(net), []

    def wait(_: Tensor) -> None:
        """The last layer's bucket is on its way; the first one's waits for this."""
        deadline = time.monotonic() + 60.0
        while torch.equal(net[4].weight, before[4]) and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.extend(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))

    net[0].weight.register_hook(wait)
    loss_of(model, batches([4], rank)[0]).backward()
    after = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    release.remove()
    result = {"during": seen, "after": after}
    assert result["during"][4:] == [True, True]
    assert not result["during"][0]
    assert result["after"] == [True] * 6


@on_ranks(3)
def test_layouts(rank: int, world: int) -> None:
    """Parameters whose elements lie in another order than that of their shape."""
    found = []
    for released in (True, False):
        for views in (True, False):
            net = OddLayouts(torch.float32)
            model = DistributedDataParallel(net, gradient_as_bucket_view=views)
            optimizer = faststep.optim.SGD(net.parameters(), lr=0.01)
            release = faststep.release_gradients(model, optimizer) if released else None
            for _ in range(2):
                model(torch.arange(90.0).view(3, 30).cos() + rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            if release is not None:
                release.remove()
            found.append(values(net))
    for result in found[:3]:
        assert_equal(result, found[3])


@on_ranks(2)
def test_the_module_inside_is_refused(rank: int, world: int) -> None:
    """A release of the module that the model wraps, from before and after it does."""
    found = []
    for late in (False, True):
        net = make_model()
        optimizer = faststep.optim.SGD(net.parameters(), lr=0.1)
        release = None if late else faststep.release_gradients(net, optimizer)
        model = DistributedDataParallel(net)
        if late:
            release = faststep.release_gradients(net, optimizer)
        before = values(net)
        with pytest.raises(RuntimeError, match="pass the DistributedDataParallel itself") as error:
            loss_of(model, batches([4], rank)[0]).backward()
        assert_equal(values(net), before)
        found.append(str(error.value))
        release.remove()
    nets = [make_model(), make_model()]
    first, second = map(DistributedDataParallel, nets)
    optimizer = faststep.optim.SGD([p for one in nets for p in one.parameters()], lr=0.1)
    release = faststep.release_gradients(first, optimizer)
    before = values(nets[1])
    loss_of(first, batches([4], rank)[0]).backward()
    with pytest.raises(RuntimeError, match="pass the DistributedDataParallel itself") as error:
        loss_of(second, batches([4], rank)[0]).backward()
    assert_equal(values(nets[1]), before)
    found.append(str(error.value))
    release.remove()
    alone = make_model()  # one that no model wraps may be another on each rank
    optimizer = faststep.optim.SGD(alone.parameters(), lr=0.1)
    release = faststep.release_gradients(alone, optimizer)
    loss_of(alone, batches([4], rank)[0]).backward()
    assert all(p.grad is None for p in alone.parameters())
    release.remove()
    assert len(found) == 3


@on_ranks(2, how=("saved", "copied"))
def test_a_copy_of_the_model_is_not_released(rank: int, world: int, how: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    release = faststep.release_gradients(model, optimizer)
    if how == "copied":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    for one in (other, model):
        one(torch.full((1, 3), 1.0 + rank)).sum().backward()
    assert torch.equal(other.module.weight.grad, torch.full((2, 3), 1.5))
    assert model.module.weight.grad is None
    release.remove()
