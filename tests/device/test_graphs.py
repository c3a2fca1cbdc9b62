"""Steps captured into a CUDA graph and replayed."""

import torch

import faststep
from faststep import _C
from faststep.optim.request import ScalerRequest
from gpu.common import Twins, values

from . import fake
from .common import scaler_on

SHAPES = (3, 20000)


def refill(pair: Twins, step: int, scale: float = 1.0) -> None:
    """New values in the gradients' own memory: a graph knows the addresses only."""
    for i, (p, q) in enumerate(zip(pair.cpu, pair.cuda, strict=True)):
        grad = values(tuple(p.shape), 10 * step + i, torch.float32, scale)
        p.grad.copy_(grad)
        fake.plain(q.grad).copy_(grad)


def test_chain_with_overflow(machine: fake.Machine) -> None:
    pair = Twins([values((n,), n, torch.float32) for n in SHAPES])
    a, b = pair.optimizers(faststep.optim.AdamW, max_grad_norm=0.5)
    b.param_groups[0]["capturable"] = True
    options = {"init_scale": 1024.0, "growth_interval": 2, "max_scale": 4096.0}
    ours, theirs = scaler_on(None, **options), scaler_on(0, **options)
    pair.set_grads([torch.zeros(n) for n in SHAPES])

    def whole(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        scaler.step(optimizer)
        scaler.update()

    whole(a, ours)
    whole(b, theirs)
    stream = machine.stream()
    machine.use(stream)
    flag = fake.claim(torch.zeros(()))  # what a graph writes has to live as long as the graph
    b.found_inf, b.grad_scale, b._asked = flag, theirs._scale, ScalerRequest(looks_for_inf=True)
    machine.capture(stream)
    b.step()
    graph = machine.captured(stream)
    del b.found_inf, b.grad_scale, b._asked
    for step in range(3):
        refill(pair, step, scale=float(ours._scale))
        fake.plain(theirs._scale).copy_(ours._scale)
        if step == 1:
            pair.cpu[0].grad[0] = float("inf")
            fake.plain(pair.cuda[0].grad)[0] = float("inf")
        fake.plain(flag).zero_()
        whole(a, ours)
        machine.replay(graph, stream)
        machine.synchronize()
        pair.assert_same(a, b)
        assert bool(fake.plain(flag) != 0) is (step == 1)


def test_replays_tell_whether_they_were_skipped(machine: fake.Machine) -> None:
    pair = Twins([torch.ones(3)])
    optimizer = faststep.optim.SGD(pair.cuda, lr=0.1)
    optimizer.found_inf = flag = fake.claim(torch.tensor(1.0))
    pair.set_grads([torch.ones(3)])
    stream = machine.stream()
    machine.use(stream)
    machine.capture(stream)
    optimizer.step()
    graph = machine.captured(stream)
    for skipped in (True, False, True):
        fake.plain(flag).fill_(float(skipped))
        machine.replay(graph, stream)
        machine.synchronize()
        assert optimizer.step_was_skipped is skipped


def test_replays_after_a_state_dict_was_loaded(machine: fake.Machine) -> None:
    pair = Twins([torch.ones(3)])
    a, b = pair.optimizers(faststep.optim.SGD, lr=0.1)
    pair.set_grads([torch.ones(3)])
    stream = machine.stream()
    machine.use(stream)
    machine.capture(stream)
    b.step()
    graph = machine.captured(stream)
    b.load_state_dict(b.state_dict())
    a.step()
    machine.replay(graph, stream)
    machine.synchronize()
    pair.assert_same(a, b)


def test_steps_of_one_graph_share_their_upload(machine: fake.Machine) -> None:
    """Another learning rate goes with the launches."""
    pair = Twins([torch.ones(3)])
    a, b = pair.optimizers(faststep.optim.SGD)
    pair.set_grads([torch.ones(3)])
    stream = machine.stream()
    machine.use(stream)
    before = _C.device_counts()
    machine.capture(stream)
    for step in range(5):
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    graph = machine.captured(stream)
    machine.replay(graph, stream)
    machine.synchronize()
    after = _C.device_counts()
    assert (after[0] - before[0], after[1] - before[1]) == (10, 1)  # launches, uploads
    pair.assert_same(a, b)
    machine.drop(graph)


def test_graph_and_optimizer_leave_no_memory(machine: fake.Machine) -> None:
    """Whichever goes first, what the graph needed is freed with the last of them."""
    stream = machine.stream()
    machine.use(stream)
    before = machine.living()
    for graph_first in (True, False):
        pair = Twins([torch.ones(3)])
        optimizer = faststep.optim.SGD(pair.cuda, lr=0.1)
        pair.set_grads([torch.ones(3)])
        machine.capture(stream)
        optimizer.step()
        graph = machine.captured(stream)
        machine.replay(graph, stream)
        machine.synchronize()
        assert machine.living().memory > before.memory
        if graph_first:
            machine.drop(graph)
        del optimizer
        if not graph_first:
            machine.replay(graph, stream)  # its parameter and gradient are there
            machine.synchronize()
            machine.drop(graph)
        assert machine.complaint() is None
    other = faststep.optim.SGD([fake.parameter(torch.ones(3))], lr=0.1)
    other.param_groups[0]["params"][0].grad = fake.claim(torch.ones(3))
    other.step()  # frees what graphs have left
    del other
    after = machine.living()
    assert (after.memory, after.pinned) == (before.memory, before.pinned)
    assert after.objects == before.objects


def test_captured_calls_on_lists_leave_no_memory(machine: fake.Machine) -> None:
    """Their tables belong to no optimizer."""
    stream = machine.stream()
    machine.use(stream)
    tensors = [fake.claim(torch.ones(n)) for n in SHAPES]

    def replayed() -> None:
        machine.capture(stream)
        _C.device_clamp(tensors, 0.5)
        graph = machine.captured(stream)
        for tensor in tensors:
            fake.plain(tensor).fill_(3.0)
        machine.replay(graph, stream)
        machine.synchronize()
        assert all(bool((fake.plain(t) == 0.5).all()) for t in tensors)
        machine.drop(graph)

    replayed()
    before = machine.living()
    for _ in range(20):
        replayed()
    after = machine.living()
    assert (after.memory, after.pinned) == (before.memory, before.pinned)
