"""Models and loops as people write them, in every way of `beside_ddp`."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from faststep import zero
from ranks import on_cases, on_ranks

from .beside_ddp import UNEVEN, Run, Script, Table


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


def _make(run: Run, net: nn.Module, unused: bool = False) -> tuple[Any, Any]:
    """The model that the loop calls, and its optimizer."""
    model = run.wrap(net, unused)
    return model, run.shard(model, torch.optim.AdamW(net.parameters(), lr=0.02))


def _rows(run: Run, step: int, width: int = 6) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + run.rank)
    return torch.randn(5, width, generator=made)


def _train(
    run: Run, net: nn.Module, after: Callable[[int], Any] = bool, unused: bool = False
) -> None:
    model, optimizer = _make(run, net, unused)
    for step in range(4):
        optimizer.zero_grad()
        model(_rows(run, step)).square().mean().backward()
        optimizer.step()
        after(step)


def _swapped_average(run: Run) -> None:
    net = _Net()
    average = copy.deepcopy(net)

    def after(_: int) -> None:
        for mean, param in zip(average.parameters(), net.parameters(), strict=True):
            mean.data.lerp_(param.data, 0.3)
        for _ in range(2):
            for mean, param in zip(average.parameters(), net.parameters(), strict=True):
                mean.data, param.data = param.data, mean.data
            run.kept.append(net(torch.ones(1, 6)).detach())

    _train(run, net, after)


def _gan(run: Run) -> None:
    """The discriminator is frozen while the generator learns."""
    torch.manual_seed(1)
    judge_net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    maker, maker_optimizer = _make(run, _Net())
    judge, judge_optimizer = _make(run, judge_net)
    for step in range(4):
        made = maker(_rows(run, step))
        judge_net.requires_grad_(True)
        judge_optimizer.zero_grad()
        judge(made.detach()).square().mean().backward()
        judge(_rows(run, step, 2)).sub(1).square().mean().backward()
        judge_optimizer.step()
        judge_net.requires_grad_(False)
        maker_optimizer.zero_grad()
        judge(made).sub(1).square().mean().backward()
        maker_optimizer.step()


def _gradient_penalty(run: Run) -> None:
    model, optimizer = _make(run, _Net())
    for step in range(4):
        optimizer.zero_grad()
        x = _rows(run, step).requires_grad_()
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


def _backward_inside(run: Run) -> None:
    net = _Net()
    net.run = lambda block, x: _Again.apply(x, block) if x.requires_grad else block(x)
    _train(run, net)


def _checkpoints(run: Run) -> None:
    for reentrant in (False, True):
        net = _Net()
        net.run = lambda block, x, kind=reentrant: (
            checkpoint(block, x, use_reentrant=kind) if x.requires_grad else block(x)
        )
        _train(run, net)


def _inner_loop(run: Run) -> None:
    """Weights after a step of their own, as MAML has them."""
    net = _Net()
    model, optimizer = _make(run, net)
    for step in range(3):
        optimizer.zero_grad()
        params = dict(net.named_parameters())
        loss = torch.func.functional_call(net, params, (_rows(run, step),)).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        outer = torch.func.functional_call(net, fast, (_rows(run, step + 9),)).square().mean()
        (outer + 0 * model(_rows(run, step)).sum()).backward()
        optimizer.step()


def _pruned(run: Run) -> None:
    net = _Net()
    layer = net.blocks[0][0]  # type: ignore[index]

    def after(step: int) -> None:
        if step == 0:
            prune.l1_unstructured(layer, "weight", 0.5)
        if step == 2:
            prune.remove(layer, "weight")

    _train(run, net, after)


def _replaced(run: Run) -> None:
    """The optimizer has a parameter that is no longer the model's."""
    net = _Net()

    def after(step: int) -> None:
        if step == 1:
            net.head.weight = nn.Parameter(torch.full((2, 8), 0.3))

    _train(run, net, after, unused=True)


class _Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return super().forward(x)


def _set_in_forward(run: Run) -> None:
    net = _Net()
    torch.manual_seed(3)
    net.head = _Normalized(8, 2)
    _train(run, net)


def _as_a_vector(run: Run) -> None:
    net = _Net()

    def after(_: int) -> None:
        if run.kind == "stage 3":  # torch flattens nothing that is sharded unevenly
            net.head.bias.data = net.head.bias.data * 0.9
            return
        vector_to_parameters(
            parameters_to_vector(net.parameters()).detach() * 0.9, net.parameters()
        )

    _train(run, net, after)


def _exchanged_gradients(run: Run) -> None:
    net = _Net()
    model, optimizer = _make(run, net)
    one, other = (block[0].weight for block in [*net.blocks][1:])  # type: ignore[index]
    for step in range(3):
        optimizer.zero_grad()
        model(_rows(run, step)).square().mean().backward()
        one.grad, other.grad = other.grad, one.grad
        nn.utils.clip_grad_norm_(one, 0.01)
        optimizer.step()


def _new_module(run: Run) -> None:
    net = _Net()

    def after(step: int) -> None:
        if step == 1:
            net.blocks[1] = nn.Identity()

    _train(run, net, after, unused=True)


def _in_a_thread(run: Run) -> None:
    model, optimizer = _make(run, _Net())
    for step in range(3):
        optimizer.zero_grad()
        loss = model(_rows(run, step)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optimizer.step()


def _cycled(run: Run) -> None:
    """A scheduler that cycles learning rate and betas."""
    net = _Net()
    model, optimizer = _make(run, net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    for step in range(5):
        optimizer.zero_grad()
        model(_rows(run, step)).square().mean().backward()
        optimizer.step()
        optimizer.step()  # the same gradients again
        schedule.step()


class _Tied(nn.Module):
    """A head that is the embedding, and a frozen parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.abs().mul(5).long() % 11)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def _tied(run: Run) -> None:
    net = _Tied()
    _train(run, net)
    assert net.head.weight is net.embedding.weight


def _compiled(run: Run) -> None:
    model, optimizer = _make(run, _Net())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for step in range(3):
        optimizer.zero_grad()
        compiled(_rows(run, step)).square().mean().backward()
        optimizer.step()


def _uneven_accumulation(run: Run) -> None:
    model, optimizer = _make(run, _Net())
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(1 + 2 * run.rank):
            with run.no_sync(model, optimizer):
                model(_rows(run, 10 * step + micro)).square().mean().backward()
        model(_rows(run, 10 * step + 9)).square().mean().backward()
        optimizer.step()


SCRIPTS: dict[str, Script] = {
    "gan": _gan,
    "checkpoints": _checkpoints,
    "in a thread": _in_a_thread,
    "cycled": _cycled,
    "swapped average": _swapped_average,
    "gradient penalty": _gradient_penalty,
    "backward inside": _backward_inside,
    "inner loop": _inner_loop,
    "pruned": _pruned,
    "replaced": _replaced,
    "set in forward": _set_in_forward,
    "as a vector": _as_a_vector,
    "exchanged gradients": _exchanged_gradients,
    "new module": _new_module,
    "tied": _tied,
    "compiled": _compiled,
    "uneven accumulation": _uneven_accumulation,
}
TABLE = Table(
    SCRIPTS,
    left_out={"uneven accumulation": UNEVEN},
    refused={"as a vector": "was given values by .data =, which fully_shard ignores"},
    as_torch=[
        "swapped average",
        "gradient penalty",
        "inner loop",
        "pruned",
        "replaced",
        "set in forward",
    ],
)


@on_cases(TABLE.cases())
def test_the_parameters_of_ddp(rank: int, world: int, name: str) -> None:
    TABLE.check(rank, world, name)


@on_ranks(2)
def test_a_dtype_that_is_set_later_is_refused(rank: int, world: int) -> None:
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
    for text in said:
        assert "'head.bias' is torch.float64, and was torch.float32 when" in text, text
    assert len(said) == 2
