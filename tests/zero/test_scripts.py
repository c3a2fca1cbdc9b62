"""More scripts as people write them, run by torch's optimizer inside DistributedDataParallel, and
sharded: plain, inside of it, and at stage 3."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from accumulate.processes import Job
from faststep import zero

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
Ranks = Callable[[str], list[Any]]
STAGES = {"stage 1": 1, "stage 2": 2, "wrapped": 2, "stage 3": 3}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8), nn.Tanh()) for width in (6, 8, 8)
        )
        self.head = nn.Linear(8, 2)
        self.run: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)  # type: ignore[no-any-return]


class _Run:
    """A rank that runs a script in one way; `kept` is what is compared, beside the parameters."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank
        self.nets: list[nn.Module] = []
        self.kept: list[Tensor] = []

    def make(self, net: nn.Module, unused: bool = False) -> tuple[Any, Any]:
        """The model that the loop calls, and its optimizer."""
        self.nets.append(net)
        model = net
        if self.kind in ("ddp", "wrapped"):
            model = DistributedDataParallel(net, find_unused_parameters=unused)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.02)
        if self.kind != "ddp":
            size: dict[str, Any] = {} if self.kind == "stage 3" else {"bucket_mb": 0.001}
            optimizer = zero.shard(model, optimizer, stage=STAGES[self.kind], **size)
        return model, optimizer

    def rows(self, step: int, width: int = 6) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(5, width, generator=made)

    def train(
        self, net: nn.Module, after: Callable[[int], Any] = bool, unused: bool = False
    ) -> Any:
        model, optimizer = self.make(net, unused)
        for step in range(4):
            optimizer.zero_grad()
            model(self.rows(step)).square().mean().backward()
            optimizer.step()
            after(step)

    def values(self) -> list[Tensor]:
        params = [param.detach() for net in self.nets for param in net.parameters()]
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
        return [value.clone() for value in (*whole, *self.kept)]


def _swapped_average(run: _Run) -> None:
    net = _Net()
    average = copy.deepcopy(net)

    def after(_: int) -> None:
        for mean, param in zip(average.parameters(), net.parameters(), strict=True):
            mean.data.lerp_(param.data, 0.3)
        for _ in range(2):
            for mean, param in zip(average.parameters(), net.parameters(), strict=True):
                mean.data, param.data = param.data, mean.data
            run.kept.append(net(torch.ones(1, 6)).detach())

    run.train(net, after)


def _gan(run: _Run) -> None:
    """The discriminator is frozen while the generator learns."""
    torch.manual_seed(1)
    judge_net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    maker, maker_optimizer = run.make(_Net())
    judge, judge_optimizer = run.make(judge_net)
    for step in range(4):
        made = maker(run.rows(step))
        judge_net.requires_grad_(True)
        judge_optimizer.zero_grad()
        judge(made.detach()).square().mean().backward()
        judge(run.rows(step, 2)).sub(1).square().mean().backward()
        judge_optimizer.step()
        judge_net.requires_grad_(False)
        maker_optimizer.zero_grad()
        judge(made).sub(1).square().mean().backward()
        maker_optimizer.step()


def _gradient_penalty(run: _Run) -> None:
    model, optimizer = run.make(_Net())
    for step in range(4):
        optimizer.zero_grad()
        x = run.rows(step).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward()
        optimizer.step()


class _Again(torch.autograd.Function):
    """Runs a block again in backward, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(grad)
        return x.grad, None


def _backward_inside(run: _Run) -> None:
    net = _Net()
    net.run = lambda block, x: _Again.apply(x, block) if x.requires_grad else block(x)
    run.train(net)


def _checkpoints(run: _Run) -> None:
    for reentrant in (False, True):
        net = _Net()
        net.run = lambda block, x, kind=reentrant: (
            checkpoint(block, x, use_reentrant=kind) if x.requires_grad else block(x)
        )
        run.train(net)


def _inner_loop(run: _Run) -> None:
    """Weights after a step of their own, as MAML has them."""
    net = _Net()
    model, optimizer = run.make(net)
    for step in range(3):
        optimizer.zero_grad()
        params = dict(net.named_parameters())
        loss = torch.func.functional_call(net, params, (run.rows(step),)).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        outer = torch.func.functional_call(net, fast, (run.rows(step + 9),)).square().mean()
        (outer + 0 * model(run.rows(step)).sum()).backward()
        optimizer.step()


def _pruned(run: _Run) -> None:
    net = _Net()
    layer = net.blocks[0][0]  # type: ignore[index]

    def after(step: int) -> None:
        if step == 0:
            prune.l1_unstructured(layer, "weight", 0.5)
        if step == 2:
            prune.remove(layer, "weight")

    run.train(net, after)


def _replaced(run: _Run) -> None:
    """The optimizer has a parameter that is no longer the model's."""
    net = _Net()

    def after(step: int) -> None:
        if step == 1:
            net.head.weight = nn.Parameter(torch.full((2, 8), 0.3))

    run.train(net, after, unused=True)


class _Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return super().forward(x)


def _set_in_forward(run: _Run) -> None:
    net = _Net()
    torch.manual_seed(3)
    net.head = _Normalized(8, 2)
    run.train(net)


def _as_a_vector(run: _Run) -> None:
    net = _Net()

    def after(_: int) -> None:
        vector_to_parameters(
            parameters_to_vector(net.parameters()).detach() * 0.9, net.parameters()
        )

    run.train(net, after)


def _in_a_thread(run: _Run) -> None:
    model, optimizer = run.make(_Net())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(run.rows(step)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()


def _cycled(run: _Run) -> None:
    """A scheduler that cycles learning rate and betas."""
    net = _Net()
    model, optimizer = run.make(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    for step in range(5):
        optimizer.zero_grad()
        model(run.rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.step()  # the same gradients again
        schedule.step()


def _uneven_accumulation(run: _Run) -> None:
    model, optimizer = run.make(_Net())
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(1 + 2 * run.rank):
            with (model if run.kind in ("ddp", "wrapped") else optimizer).no_sync():
                model(run.rows(10 * step + micro)).square().mean().backward()
        model(run.rows(10 * step + 9)).square().mean().backward()
        optimizer.step()


ALSO_STAGE_3: dict[str, Callable[[_Run], None]] = {
    "gan": _gan,
    "checkpoints": _checkpoints,
    "in a thread": _in_a_thread,
    "cycled": _cycled,
}
SCRIPTS: dict[str, Callable[[_Run], None]] = ALSO_STAGE_3 | {
    "swapped average": _swapped_average,
    "gradient penalty": _gradient_penalty,
    "backward inside": _backward_inside,
    "inner loop": _inner_loop,
    "pruned": _pruned,
    "replaced": _replaced,
    "set in forward": _set_in_forward,
    "as a vector": _as_a_vector,
    "uneven accumulation": _uneven_accumulation,
}


def _compared(rank: int, world: int, name: str) -> dict[str, float]:
    found = {}
    expected: list[Tensor] = []
    kinds = [kind for kind in STAGES if kind != "stage 3" or name in ALSO_STAGE_3]
    for kind in ("ddp", *kinds):
        run = _Run(kind, rank)
        SCRIPTS[name](run)
        values = run.values()
        expected = expected or values
        pairs = zip(values, expected, strict=True)
        found[kind] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_parameters_of_ddp(name: str, ranks: Ranks) -> None:
    for said in ranks(f"scripts: {name}"):
        assert len(said) == 4 + (name in ALSO_STAGE_3)
        assert max(said.values()) < 1e-5, said


def _other_dtype(rank: int, world: int) -> list[str]:
    said = []
    for stage in (1, 2):
        net = _Net()
        optimizer = zero.shard(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage)  # type: ignore[arg-type]
        net.double()
        try:
            net(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
        except TypeError as error:
            said.append(str(error))
    return said


def test_a_dtype_that_is_set_later_is_refused(ranks: Ranks) -> None:
    for said in ranks("scripts: other dtype"):
        for text in said:
            assert "'head.bias' is torch.float64, and was torch.float32 when" in text, text
        assert len(said) == 2


ZERO_JOBS = [
    Job("scripts: other dtype", 2, _other_dtype),
    *(Job(f"scripts: {name}", 2, _compared, (name,)) for name in SCRIPTS),
]
