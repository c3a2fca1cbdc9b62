"""No two kinds of tensors may look alike to a step that compares torch's records."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

import faststep
from faststep._torch import kinds
from faststep._torch import records as _records
from programs import Programs

from .common import assert_same_bits, parameters
from .declarations import ALL, Declaration


class Logged(Tensor):
    """A subclass with its own __torch_dispatch__ and memory of its own elsewhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logged:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*unwrapped(args), **unwrapped(kwargs or {}))


class WithMemory(Tensor):
    """A subclass with its own __torch_dispatch__ and memory that is not what it means."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("nothing is done with it here")


def unwrapped(value: Any) -> Any:
    return tree_map(lambda v: v.inner if isinstance(v, Logged) else v, value)


def batched() -> Tensor:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    torch.vmap(keep)(torch.zeros(3, 4))
    return kept[0]


FURTHER: dict[str, Callable[[], Tensor]] = {
    "compressed sparse": lambda: torch.zeros(2, 2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4)]),
    "zeros without memory": lambda: torch._efficientzerotensor(4),
    "functionalized": lambda: torch._to_functional_tensor(torch.zeros(4)),
    "batched": batched,
    "wrapped": lambda: Logged(torch.zeros(4)),
    "on the CPU's number 1": lambda: torch.Tensor._make_wrapper_subclass(
        Logged, (4,), device="cpu:1"
    ),
}
if torch.backends.mkldnn.is_available():
    FURTHER["of MKL-DNN"] = lambda: torch.zeros(4).to_mkldnn()


def described(tensor: Tensor) -> tuple[int, ...]:
    """The words of a record that hold more than sizes and places."""
    layout = _records.find()[0]
    assert layout is not None
    return _records._seen(layout, tensor)[-2:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FURTHER)
def test_a_kind_that_the_experiment_does_not_make_is_told_apart(kind: str) -> None:
    tensor = FURTHER[kind]()
    others = {name: described(other) for name, other in kinds.different_tensors()}
    if kind == "wrapped":  # to C a subclass is a subclass
        del others["a subclass with its own __torch_dispatch__"]
    assert described(tensor) not in others.values()


def gradient_of(layer: torch.nn.Module, *shape: int) -> Tensor | None:
    layer(torch.randn(shape)).sum().backward()
    return next(layer.parameters()).grad


ORDINARY: dict[str, Callable[[], Tensor | None]] = {
    "detached": lambda: torch.zeros(4).detach(),
    "data": lambda: torch.zeros(4).data,
    "a view": lambda: torch.zeros(8)[:4],
    "a parameter": lambda: Parameter(torch.zeros(4)),
    "a number": lambda: torch.tensor(1.0),
    "of NumPy": lambda: torch.from_numpy(np.zeros(4, dtype=np.float32)),
    "shared": lambda: torch.zeros(4).share_memory_(),
    "a matrix's gradient": lambda: gradient_of(torch.nn.Linear(4, 3), 5, 4),
    "a filter's gradient": lambda: gradient_of(torch.nn.Conv2d(2, 3, 3), 1, 2, 5, 5),
    "a norm's gradient": lambda: gradient_of(torch.nn.LayerNorm(4), 2, 4),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_tensors_are_alike(kind: str) -> None:
    """Else torch would be asked again where scripts change between them."""
    tensor = ORDINARY[kind]()
    assert tensor is not None
    assert described(tensor) == described(torch.zeros(4))


@pytest.mark.parametrize("kind", ["of the same kind", *kinds._KINDS])
def test_a_kind_that_looks_like_another_turns_records_off(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(kinds._KINDS, kind, lambda: torch.zeros(4))
    layout, reason = _records.find()
    assert layout is None
    assert reason == f"{kind} has a record like that of a tensor of torch.float32"


@pytest.mark.parametrize(
    ("kind", "word"),
    [("a negated view", "negated"), ("a subclass with its own __torch_dispatch__", "subclass")],
)
def test_a_mask_without_the_bits_of_a_kind_turns_records_off(
    monkeypatch: pytest.MonkeyPatch, kind: str, word: str
) -> None:
    """Also where other bits of the same bytes are compared."""
    layout, mask = _records.find()[0], _records._mask
    assert layout is not None
    plain = described(torch.zeros(4))
    own = [a ^ b for a, b in zip(described(kinds._KINDS[kind]()), plain, strict=True)]
    assert any(own)
    monkeypatch.setattr(_records, "_mask", lambda at: mask(at) & ~own[at - layout.kind])
    found, reason = _records.find()
    assert found is None
    assert word in reason


def moved_bits(word: int) -> int:
    """Bits of torch 2.13 where torch 2.10 has them: that of subclasses is alone in its byte."""
    return word & 0x0FFF_FFFF | (word & 1 << 28) >> 1 | (word & 0x7FFF_FFFF << 31) << 1


def test_masks_where_the_bit_of_subclasses_is_in_a_byte_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.10 to 2.12."""
    layout, words = _records.find()[0], _records._words
    assert layout is not None
    wrapped, plain = Logged(torch.zeros(4)), torch.zeros(4)
    before = [
        word ^ other for word, other in zip(described(wrapped), described(plain), strict=True)
    ]

    def older(address: int, count: int) -> list[int]:
        found = words(address, count)
        if count > layout.kind + 1:
            found[layout.kind + 1] = moved_bits(found[layout.kind + 1])
        return found

    monkeypatch.setattr(_records, "_words", older)
    found, reason = _records.find()
    assert found is not None, reason
    assert moved_bits(before[1]) & ~found.next_mask == 0
    assert before[0] & ~found.kind_mask == 0


def test_finding_them_says_nothing_and_leaves_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _records.find()


@pytest.mark.parametrize("kind", ["wrapper", "with memory"])
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_a_gradient_with_its_own_dispatch_is_noticed_late(
    declaration: Declaration, kind: str
) -> None:
    """In a step like the one before, and it changes nothing."""
    params, twins = parameters((3, 4), (5,)), parameters((3, 4), (5,))
    optimizer = declaration.ours(params, **declaration.kwargs)
    other = declaration.ours(twins, **declaration.kwargs)
    for step in range(9):
        for p in (*params, *twins):
            p.grad = torch.full_like(p, 1.0 + step)
        if step in (4, 7):
            inner = torch.ones(5)
            params[1].grad = (
                Logged(inner)
                if kind == "wrapper"
                else torch.Tensor._make_subclass(WithMemory, inner)
            )
            with pytest.raises(TypeError, match=r"gradient of parameter 1 .*__torch_dispatch__"):
                optimizer.step()
            params[1].grad = torch.full_like(params[1], 1.0 + step)
        optimizer.step()
        other.step()
        assert_same_bits(params, twins)


@pytest.mark.parametrize("size", [12, 5000])
def test_clipping_gradients_with_their_own_dispatch(size: int) -> None:
    """As torch does, also after many plain ones of the same shape."""
    (param,) = parameters((size,))
    for _ in range(4):
        param.grad = torch.full((size,), 2.0)
        faststep.clip_grad_norm_([param], 1.0)
    inner = torch.full((size,), 2.0)
    expected = inner.clone()
    param.grad = Logged(inner)
    assert faststep.clip_grad_norm_([param], 1.0) == torch.linalg.vector_norm(expected)
    torch.testing.assert_close(inner, expected / torch.linalg.vector_norm(expected))


LATE_DTENSORS = """
import sys, torch, torch._dynamo, faststep
gone = sys.modules.pop("torch.distributed.tensor", None)  # some versions of torch import it
clip = {"max_grad_norm": 1.0} if sys.argv[1] == "clipped" else {}
ones, grad = torch.ones(4), torch.arange(4.0)
plain, param = (torch.nn.Parameter(ones.clone()) for _ in range(2))
plain.grad = param.grad = grad
for one in (plain, param):
    optimizer = faststep.optim.AdamW([one], lr=0.1, **clip)
    optimizer.step()

if gone is not None:
    sys.modules["torch.distributed.tensor"] = gone
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
late = torch.nn.Parameter(distribute_tensor(ones.clone(), mesh, [Shard(0)]))
late.grad = distribute_tensor(grad.clone(), mesh, [Shard(0)])
optimizer.param_groups[0]["params"][0] = late
optimizer.step()
assert isinstance(optimizer.state[late]["exp_avg"], DTensor)
assert torch.equal(late.full_tensor(), plain)
"""


@pytest.mark.parametrize("how", ["plain", "clipped"])
def test_dtensors_that_come_after_the_first_step(how: str, programs: Programs) -> None:
    """Their class is learnt when a step cannot use one."""
    done = programs.run(LATE_DTENSORS, how)
    assert done.returncode == 0, done.stderr
