"""Chooses blocks to compute again or to offload, so that a step stays within a limit."""

from __future__ import annotations

import gc
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.dtensor import is_dtensor
from .._torch.fsdp import is_fsdp_shard
from ..zero.stage3.blocks import blocks_of
from .activations import (
    Step,
    UndoneStep,
    saved_by,
    seconds_of,
    seconds_per_byte,
    step_memory,
)
from .recompute import Buffers, Offloaded, Recomputed, Replaced, warm_up

TRIES = 6  # choices that are measured
MOST_STATES = 4096  # of the search; with blocks of one size there are few
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}


class BlockRow(NamedTuple):
    """A block that :func:`fit` has measured."""

    name: str
    """As in `model.named_modules()`."""
    saved: int
    """Bytes that it saves for backward and need not."""
    seconds: float
    """Of its forward in a step."""
    checkpointed: bool
    """True if it is computed again in backward."""
    offloaded: bool = False
    """True if what it saves waits for backward in host memory."""


class Fitted:
    """The answer of :func:`fit`: what was measured and chosen; `str()` makes a table of it.

    Attributes:
        rows: the blocks, in the order in which they are called.
        limit: bytes that were asked for.
        plain: bytes of the peak with all blocks as they were, measured.
        predicted: bytes of the peak with the choice, by the bytes that the blocks save.
        peak: bytes of the peak with the choice, measured.
    """

    def __init__(
        self, rows: list[BlockRow], limit: int, plain: int, predicted: int, peak: int
    ) -> None:
        self.rows = tuple(rows)
        self.limit, self.plain, self.predicted, self.peak = limit, plain, predicted, peak
        self._put: list[Replaced] = []

    def remove(self) -> None:
        """Let all blocks have their forward back. A second call does nothing."""
        while self._put:
            self._put.pop().take_off()

    def __str__(self) -> str:
        width = max([5, *(len(row.name) for row in self.rows)])
        lines = [f"{'block':{width}}  saved MiB  forward ms  checkpointed"]
        for row in self.rows:
            yes = "yes" if row.checkpointed else "offloaded" if row.offloaded else "no"
            saved, spent = row.saved / 2**20, 1000 * row.seconds
            lines.append(f"{row.name:{width}}  {saved:9.1f}  {spent:10.2f}  {yes}")
        peaks = [("limit", self.limit), ("plain peak", self.plain)]
        if any(row.checkpointed or row.offloaded for row in self.rows):
            peaks += [("predicted peak", self.predicted), ("measured peak", self.peak)]
        else:
            lines.append("nothing is checkpointed: the plain peak is within the limit")
        return "\n".join([*lines, ", ".join(f"{name} {_mib(size)}" for name, size in peaks)])


def fit(model: nn.Module, step: Step, limit: int | str = "6GiB") -> Fitted:
    """Let some blocks be computed again in backward, so that a step's peak is within a limit.

    Three steps tell the bytes that each block of a class that the model repeats saves for
    backward, the seconds of its forward, and the peak. The choice of blocks with the least seconds
    that should fit is measured, and corrected, at most six times. `torch.utils.checkpoint` computes
    them again, with `use_reentrant=False`: gradients keep their bits. On a CUDA device what a block
    saves may wait in host memory instead (:class:`save_on_cpu`), if copying it adds less time than
    computing it again. Only the `forward` of these blocks is replaced. Gradients, buffers and
    random state are afterwards what they were before.

    Args:
        model: on one device, in the mode in which it is trained.
        step: runs forward, loss and backward once, as in training, without `optimizer.step()`.
            It should use one batch again and again. Call `fit` after a first step of training, so
            that the optimizer's states are there.
        limit: of the peak, as bytes or as "6GiB" or "500MB". On CPUs it is that of the resident
            memory of the process, on CUDA of torch's tensors on the device.

    Raises:
        TypeError: limit is neither an int nor a str.
        ValueError: limit is no size, the model has no repeated blocks, is compiled, inside of
            DistributedDataParallel, divided over ranks, fitted already or on several devices, or
            step() changes parameters.
        MemoryError: no choice stays within the limit. It tells the least peak that was reached.
    """
    most = _limit_of(limit)
    blocks = blocks_of(model)
    device = _check(model, blocks)
    warm_up()
    gc.collect()
    names = {id(module): name for name, module in model.named_modules()}
    undone = UndoneStep(step, model, device)
    saved, outside = saved_by(undone, model, blocks)
    seconds = seconds_of(undone, blocks, device)
    start, plain = (size - undone.nbytes for size in step_memory(undone, device))
    order = [blocks[index] for index in saved]
    took = [seconds[index] for index in saved]
    link = seconds_per_byte(device)
    choice = _Choice(order, list(saved.values()), outside, took, start, plain, link)
    ways: list[Replaced] = [Recomputed(one, _inside(one, undone.changing)) for one in order]
    ways += [Offloaded(block) for block in order]
    chosen, reached = 0, plain
    if plain > most:
        chosen, reached = _search(
            choice, ways, lambda: step_memory(undone, device)[1] - undone.nbytes, most
        )
    is_chosen = [bool(chosen >> way & 1) for way in range(len(ways))]
    each = zip(order, saved.items(), is_chosen[: len(order)], is_chosen[len(order) :], strict=True)
    rows = [BlockRow(names[id(one)], size, seconds[i], *how) for one, (i, size), *how in each]
    fitted = Fitted(rows, most, plain, choice.predicted(chosen), reached)
    fitted._put = _put(ways, chosen)
    return fitted


def bytes_of(size: str) -> int:
    """The bytes of a size such as "6GiB", "500MB" or "1024"; ValueError for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B|)", size.strip().upper())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise ValueError(f"{size!r} is no size such as '6GiB' or '500MB'")
    return int(float(found[1]) * _UNITS[found[2]])


def _limit_of(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise TypeError(f"limit must be an int, in bytes, or a str as '6GiB', not {limit!r}")
    try:
        return bytes_of(str(limit))
    except ValueError as error:
        raise ValueError(f"limit: {error}") from None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _check(model: nn.Module, blocks: Sequence[nn.Module]) -> torch.device:
    """The device of a model that can be fitted."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None):
            raise ValueError("the model is compiled: call fit() before, and compile it afterwards")
        if isinstance(module, DistributedDataParallel):
            raise ValueError("call fit() before the model is inside of DistributedDataParallel")
        if isinstance(vars(module).get("forward"), Replaced):
            raise ValueError("the model is fitted already: call remove() of that before")
    if not blocks:
        raise ValueError(
            "the model has no repeated blocks: fit() needs modules with children, several of a "
            "class, as the layers of a transformer are"
        )
    if any(is_dtensor(param) or is_fsdp_shard(param) for param in model.parameters()):
        raise ValueError("fit() does not take parameters that are divided over ranks (FSDP)")
    devices = {param.device for param in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise ValueError(f"fit() needs a model on the CPU or one CUDA device, not {devices}")
    return devices.pop()


def _inside(block: nn.Module, buffers: Buffers) -> Buffers:
    modules = {id(module) for module in block.modules()}
    return [(module, name) for module, name in buffers if id(module) in modules]


class _State(NamedTuple):
    """What a choice frees, what it costs, and its bits, see _Choice."""

    freed: int
    seconds: float
    chosen: int


class _Choice:
    """Says what choices of blocks do to the peak, and finds the one that takes the least time.

    A choice is a number: a bit for each block that is computed again, and above these one for each
    that is offloaded. Copies take the time by which they are longer than what the block computes in
    forward, or in backward, where it takes twice as long.

    While backward is in a block, what it saves is there, computed again or not. So is what the
    blocks and other modules before it save, and gradients of the blocks behind it. The peak that
    was measured is that of the last block or of what comes behind it.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        saved: Sequence[int],
        outside: Sequence[int],
        seconds: Sequence[float],
        start: int,
        plain: int,
        link: float | None = None,
    ) -> None:
        self.start = start
        self._saved, self._seconds = saved, _evened(blocks, saved, seconds)
        if link is not None:
            of = zip(saved, self._seconds, strict=True)
            pairs = [(size * link - took, size * link - 2 * took) for size, took in of]
            self._seconds += [max(0.0, there) + max(0.0, back) for there, back in pairs]
        grads = [
            sum(one.nbytes for one in block.parameters() if one.grad is None) for block in blocks
        ]
        first, *others = outside or [0]
        until = itertools.accumulate(map(sum, zip(saved, others, strict=True)), initial=first)
        behind = [sum(grads) - upto for upto in itertools.accumulate(grads)]
        # By the number of blocks that can free something before: those ahead of a block, or all.
        there = zip(list(until)[1:], behind, strict=True)
        self._peaks = [start + size + grad for size, grad in there]
        self._peaks.append(plain)

    def predicted(self, chosen: int) -> int:
        """The peak."""
        either = chosen | chosen >> len(self._saved)
        freed = [size * (either >> i & 1) for i, size in enumerate(self._saved)]
        sums = itertools.accumulate(freed, initial=0)
        return max(peak - one for peak, one in zip(self._peaks, sums, strict=True))

    def best(self, limit: int) -> int | None:
        """The choice that takes the least time of those that should stay within a limit."""
        states = [_State(0, 0.0, 0)]
        for i, size in enumerate(self._saved):
            states = [one for one in states if self._peaks[i] - one.freed <= limit]
            ways = range(i, len(self._seconds), len(self._saved))
            more = [
                _State(freed + size, seconds + self._seconds[way], chosen | 1 << way)
                for way in ways
                for freed, seconds, chosen in states
            ]
            states = _front([*states, *more])
        fitting = [one for one in states if self._peaks[-1] - one.freed <= limit]
        return min(fitting, key=lambda one: one.seconds).chosen if fitting else None

    def cost(self, chosen: int) -> float:
        """Seconds that it adds to a step."""
        return sum(one for i, one in enumerate(self._seconds) if chosen >> i & 1)

    @property
    def all(self) -> int:
        """The choice to compute all blocks again that save something."""
        return sum(1 << i for i, size in enumerate(self._saved) if size)


def _evened(
    blocks: Sequence[nn.Module], saved: Sequence[int], seconds: Sequence[float]
) -> list[float]:
    """Of blocks of one class and size the median, so that of two the earlier one is chosen."""
    alike = list(zip(map(type, blocks), saved, strict=True))
    return [
        statistics.median(took for took, other in zip(seconds, alike, strict=True) if other == one)
        for one in alike
    ]


def _front(states: list[_State]) -> list[_State]:
    """Those that free more than any that takes less time; some of them if they are many.

    Of equals it keeps the first, whose blocks are earlier ones: these are computed again when
    less of what other blocks save is there.
    """
    kept: list[_State] = []
    for state in sorted(states, key=lambda one: (-one.freed, one.seconds)):
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    return kept[:: len(kept) // MOST_STATES + 1]


def _put(ways: Sequence[Replaced], chosen: int) -> list[Replaced]:
    put = [one for i, one in enumerate(ways) if chosen >> i & 1]
    for one in put:
        one.put()
    return put


def _search(
    choice: _Choice,
    ways: Sequence[Replaced],
    peak: Callable[[], int],
    limit: int,
) -> tuple[int, int]:
    """The quickest choice whose measured peak is within the limit, and that peak."""
    found = {0: choice.predicted(0)}
    error = 0
    for _ in range(TRIES):
        chosen = choice.best(limit - error)
        if chosen is None or chosen in found:
            chosen = choice.all  # the last one to be tried, where none was within the limit
            if chosen in found or min(found.values()) <= limit:
                break
        put = _put(ways, chosen)
        try:
            found[chosen] = peak()
        finally:
            for one in put:
                one.take_off()
        error = found[chosen] - choice.predicted(chosen)
    within = [chosen for chosen, top in found.items() if top <= limit]
    if not within:
        raise MemoryError(
            f"no choice of blocks stays within {_mib(limit)}: the least peak that was reached is "
            f"{_mib(min(found.values()))}, of which {_mib(choice.start)} are there before the step"
        )
    chosen = min(within, key=choice.cost)
    return chosen, found[chosen]
