"""Tensors without memory, and TorchDispatchModes, which see torch's operators alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import faststep
from faststep.optim import SGD, Adam, AdamW, Lion

from .common import TOLERANCE, assert_near, assert_same_bits, parameters, set_gradients

SHAPES = ((5,), (4, 3))
CLASSES = (Adam, AdamW, SGD, Lion)
NAMED = (Adam, AdamW, SGD)
LIMIT = 0.5

over_classes = pytest.mark.parametrize("cls", CLASSES)


class Watch(TorchDispatchMode):
    """Counts the operators that write to the memory of given tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.places = {t.data_ptr() for t in tensors}
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        infos = [argument.alias_info for argument in func._schema.arguments]
        changes = [info is not None and info.is_write for info in infos]
        for changed, value in zip(changes, args, strict=False):
            listed = value if isinstance(value, (list, tuple)) else [value]
            self.written += changed and any(t.data_ptr() in self.places for t in listed)
        return func(*args, **(kwargs or {}))


def settings(cls: Any) -> dict[str, Any]:
    return {"lr": 0.1, **({"momentum": 0.9} if cls is SGD else {})}


def torchs(cls: Any) -> Any:
    return getattr(torch.optim, cls.__name__)


def states(optimizer: Any) -> list[list[tuple[str, str, str, tuple[int, ...]]]]:
    return [
        [(key, type(value).__name__, str(value.device), tuple(value.shape))
         for key, value in optimizer.state[p].items()]
        for group in optimizer.param_groups for p in group["params"]
    ]  # fmt: skip


def meta() -> list[Tensor]:
    params: list[Tensor] = [Parameter(torch.ones(shape, device="meta")) for shape in SHAPES]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def fake(device: str = "cpu") -> list[Tensor]:
    with torch._guards.detect_fake_mode() or FakeTensorMode():
        params: list[Tensor] = [Parameter(torch.ones(shape, device=device)) for shape in SHAPES]
        for p in params:
            p.grad = torch.ones_like(p)
    return params


MADE: dict[str, Callable[[], list[Tensor]]] = {
    "meta": meta,
    "fake": fake,
    "fake cuda": lambda: fake("cuda"),
}
over_made = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


@over_made
@pytest.mark.parametrize("cls", NAMED)
def test_no_memory_as_torch(cls: Any, make: Callable[[], list[Tensor]]) -> None:
    """The same states, of the same classes on the same devices: estimators look at them."""
    theirs, ours = torchs(cls)(make(), **settings(cls)), cls(make(), **settings(cls))
    for optimizer in (theirs, ours):
        optimizer.step()
        optimizer.step()
    assert states(ours) == states(theirs)


@pytest.mark.parametrize("cls", NAMED)
def test_fused_meta_as_torch(cls: Any) -> None:
    for made in (torchs(cls), cls):
        with pytest.raises(RuntimeError, match="`fused=True` requires all the params"):
            made(meta(), lr=0.1, fused=True).step()


@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
@over_classes
def test_no_memory_with_the_options(cls: Any, device: str) -> None:
    """Clipping and unscaling have shapes and devices, too."""
    with FakeTensorMode():
        params = meta() if device == "meta" else fake(device)
        keep = device != "cuda"  # torch cannot copy_ fake CUDA tensors where it has no CUDA
        optimizer = cls(params, **settings(cls), max_grad_norm=LIMIT, keep_grads=keep)
        optimizer.grad_scale = torch.ones((), device=device)
        before = [p.grad for p in params]
        versions = [p.grad._version for p in params]
        optimizer.step()
        assert optimizer.last_grad_norm.shape == ()
        assert optimizer.last_grad_norm.device.type == device
        assert all(p.grad is grad for p, grad in zip(params, before, strict=True))
        moved = [p.grad._version > old for p, old in zip(params, versions, strict=True)]
        assert moved == [keep] * len(params)
        assert optimizer.grad_scale.device.type == device


def test_mkldnn_as_torch() -> None:
    for cls in NAMED:
        results = []
        for made in (torchs(cls), cls):
            p = Parameter(torch.ones(3).to_mkldnn())
            p.grad = torch.ones(3).to_mkldnn()
            try:
                made([p], lr=0.1).step()
                results.append((None, p.to_dense().tolist()))
            except RuntimeError as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1]


@over_classes
@pytest.mark.parametrize("max_norm", [None, LIMIT])
@pytest.mark.parametrize("keep", [False, True])
def test_a_mode_sees_the_step(cls: Any, max_norm: float | None, keep: bool) -> None:
    """And what it computes is the step: values, gradients and the norm."""
    options = {**settings(cls), "max_grad_norm": max_norm, "keep_grads": keep}
    params, expected = parameters(*SHAPES), parameters(*SHAPES)
    ours, plain = cls(params, **options), cls(expected, **options)
    for step in range(4):
        set_gradients(params, step)
        set_gradients(expected, step)
        before = [p._version for p in params]
        with Watch(*params) as watch:
            ours.step()
        plain.step()
        assert watch.written >= len(params)
        assert all(p._version > old for p, old in zip(params, before, strict=True))
        for mine, other in zip(params, expected, strict=True):
            assert_near(mine, other, TOLERANCE, "parameter")
            assert_near(mine.grad, other.grad, TOLERANCE, "gradient")
        if max_norm is not None:
            torch.testing.assert_close(ours.last_grad_norm, plain.last_grad_norm)
    set_gradients(params, 9)
    ours.step()  # goes on without the mode
    set_gradients(expected, 9)
    plain.step()
    for mine, other in zip(params, expected, strict=True):
        assert_near(mine, other, TOLERANCE, "parameter")


@over_classes
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, faststep.amp.GradScaler])
@pytest.mark.parametrize("limits", [{}, {"max_scale": 1024.0}])
def test_a_mode_sees_the_scaler(cls: Any, scaler_class: Any, limits: dict[str, float]) -> None:
    limits = limits if scaler_class is faststep.amp.GradScaler else {}
    results = []
    for watched in (True, False):
        params = parameters(*SHAPES)
        optimizer = cls(params, **settings(cls), max_grad_norm=LIMIT)
        scaler = scaler_class("cpu", init_scale=64.0, **limits)
        for step in range(4):
            scaler.scale(torch.zeros(()))
            set_gradients(params, step, scaler.get_scale())
            if step == 2:
                params[0].grad[1] = torch.inf
            if not watched:
                scaler.step(optimizer)
                scaler.update()
                continue
            with Watch(scaler._scale) as watch:
                scaler.step(optimizer)
                scaler.update()
            assert watch.written
        assert not optimizer.step_was_skipped
        results.append((scaler.get_scale(), params))
    (scale, ours), (other_scale, others) = results
    assert scale == other_scale == 32.0
    for mine, other in zip(ours, others, strict=True):
        assert_near(mine, other, TOLERANCE, "parameter")


@over_classes
def test_a_fake_mode_keeps_real_memory(cls: Any) -> None:
    """What torch's own loop would do, or raise, on the same tensors."""
    results = []
    for made in (cls, torchs(cls) if cls in NAMED else cls):
        params = parameters(*SHAPES)
        optimizer = made(params, **settings(cls))
        set_gradients(params, 0)
        optimizer.step()
        before = [p.detach().clone() for p in params]
        with FakeTensorMode(allow_non_fake_inputs=True):
            try:
                optimizer.step()
                error = None
            except Exception as caught:
                error = type(caught)
        results.append((error, [torch.equal(p, b) for p, b in zip(params, before, strict=True)]))
    assert results[0] == results[1]


def test_functions_on_gradients_are_seen() -> None:
    def run(work: Callable[[list[Tensor], Any], Any]) -> int:
        params = parameters(*SHAPES)
        set_gradients(params, 0)
        scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        with Watch(*(p.grad for p in params)) as watch:
            work(params, scaler)
        return watch.written

    works: dict[str, Callable[[list[Tensor], Any], Any]] = {
        "norm": lambda ps, _: faststep.clip_grad_norm_(ps, 0.1),
        "value": lambda ps, _: faststep.clip_grad_value_(ps, 0.1),
        "with norm": lambda ps, _: faststep.clip_grads_with_norm_(ps, 0.1, torch.tensor(1.0)),
        "unscale": lambda ps, scaler: scaler.unscale_(SGD(ps)),
    }
    for name, work in works.items():
        assert run(work), name
    with Watch(), pytest.raises(RuntimeError, match="non-finite"):
        faststep.get_total_norm([torch.tensor([torch.inf])], error_if_nonfinite=True)


@pytest.mark.parametrize("pairs", [False, True])
def test_sums_are_seen(pairs: bool) -> None:
    """fp32 sums of bfloat16 gradients, made in hooks, and their division."""
    results = []
    for watched in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).bfloat16()
        optimizer = AdamW(model.parameters(), lr=0.1)
        accum = faststep.accumulate(optimizer, 3, dtype=torch.float32, in_pairs=pairs)
        for number in range(6):
            with FlopCounterMode(display=False) if watched else torch.enable_grad():
                with accum:
                    x = torch.full((2, 4), number + 1.0, dtype=torch.bfloat16)
                    accum.backward(model(x).float().square().mean())
                if accum.ready:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for mine, other in zip(*results, strict=True):
        assert_near(mine, other, TOLERANCE, "parameter")


@over_classes
@pytest.mark.parametrize("clip", [None, "per_parameter"])
def test_release_is_seen(cls: Any, clip: Any) -> None:
    """Also after steps that no mode saw, which C alone repeats."""
    results = []
    for watched in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        limit = {} if clip is None else {"max_grad_norm": LIMIT}
        optimizer = cls(model.parameters(), **settings(cls), **limit)
        release = faststep.release_gradients(model, optimizer, clip=clip)
        for number in range(5):
            loss = model(torch.full((2, 4), number + 1.0)).square().mean()
            if watched and number >= 3:
                with Watch(*model.parameters()) as watch:
                    loss.backward()
                    optimizer.step()
                assert watch.written >= 2
            else:
                loss.backward()
                optimizer.step()
            assert model.weight.grad is None
        release.remove()
        results.append([p.detach().clone() for p in model.parameters()])
    for mine, other in zip(*results, strict=True):
        assert_near(mine, other, TOLERANCE, "parameter")


class Doubled(Parameter):
    """Scripts patch a parameter's gradient like this."""

    @property
    def grad(self) -> Any:
        grad = Parameter.grad.__get__(self)
        return None if grad is None else 2.0 * grad


@over_classes
def test_a_class_with_a_gradient_of_its_own(cls: Any) -> None:
    """Given to a parameter that was stepped before."""
    params, expected = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, plain = cls(params, **settings(cls)), cls(expected, **settings(cls))
    for step in range(6):
        set_gradients(expected, step)
        for p, other in zip(params, expected, strict=True):
            Parameter.grad.__set__(p, other.grad.clone())
        if step == 3:
            params[1].__class__ = Doubled
        if step >= 3:
            expected[1].grad = 2.0 * expected[1].grad
        optimizer.step()
        plain.step()
        assert_same_bits(params, expected, f"step {step}")
