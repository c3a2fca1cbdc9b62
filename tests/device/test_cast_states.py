"""States of other types than torch makes, on a CUDA device: the bits of the CPU."""

import itertools
from typing import Any

import pytest
import torch

import faststep
from gpu.common import Twins, values
from optim.common import DTYPES, dtype_name, same_bits
from optim.declarations import ADAMW, ALL, ASGD, NADAM, OTHERS, Declaration

from . import fake

pytestmark = pytest.mark.usefixtures("machine")
SHAPES = ((257,), (3, 5), (40, 50))


def step_both(pair: Twins, optimizers: tuple[torch.optim.Optimizer, ...], seed: int) -> None:
    pair.set_grads(values(tuple(p.shape), seed + i, p.dtype) for i, p in enumerate(pair.cpu))
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_states_of_other_types_than_their_parameters(
    declaration: Declaration, dtype: torch.dtype
) -> None:
    pair = Twins([values(shape, i, dtype) for i, shape in enumerate(SHAPES)])
    optimizers = pair.optimizers(declaration.ours, **declaration.kwargs, max_grad_norm=0.7)
    step_both(pair, optimizers, 0)
    for n, states in enumerate(zip(*(o.state.values() for o in optimizers), strict=True)):
        of_states = itertools.cycle(DTYPES[n:] + DTYPES[:n])
        for key in declaration.moments(optimizers[0].param_groups[0]):
            cast = next(of_states)
            states[0][key] = states[0][key].to(cast)
            states[1][key] = fake.claim(fake.plain(states[1][key]).to(cast))
    for seed in (10, 20):
        step_both(pair, optimizers, seed)
        pair.assert_same(*optimizers, grads=True)


KINDS = [(torch.bfloat16, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "remainder16")]


@pytest.mark.parametrize(("dtype", "kind"), KINDS, ids=str)
@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_masters(declaration: Declaration, dtype: torch.dtype, kind: str) -> None:
    """They begin with the step, and after states were loaded that have none."""
    pair = Twins([values(shape, i, dtype) for i, shape in enumerate(SHAPES)])
    options = {**declaration.kwargs, "max_grad_norm": 0.7, "master_weights": kind}
    own = torch.float32 if kind == "fp32" else torch.int16
    optimizers = pair.optimizers(declaration.ours, **options)
    for seed in (0, 10):
        step_both(pair, optimizers, seed)
    pair.assert_same(*optimizers, grads=True)
    for optimizer, params in zip(optimizers, (pair.cpu, pair.cuda), strict=True):
        for param in params:
            assert optimizer.state[param].pop("master_weights").dtype == own
    for seed in (20, 30):
        step_both(pair, optimizers, seed)
    pair.assert_same(*optimizers, grads=True)
    saved = [optimizer.state_dict() for optimizer in optimizers]
    assert [list(state) for state in saved[0]["state"].values()] == [
        list(state) for state in saved[1]["state"].values()
    ]
    optimizers[1].load_state_dict(saved[1])
    step_both(pair, optimizers, 40)
    pair.assert_same(*optimizers, grads=True)


@pytest.mark.parametrize("before", [None, "fp32", "bf16", "int8"])
@pytest.mark.parametrize("masters", [False, "fp32", "remainder16"])
@pytest.mark.parametrize("shape", [(0, 70), (70, 0), (0,)], ids=str)
def test_empty_parameters(shape: tuple[int, ...], masters: Any, before: Any) -> None:
    """State dicts are those of the CPU, and load with every type of states."""
    pair = Twins([values(some, i, torch.bfloat16) for i, some in enumerate((shape, (5, 70)))])
    options = {"master_weights": masters, "min_8bit_size": 0, "betas": (0.9, 0.95)}
    optimizers = pair.optimizers(faststep.optim.AdamW, state_dtype=before, **options)
    step_both(pair, optimizers, 0)
    for native, after in itertools.product((False, True), (None, "fp32", "bf16", "int8")):
        others = pair.optimizers(faststep.optim.AdamW, state_dtype=after, **options)
        saved = [optimizer.state_dict(native=native) for optimizer in optimizers]
        for mine, its in zip(*(one["state"].values() for one in saved), strict=True):
            assert list(mine) == list(its)
            assert all(same_bits(mine[key], fake.plain(its[key])) for key in mine)
        for other, one in zip(others, saved, strict=True):
            other.load_state_dict(one)
        step_both(pair, others, 10)
        pair.assert_same(*others)
        optimizers = others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("declaration", [ADAMW, NADAM, ASGD], ids=lambda d: d.name)
def test_stochastic_rounding(declaration: Declaration, dtype: torch.dtype) -> None:
    pair = Twins([values(shape, i, dtype) for i, shape in enumerate(SHAPES)])
    noisy = {"state_dtype": "bf16", "rounding": "stochastic"}
    optimizers = pair.optimizers(declaration.ours, **declaration.kwargs, **noisy)
    for seed in (0, 10, 20):
        step_both(pair, optimizers, seed)
        pair.assert_same(*optimizers)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("declaration", [ADAMW, NADAM, ASGD], ids=lambda d: d.name)
def test_a_counter_of_another_type(
    declaration: Declaration, dtype: torch.dtype, on_device: bool
) -> None:
    """Kernels count in fp32, with which the state goes on."""
    pair = Twins([values(shape, i, torch.float32) for i, shape in enumerate(SHAPES)])
    optimizers = pair.optimizers(declaration.ours, **declaration.kwargs)
    step_both(pair, optimizers, 0)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            step = torch.tensor(7, dtype=dtype)
            state["step"] = fake.claim(step) if on_device and optimizer is optimizers[1] else step
    for seed in (10, 20):
        step_both(pair, optimizers, seed)
    for p, q in zip(pair.cpu, pair.cuda, strict=True):
        assert same_bits(p, fake.plain(q))
        step = optimizers[1].state[q]["step"]
        assert step.is_cuda
        assert same_bits(fake.plain(step), torch.tensor(9.0))
        assert optimizers[0].state[p]["step"].dtype == dtype
    torchs = declaration.torchs([torch.nn.Parameter(p.detach().clone()) for p in pair.cpu])
    torchs.load_state_dict(optimizers[1].state_dict())


def test_a_counter_of_another_device() -> None:
    """torch reads it, wherever it lies; the state goes on with one on the parameter's."""
    pair = Twins([torch.ones(3), torch.ones(3)], ["cuda:0", "cuda:1"])
    optimizers = pair.optimizers(faststep.optim.NAdam)
    step_both(pair, optimizers, 0)
    moved = [(optimizers[0].state[p], 0) for p in pair.cpu]
    moved += [(optimizers[1].state[pair.cuda[0]], 1), (optimizers[1].state[pair.cuda[1]], 0)]
    for state, ordinal in moved:
        for key in ("step", "mu_product"):
            state[key] = fake.claim(fake.plain(state[key]).clone(), ordinal)
    step_both(pair, optimizers, 10)
    pair.assert_same(*optimizers)
    assert all(not state["step"].is_cuda for state in optimizers[0].state.values())


@pytest.mark.parametrize("bad", [torch.tensor(True), torch.ones(2, dtype=torch.int64), 3])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_counter_that_nobody_takes(bad: object, on_device: bool) -> None:
    pair = Twins([torch.ones(3), torch.ones(3)])
    _, optimizer = pair.optimizers(faststep.optim.AdamW)
    step_both(pair, (optimizer,), 0)
    before = [fake.plain(q).clone() for q in pair.cuda]
    claimed = fake.claim(bad) if on_device and isinstance(bad, torch.Tensor) else bad
    optimizer.state[pair.cuda[1]]["step"] = claimed
    text = "'step' of parameter 1 .* is not a one-element tensor of type float32, .* or uint8;"
    with pytest.raises(RuntimeError, match=text):
        step_both(pair, (optimizer,), 10)
    assert all(map(same_bits, before, map(fake.plain, pair.cuda)))
