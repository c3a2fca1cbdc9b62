"""Optimizers on a CUDA device: from Python to the kernels, the bits of the CPU."""

import pytest
import torch

import faststep
from faststep import _C
from gpu.common import Twins, values
from nvcc import KERNELS
from optim.declarations import ALL, Declaration
from optim.layouts import negated

from . import fake

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_negated_views(declaration: Declaration) -> None:
    """Gradients, parameters, states and step counters, of which the memory has other signs."""
    shapes = ((4, 6), (), (257,), (40, 50))
    pair = Twins([values(shape, i, torch.float32) for i, shape in enumerate(shapes)])
    for p in pair.cuda[:2]:
        p.data = negated(p.data)
    a, b = pair.optimizers(
        declaration.ours, **declaration.kwargs, max_grad_norm=0.7, keep_grads=True
    )
    for step in range(5):
        for i, (p, q) in enumerate(zip(pair.cpu, pair.cuda, strict=True)):
            grad = values(shapes[i], 10 * step + i, torch.float32)
            p.grad = grad.clone()
            q.grad = fake.claim(negated(grad) if (step + i) % 2 else grad)
            assert q.grad.is_neg() is bool((step + i) % 2)
        if step == 3:
            for state in b.state.values():
                state.update({key: negated(value) for key, value in state.items()})
        a.step()
        b.step()
        pair.assert_same(a, b, grads=True)
    assert all(value.is_neg() for state in b.state.values() for value in state.values())


def test_parameters_that_move() -> None:
    pair = Twins([values((50,), 0, torch.float32)])
    a, b = pair.optimizers(faststep.optim.SGD, lr=0.1)
    for ordinal in (0, 1):
        pair.cuda[0].data = fake.claim(fake.plain(pair.cuda[0]), ordinal)
        pair.set_grads([values((50,), 2, torch.float32)])
        a.step()
        b.step()
        pair.assert_same(a, b)


def test_launches_do_not_depend_on_the_number_of_tensors(machine: fake.Machine) -> None:
    for count in (1, 1000):
        pair = Twins([torch.ones(2)] * count)
        on_host, optimizer = pair.optimizers(faststep.optim.AdamW, max_grad_norm=1.0)
        pair.set_grads([torch.ones(2)] * count)
        optimizer.step()
        before, uploads = machine.calls("cuLaunchKernel"), _C.device_counts()[1]
        optimizer.step()
        assert machine.calls("cuLaunchKernel") - before == 2
        assert _C.device_counts()[1] == uploads, "nothing had changed"
        for p in pair.cuda:
            p.grad = fake.claim(torch.ones(2))
        optimizer.step()
        more = int(count > 1)  # short tables go with the launches
        assert _C.device_counts()[1] == uploads + more, "the gradients had moved"
        for _ in range(3):
            on_host.step()
        pair.assert_same(on_host, optimizer)


def test_kernels_are_found_once_per_device(machine: fake.Machine) -> None:
    def use_all() -> None:
        pair = Twins([torch.ones(3)] * 2, ["cuda:0", "cuda:1"])
        pair.set_grads([torch.ones(3)] * 2)
        faststep.optim.AdamW(pair.cuda, max_grad_norm=1.0).step()
        for p in pair.cuda:
            faststep.clip_grad_norm_([p], 0.5)

    names = [
        *("cuInit", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction"),
        *("cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuDeviceGetAttribute"),
    ]
    use_all()
    before = [machine.calls(name) for name in names]
    assert before[:4] == [1, 2, 2, 2 * len(KERNELS)]
    use_all()
    assert [machine.calls(name) for name in names] == before


def test_no_gradients_no_launches(machine: fake.Machine) -> None:
    pair = Twins([torch.ones(2)])
    optimizer = faststep.optim.AdamW(pair.cuda, max_grad_norm=1.0)
    before = machine.calls(None)
    optimizer.step()
    assert machine.calls(None) == before
    assert not optimizer.state


def test_version_counters_move() -> None:
    pair = Twins([torch.ones(3)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    pair.set_grads([torch.ones(3)])
    optimizer.step()
    p = pair.cuda[0]
    before = [t._version for t in (p, optimizer.state[p]["exp_avg"])]
    optimizer.step()
    assert [t._version for t in (p, optimizer.state[p]["exp_avg"])] == [v + 1 for v in before]


def test_devices_without_gradients_have_no_norm() -> None:
    """What a device measured in an earlier step does not count."""
    pair = Twins([values((50,), i, torch.float32) for i in range(3)], ["cuda:0", "cuda:1", "cpu"])
    a, b = pair.optimizers(faststep.optim.SGD, lr=0.1, max_grad_norm=0.1)
    for present in ((0, 1, 2), (0,), (2,), (1,)):
        pair.set_grads(torch.full((50,), 10.0**i) if i in present else None for i in range(3))
        a.step()
        b.step()
        torch.testing.assert_close(b.last_grad_norm.cpu(), a.last_grad_norm, rtol=1e-6, atol=0.0)
        for p, q in zip(pair.cpu, pair.cuda, strict=True):
            torch.testing.assert_close(fake.plain(q), p.detach(), rtol=1e-6, atol=1e-7)
