"""Side streams, other devices, and gradients that move."""

import pytest
import torch

import faststep
from faststep._torch.streams import lasts
from optim.declarations import ALL, Declaration

from .common import (
    CUDA,
    REHEARSAL,
    Twins,
    needs_two_devices,
    no_synchronization,
    place,
    values,
)

LATE = 20_000_000  # clock cycles: some 10 ms


def test_alternating_streams() -> None:
    """Every step runs late, on another stream than the one before, which it waits for."""
    twins = Twins([values((50_003,), 0), values((7,), 1)])
    a, b = twins.optimizers(faststep.optim.AdamW, max_grad_norm=0.1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    sources = [[values((n,), 10 * k + n) for n in (50_003, 7)] for k in range(9)]
    placed = [[place(g, CUDA) for g in grads] for grads in sources]
    torch.cuda.synchronize()
    previous = torch.cuda.current_stream()
    for step, stream in enumerate(streams * 3):
        stream.wait_stream(previous)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            for q, grad in zip(twins.cuda, placed[step], strict=True):
                q.grad = grad * 2.0
            b.step()
        for p, grad in zip(twins.cpu, sources[step], strict=True):
            p.grad = grad * 2.0
        a.step()
        previous = stream
    torch.cuda.synchronize()
    twins.assert_same(a, b)


def test_which_streams_last() -> None:
    """Those of torch's pools, but no stream that a user has made."""
    own, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(own):
        assert lasts(0, own.cuda_stream)
        assert not lasts(0, other.cuda_stream)  # it is not current
    external = torch.cuda.ExternalStream(own.cuda_stream)
    with torch.cuda.stream(external):
        assert torch.cuda.current_stream().cuda_stream == own.cuda_stream
        assert not lasts(0, own.cuda_stream)


def test_two_optimizers_on_two_streams() -> None:
    pairs = [Twins([values((30_001,), n)]) for n in range(2)]
    both = [t.optimizers(faststep.optim.AdamW, max_grad_norm=0.1) for t in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    for twins in pairs:
        twins.draw_grads(0)
    torch.cuda.synchronize()
    for _ in range(20):
        for (a, b), stream in zip(both, streams, strict=True):
            a.step()
            with torch.cuda.stream(stream):
                b.step()
    torch.cuda.synchronize()
    for twins, (a, b) in zip(pairs, both, strict=True):
        twins.assert_same(a, b)


def test_lists_on_a_side_stream() -> None:
    twins = Twins([values((30_001,), 0)])
    source = values((30_001,), 5)
    placed = place(source, CUDA)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        twins.cuda[0].grad = placed * 4.0
        norm = faststep.clip_grad_norm_(twins.cuda, 0.5)
    stream.synchronize()
    twins.cpu[0].grad = source * 4.0
    expected = faststep.clip_grad_norm_(twins.cpu, 0.5)
    assert torch.equal(norm.cpu(), expected)
    assert torch.equal(twins.cuda[0].grad.cpu(), twins.cpu[0].grad)


@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_gradients_set_to_none_each_step(declaration: Declaration) -> None:
    """Some parameters have none for a step, and others take over their memory."""
    twins = Twins([values((n,), n) for n in (100, 5000, 100, 1, 100)])
    a, b = twins.optimizers(declaration.ours, **declaration.kwargs, max_grad_norm=0.5)
    for step in range(12):
        for optimizer in (a, b):
            optimizer.zero_grad(set_to_none=True)
        twins.set_grads(
            [
                None if (step + i) % 4 == 0 else values(tuple(p.shape), 100 * step + i)
                for i, p in enumerate(twins.cpu)
            ]
        )
        a.step()
        b.step()
    twins.assert_same(a, b)


def test_host_and_device_in_one_optimizer() -> None:
    twins = Twins([values((500,), i) for i in range(4)], ["cuda:0", "cpu", "cuda:0", "cpu"])
    twins.train(twins.optimizers(faststep.optim.AdamW), 4)


def test_host_and_device_agree_on_the_norm() -> None:
    twins = Twins([values((500,), i) for i in range(2)], ["cuda:0", "cpu"])
    a, b = twins.optimizers(faststep.optim.AdamW, max_grad_norm=0.1)
    for step in range(3):
        twins.draw_grads(step)
        a.step()
        b.step()
    for p, q in zip(twins.cpu, twins.cuda, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())


@pytest.mark.parametrize("current", [0, 1])
def test_parameters_on_a_device_that_is_not_current(current: int) -> None:
    needs_two_devices()
    twins = Twins([values((5000,), 0)], [f"cuda:{1 - current}"])
    a, b = twins.optimizers(faststep.optim.AdamW, max_grad_norm=0.1)
    with torch.cuda.device(current):
        for step in range(3):
            twins.draw_grads(step)
            a.step()
            b.step()
            for params in (twins.cpu, twins.cuda):
                faststep.clip_grad_norm_(params, 0.1)
    twins.assert_same(a, b, grads=True)


def test_several_devices_in_one_optimizer() -> None:
    needs_two_devices()
    twins = Twins([values((5000,), i) for i in range(3)], ["cuda:0", "cuda:1", "cuda:0"])
    twins.train(twins.optimizers(faststep.optim.SGD, lr=0.1, momentum=0.9), 4)


def test_learning_rate_that_several_devices_read() -> None:
    needs_two_devices()
    twins = Twins([values((5000,), i) for i in range(3)], ["cuda:0", "cuda:1", "cuda:0"])
    a = faststep.optim.AdamW(twins.cpu, lr=torch.tensor(0.25))
    b = faststep.optim.AdamW(twins.cuda, lr=place(torch.tensor(0.25), CUDA))
    for step in range(4):
        twins.draw_grads(step)
        a.step()
        if step == 0:
            b.step()  # makes the states
            continue
        with no_synchronization():
            b.step()
    twins.assert_same(a, b)


@pytest.mark.skipif(REHEARSAL, reason="a claim goes with the Python object, which stays")
def test_parameters_that_move() -> None:
    twins = Twins([values((500,), 0)])
    a, b = twins.optimizers(faststep.optim.SGD, lr=0.1)
    places = ["cuda:0", "cpu", "cuda:0"]
    if torch.cuda.device_count() > 1:
        places[1:1] = ["cuda:1"]
    for step, device in enumerate(places):
        twins.cuda[0].data = place(twins.cuda[0], device)
        twins.devices[0] = torch.device(device)
        twins.draw_grads(step)
        a.step()
        b.step()
        assert torch.equal(twins.cpu[0], twins.cuda[0].cpu())
