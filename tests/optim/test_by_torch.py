"""Steps that torch's classes make for ours, or refuse: sparse, complex, differentiable ones."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep

from .common import Snapshot, outcome, state_tensors
from .declarations import ADAGRAD, OTHERS, SGD, Declaration
from .declarations import TORCHS as NEWER

TORCHS = [*NEWER, *OTHERS]
CAPTURABLE = [d for d in TORCHS if d.takes("capturable")]

over_torchs = pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
over_sparse = pytest.mark.parametrize("declaration", [SGD, ADAGRAD], ids=lambda d: d.name)


def rows(*at: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A sparse gradient of shape (4, 3); a row may come twice."""
    values = torch.arange(1.0, 3 * len(at) + 1).reshape(len(at), 3) * size
    return torch.sparse_coo_tensor([at], values.to(dtype), (4, 3), check_invariants=True)


def same_as_torch(cls: tuple[Any, Any], train: Callable[[Any], list[Tensor]]) -> None:
    """Parameters and states are those of torch's class."""
    ours, theirs = train(cls[0]), train(cls[1])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def is_ours(cls: Any) -> bool:
    return cls.__module__.startswith("faststep")


def classes(declaration: Declaration) -> tuple[Any, Any]:
    return declaration.ours, declaration.torchs


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}],
    ids=str,
)
def test_sgd_steps_on_sparse_gradients(kwargs: dict[str, Any]) -> None:
    """Beside dense ones of another group, and in turn with them."""

    def train(cls: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
        optimizer = cls([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}], 0.1, **kwargs)
        for grad in (rows(0, 2, 2), rows(1)):
            params[0].grad, params[1].grad = torch.full((4, 3), 0.5), grad
            optimizer.step()
        return [*params, *(t.to_dense() for t in state_tensors(optimizer))]

    same_as_torch(classes(SGD), train)


def _decay(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups[1]["weight_decay"] = 0.1


def _dense_after_sparse(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups[1]["momentum"] = 0.9
    optimizer.step()
    params[1].grad = torch.ones(4, 3)


def _fused(optimizer: Any, params: list[Any]) -> None:
    optimizer.param_groups[1]["fused"] = True


@pytest.mark.parametrize("refuse", [_decay, _dense_after_sparse, _fused])
def test_what_torchs_sgd_refuses_updates_nothing(refuse: Any) -> None:
    """With torch's text, which torch's class raises when it has updated the first group."""
    said = []
    for cls in classes(SGD):
        params = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
        optimizer = cls([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
        for p in params:
            p.grad = torch.ones(4, 3)
        params[1].grad = rows(0, 2)
        refuse(optimizer, params)
        values = [p.detach().clone() for p in params]
        said.append(outcome(optimizer.step)[:2])
        if cls is SGD.ours:
            torch.testing.assert_close([p.detach() for p in params], values, rtol=0, atol=0)
    assert said[0] == said[1]
    assert said[0][0] is RuntimeError


@over_torchs
def test_complex_parameters(declaration: Declaration) -> None:
    def train(cls: Any) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5, dtype=dtype)) for dtype in (torch.complex64, None)]
        optimizer = cls(params, lr=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [*params, *state_tensors(optimizer)]

    same_as_torch(classes(declaration), train)


def _through_steps(cls: Any, clip: float | None) -> list[Tensor]:
    """Parameters after steps, and their derivatives by where they began and by the gradients.

    autograd takes two steps of most classes of torch, and one of the others.
    """
    torch.manual_seed(0)
    before = [torch.randn(3, requires_grad=True, dtype=torch.float64) for _ in range(2)]
    grads = [torch.randn(3, requires_grad=True, dtype=torch.float64) for _ in range(4)]
    params = [p.clone() for p in before]
    groups: list[Any] = [{"params": [params[0]]}, {"params": [params[1]], "lr": 0.05}]
    ours = {"max_grad_norm": clip} if clip is not None and is_ours(cls) else {}
    optimizer = cls(groups, lr=0.1, differentiable=True, **ours)
    steps = 1 if cls.__name__ in ("Adamax", "Rprop") else 2
    for some in (grads[:2], grads[2:])[:steps]:
        norm = nn.utils.get_total_norm(some)
        for p, grad in zip(params, some, strict=True):
            clips = clip is not None and not ours
            p.grad = grad * torch.clamp(clip / (norm + 1e-6), max=1.0) if clips else grad
        optimizer.step()
    loss = sum(p.pow(2).sum() for p in params)
    derivatives = torch.autograd.grad(loss, [*before, *grads], allow_unused=True)
    return [*(p.detach() for p in params), *(d for d in derivatives if d is not None)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("clip", [None, 0.5])
@over_torchs
def test_autograd_records_a_differentiable_step(
    declaration: Declaration, clip: float | None
) -> None:
    same_as_torch(classes(declaration), lambda cls: _through_steps(cls, clip))


@over_torchs
def test_a_differentiable_group_beside_another_is_clipped_by_one_norm(
    declaration: Declaration,
) -> None:
    """The option of a group chooses torch's loop; that of the optimizer makes autograd record."""

    def train(cls: Any) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
        groups = [{"params": params[:1], "differentiable": True}, {"params": params[1:]}]
        ours = is_ours(cls)
        optimizer = cls(groups, lr=0.1, **({"max_grad_norm": 0.5} if ours else {}))
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(3)
            if not ours:
                nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
        return [*params, *state_tensors(optimizer)]

    ours, theirs = map(train, classes(declaration))
    torch.testing.assert_close(ours, theirs)
    assert not any(p.grad_fn for p in ours)


@pytest.mark.parametrize("declaration", CAPTURABLE, ids=lambda d: d.name)
def test_capturable_on_the_cpu_raises_torchs_error(declaration: Declaration) -> None:
    said = []
    for cls in classes(declaration):
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        groups: list[Any] = [{"params": params[:1]}, {"params": params[1:], "capturable": True}]
        optimizer = cls(groups, lr=0.1)
        for p in params:
            p.grad = torch.ones(3)
        before = Snapshot(optimizer)
        said.append(outcome(optimizer.step))
        if cls is declaration.ours:
            before.assert_unchanged()
    assert said[0] == said[1]
    assert said[0][0] is AssertionError


@pytest.mark.parametrize("bad", [None, "overflow", "sum of two", "sum of two that fits"])
@over_sparse
@pytest.mark.parametrize("ours", [False, True], ids=["torchs scaler", "our scaler"])
def test_sparse_gradients_under_a_scaler(
    declaration: Declaration, bad: str | None, ours: bool
) -> None:
    """An overflow skips the step of all parameters; entries are looked at one by one."""

    def train(cls: Any) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
        optimizer = cls(params, lr=0.1)
        kind = faststep.amp.GradScaler if ours and cls is declaration.ours else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        params[0].grad, params[1].grad = torch.ones(4, 3), rows(0, 2, 2)
        if bad is not None:
            size = {"overflow": torch.inf, "sum of two": 3e38 / 4}.get(bad, 1e37)
            values = torch.full((2, 3), size)
            params[1].grad = torch.sparse_coo_tensor(
                [[1, 1]], values * 4, (4, 3), check_invariants=True
            )
        scaler.step(optimizer)
        scaler.update()
        return [*params, torch.tensor(scaler.get_scale())]

    same_as_torch(classes(declaration), train)


@pytest.mark.parametrize("size", [1.0, 9000.0])
def test_sparse_fp16_is_added_up_before_the_look_at_it(size: float) -> None:
    """As torch's scaler coalesces it, with `fused=True` say, where the sum may be infinite."""
    param = nn.Parameter(torch.ones(4, 3, dtype=torch.float16))
    param.grad = rows(2, 2, size=size, dtype=torch.float16)
    optimizer = SGD.ours([param], lr=0.1, max_grad_norm=1.0)
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    with contextlib.suppress(NotImplementedError):  # of torch for fp16
        scaler.step(optimizer)
        assert optimizer.step_was_skipped == (size == 9000.0)


@over_sparse
def test_dense_sparse_and_complex_are_clipped_by_one_norm(declaration: Declaration) -> None:
    def train(cls: Any) -> list[Tensor]:
        params = [
            nn.Parameter(torch.ones(4, 3)),
            nn.Parameter(torch.ones(4, 3)),
            nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        ]
        grads = [torch.full((4, 3), 0.5), rows(0, 2, 2), torch.tensor([1.0 + 2.0j, 3.0])]
        ours = is_ours(cls)
        optimizer = cls(params, lr=0.1, **({"max_grad_norm": 0.5} if ours else {}))
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        if not ours:
            nn.utils.clip_grads_with_norm_(
                params, 0.5, nn.utils.get_total_norm([g.to_dense() for g in grads])
            )
        optimizer.step()
        return [p.detach() for p in params]

    ours, theirs = map(train, classes(declaration))
    torch.testing.assert_close(ours, theirs)
