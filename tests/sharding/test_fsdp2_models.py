"""Models and loops that FSDP2's users write, with torch's optimizer and with ours."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import faststep
import faststep.optim
from ranks import on_ranks

from .common import local

WIDTH = 12
RESHARD = (False, True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def blocks_of(**options: Any) -> nn.Sequential:
    """Three blocks, each sharded by itself."""
    torch.manual_seed(42)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def same(mine: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            local(one), local(other), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


def train(
    rank: int,
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor, int], Tensor],
    clip: Callable[[nn.Module, int], Any] = lambda model, step: None,
    steps: int = 3,
    tolerance: float = 1e-5,
) -> None:
    """One loop with torch's Adam and the same with ours: parameters agree after each step."""
    theirs, mine = build(), build()
    optimizers = [
        torch.optim.Adam(theirs.parameters(), lr=1e-2),
        faststep.optim.Adam(mine.parameters(), lr=1e-2),
    ]
    for step in range(steps):
        x = batch(rank, step)
        losses, norms = [], []
        for model, optimizer in zip((theirs, mine), optimizers, strict=True):
            loss = loss_of(model, x, step)
            if loss.requires_grad:
                loss.backward()
                norms.append(clip(model, step))
                optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
        if norms and norms[0] is not None:
            torch.testing.assert_close(norms[0].full_tensor(), norms[1].full_tensor())
        same(mine, theirs, tolerance)


def total(model: nn.Module, x: Tensor, step: int) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@on_ranks(2)
def test_frozen_inside(rank: int, world: int) -> None:
    """Only biases are trained, frozen before or after sharding, with blocks computed again."""
    for reshard, again in itertools.product(RESHARD, (False, True)):

        def freeze(model: nn.Module) -> None:
            for name, param in model.named_parameters():
                param.requires_grad_("bias" in name)

        def build(reshard: bool = reshard, again: bool = again) -> nn.Module:
            torch.manual_seed(42)
            model = nn.Sequential(*(Block() for _ in range(3)))
            if reshard is again:
                freeze(model)
            for at in range(3):
                if again:
                    model[at] = checkpoint_wrapper(model[at])
                fully_shard(model[at], reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            freeze(model)
            return model

        train(rank, build, total)


@on_ranks(2, 4)
def test_frozen_across(rank: int, world: int) -> None:
    """Every other block is frozen, one step is without gradients, and all are trained later."""
    for reshard, unfreeze in zip(RESHARD, reversed(RESHARD), strict=True):

        def loss_of(model: nn.Module, x: Tensor, step: int, unfreeze: bool = unfreeze) -> Tensor:
            for at, block in enumerate(model.children()):
                block.requires_grad_(at % 2 == 1 or (unfreeze and step >= 4))
            with torch.set_grad_enabled(step != 2):
                return total(model, x, step)

        def build(reshard: bool = reshard) -> nn.Module:
            return blocks_of(reshard_after_forward=reshard)

        train(rank, build, loss_of, steps=5)


class Repeated(nn.Module):
    """The same layers several times, with and without gradients, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(torch.relu(self.trained(x)))
            with torch.no_grad():
                x += torch.relu(self.trained(x))
        return x


class Two(nn.Module):
    """Two results: the script uses both, or one; or the module calls only one layer."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.both = both

    def forward(self, x: Tensor) -> Any:
        one = torch.relu(self.one(x))
        return (one, torch.relu(self.two(x))) if self.both else one


def sharded(make: Callable[[], nn.Module], names: tuple[str, ...], **options: Any) -> nn.Module:
    torch.manual_seed(42)
    model = make()
    for name in names:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


@on_ranks(2)
def test_repeated_forward(rank: int, world: int) -> None:
    for reshard in RESHARD:
        names = ("first", "frozen", "trained")
        train(
            rank,
            lambda r=reshard, n=names: sharded(Repeated, n, reshard_after_forward=r),
            total,
        )


@on_ranks(2)
def test_unused(rank: int, world: int) -> None:
    """A result that the loss does not use after two steps, and a layer that is never called."""

    def some(model: nn.Module, x: Tensor, step: int) -> Tensor:
        one, two = model(x)
        loss: Tensor = (one * two).sum() if step < 2 else one.sum()
        return loss

    for reshard in RESHARD:
        options = {"reshard_after_forward": reshard}
        train(rank, lambda o=options: sharded(lambda: Two(True), ("one",), **o), some)
        train(rank, lambda o=options: sharded(lambda: Two(False), ("one", "two"), **o), total)


Pair = collections.namedtuple("Pair", "x y")


class Wrapped(nn.Module):
    """A block whose activations travel inside of a container."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.block, self.pack, self.unpack = Block(), pack, unpack

    def forward(self, x: Any) -> Any:
        return self.pack(self.block(self.unpack(x)))


@on_ranks(2)
def test_containers(rank: int, world: int) -> None:
    kinds: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
        (lambda x: [x], lambda c: c[0]),
        (lambda x: (x,), lambda c: c[0]),
        (lambda x: {"x": x}, lambda c: c["x"]),
        (lambda x: Pair(x, torch.ones_like(x)), lambda c: c.x),
    ]
    for pack, unpack in kinds:

        def build(pack: Any = pack, unpack: Any = unpack) -> nn.Module:
            torch.manual_seed(42)
            model = nn.Sequential(*(Wrapped(pack, unpack) for _ in range(3)))
            for block in model:
                fully_shard(block)
            return fully_shard(model)

        def loss_of(model: nn.Module, x: Tensor, step: int, p: Any = pack, u: Any = unpack) -> Any:
            return u(model(p(x))).square().mean()

        train(rank, build, loss_of)


NORMS = (1.0, 2.0, 3.0, float("inf"))


@on_ranks(4)
def test_tensor_parallel(rank: int, world: int) -> None:
    """Tensor parallel inside, sharded outside: DTensors of a mesh of two dimensions; also clipped
    by torch, by every kind of norm."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def build() -> nn.Module:
        torch.manual_seed(42)
        model = nn.Sequential(*(Block() for _ in range(3)))
        for block in model:
            parallelize_module(block, mesh["tensor"], plan)
            fully_shard(block, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    def clip(model: nn.Module, step: int) -> Any:
        if step == 0:
            return None
        norm = NORMS[step - 1]
        return nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type=norm, foreach=True)

    train(mesh.get_local_rank("data"), build, total, clip, steps=1 + len(NORMS))


def largest(param: Tensor) -> Shard:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


@on_ranks(2)
def test_mixed_precision(rank: int, world: int) -> None:
    """bf16 in forward and fp32 in the optimizer, and the other way for what ranks send."""
    half, single = torch.bfloat16, torch.float32
    options_of = zip(RESHARD, (None, largest), strict=True)
    for kinds, (reshard, place) in itertools.product(
        ((half, None), (half, single), (single, half)), options_of
    ):
        options = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=kinds[0], reduce_dtype=kinds[1]),
            "reshard_after_forward": reshard,
            "shard_placement_fn": place,
        }
        # Where one optimizer's parameter is rounded to the next bf16, so are gradients.
        train(rank, lambda o=options: blocks_of(**o), total, tolerance=1e-3)


@on_ranks(2)
def test_accumulated(rank: int, world: int) -> None:
    """Micro-batches without a reduction between them, whose sums are fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def loss_of(model: Any, x: Tensor, step: int) -> Tensor:
        model.set_requires_gradient_sync(False)
        for part in range(3):
            total(model, x * (part + 1), step).backward()
        model.set_requires_gradient_sync(True)
        return total(model, x, step)

    for reshard in RESHARD:
        options = {"mp_policy": policy, "reshard_after_forward": reshard}
        train(rank, lambda o=options: blocks_of(**o), loss_of)


@on_ranks(2)
def test_kept_state_dict(rank: int, world: int) -> None:
    """A state dict made once has the parameters' own memory before and after each step."""
    for width in (2, 3, 4, 5):
        torch.manual_seed(42)
        model: Any = fully_shard(nn.Linear(width, width, bias=False))
        optimizer = faststep.optim.AdamW(model.parameters(), lr=1e-2)
        kept = model.state_dict()["weight"]
        for _ in range(3):
            model(torch.ones(width, width)).sum().backward()
            before = local(kept).clone()
            optimizer.step()
            optimizer.zero_grad()
            assert local(kept).data_ptr() == local(model.weight).data_ptr()
            assert not before.numel() or not torch.equal(local(kept), before)
        model.load_state_dict({"weight": model.weight.detach().clone().fill_(7)})
        model(torch.ones(width, width)).sum().backward()
        optimizer.step()
        assert bool((local(model.weight) != 7).all())
        assert torch.equal(local(kept), local(model.weight))
