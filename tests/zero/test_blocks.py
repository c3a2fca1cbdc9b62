"""`shard(stage=3)`: which modules it shards by default, and several optimizers over one model."""

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import faststep.optim
from faststep import zero
from faststep._torch.dtensor import full_tensor
from faststep.zero.stage3.blocks import blocks_of
from ranks import on_ranks


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        scores = self.q(x) @ self.k(memory).transpose(-1, -2)
        out: Tensor = self.out(scores.softmax(-1) @ self.v(memory))
        return out


class _Block(nn.Module):
    """Of a decoder if it also looks at a memory."""

    def __init__(self, width: int, has_memory: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = _Attention(width)
        self.cross = _Attention(width) if has_memory else None
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        out: Tensor = x + self.mlp(x)
        return out


class _Stack(nn.Module):
    def __init__(self, width: int, depth: int, has_memory: bool = False) -> None:
        super().__init__()
        self.block = nn.ModuleList(_Block(width, has_memory) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for block in self.block:
            x = block(x, memory)
        out: Tensor = self.norm(x)
        return out


class _T5(nn.Module):
    """One embedding for encoder, decoder and the output."""

    def __init__(self, depth: int = 3, in_dict: bool = False) -> None:
        super().__init__()
        self.shared = nn.Embedding(20, 8)
        stacks = {"encoder": _Stack(8, depth), "decoder": _Stack(8, depth + 1, True)}
        self.stacks: Any = nn.ModuleDict(stacks) if in_dict else None
        if not in_dict:
            self.encoder, self.decoder = stacks["encoder"], stacks["decoder"]
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        of = self.stacks or {"encoder": self.encoder, "decoder": self.decoder}
        x = self.shared(tokens)
        out: Tensor = self.head(of["decoder"](x, of["encoder"](x)))
        return out


class _GPT(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(20, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(_Block(8) for _ in range(depth))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _vit() -> nn.Module:
    blocks = OrderedDict((f"layer_{number}", _Block(8)) for number in range(4))
    return nn.Sequential(
        nn.Embedding(20, 8), nn.Sequential(blocks), nn.LayerNorm(8), nn.Linear(8, 20)
    )


class _Normed(nn.Sequential):
    """A class that is there more often than blocks are, and holds as much."""

    def __init__(self, before: int, after: int, size: int) -> None:
        super().__init__(
            nn.Conv1d(before, after, size, padding=size // 2), nn.GroupNorm(1, after), nn.ReLU()
        )


class _Bottleneck(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        inner = after // 2
        self.way = nn.Sequential(
            _Normed(before, inner, 1), _Normed(inner, inner, 3), _Normed(inner, after, 1)
        )
        self.down = nn.Sequential(nn.Conv1d(before, after, 1)) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.way(x) + self.down(x)
        return out


class _ResNet(nn.Module):
    def __init__(self, in_one: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4))
        widths = [4, 8, 16, 32]
        stages = [
            nn.Sequential(_Bottleneck(before, after), _Bottleneck(after, after))
            for before, after in zip([4, *widths], widths, strict=False)
        ]
        self.stages: Any = nn.Sequential(*stages) if in_one else None
        if not in_one:
            self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.head = nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens).transpose(1, 2)
        for stage in self.stages or (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        out: Tensor = self.head(x.transpose(1, 2))
        return out


class _Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.merge = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.merge(x)
        return out


class _Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Embedding(20, 4)
        depths = ((4, 2), (8, 2), (16, 6), (32, 2))
        self.stages = nn.ModuleList(_Stage(width, depth) for width, depth in depths)
        self.head = nn.Linear(64, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.patches(tokens)
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.head(x)
        return out


class _Lists(nn.Module):
    """Attention and MLP of each layer in a list, which cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.ModuleList([_Attention(8), nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))])
            for _ in range(3)
        )
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for attention, mlp in self.layers:
            x = x + mlp(attention(x))
        out: Tensor = self.head(x)
        return out


class _Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(20, 8)
        self.first, self.second, self.third = _Block(8), _Block(8), _Block(8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(self.second(self.first(self.token(tokens)))))
        return out


class _Once(nn.Module):
    """No class of a block is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.block, self.head = nn.Embedding(20, 8), _Attention(8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.token(tokens)))
        return out


class _Shared(_GPT):
    """Blocks that use one weight between them, and one that is there twice."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1].attention.q.weight = self.blocks[0].attention.k.weight
        self.blocks.append(self.blocks[2])


def _mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Embedding(20, 32)]
    for _ in range(3):
        layers += [nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 20))


def _torchs() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(20, 8), encoder, nn.Linear(8, 20))


def _named(pattern: str, *numbers: Any) -> list[str]:
    return [
        pattern.format(*some) if isinstance(some, tuple) else pattern.format(some)
        for some in numbers
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "T5": (_T5, _named("encoder.block.{}", 0, 1, 2) + _named("decoder.block.{}", 0, 1, 2, 3)),
    "T5 of a dict": (
        lambda: _T5(2, True),
        _named("stacks.encoder.block.{}", 0, 1) + _named("stacks.decoder.block.{}", 0, 1, 2),
    ),
    "GPT": (lambda: _GPT(6), _named("blocks.{}", *range(6))),
    "GPT of two": (lambda: _GPT(2), _named("blocks.{}", 0, 1)),
    "ViT": (_vit, _named("1.layer_{}", *range(4))),
    "ResNet": (_ResNet, [f"layer{a}.{b}" for a in (1, 2, 3, 4) for b in (0, 1)]),
    "ResNet of one": (
        lambda: _ResNet(True), [f"stages.{a}.{b}" for a in range(4) for b in (0, 1)],
    ),
    "Swin": (
        _Swin, [f"stages.{a}.blocks.{b}" for a in range(4) for b in range(6 if a == 2 else 2)],
    ),
    "lists": (_Lists, [f"layers.{a}.{b}" for a in range(3) for b in (0, 1)]),
    "attributes": (_Attributes, ["first", "second", "third"]),
    "once": (_Once, []),
    "shared": (_Shared, ["blocks.2", "blocks.3"]),
    "MLP": (_mlp, _named("{}", 1, 4, 7, 10)),
    "torch's": (_torchs, _named("1.layers.{}", 0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_found(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    with torch.device("meta"):
        on_meta = make()
    for one in (model, on_meta):
        found = {id(block) for block in blocks_of(one)}
        assert [path for path, module in one.named_modules() if id(module) in found] == expected


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = _tokens(rank, step)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _whole(model: nn.Module) -> list[Tensor]:
    return [full_tensor(param.detach()) for param in model.parameters()]


def _twin(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    twin = make()
    twin.load_state_dict(model.state_dict())
    return twin


def _reduce(model: nn.Module, world: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= world


def _close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(one, other, strict=True))


@on_ranks(2, name=MODELS)
def test_default_blocks_train_as_one_process_does(rank: int, world: int, name: str) -> None:
    """Three steps with the default blocks, clipped by several norms, and in one process."""
    make, expected = MODELS[name]
    torch.manual_seed(3)
    model = make()
    twin = _twin(model, make)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("faststep.zero.blocks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3)
    logger.removeHandler(handler)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5)
    for step, order in enumerate((math.inf, 1.0, 2.0)):
        _loss(model, rank, step).backward()
        _loss(twin, rank, step).backward()
        _reduce(twin, world)
        mine: Any = optimizer.clip_grad_norm_(0.01, order)
        theirs = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01, order)
        assert torch.isclose(mine.full_tensor(), theirs, rtol=1e-3)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    sharded = [path for path, one in model.named_modules() if isinstance(one, FSDPModule)]
    assert list(optimizer.blocks) == sharded[1:] == expected
    assert _close(_whole(model), _whole(twin))
    (logged,) = [text for text in records if "shard(stage=3)" in text]
    assert all(block in logged for block in expected)
    warnings_of_blocks = [text for one in warned if "shard(stage=3)" in (text := str(one.message))]
    if rank or name not in ("once", "shared"):
        assert warnings_of_blocks == []
    elif name == "once":
        (text,) = warnings_of_blocks
        assert "what is outside of blocks (no blocks) holds 100% of the model's parameters" in text


class _Pair(nn.Module):
    """Two parts, each trained by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rest = _GPT(2), _GPT(3), nn.Linear(20, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.a(tokens) + self.b(tokens)
        return out + self.rest(out).sum(-1, keepdim=True)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _adam(params: Any) -> torch.optim.Optimizer:
    return faststep.optim.AdamW(params, lr=0.01, eps=1.0)


HOWS = ("whole", "steps between", "parts", "made later")


@on_ranks(2, how=HOWS)
def test_two_optimizers_over_one_model(rank: int, world: int, how: str) -> None:
    torch.manual_seed(4)
    model = _Pair()
    twin = _twin(model, _Pair)

    def optimizers(of: Any) -> list[torch.optim.Optimizer]:
        a, b = of.a.parameters(), [*of.b.parameters(), *of.rest.parameters()]
        return [_momentum(a), _adam(b)]

    def step(model: Any, some: Sequence[Any], number: int, is_plain: bool) -> list[float]:
        _loss(model, rank, number).backward()
        if is_plain:
            _reduce(model, world)
        norms = []
        for one in some:
            params = [p for group in one.param_groups for p in group["params"]]
            clip = torch.nn.utils.clip_grad_norm_ if is_plain else None
            norm: Any = clip(params, 0.1) if clip else one.clip_grad_norm_(0.1)
            norms.append(float(full_tensor(norm)))
            one.step()
        for one in some:
            one.zero_grad()
        return norms

    made, plain = optimizers(model), optimizers(twin)
    for number in (0, 1):  # states that exist already, alike on all ranks
        for of, some in ((model, made), (twin, plain)):
            step(of, some, number, True)
    norms = []
    if how == "whole":  # both hold the parameters that the first call replaces
        sharded: list[Any] = [zero.shard(model, one, stage=3) for one in made]
    elif how == "steps between":
        sharded = [zero.shard(model, made[0], stage=3)]
        twins = plain[:1]
        norms.append((step(model, sharded, 2, False), step(twin, twins, 2, True)))
        model.zero_grad()
        twin.zero_grad()
        sharded.append(zero.shard(model, made[1], stage=3))
    elif how == "parts":  # a part, then the rest with the whole model
        sharded = [zero.shard(model.a, made[0], stage=3), zero.shard(model, made[1], stage=3)]
    else:  # made of the sharded parameters
        first = zero.shard(model, made[0], stage=3)
        new = _adam([*model.b.parameters(), *model.rest.parameters()])
        plain[1] = _adam([*twin.b.parameters(), *twin.rest.parameters()])
        sharded = [first, zero.shard(model, new, stage=3)]
    for number in (3, 4, 5):
        norms.append((step(model, sharded, number, False), step(twin, plain, number, True)))
    for mine, theirs in norms:
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert _close(_whole(model), _whole(twin))
    assert all(isinstance(param, DTensor) for param in model.parameters())
