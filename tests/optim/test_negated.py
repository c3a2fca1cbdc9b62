"""Lazily negated views, of which the memory holds the opposite signs: the bits of resolved ones."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from faststep import _C

from . import common
from .common import TOLERANCE, assert_near, assert_same_bits, generator, parameters, state_tensors
from .declarations import ADAMW, ALL, SGD, TORCHS, Declaration
from .layouts import negated

SHAPES = ((), (1,), (64,), (5, 13), (17_000,))
over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)


@pytest.fixture(
    params=[{}, {"negated": 0}, {"known": False}], ids=["records", "unknown bit", "no records"]
)
def records(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's records tell which views are negated; or torch is asked."""
    with common.records(**request.param):
        yield


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def imaginary(value: Tensor) -> Tensor:
    """The lazily negated part of a complex tensor."""
    return torch.complex(torch.zeros_like(value), -value).conj().imag


def transposed(value: Tensor) -> Tensor:
    return negated(value.t().contiguous()).t() if value.dim() == 2 else negated(value)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": negated,
    "imaginary": imaginary,
    "transposed": transposed,
}


def by_autograd(conjugate: bool) -> Parameter:
    """A parameter with a gradient of 2, lazily negated or not."""
    param = Parameter(torch.tensor([0.5]))
    z = torch.complex(torch.tensor(1.0), param.squeeze())
    ((z.conj() * (1 + 2j)).real if conjugate else 2.0 * param.sum()).backward()
    assert param.grad is not None
    assert param.grad.is_neg() is conjugate
    assert param.grad.item() == 2.0
    assert param.grad.stride() == (1,)
    return param


@over_all
def test_a_gradient_that_autograd_negates(declaration: Declaration, records: None) -> None:
    params = [by_autograd(conjugate) for conjugate in (True, False)]
    for param in params:
        declaration.ours([param], **declaration.kwargs).step()
    assert_same_bits(params[:1], params[1:])
    if declaration.torchs is not None:
        theirs = by_autograd(True)
        declaration.torchs([theirs], **declaration.kwargs, foreach=False).step()
        assert_near(params[0], theirs, TOLERANCE, "against torch's loop")


@pytest.mark.parametrize("way", WAYS)
@over_all
def test_gradients_negated_in_some_steps(declaration: Declaration, way: str, records: None) -> None:
    """Beside others that are not, in traced steps and others, short and long."""
    ours, resolved, theirs = (parameters(*SHAPES, (64,)) for _ in range(3))
    optimizers = [declaration.ours(ps, **declaration.kwargs) for ps in (ours, resolved)]
    if declaration.torchs is not None:
        optimizers.append(declaration.torchs(theirs, **declaration.kwargs, foreach=False))
    for step in range(8):
        for index, (p, q, r) in enumerate(zip(ours, resolved, theirs, strict=True)):
            grad = draw(tuple(p.shape), 100 * step + index)
            turn = (step >> index % 3) & 1 and index < len(SHAPES)
            p.grad, q.grad, r.grad = WAYS[way](grad) if turn else grad.clone(), grad, grad.clone()
            assert p.grad.is_neg() is bool(turn)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(ours, resolved)
        assert_same_bits(*map(state_tensors, optimizers[:2]))
        assert [p._version for p in ours] == [p._version for p in resolved]
        assert [t._version for t in state_tensors(optimizers[0])] == [
            t._version for t in state_tensors(optimizers[1])
        ]
    for p, r in zip(ours, theirs, strict=True):
        if declaration.torchs is not None:
            assert_near(p, r, TOLERANCE, "against torch's loop")


@over_all
def test_gradients_that_change_nothing_but_their_signs(
    declaration: Declaration, records: None
) -> None:
    """The same object and memory, negated between steps that are traced."""
    ours, resolved = parameters((64,), (3,), ()), parameters((64,), (3,), ())
    optimizers = [declaration.ours(ps, **declaration.kwargs) for ps in (ours, resolved)]
    grads = [draw(tuple(p.shape), i) for i, p in enumerate(ours)]
    for p, grad in zip(ours, grads, strict=True):
        p.grad = grad.clone()
    for step in range(9):
        if step % 3 == 2:
            for p in ours:
                assert p.grad is not None
                p.grad.data = torch._neg_view(p.grad.data)
        for p, q in zip(ours, resolved, strict=True):
            q.grad = p.grad.resolve_neg().clone()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(ours, resolved)


@pytest.mark.parametrize("write_back", [False, True])
@over_all
def test_parameters_and_states(declaration: Declaration, write_back: bool, records: None) -> None:
    """What is written keeps its negative bit; the values, also of gradients, are the same."""
    shapes = ((), (64,), (5, 13), (17_000,))
    values = [draw(shape, 5) for shape in shapes]
    ours = [Parameter(negated(value)) for value in values]
    resolved = [Parameter(value) for value in values]
    options = {**declaration.kwargs}
    if write_back:
        options |= {"max_grad_norm": 0.1, "keep_grads": True}
    optimizers = [declaration.ours(ps, **options) for ps in (ours, resolved)]
    for step in range(5):
        for index, (p, q) in enumerate(zip(ours, resolved, strict=True)):
            grad = draw(tuple(p.shape), 100 * step + index)
            p.grad, q.grad = negated(grad) if step % 2 else grad.clone(), grad
        if step == 2:
            for state in optimizers[0].state.values():
                state.update({key: torch._neg_view(-t) for key, t in state.items()})
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(ours, resolved)
        assert_same_bits(*map(state_tensors, optimizers))
        assert_same_bits([p.grad for p in ours], [q.grad for q in resolved])
        assert all(p.is_neg() for p in ours)
        assert all(t.is_neg() is (step >= 2) for t in state_tensors(optimizers[0]))


def test_parameters_that_are_negated_between_steps(records: None) -> None:
    ours, resolved = parameters((64,), (5, 3)), parameters((64,), (5, 3))
    optimizers = [faststep.optim.AdamW(ps, lr=0.1) for ps in (ours, resolved)]
    for step in range(9):
        for p, q in zip(ours, resolved, strict=True):
            p.grad, q.grad = draw(tuple(p.shape), step), draw(tuple(p.shape), step)
            if step % 3 == 2:
                p.data, q.data = torch._neg_view(p.data), -q.data
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bits(ours, resolved)


def test_states_that_were_loaded(records: None) -> None:
    """load_state_dict keeps the negative bit of what it is given."""
    params, twins = parameters((64,)), parameters((64,))
    optimizers = [faststep.optim.AdamW(ps) for ps in (params, twins)]
    for p in (*params, *twins):
        p.grad = draw((64,), 1)
    for optimizer in optimizers:
        optimizer.step()
    saved = optimizers[1].state_dict()
    loaded = copy.deepcopy(saved)
    loaded["state"][0]["exp_avg"] = negated(loaded["state"][0]["exp_avg"])
    optimizers[0].load_state_dict(loaded)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(params, twins)
    assert_same_bits(*map(state_tensors, optimizers))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("explicit", [False, True])
@over_all
def test_under_a_scaler(
    declaration: Declaration, explicit: bool, max_norm: float | None, dtype: torch.dtype
) -> None:
    """Unscaled gradients are written back with the right sign, and an overflow is found."""
    if dtype == torch.float16 and (explicit or max_norm is None):
        dtype = torch.bfloat16  # torch unscales no fp16 gradients before a step
    found: list[list[Tensor]] = []
    for way in (negated, lambda value: value):
        params = parameters(*SHAPES, dtype=dtype)
        optimizer = declaration.ours(params, **declaration.kwargs)
        scaler = faststep.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        seen: list[Tensor] = []
        for step in range(4):
            for index, p in enumerate(params):
                grad = draw(tuple(p.shape), 10 * step + index, dtype)
                p.grad = way(torch.full_like(grad, torch.inf) if step == 2 and index == 1 else grad)
            if explicit:
                scaler.unscale_(optimizer)
                if max_norm is not None:
                    seen.append(faststep.clip_grad_norm_(params, max_norm))
                seen += [p.grad.clone() for p in params if p.grad is not None]
                scaler.step(optimizer)
            else:
                scaler.step(optimizer, max_norm=max_norm)
            scaler.update()
            seen.append(torch.tensor(scaler.get_scale()))
        found.append([*params, *state_tensors(optimizer), *seen])
    assert_same_bits(*found)


@pytest.mark.parametrize("declaration", [ADAMW, SGD], ids=lambda d: d.name)
def test_long_steps(declaration: Declaration, records: None) -> None:
    """Of more elements than the GIL is held for; clipped by the norm that `unscale_` took."""
    count = (1 << 20) + 7
    found: list[list[Tensor]] = []
    for way in (negated, lambda value: value):
        params = parameters((count,), (3,))
        optimizer = declaration.ours(params, **declaration.kwargs)
        scaler = faststep.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        norms = []
        for step in range(3):
            for p in params:
                p.grad = way(draw(tuple(p.shape), step))
            if step:
                scaler.unscale_(optimizer)
                norms.append(faststep.clip_grad_norm_(params, 1.0))
            scaler.step(optimizer)
            scaler.update()
        found.append([*params, *state_tensors(optimizer), *norms, params[0].grad])
    assert_same_bits(*found)


class Negate(torch.autograd.Function):
    """The identity, whose gradients are lazily negated views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return negated(grad)


def loss_of(params: list[Parameter], step: int, negates: bool) -> Tensor:
    """Of which every second step's gradients are lazily negated, if asked."""
    total = torch.zeros(())
    for index, p in enumerate(params):
        x: Tensor = Negate.apply(p) if negates and step % 2 else p * 1.0
        total = total + (x * draw(tuple(p.shape), 10 * step + index, p.dtype)).float().sum()
    return total


def negations(params: list[Parameter]) -> list[bool]:
    """Notes of each gradient that autograd hands over whether it is negated."""
    seen: list[bool] = []
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.is_neg()))
    return seen


def test_the_norm(records: None) -> None:
    found = []
    for negates in (True, False):
        params = parameters(*SHAPES)
        seen = negations(params)
        optimizer = faststep.optim.AdamW(params, lr=0.1, max_grad_norm=0.5)
        norms = []
        for step in range(4):
            loss_of(params, step, negates).backward()
            optimizer.step()
            norms.append(torch.as_tensor(optimizer.last_grad_norm))
            optimizer.zero_grad()
        assert sum(seen) == 2 * len(params) * negates
        found.append([*params, *state_tensors(optimizer), *norms])
    assert_same_bits(*found)


@over_all
def test_released_gradients(declaration: Declaration, records: None) -> None:
    found = []
    for negates, released in ((True, True), (False, True), (False, False)):
        params = parameters(*SHAPES)
        model = torch.nn.ParameterList(params)
        optimizer = declaration.ours(params, **declaration.kwargs)
        seen = negations(params)
        release = faststep.release_gradients(model, optimizer) if released else None
        for step in range(9):
            loss_of(params, step // 2, negates).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert any(seen) is negates
        assert release is None or all(p.grad is None for p in params)
        found.append([*params, *state_tensors(optimizer)])
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("steps", [3, 4])
def test_fp32_sums(in_pairs: bool, steps: int, records: None) -> None:
    found = []
    for negates in (True, False):
        params = parameters(*SHAPES, dtype=torch.bfloat16)
        seen = negations(params)
        optimizer = faststep.optim.SGD(params, lr=0.1)
        accum = faststep.accumulate(optimizer, steps, dtype=torch.float32, in_pairs=in_pairs)
        sums: list[Tensor] = []
        for step in range(2 * steps):
            with accum:
                accum.backward(loss_of(params, step, negates))
            if accum.ready:
                sums += [p.grad.clone() for p in params if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        assert any(seen) is negates
        assert len(sums) == 2 * len(params)
        found.append([*params, *sums])
    assert_same_bits(*found)


def test_a_sum_and_its_terms() -> None:
    """Each of them negated or not, packed or not."""
    for number in range(32):
        tensors = [draw((40, 7), seed) for seed in range(3)]
        given = [t if number >> k & 1 else negated(t) for k, t in enumerate(tensors)]
        if number & 8:
            given[0] = negated(tensors[0].t().contiguous()).t()
        if number & 16:
            given[1] = imaginary(tensors[1])
        want = tensors[0] + tensors[1] + tensors[2]
        _C.accumulate(given[:1], given[1:2], 1.0, False, given[2:])
        assert_same_bits(given[:1], [want])
        _C.accumulate(given[:1], given[1:2], 0.5, True)
        assert_same_bits(given[:1], [tensors[1] * 0.5])


@pytest.mark.parametrize("declaration", [ADAMW, SGD], ids=lambda d: d.name)
def test_scalars(declaration: Declaration) -> None:
    """The scale, the flag of an overflow and the learning rate."""
    for found in (0.0, 1.0):
        results = []
        for way in (negated, lambda value: value):
            params = parameters((64,))
            params[0].grad = draw((64,), 3)
            lr = way(torch.tensor(0.1))
            optimizer: Any = declaration.ours(params, **{**declaration.kwargs, "lr": lr})
            optimizer.grad_scale = way(torch.tensor(4.0))
            optimizer.found_inf = way(torch.tensor(found))
            optimizer.step()
            results.append([*params, *state_tensors(optimizer)])
        assert_same_bits(*results)


class Asked(Tensor):
    """A subclass that sees what is asked of it."""

    names: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass(records: None) -> None:
    """With Python code of its own, which does not run for this where torch has to be asked."""
    params, twins = parameters((64,), (5, 3)), parameters((64,), (5, 3))
    optimizers = [faststep.optim.AdamW(ps) for ps in (params, twins)]
    for step in range(6):
        for p, q in zip(params, twins, strict=True):
            grad = draw(tuple(p.shape), step)
            p.grad, q.grad = (negated(grad) if step % 2 else grad.clone()).as_subclass(Asked), grad
        Asked.names.clear()
        for optimizer in optimizers:
            optimizer.step()
        assert "is_neg" not in Asked.names
        assert_same_bits(params, twins)


@pytest.mark.parametrize("name", [d.name for d in TORCHS])
def test_a_mode_may_answer(name: str, records: None) -> None:
    """A torch function mode sees the question where it is asked, and may run any code."""
    declaration = next(d for d in TORCHS if d.name == name)
    params, twins = parameters((64,), ()), parameters((64,), ())
    optimizers = [declaration.ours(ps, **declaration.kwargs) for ps in (params, twins)]
    with torch.device("cpu"):
        for step in range(5):
            for p, q in zip(params, twins, strict=True):
                grad = draw(tuple(p.shape), step)
                p.grad, q.grad = negated(grad) if step % 2 else grad.clone(), grad
            for optimizer in optimizers:
                optimizer.step()
            assert_same_bits(params, twins)


def test_memory_shared_with_its_negation() -> None:
    """Two parameters over one memory are updated one after the other."""
    for size in (64, 40_000):
        value = draw((size,), 2)
        both = [Parameter(value), Parameter(torch._neg_view(value))]
        expected = value.clone()
        both[0].grad, both[1].grad = torch.full((size,), 1.0), negated(torch.full((size,), 0.25))
        faststep.optim.SGD(both, lr=0.5).step()
        assert_same_bits(both, [expected - 0.5 + 0.125, -(expected - 0.5 + 0.125)])


def test_a_gradient_that_cannot_be_written() -> None:
    """An expanded one, negated: an error where it is written, the right sign where it is read."""
    param, twin = parameters((5, 3)), parameters((5, 3))
    for p, way in ((param[0], negated), (twin[0], lambda value: value)):
        p.grad = way(torch.ones(5, 1)).expand(5, 3)
    optimizers = [faststep.optim.SGD(ps, lr=0.1) for ps in (param, twin)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(param, twin)
    keeping = faststep.optim.SGD(param, lr=0.1, max_grad_norm=1e-3, keep_grads=True)
    with pytest.raises(RuntimeError, match="several elements in one memory location"):
        keeping.step()
