"""Helpers shared by the optimizer tests."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from faststep import _C

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Against torch's own arithmetic, which rounds after every operation.
TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 5e-3},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}

# One step against fp64 from the same start: fp32 arithmetic inside, one rounding at the end.
ONE_STEP = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 2e-6, "atol": 2e-7},
    torch.bfloat16: {"rtol": 0.51 * 2.0**-7, "atol": 1e-6},
    torch.float16: {"rtol": 0.51 * 2.0**-10, "atol": 1e-6},
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_near(
    actual: Tensor,
    expected: Tensor,
    table: dict[torch.dtype, Any],
    what: str,
    terms: float = 1.0,
) -> None:
    """actual in its own dtype against expected in any dtype, with the tolerance of actual's.

    What may be 0 as the sum of larger terms is as exact as these are: `terms` is their size.
    """
    tolerance = {**table[actual.dtype], "atol": terms * table[actual.dtype]["atol"]}
    a, b = actual.detach().double(), expected.detach().double()
    if a.shape == b.shape and torch.allclose(a, b, equal_nan=True, **tolerance):
        return  # assert_close takes ten times as long to say so
    torch.testing.assert_close(
        a, b, equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself, -0.0 is not 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    a, b = (t.detach().clone(memory_format=torch.contiguous_format) for t in (left, right))
    return torch.equal(a.view(as_int), b.view(as_int))


def assert_same_bits(
    left: Iterable[Tensor], right: Iterable[Tensor], what: str = "tensors"
) -> None:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert same_bits(a, b), f"{what}, number {index}: {a} differs from {b}"


def parameters(*shapes: tuple[int, ...], seed: int = 0, dtype: Any = None) -> list[Parameter]:
    """Fresh contiguous parameters; the same seed gives the same values."""
    source = generator(seed)
    dtype = dtype or torch.float32
    values = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    return [Parameter(value) for value in values]


@functools.lru_cache(32)  # ours and torch's class are given the same
def _drawn(seed: int, *shapes: torch.Size) -> list[Tensor]:
    source = generator(seed)
    return [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]


def set_gradients(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    """Fresh gradients; the same seed gives the same values."""
    params = [*params]
    values = _drawn(1_000_003 + seed, *(p.shape for p in params))
    for p, value in zip(params, values, strict=True):
        p.grad = torch.empty_like(p).copy_(value.to(p.dtype) * scale)


def train(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    steps: int = 1,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Steps with gradients seed, seed + 1, ..., multiplied by the scaler's scale."""
    for index in range(steps):
        if scaler is None:
            set_gradients(params, seed + index)
            optimizer.step()
        else:
            scaler.scale(torch.zeros(()))
            set_gradients(params, seed + index, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor of the state, in the order of parameters and then of keys."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            values = optimizer.state.get(p, {})
            found += [values[key] for key in sorted(values) if torch.is_tensor(values[key])]
    return found


class Snapshot:
    """Copies of parameters, gradients and states, to prove that nothing moved."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.tensors = [t.detach().clone() for t in self.current()]
        self.keys = self.state_keys()

    def current(self) -> list[Tensor]:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None and not p.grad.is_sparse]
        return [*params, *grads, *state_tensors(self.optimizer)]

    def state_keys(self) -> list[list[str]]:
        return [sorted(values) for values in self.optimizer.state.values() if values]

    def assert_unchanged(self) -> None:
        assert self.state_keys() == self.keys, "the state's keys changed"
        assert_same_bits(self.current(), self.tensors, "parameters, gradients and states")


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """What a call did, as a user sees it: exception type and text, and the warnings' texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            error: tuple[Any, ...] = (None, "")
        except Exception as exception:
            error = (type(exception), str(exception))
    return (*error, [(w.category, str(w.message)) for w in caught])


@contextmanager
def records(known: bool = True, **words: int) -> Iterator[None]:
    """Steps look at torch's records, with some words of their layout replaced, or ask torch."""
    layout = faststep._layout
    _C.use_records(*(layout._replace(**words) if known and layout is not None else ()))
    try:
        yield
    finally:
        _C.use_records(*(layout or ()))


def assert_as_torchs(
    declaration: Any,
    work: Callable[[Any, list[Parameter]], Any],
    *shapes: tuple[int, ...],
    groups: Callable[[list[Parameter]], Any] = list,
    **torchs: Any,
) -> None:
    """After some work the parameters are where torch's class, with further options, leaves them.

    Args:
        declaration: of both classes.
        work: takes an optimizer and its parameters.
        shapes: of the parameters.
        groups: what the optimizer is given for them.
        torchs: options for torch's class alone.
    """
    ends = []
    for cls, options in ((declaration.ours, {}), (declaration.torchs, torchs)):
        params = parameters(*shapes)
        work(cls(groups(params), **declaration.kwargs, **options), params)
        ends.append(params)
    for mine, its in zip(*ends, strict=True):
        assert_near(mine, its, TOLERANCE, getattr(work, "__name__", "parameter"))


def released_and_stepped(
    sizes: tuple[int, int], steps: int, dtype: torch.dtype, **options: Any
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """AdamW over two equal linear layers: one has updated during backward, one by step()."""
    model, plain = (torch.nn.Linear(*sizes, dtype=dtype) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    releasing = faststep.optim.AdamW(model.parameters(), **options)
    stepping = faststep.optim.AdamW(plain.parameters(), **options)
    release = faststep.release_gradients(model, releasing)
    for number in range(steps):
        x = torch.randn(4, sizes[0], generator=generator(number)).to(dtype)
        for one, by in ((model, releasing), (plain, stepping)):
            one(x).square().sum().backward()
            by.step()
            by.zero_grad()
    release.remove()
    return releasing, stepping
