"""Sharded gradients that a script reads, clips, changes and replaces, beside those of DDP."""

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep import zero
from ranks import WAIT, on_cases, on_ranks

from .common import error_of

Params = list[nn.Parameter]
inf = float("inf")


def _each(work: Callable[[Tensor, Tensor], object]) -> Callable[[Params], object]:
    """For each parameter: with its gradient, and itself."""
    return lambda params: [work(p.grad, p.detach()) for p in params]  # type: ignore[arg-type]


def _all(work: Callable[[list[Tensor], list[Tensor]], object]) -> Callable[[Params], object]:
    """With all gradients, and all parameters."""
    return lambda ps: work([p.grad for p in ps], [p.detach() for p in ps])  # type: ignore[misc]


def _one(work: Callable[[Tensor], object]) -> Callable[[Params], object]:
    """With the gradient of the large matrix."""
    return lambda params: work(params[2].grad)  # type: ignore[arg-type]


def _set(value: Callable[[Tensor, Tensor], Tensor | None]) -> Callable[[Params], object]:
    def work(params: Params) -> None:
        for param in params:
            assert param.grad is not None
            param.grad = value(param.grad, param.detach())

    return work


CLIPS: dict[str, Callable[[Params], object]] = {
    "norm": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "inf": lambda ps: nn.utils.clip_grad_norm_(ps, 0.01, inf),
    "1": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, 1.0),
    "3": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, 3),
    "foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=True),
    "no foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=False),
    "some": lambda ps: nn.utils.clip_grad_norm_(ps[2:4], 0.1),
    "one": lambda ps: nn.utils.clip_grad_norm_(ps[2], 0.1),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.001),
    "value, no foreach": lambda ps: nn.utils.clip_grad_value_(ps, 0.001, foreach=False),
    "ours": lambda ps: faststep.clip_grad_norm_(ps, 0.1),
    "our inf": lambda ps: faststep.clip_grad_norm_(ps, 0.1, inf),
    "our value": lambda ps: faststep.clip_grad_value_(ps, 0.001),
    "our total": _all(lambda grads, _: faststep.get_total_norm(grads)),
    "total 0": _all(lambda grads, _: nn.utils.get_total_norm(grads, 0)),
    "total -inf": _all(lambda grads, _: nn.utils.get_total_norm(grads, -inf)),
    "twice": lambda ps: [nn.utils.clip_grad_norm_(ps, limit) for limit in (0.2, 0.1)],
    "then a norm": lambda ps: (nn.utils.clip_grad_value_(ps, 0.01), ps[0].grad.norm()),  # type: ignore[union-attr]
}
READS: dict[str, Callable[[Params], object]] = {
    "norm": _each(lambda grad, _: grad.norm()),
    "data.norm": _each(lambda grad, _: grad.data.norm(2).item()),
    "torch.norm": _each(lambda grad, _: torch.norm(grad.detach(), 2.0)),
    "norm of columns": _each(lambda grad, _: torch.linalg.vector_norm(grad, dim=0)),
    "norm in float64": _each(lambda grad, _: torch.linalg.vector_norm(grad, dtype=torch.float64)),
    "double": _each(lambda grad, _: grad.double().norm()),
    "abs, mean": _each(lambda grad, _: grad.abs().mean()),
    "max": _each(lambda grad, _: grad.max().item()),
    "clone": _each(lambda grad, _: grad.clone()),
    "numpy": _each(lambda grad, _: float(grad.numpy().sum())),
    "asarray": _each(lambda grad, _: float(np.asarray(grad).sum())),
    "tolist": _each(lambda grad, _: grad.tolist()),
    "deepcopy": _each(lambda grad, _: copy.deepcopy(grad).clone()),
    "pickle": _each(lambda grad, _: pickle.loads(pickle.dumps(grad))),
    "isfinite": _each(lambda grad, _: torch.isfinite(grad).all().item()),
    "cat": _all(lambda grads, _: torch.cat([grad.reshape(-1) for grad in grads]).std()),
    "_foreach_abs": _all(lambda grads, _: torch._foreach_abs(grads)),
    "dot": _each(lambda grad, param: (grad * param).sum()),
    "similarity": _each(
        lambda grad, param: torch.cosine_similarity(grad.view(1, -1), param.reshape(1, -1))
    ),
    "index": _one(lambda grad: grad[3, 4].item()),
    "svd": _one(torch.linalg.svdvals),
    "matmul": _one(lambda grad: (grad @ grad.T).trace()),
    "unbind": _each(lambda grad, _: grad.unbind(0)[0].sum()),
    "zeros_like": _each(lambda grad, _: torch.zeros_like(grad)),
    "new_ones": _each(lambda grad, _: grad.new_ones(3)),
    "buffer": _each(lambda grad, param: torch.zeros_like(param).add_(grad)),
    "bool": _each(lambda grad, _: bool((grad == 0).any())),
    "size": _each(lambda grad, _: (grad.shape, grad.dtype, grad.stride(), grad.numel())),
}
WRITES: dict[str, Callable[[Params], object]] = {
    "element": _one(lambda grad: grad.__setitem__((3, 4), 7.0)),
    "row": _one(lambda grad: grad[3].zero_().sum()),
    "row, then all": _one(lambda grad: (grad[:3].zero_(), grad.mul_(2), grad[5].add_(1))),
    "row, then norms": lambda ps: (
        *(nn.utils.clip_grad_norm_(ps, 0.05) for ps[2].grad[0] in (torch.ones(288),)),  # type: ignore[index]
        *(p.grad.norm() for p in ps),  # type: ignore[union-attr]
    ),
    "strided": _one(lambda grad: grad.view(-1)[::2].mul_(0.0).sum()),
    "transposed": _one(lambda grad: grad.t().mul_(0.3).sum()),
    "*=": _each(lambda grad, _: grad.mul_(0.5) is grad),
    "/=": _each(lambda grad, _: grad.div_(3) is grad),
    "by a tensor": _each(lambda grad, _: grad.mul_(torch.tensor(0.3)) is grad),
    "mask": _each(lambda grad, param: grad.masked_fill_(param > 0, 0.0) is grad),
    "times mask": _each(lambda grad, param: grad.mul_((param > 0).float()) is grad),
    "broadcast": _one(lambda grad: grad.mul_(torch.arange(288.0) / 288) is grad),
    "weight decay": _each(lambda grad, param: grad.add_(param, alpha=0.1) is grad),
    "nan_to_num_": _each(lambda grad, _: grad.nan_to_num_(0.0) is grad),
    "tanh_": _each(lambda grad, _: grad.tanh_() is grad),
    "copy_": _each(lambda grad, param: grad.copy_(param) is grad),
    "copy_ of itself": _each(lambda grad, _: grad.copy_(grad * 3) is grad),
    "lerp_": _each(lambda grad, param: grad.lerp_(param, 0.3) is grad),
    "_foreach_mul_": _all(lambda grads, _: torch._foreach_mul_(grads, [0.1, 0.2, 0.3, 0.4, 0.5])),
    "_foreach_add_": _all(lambda grads, params: torch._foreach_add_(grads, params, alpha=0.3)),
    "_foreach_addcmul_": _all(lambda gs, ps: torch._foreach_addcmul_(gs, ps, ps, 0.3)),
    "noise": _each(lambda grad, _: grad.add_(torch.randn_like(grad)) is grad),
    "normal_": _each(lambda grad, _: grad.normal_() is grad),
    "centered": _each(lambda grad, _: grad.sub_(grad.mean(dim=0, keepdim=True)) is grad),
    "out=": _each(lambda grad, param: torch.mul(param, 2.0, out=grad) is grad),
    "all_reduce": _each(
        lambda grad, _: (dist.all_reduce(grad), grad.div_(dist.get_world_size()) is grad)[1]
    ),
    "all_reduce of data": _each(
        lambda grad, _: (dist.all_reduce(grad.data, async_op=True).wait(), grad.data.mul_(0.3))  # type: ignore[union-attr]
    ),
    "another optimizer": lambda ps: torch.optim.SGD(ps, 0.1).step(),
    "zero_": _each(lambda grad, _: grad.zero_() is grad),
    "norms between": lambda ps: [
        (p.grad.norm(), p.grad.mul_(2) is p.grad, p.grad.norm()) for p in ps  # type: ignore[union-attr]
    ],
}  # fmt: skip
SETS: dict[str, Callable[[Params], object]] = {
    "product": _set(lambda grad, _: grad * 2),
    "clone": _set(lambda grad, _: grad.clone()),
    "detach": _set(lambda grad, _: grad.detach()),
    "data": _set(lambda grad, _: grad.data),
    "data =": _each(lambda grad, _: setattr(grad, "data", grad.data * 0.5)),
    "vector": _all(
        lambda grads, _: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(grads) * 0.5, grads
        )
    ),
    "ones": _set(lambda _, param: torch.ones_like(param)),
    "none": _set(lambda *_: None),
    "some": lambda ps: setattr(ps[1], "grad", None),
}
KINDS = {"clip": CLIPS, "read": READS, "write": WRITES, "set": SETS}


def _model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    layers = (conv, nn.Flatten(), nn.Linear(8 * 36, 33), nn.Tanh(), nn.Linear(33, 5, bias=False))
    return nn.Sequential(*layers).to(dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.clone() if isinstance(value, Tensor) else value


def _agree(one: Any, other: Any, rtol: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            _agree(a, b, rtol) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (float, Tensor)) and isinstance(other, (float, Tensor)):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.dtype == other.dtype and torch.allclose(one, other, rtol, rtol / 10)
    return bool(one == other)


def _beside_ddp(rank: int, world: int, kind: str, options: dict[str, Any]) -> list[str]:
    """The cases in which a sharded model differs from DDP, by its result or its training."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    is_wrapped = options.pop("wrapped", False)
    sides = []
    for is_ours in (False, True):
        model: nn.Module = _model(dtype)
        params = list(model.parameters())
        if not is_ours or is_wrapped:
            model = DistributedDataParallel(model)
        optimizer: Any = torch.optim.SGD(params, lr=0.1)
        sides.append(
            (model, params, zero.shard(model, optimizer, **options) if is_ours else optimizer)
        )
    start = copy.deepcopy(sides[0][0].state_dict())
    wrong = []
    for name, case in KINDS[kind].items():
        found = []
        for model, params, optimizer in sides:
            with torch.no_grad():
                for param, value in zip(params, start.values(), strict=True):
                    param.copy_(value)
            said: list[Any] = []
            for step in range(2):
                torch.manual_seed(10 * step + rank)
                model(torch.randn(4, 3, 8, 8, dtype=dtype)).square().mean().backward()
                torch.manual_seed(step)
                try:
                    said.append(_plain(case(params)))
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
                said.append([None if p.grad is None else p.grad.clone() for p in params])
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 0)
            found.append([*said, [p.detach().clone() for p in params]])
        if not _agree(*found, 1e-4 if dtype == torch.float32 else 0.05):
            wrong.append(f"{name}: {found}")
    return wrong


CHOICES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (2, {"stage": 1}),
    "stage 2, three ranks": (3, {"stage": 2, "bucket_mb": 0.01}),
    "ranks without slices": (4, {"stage": 1}),
    "wrapped": (2, {"stage": 2, "wrapped": True}),
    "fp32 slices": (2, {"dtype": torch.bfloat16, "master_weights": True}),
}


CASES = [
    *((choice, kind) for choice in ("stage 1", "stage 2, three ranks") for kind in KINDS),
    ("ranks without slices", "clip"),
    *(("wrapped", kind) for kind in ("clip", "set")),
    *(("fp32 slices", kind) for kind in ("clip", "write")),
]


@on_cases((CHOICES[choice][0], choice, kind) for choice, kind in CASES)
def test_what_a_script_does_to_gradients(rank: int, world: int, choice: str, kind: str) -> None:
    assert _beside_ddp(rank, world, kind, CHOICES[choice][1]) == []


@on_ranks(2)
def test_a_rank_that_reads_alone_hears_who_is_missing(rank: int, world: int) -> None:
    """And training goes on."""
    model = _model(torch.float32)
    params = list(model.parameters())
    optimizer = zero.shard(model, torch.optim.SGD(params, lr=0.1), timeout=0.5)
    norms = "reading the norms of gradients (of order 2)"
    for read, what in (
        (_each(lambda grad, _: grad.norm()), norms),
        (_one(lambda grad: grad[3, 4].item()), "reading the gradient of '2.weight'"),
        (CLIPS["norm"], norms),
    ):
        torch.manual_seed(rank)
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        begun = time.monotonic()
        if rank == 0:
            assert error_of(lambda read=read: read(params)) == (
                f"RuntimeError: rank 0: all ranks must call {what} together, and rank 1 did not "
                "within 0.5 s (timeout= of shard()); nothing was sent, and training can go on"
            )
        assert time.monotonic() - begun < WAIT / 2  # which the group would wait
        dist.barrier()
        nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_states_of_a_parameter_are_an_error(rank: int, world: int) -> None:
    """What a script asks where ranks have parts."""
    model = _model(torch.float32)
    optimizer = zero.shard(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    param = model[2].weight
    said = {
        name: error_of(ask)
        for name, ask in {
            "get": lambda: optimizer.state.get(param),
            "[]": lambda: optimizer.state[param],
            "in": lambda: param in optimizer.state,
            "pop": lambda: optimizer.state.pop(param, None),
            "set": lambda: optimizer.state.__setitem__(param, {}),
        }.items()
    }
    for name, text in said.items():
        assert "spread over the ranks" in text, (name, text)
