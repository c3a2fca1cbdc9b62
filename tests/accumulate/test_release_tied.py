"""release_gradients() of embeddings that share their weight: rows, with the bits of the whole."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import faststep

from .common import assert_equal, values

VOCABULARY, WIDTH = 50, 8


class Tied(nn.Module):
    """A language model without a middle; tokens come several times."""

    def __init__(self, dtype: torch.dtype = torch.float32, **kwargs: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.token = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype, **kwargs)
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.token.weight
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.middle(self.token(tokens)).tanh())
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, (4, 16), generator=generator)


MAKE: dict[str, Any] = {
    "AdamW": lambda ps: faststep.optim.AdamW(ps, lr=0.01),
    "SGD": lambda ps: faststep.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Lion": lambda ps: faststep.optim.Lion(ps, lr=0.01),
}


def train(make: Any, model: nn.Module, released: bool) -> list[Tensor]:
    optimizer = make(model.parameters())
    release = faststep.release_gradients(model, optimizer) if released else None
    for seed in range(4):
        model(batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if release is not None:
        release.remove()
    states = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    return values(model) + [v for v in states if isinstance(v, Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kwargs", [{}, {"padding_idx": 3}], ids=["plain", "padding"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_bits_of_the_ordinary_step(make: Any, kwargs: Any, dtype: torch.dtype) -> None:
    plain, released = Tied(dtype, **kwargs), Tied(dtype, **kwargs)
    assert_equal(train(make, released, True), train(make, plain, False))


class Large(TorchDispatchMode):
    """Notes the operators that make a dense tensor of the weight's size."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        makes = isinstance(result, Tensor) and not func.is_view and not name.endswith("_")
        if makes and not result.is_sparse and result.numel() == VOCABULARY * WIDTH:
            self.names.append(name)
        return result


def test_no_tensor_of_the_weights_size_for_the_embedding() -> None:
    model = Tied()
    optimizer = MAKE["SGD"](model.parameters())
    found = []
    for released in (False, True):
        if released:
            release = faststep.release_gradients(model, optimizer)
        loss = model(batch(0))
        with Large() as large:
            loss.backward()
        found.append(sorted(large.names))
    assert found == [["add", "embedding_dense_backward", "mm"], ["add", "mm"]]
    release.remove()


class Part(nn.Module):
    def __init__(self, tied: Tied) -> None:
        super().__init__()
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tied.token(input=tokens).square().sum()


def test_an_embedding_that_is_used_alone() -> None:
    """And called by keyword, with no tokens, or without gradients."""
    plain, released = (Part(Tied()) for _ in range(2))
    for model in (released, plain):
        train(MAKE["AdamW"], model, model is released)
    assert_equal(values(released), values(plain))
    optimizer = MAKE["AdamW"](released.parameters())
    release = faststep.release_gradients(released, optimizer)
    before = values(released)
    released(torch.zeros(0, 3, dtype=torch.int64)).backward()
    assert not any(param.grad is not None for param in released.parameters())
    optimizer.step()
    assert not torch.equal(released.tied.token.weight, before[0])  # weight decay
    with torch.no_grad():
        assert torch.equal(released.tied.token(batch(0)), released.tied.token.weight[batch(0)])
    release.remove()


def test_hooks_of_others_find_what_they_would_find() -> None:
    model = Tied()
    seen: dict[str, list[Tensor]] = {"output": [], "gradient": []}

    def noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen["output"].append(output.detach().clone())
        return output + 1.0

    model.token.register_forward_hook(noise)
    model.token.weight.register_hook(lambda grad: seen["gradient"].append(grad.clone()))
    release = None
    for _ in range(2):
        loss = model(batch(0))
        loss.backward()
        seen.setdefault("loss", []).append(loss.detach())
        model.zero_grad()
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.0)
        release = faststep.release_gradients(model, optimizer)
    assert release is not None
    for first, second in seen.values():
        assert torch.equal(first, second)
    release.remove()


def test_gradients_of_the_embedding_alone_are_rows() -> None:
    """For hooks on the weight and torch.autograd.grad, which no hook could give the whole."""
    model = Part(Tied())
    weight, seen = model.tied.token.weight, []
    (expected,) = torch.autograd.grad(model(batch(0)), weight)
    release = faststep.release_gradients(model.tied, MAKE["SGD"](model.parameters()))
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    (found,) = torch.autograd.grad(model(batch(0)), weight)
    assert len(seen) == 1
    for grad in (found, *seen):
        assert grad.is_sparse
        assert torch.equal(grad.to_dense(), expected)
    (both,) = torch.autograd.grad(model.tied(batch(0)), weight)
    assert both.layout is torch.strided
    release.remove()
    assert torch.equal(torch.autograd.grad(model(batch(0)), weight)[0], expected)


def test_a_weight_that_was_replaced_is_not_looked_up_by_rows() -> None:
    model = Tied()
    release = faststep.release_gradients(model, MAKE["SGD"](model.parameters()))
    model.token.weight = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    model(batch(0)).backward()
    assert model.token.weight.grad.layout is torch.strided
    release.remove()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    results = []
    for compiles in (False, True):
        torch.compiler.reset()
        model = Tied()
        optimizer = MAKE["SGD"](model.parameters())
        release = faststep.release_gradients(model, optimizer)
        call = torch.compile(model, backend=backend) if compiles else model
        for seed in range(3):
            call(batch(seed)).backward()
            optimizer.step()
        release.remove()
        results.append(values(model))
    assert_equal(*results)


def test_copies_are_not_released() -> None:
    model = Tied()
    release = faststep.release_gradients(model, MAKE["SGD"](model.parameters()))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.token(batch(0)).sum().backward()
        assert other.token.weight.grad.layout is torch.strided
    release.remove()


@pytest.mark.parametrize("explicit", [True, False])
def test_nothing_is_left(explicit: bool) -> None:
    model = Tied()
    release = faststep.release_gradients(model, MAKE["SGD"](model.parameters()))
    assert len(model.token._forward_hooks) == 1
    if explicit:
        release.remove()
    del release
    assert not model.token._forward_hooks
    assert not model.token._forward_hooks_with_kwargs


SPECIAL: dict[str, dict[str, Any]] = {
    "sparse": {"sparse": True},
    "max_norm": {"max_norm": 1.0},
    "by frequency": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("kwargs", SPECIAL.values(), ids=SPECIAL)
def test_special_embeddings_stay_as_they_are(kwargs: dict[str, Any]) -> None:
    model = Tied(**kwargs)
    release = faststep.release_gradients(model, MAKE["SGD"](model.parameters()))
    assert not model.token._forward_hooks
    release.remove()


def test_embeddings_that_share_nothing_stay_as_they_are() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    release = faststep.release_gradients(model, MAKE["SGD"](model.parameters()))
    assert not model.token._forward_hooks
    release.remove()
    model = Tied()
    frozen = faststep.optim.SGD(model.middle.parameters())
    release = faststep.release_gradients(model, frozen)
    assert not model.token._forward_hooks
    release.remove()
