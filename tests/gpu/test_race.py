"""`begin` many times over, beside copies: in every launch the last block is the only one to write
the norm, and it reads what all others wrote.

A launch that ends with no last block, or with two, or that reads a partial result too early, writes
another norm or none. The ticket that counts blocks must be 0 again after each.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import faststep
from faststep import _C
from faststep._devices import HOST
from faststep.optim.plan_step import Phase, Scalars

from .common import CUDA, REHEARSAL, place, values

CHUNK = 16384  # elements
LAUNCHES = 3 if REHEARSAL else 20_000
WATCHED = 3 if REHEARSAL else 1000  # launches between two looks at the results
COPY_EVERY = 8
# A tensor of one element is a chunk too.
SHORT = 3


def counts() -> list[int]:
    """Chunks around what a grid of two blocks per multiprocessor takes; 263, 264, 265 and 2113 on a
    device with 132 of them.
    """
    if REHEARSAL:
        return [1, 7, 8, 9, 65]
    blocks = 2 * 132
    if torch.cuda.is_available():
        blocks = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    return [1, 7, blocks - 1, blocks, blocks + 1, 8 * blocks + 1, 75_000]


class Measured:
    """Parameters whose gradients are measured by launches of `begin` alone.

    Args:
        grads: the gradients, on the host.
        device: where they are measured.
    """

    def __init__(self, grads: list[Tensor], device: torch.device = CUDA) -> None:
        self.parameters = [torch.nn.Parameter(place(torch.zeros_like(g), device)) for g in grads]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = place(grad, device)
        self.optimizer = faststep.optim.SGD(self.parameters, lr=0.1)
        self.plan = _C.Plan()
        self.norm = place(torch.zeros((), dtype=torch.float64), device)
        flag = place(torch.zeros(()), device)
        self._scalars = {HOST if device.index is None else 0: Scalars(None, flag, self.norm)}
        self._rules = self.optimizer._rules()

    def launch(self) -> None:
        """Measure; `norm` is NaN if no block takes itself for the last one."""
        self.norm.fill_(math.nan)
        arguments: tuple[Any, ...] = (self._scalars, False, 1e30, False, Phase.MEASURE)
        params, state = [self.parameters], self.optimizer.state
        what, _ = self.plan.step(params, self._rules, state, None, *arguments)
        assert what == "done"


class Copies:
    """Copies on another stream, as many as fit beside the launches."""

    def __init__(self) -> None:
        size = 1 << (10 if REHEARSAL else 26)
        self._pair = [torch.zeros(size, device=CUDA) for _ in range(2)]
        self._stream = torch.cuda.Stream()

    def more(self) -> None:
        with torch.cuda.stream(self._stream):
            self._pair[1].copy_(self._pair[0])


@pytest.fixture
def copies() -> Iterator[Copies]:
    yield Copies()
    torch.cuda.synchronize()


def norm_of(grads: list[Tensor]) -> float:
    """What the CPU measures."""
    measured = Measured(grads, torch.device("cpu"))
    measured.launch()
    return float(measured.norm)


def repeat(measured: Measured, launches: int, copies: Copies) -> float:
    """Launch again and again; the norm that all of them found, or AssertionError."""
    first: Tensor | None = None
    differ = place(torch.zeros((), dtype=torch.int64), CUDA)
    for number in range(launches):
        if number % COPY_EVERY == 0:
            copies.more()
        measured.launch()
        if first is None:
            first = measured.norm.clone()
        differ += (measured.norm != first).to(torch.int64)
        if (number + 1) % WATCHED == 0:
            torch.cuda.synchronize()
            assert int(differ.cpu()) == 0, f"{int(differ.cpu())} of {number + 1} norms differ"
    assert first is not None
    return float(first.cpu())


def assert_ticket_is_zero(measured: Measured) -> None:
    """A grid of one block writes its norm only if the ticket was 0 when it began."""
    for parameter in measured.parameters[:-1]:
        parameter.grad = None
    measured.launch()
    torch.cuda.synchronize()
    last = measured.parameters[-1].grad
    assert last is not None
    assert float(measured.norm.cpu()) == float(last.cpu().double().norm())


@pytest.mark.parametrize("chunks", counts())
def test_whole_chunks(chunks: int, copies: Copies) -> None:
    """Most chunks are 16384 elements of one tensor; the last one is a tensor of one element."""
    elements = (chunks - 1) * CHUNK
    if not REHEARSAL and elements * 6 > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {elements * 6 / 2**30:.0f} GiB")
    piece = values((min(max(elements, 1), 1_000_003),), chunks, torch.bfloat16)
    whole = piece.repeat(-(-elements // piece.numel()))[:elements]
    grads = [whole, torch.full((1,), 3.0, dtype=torch.bfloat16)]
    measured = Measured(grads)
    assert repeat(measured, LAUNCHES, copies) == norm_of(grads)
    assert_ticket_is_zero(measured)


@pytest.mark.parametrize("chunks", counts()[:-1])
def test_short_chunks(chunks: int, copies: Copies) -> None:
    """A tensor of three elements per chunk, so that blocks come to the ticket at once."""
    grads = [values((SHORT,), n) for n in range(chunks - 1)] + [torch.full((1,), 3.0)]
    measured = Measured(grads)
    launches = min(LAUNCHES, 4_000_000 // chunks)  # the host takes its time for each tensor
    assert repeat(measured, launches, copies) == norm_of(grads)
    assert_ticket_is_zero(measured)
