"""Clipping and norms of gradients on a CUDA device: the bits of the CPU, or torch's own way."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import faststep
from faststep import _C
from gpu.common import Twins, values
from optim.common import DTYPES, dtype_name, same_bits
from optim.layouts import negated

from . import fake

pytestmark = pytest.mark.usefixtures("machine")


def pair_of(*grads: Tensor) -> Twins:
    pair = Twins([torch.zeros_like(g) for g in grads])
    pair.set_grads(grads)
    return pair


def assert_same_grads(pair: Twins) -> None:
    for p, q in zip(pair.cpu, pair.cuda, strict=True):
        assert same_bits(p.grad, fake.plain(q.grad))


def test_negated_views() -> None:
    shapes = ((7, 5), (), (20_000,))
    pair = Twins([torch.zeros(shape) for shape in shapes])
    for i, (p, q) in enumerate(zip(pair.cpu, pair.cuda, strict=True)):
        grad = values(shapes[i], i, torch.float32)
        p.grad, q.grad = grad.clone(), fake.claim(negated(grad))
    norms = [faststep.clip_grad_norm_(p, 0.25) for p in (pair.cpu, pair.cuda)]
    assert same_bits(norms[0], fake.plain(norms[1]))
    assert_same_grads(pair)
    for params in (pair.cpu, pair.cuda):
        faststep.clip_grad_value_(params, 1e-3)
    assert_same_grads(pair)
    norm = torch.tensor(8.0)
    faststep.clip_grads_with_norm_(pair.cpu, 1.0, norm)
    faststep.clip_grads_with_norm_(pair.cuda, 1.0, fake.claim(negated(norm)))
    assert_same_grads(pair)


def test_nothing_is_written_below_the_limit() -> None:
    pair = pair_of(torch.full((3,), 0.1))
    version = pair.cuda[0].grad._version
    faststep.clip_grad_norm_(pair.cuda, 5.0)
    assert torch.equal(fake.plain(pair.cuda[0].grad), torch.full((3,), 0.1))
    assert pair.cuda[0].grad._version == version + 1  # nobody on the host knows


def test_error_if_the_returned_norm_is_nonfinite() -> None:
    pair = pair_of(torch.full((1000,), 6e4, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"total norm of order 2.0 .* is non-finite"):
        faststep.clip_grad_norm_(pair.cuda, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"total norm of order 1.0 .* is non-finite"):
        faststep.get_total_norm([p.grad for p in pair.cuda], 1.0, error_if_nonfinite=True)
    assert (fake.plain(pair.cuda[0].grad) == 6e4).all()


def test_two_launches(machine: fake.Machine) -> None:
    for count in (1, 500):
        pair = pair_of(*[torch.ones(3)] * count)
        before = machine.calls("cuLaunchKernel")
        faststep.clip_grad_norm_(pair.cuda, 1.0)
        assert machine.calls("cuLaunchKernel") - before == 2


@pytest.mark.parametrize(
    "clip",
    [
        lambda p: faststep.clip_grad_norm_(p, 0.5),
        lambda p: faststep.clip_grad_value_(p, 0.5),
    ],
)
def test_without_kernels_torch_does_it(
    machine: fake.Machine, monkeypatch: pytest.MonkeyPatch, clip: Callable[[list[Tensor]], object]
) -> None:
    monkeypatch.setattr("faststep.clip.has_kernels_for", lambda tensor: False)
    pair = pair_of(values((300,), 0, torch.float32))
    before = machine.calls(None)
    clip(pair.cuda)
    clip(pair.cpu)
    assert machine.calls(None) == before
    torch.testing.assert_close(fake.plain(pair.cuda[0].grad), pair.cpu[0].grad)


def test_bad_lists() -> None:
    inside, outside, out = fake.claim(torch.ones(3)), torch.ones(3), fake.claim(torch.zeros(()))
    with pytest.raises(TypeError, match=r"tensor 1 is on cpu, not on cuda:0"):
        _C.device_norm([inside, outside], 2.0, out)
    with pytest.raises(TypeError, match=r"tensor 0 is not on a CUDA device"):
        _C.device_clamp([outside], 2.0)
    with pytest.raises(TypeError, match=r"norm is on cuda:1, not on cuda:0"):
        _C.device_clip([inside], 1.0, fake.claim(torch.zeros(()), 1))
    with pytest.raises(TypeError, match=r"out is not a one-element tensor"):
        _C.device_norm([inside], 2.0, inside)
    with pytest.raises(IndexError):
        _C.device_clamp([], 1.0)


def test_python_code_that_runs_between(machine: fake.Machine) -> None:
    """Looking at a type for the first time may call a function on another list."""
    others = [fake.claim(torch.full((70000,), 8.0)) for _ in range(3)]
    calls: list[str] = []

    class Meta(type(torch.Tensor)):  # type: ignore[misc]
        def __getattribute__(cls, name: str) -> object:
            if not calls:
                calls.append(name)
                _C.device_clamp(others, 100.0)
            return super().__getattribute__(name)

    tensors = [fake.claim(torch.ones(3))]
    for name in ("clip", "norm", "unscale"):
        odd = Meta("Odd", (fake.OnCuda,), {})
        scalar = torch.tensor(4.0 if name == "unscale" else 2.0).as_subclass(odd)
        calls.clear()
        if name == "clip":
            _C.device_clip(tensors, 1.0, scalar)
        elif name == "norm":
            _C.device_norm(tensors, float("inf"), scalar)
        else:
            _C.device_unscale(tensors, scalar, fake.claim(torch.zeros(())), True)
        assert calls
    machine.synchronize()
    assert fake.plain(tensors[0]).tolist() == pytest.approx([2.0] * 3, rel=1e-5)
    assert all(bool((fake.plain(t) == 8.0).all()) for t in others)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_each_element_is_looked_at(dtype: torch.dtype, bad: float) -> None:
    """Wherever it is in the words of a warp, which thread has it and in which of its lanes."""
    count = 2 * 16_384 + 5
    grad = values((count,), 0, dtype)
    found = fake.claim(torch.zeros(()))
    sums = fake.claim(torch.zeros(3, dtype=torch.float64))
    here = fake.claim(grad)
    wrong = []
    for place in [*range(0, 300, 7), *range(300, count, 1237), *range(count - 12, count)]:
        kept = fake.plain(here)[place].item()
        fake.plain(here)[place] = bad
        fake.plain(found).zero_()
        _C.device_chunk_squares([here], None, sums, found)
        if fake.plain(found).item() != 1.0:
            wrong.append(place)
        fake.plain(here)[place] = kept
    assert wrong == []


SIZES = [*zip((3, 40_000, 16_384, 0, 9), (*DTYPES, DTYPES[0]), strict=True)]


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0])
@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_chunk_squares(scale: float | None, bad: float) -> None:
    grads = [values((n,), n, d) for n, d in SIZES]
    grads[1][20_000] = bad
    count = sum(-(-grad.numel() // 16_384) for grad in grads)
    expected, sums = (
        torch.zeros(count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.float64),
    )
    seen = _C.chunk_squares(grads, 1.0 if scale is None else 1.0 / scale, expected)
    here, found = fake.claim(sums), fake.claim(torch.zeros(()))
    where = None if scale is None else fake.claim(torch.tensor(scale))
    _C.device_chunk_squares([fake.claim(grad) for grad in grads], where, here, found)
    assert same_bits(fake.plain(here), expected)
    assert bool(fake.plain(found)) is seen is (bad != 0.0)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 16_384, 16_385, 70_000])
def test_fold_squares(count: int) -> None:
    sums = values((count,), count, torch.float64).square()
    norm = fake.claim(torch.zeros((), dtype=torch.float64))
    _C.device_fold_squares(fake.claim(sums), norm)
    assert fake.plain(norm).item() == math.sqrt(_C.fold_squares(sums))


def test_chunk_squares_that_do_not_fit() -> None:
    grads, found = [fake.claim(torch.ones(20_000))], fake.claim(torch.zeros(()))
    for sums, kind in (
        (fake.claim(torch.zeros(3, dtype=torch.float64)), ValueError),
        (fake.claim(torch.zeros(2)), TypeError),
        (torch.zeros(2, dtype=torch.float64), TypeError),
        (fake.claim(torch.zeros(4, dtype=torch.float64)[::2]), TypeError),
    ):
        with pytest.raises(kind, match="sums"):
            _C.device_chunk_squares(grads, None, sums, found)
