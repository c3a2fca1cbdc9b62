"""What a script may do beside and between forward and backward: the cross-entropy is torch's."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torchs
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import faststep.nn.functional
from faststep.nn.functional import cross_entropy

N, C = 8, 33
FUNCTIONS = (cross_entropy, torchs)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faststep.nn.functional, "_CLASSES", 0)
    monkeypatch.setattr(faststep.nn.functional, "_LOGITS", 0)


def made(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(N, C, generator=generator)
    target = torch.randint(C, (N,), generator=generator)
    return logits.to(dtype), target


def close(ours: Any, theirs: Any, dtype: torch.dtype = torch.float32) -> None:
    limit = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit / 4, equal_nan=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x * 1,
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], 2)[..., 0],
    "wide": lambda x: torch.cat([x, x], 1)[:, :C],
    "expanded": lambda x: x[:1].expand(N, C),
    "one column": lambda x: x[:, :1].expand(N, C),
    "empty": lambda x: x[:0],
    "one class": lambda x: x[:, :1],
    "no class": lambda x: x[:0, :0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_all_options(dtype: torch.dtype, layout: str, weighted: bool) -> None:
    base, classes = made(dtype)
    logits = LAYOUTS[layout](base)
    classes = classes[: len(logits)] % max(1, logits.shape[1])
    weight = torch.linspace(0, 2, logits.shape[1], dtype=dtype) if weighted else None
    for reduction, ignored, smoothing in itertools.product(
        ("none", "mean", "sum"), (-100, 0, 2), (0.0, 0.1)
    ):
        found = []
        for function in FUNCTIONS:
            leaf = base.clone().requires_grad_()
            options: Any = {"reduction": reduction, "label_smoothing": smoothing}
            given = LAYOUTS[layout](leaf), classes, weight
            loss = function(*given, ignore_index=ignored, **options)
            by = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
            (grad,) = torch.autograd.grad(loss, leaf, by)
            found.append((loss, grad))
        close(*found, dtype)


# What a script does with logits of its own, and what it may see of it.
def written_between(f: Any, x: Tensor, y: Tensor) -> Any:
    loss = f(x, y)
    with torch.no_grad():
        x.zero_()
    loss.backward()
    return x


def written_by_autograd(f: Any, x: Tensor, y: Tensor) -> Any:
    loss = f(x, y)
    x.mul_(2)
    (loss + x.sum()).backward()
    return x


def target_written(f: Any, x: Tensor, y: Tensor) -> Any:
    loss = f(x, y)
    y.fill_(0)
    loss.backward()


def backward_twice(f: Any, x: Tensor, y: Tensor) -> Any:
    loss = f(x, y)
    loss.backward()
    loss.backward()


def kept_and_changed(f: Any, x: Tensor, y: Tensor) -> Any:
    x.register_hook(lambda grad: grad.mul_(3))
    loss = f(x, y)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    first.zero_()
    loss.backward(retain_graph=True)
    loss.backward()
    return x


def read_after(f: Any, x: Tensor, y: Tensor) -> Any:
    f(x, y).backward()
    return x


def used_by_others(f: Any, x: Tensor, y: Tensor) -> Any:
    x.retain_grad()
    total = x.exp().sum() + x.softmax(1).pow(2).sum() + x.sin().sum()
    loss = f(x, y) + total + f(x, y, reduction="sum") + f(x[:, :5], y.clamp(max=4))
    loss.backward()
    return x.grad, x


def saved_seen(f: Any, x: Tensor, y: Tensor) -> Any:
    """Hooks see what is saved, and it stays as it was."""
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor, tensor.clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = f(x, y)
    (loss * 3).backward()
    assert kept
    assert all(torch.equal(one, before) for one, before in kept)


def saved_on_cpu(f: Any, x: Tensor, y: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = f(x, y)
    loss.backward()


def saved_taken(f: Any, x: Tensor, y: Tensor) -> Any:
    """What a script takes from the graph stays as it was."""
    loss = f(x, y)
    node: Any = loss.grad_fn
    taken = getattr(node, "saved_tensors", ()) or (node._saved_target,)
    before = [one if one is None else one.clone() for one in taken]
    (loss * 3).backward()
    for one, same in zip(taken, before, strict=True):
        assert one is same is None or torch.equal(one, same)


def checkpointed(f: Any, x: Tensor, y: Tensor) -> Any:
    for reentrant in (False, True):
        checkpoint(f, x * 1, y, use_reentrant=reentrant).backward()


def failed_before(f: Any, x: Tensor, y: Tensor) -> Any:
    """An error below the loss, and one more pass."""
    calls = []

    def hook(grad: Tensor) -> None:
        calls.append(grad)
        if len(calls) == 1:
            raise ValueError("once")

    z = x * 1
    z.register_hook(hook)
    loss = f(z, y)
    with pytest.raises(ValueError, match="once"):
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    calls.clear()
    with pytest.raises(ValueError, match="once"):
        loss.backward()
    loss.backward()


def watched(f: Any, x: Tensor, y: Tensor) -> Any:
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        loss = f(x, y)
        loss.backward()


def several_outputs(f: Any, x: Tensor, y: Tensor) -> Any:
    loss, other = f(x, y), f(2 * x, y, reduction="none")
    return torch.autograd.grad([loss, other], [x], [torch.tensor(2.0), torch.ones(N)])


def accumulated(f: Any, x: Tensor, y: Tensor) -> Any:
    for part in range(4):
        (f(x[2 * part : 2 * part + 2], y[2 * part : 2 * part + 2]) / 4).backward()


def only_a_part(f: Any, x: Tensor, y: Tensor) -> Any:
    f(x, y, reduction="none")[3].backward()


def vmapped(f: Any, x: Tensor, y: Tensor) -> Any:
    losses = torch.func.vmap(f)(x.view(2, 4, C), y.view(2, 4))
    hessian = torch.func.hessian(lambda z: f(z, y[:1]))(x[:1].detach())
    return losses, hessian, torch.func.grad(f)(x.detach(), y)


def nobody_counts(f: Any, x: Tensor, y: Tensor) -> Any:
    loss = f(x, y.fill_(7), ignore_index=7)
    loss.backward()
    return loss


def deterministic(f: Any, x: Tensor, y: Tensor) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        f(x, y).backward()
    finally:
        torch.use_deterministic_algorithms(False)


def in_inference(f: Any, x: Tensor, y: Tensor) -> Any:
    with torch.inference_mode():
        loss = f(x, y)
    return loss.is_inference(), loss.requires_grad, loss.clone()


def gradients_in_inference(f: Any, x: Tensor, y: Tensor) -> Any:
    with torch.inference_mode(), torch.enable_grad():
        loss = f(x.detach().requires_grad_(), y)
    leaf = x.detach().requires_grad_()
    with torch.inference_mode(), torch.enable_grad():
        other = f(leaf, y)
    return loss.requires_grad, other.requires_grad, other.clone()


def node_shown(f: Any, x: Tensor, y: Tensor) -> Any:
    """As print and torchviz show it."""
    nodes = [f(x, y).grad_fn, f(x, y, label_smoothing=0.1).grad_fn]
    for node in nodes:
        assert all(one.size() for one in getattr(node, "saved_tensors", ()))
    return [str(node).split(" at ")[0] for node in nodes]


def result_written(f: Any, x: Tensor, y: Tensor) -> Any:
    losses = f(x, y, reduction="none")
    losses.mul_(2).sum().backward()
    losses[0] = 1
    one = f(x, y)
    one += 1
    return losses._is_view(), one._is_view(), one


def dimensions(f: Any, x: Tensor, y: Tensor) -> Any:
    images = x.view(2, 3, 4, 11)[..., :1].contiguous(memory_format=torch.channels_last)
    labels = y.view(2, 4, 1) % 3
    return f(images, labels), f(x, x.detach().softmax(1)), f(x[0], y[0]), f(x[0], x[1].softmax(0))


def no_gradient_wanted(f: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        assert not f(x, y).requires_grad
    return f(x.detach(), y).requires_grad, f(x, y).requires_grad


def weight_wants_a_gradient(f: Any, x: Tensor, y: Tensor) -> Any:
    f(x, y, torch.ones(C, requires_grad=True)).backward()


def probabilities_want_one(f: Any, x: Tensor, y: Tensor) -> Any:
    probabilities = x.detach().softmax(1).requires_grad_()
    f(x, probabilities).backward()
    return probabilities.grad


USES = [
    accumulated,
    backward_twice,
    checkpointed,
    deterministic,
    dimensions,
    failed_before,
    gradients_in_inference,
    in_inference,
    kept_and_changed,
    no_gradient_wanted,
    nobody_counts,
    node_shown,
    only_a_part,
    probabilities_want_one,
    read_after,
    result_written,
    saved_on_cpu,
    saved_seen,
    saved_taken,
    several_outputs,
    target_written,
    used_by_others,
    vmapped,
    watched,
    weight_wants_a_gradient,
    written_between,
    written_by_autograd,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_uses(use: Callable[..., Any]) -> None:
    results = []
    for function in FUNCTIONS:
        values, target = made()
        leaf = values.requires_grad_()
        seen: Any = []
        try:
            seen.append(use(function, leaf * 1, target))
        except RuntimeError as error:
            seen.append((type(error), str(error)))
        results.append((seen, leaf.grad))
    close_or_equal(*results)


def close_or_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        close(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            close_or_equal(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_scaled_losses_of_16_bits_keep_small_gradients(dtype: torch.dtype, scale: float) -> None:
    values, target = made(dtype)
    found = []
    for function in FUNCTIONS:
        leaf = values.repeat(512, 1).requires_grad_()
        with torch.autocast("cpu", dtype):
            loss = function(leaf, target.repeat(512))
        (loss * scale).backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=2e-2, atol=1e-7 if dtype == torch.float16 else 1e-10)


class Noted(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_the_call() -> None:
    logits, target = made()
    with Noted() as ours:
        cross_entropy(logits, target)
    with Noted() as theirs:
        torchs(logits, target)
    assert ours.names == theirs.names == ["cross_entropy"]


def test_gradients_are_tensors_of_their_own() -> None:
    """Also where backward returns what forward has saved."""
    values, target = made()
    for by in (1.0, 2.0):
        leaf = values.clone().requires_grad_()
        loss = cross_entropy(leaf * 1, target) * by
        loss.backward()
        grad = leaf.grad
        assert grad is not None
        assert grad.is_contiguous()
        assert not grad.requires_grad
        assert grad.grad_fn is None
        grad.zero_()
        assert torch.equal(leaf.detach(), values)


def memory_of(work: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes of torch's CPU memory beyond those before, and those at the end."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        work()
    results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_of_memory(dtype: torch.dtype) -> None:
    """One tensor of the logits' size above them; a second one if the graph is kept."""
    logits = torch.randn(64, 5000).to(dtype)
    leaf, target = logits.requires_grad_(), torch.randint(5000, (64,))

    def step(function: Any, **options: Any) -> Callable[[], None]:
        def work() -> None:
            with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
                loss = function(leaf, target)
            (loss * 3).backward(**options)
            leaf.grad = None

        return work

    peaks = [
        memory_of(work)[0] / logits.nbytes
        for work in (
            step(cross_entropy),
            step(cross_entropy, retain_graph=True),
            step(torchs),
        )
    ]
    assert 1 <= peaks[0] < 1.01
    assert 2 <= peaks[1] < 2.01
    assert peaks[2] >= 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_without_a_name_are_freed_by_forward(function: Any) -> None:
    leaf, target = torch.randn(64, 5000, requires_grad=True), torch.randint(5000, (64,))
    losses: list[Tensor] = []
    peak, left = memory_of(lambda: losses.append(function(leaf * 1, target)))
    assert 2 <= peak / leaf.nbytes < 2.01
    assert 1 <= left / leaf.nbytes < 1.01
