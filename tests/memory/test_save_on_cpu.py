"""Tensors that are saved on the CPU: a script sees what it sees with torch's class."""

import gc
import inspect
import random
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from faststep import memory
from faststep.memory.slabs import Slabs

Make = Callable[..., Any]  # of a context


def seen(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        return tensor.layout, tensor.detach().to_dense().tolist()
    values = tensor.detach().to(torch.complex128).flatten().tolist()
    return tensor.dtype, tensor.shape, tensor.stride(), values, type(tensor).__name__


class Holding(torch.autograd.Function):
    """Saves an input and an output, and tells what backward gets."""

    told: list[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = x * 2
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, y, out = ctx.saved_tensors
        Holding.told += [seen(x), seen(y), seen(out), x.requires_grad, out.requires_grad]
        again = ctx.saved_tensors[1]
        again.add_(1)
        Holding.told += [seen(y), seen(ctx.saved_tensors[1])]
        return grad * 2, None


def upstreams_own(make: Make, pin: bool) -> list[Any]:
    """The cases of torch's own test of the class."""
    told = []
    indices = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 1.0]), requires_grad=True)
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
    for x in [torch.arange(5).to(kind).requires_grad_() for kind in kinds] + [sparse]:
        with make(pin):
            y: Any = x * x
        told += [seen(y.grad_fn._saved_self), seen(y.grad_fn._saved_other)]
        told += [y.grad_fn._saved_self.requires_grad, y.grad_fn._saved_self.is_leaf]
        total = (y.to_dense() if y.is_sparse else y).sum()
        (total.real if total.is_complex() else total).backward()
        told.append(seen(x.grad))
    return told


def forms(make: Make, pin: bool) -> list[Any]:
    base = torch.arange(24.0).view(2, 3, 4).requires_grad_()
    Holding.told = []
    for x in (base, base.transpose(0, 2), base[:, 1], base[..., ::2], base[:1].expand(5, 3, 4)):
        with make(pin):
            out = Holding.apply(x, x.detach().clone())
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    return [*Holding.told, seen(base.grad)]


def changed_in_place(make: Make, pin: bool) -> list[Any]:
    told = []
    for what in ("input", "output", "parameter", "data"):
        x, weight = torch.ones(3, requires_grad=True), nn.Parameter(torch.full((3,), 2.0))
        with make(pin):
            hidden = x * weight
            out = (hidden * hidden).exp()
        with torch.no_grad():
            if what == "data":
                hidden.data.zero_()
            else:
                {"input": hidden, "output": out, "parameter": weight}[what].mul_(0.5)
        out.sum().backward()
        told += [seen(x.grad), seen(weight.grad)]
    return told


def nested(make: Make, pin: bool) -> list[Any]:
    told: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        told.append("pack")
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        told.append("unpack")
        return tensor

    x = torch.arange(3.0, requires_grad=True)
    with make(pin), graph.saved_tensors_hooks(pack, unpack):
        inner = x.sin()
    with graph.saved_tensors_hooks(pack, unpack):
        outer = x.cos()
        with make(pin), make(not pin):
            outer = outer * x
    (inner + outer).sum().backward()
    with graph.disable_saved_tensors_hooks("none here"):
        try:
            with make(pin):
                pass
        except RuntimeError as error:
            told.append(str(error))
    return [*told, seen(x.grad)]


def checkpointed(make: Make, pin: bool) -> list[Any]:
    told: list[Any] = []

    def inside(x: Tensor) -> Tensor:
        with make(pin):
            return (x.sin() * x).exp()

    for reentrant in (False, True):
        x = torch.arange(3.0, requires_grad=True)
        with make(pin):
            y = checkpoint(inside, x * 1, use_reentrant=reentrant)
            z = checkpoint(torch.tanh, y, use_reentrant=reentrant)
        z.sum().backward()
        told.append(seen(x.grad))
    return told


def twice(make: Make, pin: bool) -> list[Any]:
    x = torch.arange(3.0, requires_grad=True)
    with make(pin):
        y = (x.sin() * x).exp().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (grad * grad).sum().backward(retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    told: list[Any] = [seen(x.grad)]
    try:
        y.backward()
    except RuntimeError as error:
        told.append(str(error))
    return told


def failing(make: Make, pin: bool) -> list[Any]:
    told: list[Any] = []

    def fail(grad: Tensor) -> None:
        if len(told) < 1:
            raise KeyError("the script's")

    x = torch.arange(3.0, requires_grad=True)
    with make(pin):
        hidden = x.sin()
        hidden.register_hook(fail)
        y = hidden.exp().sum()
    try:
        y.backward(retain_graph=True)
    except KeyError as error:
        told.append(str(error))
    y.backward()
    try:
        with make(pin):
            raise KeyError("inside")
    except KeyError:
        told.append(seen((x * x).grad_fn._saved_self))  # type: ignore[union-attr]
    return [*told, seen(x.grad)]


def threads(make: Make, pin: bool) -> list[Any]:
    told: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.full((3,), float(number), requires_grad=True)
        with make(pin):
            y = x.sin() * x
        y.sum().backward()
        told[number] = seen(x.grad)

    running = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return [told[i] for i in range(4)]


class Marked(Tensor):
    pass


def subclasses(make: Make, pin: bool) -> list[Any]:
    x = torch.arange(3.0).as_subclass(Marked).requires_grad_()
    Holding.told = []
    with make(pin):
        y = Holding.apply(x, x.detach().clone()) * x
    y.sum().backward()
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    try:
        with make(pin):
            z = (ragged * ragged).to_padded_tensor(0.0)
        z.sum().backward()
    except RuntimeError as error:
        Holding.told.append(str(error))
    conjugated = torch.tensor([1 + 2j], requires_grad=True)
    with make(pin):
        w = conjugated.conj() * conjugated.conj()
    w.abs().sum().backward()
    return [*Holding.told, seen(x.grad), seen(conjugated.grad)]


def transformed(make: Make, pin: bool) -> list[Any]:
    """torch.func refuses the hooks; vmap and forward mode do not."""
    told: list[Any] = []
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with make(pin):
        y = torch.vmap(lambda row: row.sin() * row)(x)
        try:
            torch.func.grad(lambda one: one.sin().sum())(torch.ones(3))
        except RuntimeError as error:
            told.append(str(error))
    y.sum().backward()
    return [*told, seen(x.grad)]


def compiled(make: Make, pin: bool) -> list[Any]:
    def f(x: Tensor) -> Tensor:
        with make(pin):
            return (x.sin() * x).exp()

    told = []
    for outside in (False, True):
        x = torch.arange(3.0, requires_grad=True)
        called: Any = torch.compile(torch.exp if outside else f, backend="aot_eager")
        if outside:
            with make(pin):
                y = called(x.sin())
        else:
            y = called(x)
        y.sum().backward()
        told.append(seen(x.grad))
    return told


CASES = (
    *(upstreams_own, forms, changed_in_place, nested, checkpointed, twice, failing, threads),
    *(subclasses, transformed, compiled),
)


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_torchs(case: Callable[..., list[Any]], pin: bool) -> None:
    assert repr(case(memory.save_on_cpu, pin)) == repr(case(graph.save_on_cpu, pin))


def test_the_class_has_torchs_interface() -> None:
    ours, theirs = (
        [(one.name, one.kind, one.default) for one in inspect.signature(kind).parameters.values()]
        for kind in (memory.save_on_cpu, graph.save_on_cpu)
    )
    assert ours == theirs
    assert issubclass(memory.save_on_cpu, graph.save_on_cpu)


@pytest.mark.parametrize("pin", [False, True])
def test_a_graph_that_no_backward_runs_is_freed(pin: bool) -> None:
    """With torch's class an output holds itself on a CPU."""
    x = torch.ones(3, requires_grad=True)
    with memory.save_on_cpu(pin):
        y = x.sin().exp()
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None


def test_slabs() -> None:
    made: list[int] = []

    def make(nbytes: int) -> Tensor:
        made.append(nbytes >> 20)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    slabs = Slabs(make)
    sizes = [1, 100 << 20, 600 << 20, 3 << 30]
    taken = [slabs.take(size) for size in sizes]
    assert made == [64, 512, 1024, 4096]
    for _ in range(3):  # ranges do not meet, and what is free again is whole again
        taken += [slabs.take(random.randrange(1, 40 << 20)) for _ in range(30)]
        by_slab = sorted((id(slab), start, end) for slab, start, end in taken)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(by_slab))
        random.shuffle(taken)
        slabs.returned.extend(taken)
        taken = []
        slabs.take_back()
        assert all(slab.free == [(0, slab.memory.numel())] for slab in slabs.slabs)
    assert made == [64, 512, 1024, 4096]
