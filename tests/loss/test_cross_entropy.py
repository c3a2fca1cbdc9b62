"""faststep.nn.functional.cross_entropy against torch's."""

import itertools
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torchs
from torch.utils._python_dispatch import TorchDispatchMode

import faststep.nn.functional
from faststep import _C
from faststep.nn.functional import cross_entropy
from programs import Programs

SHAPES = [(1, 1), (3, 5), (7, 31), (4, 32), (5, 33), (3, 1023), (2, 1024), (2, 1025), (3, 5000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = (torchs, cross_entropy)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def made(n: int, c: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits and targets, some of them ignored."""
    logits, target = (5 * torch.randn(n, c)).to(dtype), torch.randint(c, (n,))
    target[1::3] = -100
    return logits.requires_grad_(), target


def results(function: Any, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient; the losses of rows get different gradients."""
    logits = logits.detach().requires_grad_()
    loss = function(logits, *args, **options)
    loss.backward(torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape))
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faststep.nn.functional, "_CLASSES", 0)
    monkeypatch.setattr(faststep.nn.functional, "_LOGITS", 0)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function may not be called."""

    def refused(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("torch's function was called")

    monkeypatch.setattr(faststep.nn.functional, "_torchs", refused)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of torch's function."""
    found: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        found.append(args)
        return torchs(*args, **kwargs)

    monkeypatch.setattr(faststep.nn.functional, "_torchs", noted)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1])
@pytest.mark.usefixtures("no_torch")
def test_it_is_torchs(
    shape: tuple[int, int], dtype: torch.dtype, reduction: str, smoothing: float
) -> None:
    logits, target = made(*shape, dtype)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    exact = results(torchs, logits.double(), target, **options)
    for right, ours in zip(exact, results(cross_entropy, logits, target, **options), strict=True):
        assert ours.dtype == dtype
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(ours.double(), right, rtol=limit, atol=limit / 4)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.usefixtures("no_torch")
def test_class_weights(reduction: str) -> None:
    logits, target = made(40, 30)
    weight, options = torch.rand(30), {"reduction": reduction, "ignore_index": 3}
    target.clamp_(min=0)
    exact = results(torchs, logits.double(), target, weight.double(), **options)
    ours = results(cross_entropy, logits, target, weight, **options)
    for one, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.usefixtures("no_torch")
def test_autocast_reads_logits_as_they_are(dtype: torch.dtype, weighted: bool) -> None:
    logits, target = made(9, 100, dtype)
    weight = torch.rand(100) if weighted else None
    with torch.autocast("cpu", torch.bfloat16):
        (loss, grad), (right, right_grad) = (
            results(f, logits, target, weight) for f in (cross_entropy, torchs)
        )
    assert loss.dtype == right.dtype == torch.float32
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(grad, right_grad, rtol=1e-2, atol=1e-6)


EXTREMES = [float("inf"), -float("inf"), float("nan"), 1e38, -1e38, 3e38, -3e38, 0.0, -0.0, 88.5]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.usefixtures("no_torch")
def test_extreme_logits(smoothing: float, reduction: str) -> None:
    pairs = list(itertools.product(EXTREMES, EXTREMES))
    logits = torch.randn(3 * len(pairs), 1100)
    for i, (a, b) in enumerate(pairs):
        logits[3 * i, 0], logits[3 * i, 1050] = a, b
        logits[3 * i + 1] = a
        logits[3 * i + 1, 1050:] = b
        logits[3 * i + 2, :1024], logits[3 * i + 2, 1024:] = a, b
    for target in (0, 1050, 7, -100):
        targets = torch.full((len(logits),), target)
        options = {"reduction": reduction, "label_smoothing": smoothing}
        ours, theirs = (results(f, logits, targets, **options) for f in (cross_entropy, torchs))
        torch.testing.assert_close(ours[1], theirs[1], equal_nan=True, rtol=1e-5, atol=1e-5)
        loss = torchs(logits.double(), targets, **options).float()
        # With smoothing torch adds logits up in fp32: its sum overflows where the mean does not.
        right = torch.where(theirs[0].isinf(), loss, theirs[0])
        right = torch.where(ours[0].isinf(), theirs[0], right)
        torch.testing.assert_close(ours[0], right, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.usefixtures("no_torch")
def test_nothing_counts(reduction: str) -> None:
    for rows, target in ((0, 0), (3, -100)):
        given = torch.randn(rows, 5), torch.full((rows,), target)
        ours, theirs = (results(f, *given, reduction=reduction) for f in BOTH[::-1])
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    given = torch.randn(3, 5), torch.tensor([0, 1, 1])
    weight = torch.tensor([0.0, 0, 1, 1, 1])
    ours, theirs = (results(f, *given, weight, reduction=reduction) for f in BOTH[::-1])
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.usefixtures("no_torch")
def test_rows_and_targets_with_strides() -> None:
    wide, targets = torch.randn(6, 90), torch.randint(40, (6, 2))
    logits = wide[::2, 7:47]
    ours, theirs = (results(f, logits, targets[::2, 1]) for f in (cross_entropy, torchs))
    torch.testing.assert_close(ours, theirs)
    leaf = torch.randn(4, 9, requires_grad=True)
    cross_entropy(leaf, torch.arange(4), reduction="none").sum().backward()  # a stride of 0
    right = leaf.detach().requires_grad_()
    torchs(right, torch.arange(4), reduction="sum").backward()
    torch.testing.assert_close(leaf.grad, right.grad)


CODE = """
import hashlib, torch
from faststep.nn import functional
from faststep.nn.functional import cross_entropy
functional._CLASSES = functional._LOGITS = 0
torch.manual_seed(3)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for n, c in ((300, 1000), (9, 50257), (3000, 10)):
        logits = (4 * torch.randn(n, c)).to(dtype).requires_grad_()
        target = torch.randint(c, (n,))
        bits = set()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for smoothing in (0.0, 0.1):
                loss = cross_entropy(logits, target, label_smoothing=smoothing)
                (grad,) = torch.autograd.grad(loss, logits)
                data = loss.detach().float().numpy().tobytes() + grad.float().numpy().tobytes()
                bits.add((smoothing, hashlib.sha256(data).hexdigest()))
        print(len(bits), sorted(bits))
"""


def test_bits_are_the_same_for_threads_and_instruction_sets(programs: Programs) -> None:
    outputs = set()
    for level in _C.cpu_info()["supported"]:
        done = programs.run("import sys\nexec(sys.argv[1])", CODE, FASTSTEP_CPU=level)
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("2 ") for line in done.stdout.splitlines())
        outputs.add(done.stdout)
    assert len(outputs) == 1


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sub(Tensor):
    pass


def test_what_torch_computes(calls: list[Any]) -> None:
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 4])
    rest: dict[str, Callable[[Any], Any]] = {
        "fp64": lambda f: f(x.double(), y),
        "probabilities": lambda f: f(x, x.softmax(1)),
        "dimensions": lambda f: f(x.view(2, 5, 2), y.view(2, 2)),
        "one row": lambda f: f(x[0], y[0]),
        "transposed": lambda f: f(x.t().contiguous().t(), y),
        "bytes": lambda f: f(x, y.byte()),
        "legacy": lambda f: f(x, y, size_average=False),
        "weights and smoothing": lambda f: f(x, y, x[0].abs(), label_smoothing=0.1),
        "weights in bf16": lambda f: f(x.bfloat16(), y, x[0].abs().bfloat16()),
        "negated": lambda f: f(torch._neg_view(x), y),
        "grad": lambda f: torch.func.grad(f)(x, y),
        "vmap": lambda f: torch.func.vmap(f)(x.view(2, 2, 5), y.view(2, 2)),
        "jvp": lambda f: torch.func.jvp(lambda t: f(t, y), (x,), (x,))[1],
        "subclass": lambda f: f(x.as_subclass(Sub), y).as_subclass(Tensor),
    }
    for name, call in rest.items():
        calls.clear()
        torch.testing.assert_close(call(cross_entropy), call(torchs), rtol=0, atol=0)
        assert len(calls) == 1, name
    calls.clear()
    with Seen():
        cross_entropy(x, y)
    with torch.autograd.forward_ad.dual_level():
        cross_entropy(x, y)
    torch.jit.trace(cross_entropy, (x, y))  # type: ignore[no-untyped-call]
    assert len(calls) >= 3


@pytest.mark.parametrize(
    ("logits", "target", "options"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), {}),
        (torch.zeros(2, 3), torch.tensor([0, -1]), {}),
        (torch.zeros(2, 3), torch.tensor([0, 1, 2]), {}),
        (torch.zeros(2, 3), torch.tensor([0, 1], dtype=torch.int32), {}),
        (torch.zeros(2, 3, dtype=torch.long), torch.tensor([0, 1]), {}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"weight": torch.ones(2)}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"weight": [1.0, 1.0, 1.0]}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"weight": torch.ones(3).double()}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"weight": torch.ones(3, requires_grad=True)}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"reduction": "max"}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"label_smoothing": 1.5}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"label_smoothing": "a"}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"ignore_index": 1.5}),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {"ignore_index": 2**70}),
        (torch.zeros(2, 3), None, {}),
        ("logits", torch.tensor([0, 1]), {}),
    ],
)
def test_errors_are_torchs(logits: Any, target: Any, options: dict[str, Any]) -> None:
    texts = []
    for function in (cross_entropy, torchs):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of whatever class torch's has
            function(logits, target, **options)
        texts.append((caught.type, str(caught.value)))
    assert texts[0] == texts[1]


def test_logits_used_otherwise() -> None:
    logits, target = made(5, 40)
    plain = logits.detach().clone()
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    alias, product = logits.detach(), logits.exp()
    view = logits[:, :30]
    loss = cross_entropy(logits, target) + cross_entropy(logits, target, label_smoothing=0.1)
    loss = loss + cross_entropy(view, target.clamp(max=29)) + product.sum()
    loss.backward(retain_graph=True)
    once = logits.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    torch.testing.assert_close(logits.grad, 2 * once)
    torch.testing.assert_close(seen[0], once)
    for same in (logits, alias):
        assert torch.equal(same.detach(), plain)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_gradient(dtype: torch.dtype) -> None:
    base, target = made(4, 60, dtype)
    weight = torch.rand(60) if dtype == torch.float32 else None
    for reduction, smoothing in (("mean", 0.0), ("mean", 0.2), ("none", 0.0)):
        found = []
        for function, logits in ((cross_entropy, base * 2), (torchs, base.double() * 2)):
            scale = None if smoothing or weight is None else weight.to(logits.dtype)
            options: Any = {"reduction": reduction, "label_smoothing": smoothing}
            loss = function(logits, target, scale, **options)
            by = torch.ones_like(loss).mul_(3).requires_grad_()
            (grad,) = torch.autograd.grad(loss, logits, by, create_graph=True)
            second = torch.autograd.grad(grad.pow(2).sum(), (logits, by), create_graph=True)
            third = torch.autograd.grad(second[0].pow(2).sum(), logits)
            found.append([one.double() for one in (grad, *second, *third)])
        for ours, exact in zip(*found, strict=True):
            atol = 4 * TOLERANCE[dtype] * exact.abs().max().item()
            torch.testing.assert_close(ours, exact, rtol=0, atol=atol)


def test_batched_gradients() -> None:
    logits, target = made(4, 6)
    found = [
        torch.autograd.grad(
            f(logits, target, reduction="none"), logits, torch.eye(4), is_grads_batched=True
        )[0]
        for f in (cross_entropy, torchs)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("no_torch")
def test_without_gradients() -> None:
    logits, target = made(4, 6)
    with torch.no_grad():
        assert not cross_entropy(logits, target).requires_grad
    with torch.inference_mode():
        assert cross_entropy(logits, target).is_inference()
    assert not cross_entropy(logits.detach(), target).requires_grad


def test_saved_tensors_can_be_packed() -> None:
    logits, target = made(4, 6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
        loss = cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, torch.autograd.grad(torchs(logits, target), logits)[0])


def test_compiled_functions_have_torchs(calls: list[Any]) -> None:
    logits, target = made(4, 6)
    compiled = torch.compile(lambda x, y: cross_entropy(x, y), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, target), torchs(logits, target))


def test_torchs_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own sample inputs of the operator, in fp32."""
    stand_in: Any = types.ModuleType("expecttest")  # torch imports it for tests that are not run
    stand_in.TestCase = unittest.TestCase
    monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.cross_entropy")
    samples = [*info.sample_inputs("cpu", torch.float32, requires_grad=True)]
    assert len(samples) > 20
    for sample in samples:
        ours, theirs = (f(sample.input, *sample.args, **sample.kwargs) for f in BOTH[::-1])
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        grads = (torch.autograd.grad(one.sum(), sample.input)[0] for one in (ours, theirs))
        torch.testing.assert_close(*grads, equal_nan=True)


def test_small_logits_are_torchs(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(faststep.nn.functional, "_torchs", lambda *args: calls.append(args))
    for shape in ((300, 1024), (255, 1024), (300, 1023)):
        cross_entropy(torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long))
    assert len(calls) == 2
