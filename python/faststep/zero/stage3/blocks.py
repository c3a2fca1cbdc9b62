"""Which modules stage 3 shards one by one: the blocks that a model repeats."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

FEW = 8  # a class of fewer blocks may be one of stages or stacks, which have blocks inside
TOO_LARGE = 1 / 3  # of the model: a stage or stack that holds more is taken apart
MOST = 2 / 3  # of a block: what those inside must hold for it
SMALL = 1 / 20  # of the model: classes that hold less are no blocks
HALF = 1 / 2  # of the model: a warning if more is gathered at once

_log = logging.getLogger("faststep.zero.blocks")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that have children and a class that occurs several times.

    So a stack of blocks is taken apart where it is there twice, as encoder and decoder are, or a
    few times in several widths, and one holds over a third of the model. Without such modules they
    are single layers of one class in a Sequential or another container. None shares a parameter
    with what is outside of it.
    """
    total = _size_of([model])
    opened: set[type] = set()
    while True:
        found = _repeated(model, opened)
        counts = Counter(map(type, found))
        largest = {type(block): block for block in sorted(found, key=lambda one: _size_of([one]))}
        large = {
            kind
            for kind, block in largest.items()
            if counts[kind] < FEW
            and _size_of([block]) > TOO_LARGE * total
            and _size_of(_repeated(block, opened | {kind})) >= MOST * _size_of([block])
        }
        if not large:
            break
        opened |= large
    found = _held(found, total) or _held(_layers(model), total)
    homes = [{home for _, home in places} for places in homes_of(model, found).values()]
    tied = {home for some in homes if len(some) > 1 for home in some}  # to what is outside
    return [block for block in found if id(block) not in tied]


def has_forward(module: nn.Module) -> bool:
    """True if a module can be called: a ModuleList cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _size_of(modules: Iterable[nn.Module]) -> int:
    """The elements of their parameters, each once."""
    params = {id(param): param for module in modules for param in module.parameters()}
    return sum(param.numel() for param in params.values())


def _repeated(root: nn.Module, opened: set[type]) -> list[nn.Module]:
    """The outermost modules with children whose class is there several times, but for these."""
    kinds = Counter(type(one) for one in root.modules() if one is not root and _size_of([one]))

    def is_block(module: nn.Module) -> bool:
        is_kind = kinds[type(module)] > 1 and type(module) not in opened
        return is_kind and has_forward(module) and _size_of(module.children()) > 0

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if is_block(child):
                yield child
            else:
                yield from walk(child)

    return list(dict.fromkeys(walk(root)))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers without children of containers, which call them, of classes that occur twice."""
    inside = [
        layer
        for parent in model.modules()
        if isinstance(parent, nn.Sequential) or not has_forward(parent)
        for layer in parent.children()
        if has_forward(layer) and not list(layer.children())
    ]
    kinds = Counter(map(type, dict.fromkeys(inside)))
    return [layer for layer in dict.fromkeys(inside) if kinds[type(layer)] > 1]


def _held(blocks: Sequence[nn.Module], total: int) -> list[nn.Module]:
    """Those of classes that hold much of the model together."""
    sizes = {
        kind: _size_of(block for block in blocks if type(block) is kind)
        for kind in set(map(type, blocks))
    }
    return [block for block in blocks if sizes[type(block)] > SMALL * total]


def homes_of(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, list[tuple[str, int]]]:
    """By the `id` of each parameter: its names, each with the `id` of the innermost block; or 0."""
    home: dict[int, int] = {}
    for block in sorted(blocks, key=lambda one: sum(1 for _ in one.modules()), reverse=True):
        home.update((id(module), id(block)) for module in block.modules())
    found: dict[int, list[tuple[str, int]]] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(path, recurse=False):
            found.setdefault(id(param), []).append((name, home.get(id(module), 0)))
    return found


def announce(model: nn.Module, blocks: Sequence[nn.Module], is_default: bool) -> tuple[str, ...]:
    """Log which blocks are sharded, and warn if that saves little; returns their names."""
    total = _size_of([model])
    known = {id(block) for block in blocks}
    names = tuple(name for name, module in model.named_modules() if id(module) in known)
    kinds = Counter(type(block).__name__ for block in blocks)
    what = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no blocks"
    _log.info("shard(stage=3): %s, and the rest of the model: %s", what, ", ".join(names))
    sizes = {name: _size_of([model.get_submodule(name)]) for name in names}
    sizes[""] = total - _size_of(blocks)
    name = max(sizes, key=sizes.__getitem__)
    if is_default and sizes[name] > HALF * total:
        which = f"block {name!r}" if name else f"what is outside of blocks ({what})"
        warnings.warn(
            f"shard(stage=3): {which} holds {sizes[name] / total:.0%} of the model's parameters, "
            "which are gathered at once: say by blocks= which modules to shard one by one",
            stacklevel=5,
        )
    return names
