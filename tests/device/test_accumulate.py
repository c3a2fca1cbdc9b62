"""fp32 sums of low-precision gradients on a CUDA device: odd layouts, errors, and a window."""

import pytest
import torch

import faststep
from faststep import _C
from faststep.grads.add import Addition, add_alike
from gpu.common import values
from optim.common import same_bits
from optim.layouts import negated

from . import fake

pytestmark = pytest.mark.usefixtures("machine")


def test_layouts() -> None:
    term, total = values((6, 4), 0, torch.bfloat16).t(), values((4, 6), 1, torch.float32)
    claimed = fake.claim(total.clone())
    add_alike([Addition(claimed, fake.claim(term), None, 1.0, False)])
    assert torch.equal(fake.plain(claimed), total + term.float())


@pytest.mark.parametrize("start", [False, True])
def test_negated_views(start: bool) -> None:
    total, term = values((400,), 0, torch.float32), values((400,), 1, torch.bfloat16)
    claimed = fake.claim(negated(total))
    _C.device_accumulate([claimed], [fake.claim(negated(term))], 0.3, start, [fake.claim(term)])
    _C.accumulate([total], [term], 0.3, start, [term])
    assert same_bits(fake.plain(claimed), total)


def test_an_addition_is_one_launch_and_moves_the_version() -> None:
    total, term = fake.claim(torch.ones(5)), fake.claim(torch.ones(5, dtype=torch.bfloat16))
    launches, version = _C.device_counts()[0], total._version
    add_alike([Addition(total, term, None, 2.0, False)])
    assert (_C.device_counts()[0], total._version) == (launches + 1, version + 1)
    assert fake.plain(total).tolist() == [3.0] * 5
    add_alike([Addition(total, term, None, 0.5, True)])
    assert fake.plain(total).tolist() == [0.5] * 5


def test_what_cannot_be_added() -> None:
    total = fake.claim(torch.ones(3))
    for sums, terms, text in (
        ([total], [torch.ones(3)], "term 0 is on cpu"),
        ([total], [fake.claim(torch.ones(3), 1)], "term 0 is on"),
        ([total], [fake.claim(torch.ones(4))], "not of the sum's shape"),
        ([total], [total], "shares memory"),
        ([torch.ones(3)], [total], "not on a CUDA device"),
    ):
        with pytest.raises(TypeError, match=text):
            _C.device_accumulate(sums, terms, 1.0)
    with pytest.raises(TypeError, match="further term 0 is on cpu"):
        _C.device_accumulate([total], [fake.claim(torch.ones(3))], 1.0, False, [torch.ones(3)])
    with pytest.raises(ValueError, match="1 sums and 2 terms"):
        _C.device_accumulate([total], [total, total], 1.0)
    assert fake.plain(total).tolist() == [1.0] * 3


@pytest.mark.parametrize("in_pairs", [False, True])
def test_a_window(machine: fake.Machine, in_pairs: bool) -> None:
    """Gradients of several micro-steps on the device, through the sums' own hook."""
    param = fake.parameter(torch.zeros(300, dtype=torch.bfloat16))
    sums = faststep.accumulation.sums.Sums(in_pairs)
    sums.attach([("weight", param)])
    expected = torch.zeros(300)
    launches = _C.device_counts()[0]
    for index in range(3):
        grad = values((300,), index, torch.bfloat16)
        param.grad = fake.claim(grad.clone())
        sums.collect(last=False)
        expected += grad.float()
        sums.release_grads()
    sums.add_waiting()
    assert _C.device_counts()[0] - launches == (2 if in_pairs else 3)
    hidden = sums.hidden(param)
    assert hidden is not None
    assert torch.equal(fake.plain(hidden), expected)
    sums.remove()
