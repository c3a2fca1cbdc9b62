"""_C.accumulate: sum += factor * term of any two types, against torch, bit for bit."""

import itertools
import math
from typing import Any

import pytest
import torch

from faststep import _C
from gradients import LAYOUTS
from optim.common import assert_same_bits

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LOW = (torch.bfloat16, torch.float16)


def like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Other values in the same layout."""
    strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return strided.copy_(torch.randn(tensor.shape))


SIZES = {name: make().numel() for name, make in LAYOUTS.items()}
PAIRS = [(a, b) for a, b in itertools.product(LAYOUTS, LAYOUTS) if SIZES[a] == SIZES[b]]


@pytest.mark.parametrize(("layout", "term_layout"), [*PAIRS, *((name, "own") for name in LAYOUTS)])
def test_layouts(layout: str, term_layout: str) -> None:
    """Sum and term in the same layout, and in any other that the shape allows."""
    total = LAYOUTS[layout]()
    if term_layout == "own":
        term = like(total, torch.bfloat16)
    else:
        term = LAYOUTS[term_layout]().to(torch.bfloat16).reshape(total.shape)
    expected = total + term.float()
    _C.accumulate([total], [term], 1.0)
    assert torch.equal(total, expected)


@pytest.mark.parametrize(("to", "of"), list(itertools.product(DTYPES, DTYPES)))
def test_types(to: torch.dtype, of: torch.dtype) -> None:
    """Computed in fp64 if either is, else in fp32, and rounded once to the sum's type."""
    wide = torch.float64 if torch.float64 in (to, of) else torch.float32
    total, term = torch.randn(40000).to(to), torch.randn(40000).to(of)
    factor = torch.tensor(1 / 3, dtype=wide)
    expected = (total.to(wide) + term.to(wide) * factor).to(to)
    first = (term.to(wide) * factor).to(to)
    _C.accumulate([total], [term], 1 / 3)
    assert torch.equal(total, expected)
    _C.accumulate([total], [term], 1 / 3, True)
    assert torch.equal(total, first)


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("low", LOW)
def test_every_rounding(low: torch.dtype, flushes: bool) -> None:
    """Each number of 16 bits, and floats around it and around the middle to the next. What a thread
    makes of subnormal floats is not heard: those of float16 are normal floats."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(low)
    wide, steps = halves.double(), torch.arange(-3, 4, dtype=torch.int32)
    first_beyond = 2.0 ** math.frexp(torch.finfo(low).max)[1]
    middles = (wide + wide.roll(-1).clamp(-first_beyond, first_beyond)) / 2
    around = torch.cat([wide, middles]).float().view(torch.int32)[:, None] + steps
    floats = around.view(torch.float32).flatten()
    if flushes and low is torch.bfloat16:
        floats = floats[floats.abs() >= torch.finfo(torch.float32).tiny]
    narrow, back = floats.to(low), halves.float()
    found, widened = torch.empty_like(narrow), torch.empty_like(back)
    try:
        torch.set_num_threads(1)
        assert torch.set_flush_denormal(flushes) or not flushes
        _C.accumulate([found, widened], [floats, halves], 1.0, True)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits([found.where(~found.isnan(), 0)], [narrow.where(~narrow.isnan(), 0)])
    assert torch.equal(found.isnan(), narrow.isnan())
    if not flushes or low is torch.float16:
        torch.testing.assert_close(widened, back, rtol=0, atol=0, equal_nan=True)


def test_the_bits_of_torchs_add() -> None:
    """Eight gradients, in the order in which they come."""
    for dtype in LOW:
        grads = [torch.randn(40000).to(dtype) for _ in range(8)]
        ours, theirs = torch.empty(40000), torch.zeros(40000)
        for index, grad in enumerate(grads):
            _C.accumulate([ours], [grad], 1.0, index == 0)
            theirs += grad
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("count", [40000, (1 << 19) + 5], ids=["cached", "non-temporal"])
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_terms_at_a_time(dtype: torch.dtype, start: bool, count: int) -> None:
    """The bits of one after the other."""
    total = torch.randn(count).to(torch.promote_types(dtype, torch.float32))
    once = total.clone()
    first, second = (torch.randn(count).to(dtype) for _ in range(2))
    _C.accumulate([once], [first], 1 / 3, start)
    _C.accumulate([once], [second], 1 / 3)
    _C.accumulate([total], [first], 1 / 3, start, [second])
    assert torch.equal(total, once)


@pytest.mark.parametrize("dtypes", list(itertools.permutations(DTYPES, 3)))
def test_types_of_two_terms(dtypes: tuple[torch.dtype, ...]) -> None:
    """Computed in fp64 if any is, and rounded to the sum's type at the end."""
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    total, first, second = (torch.randn(3000).to(dtype) for dtype in dtypes)
    expected = total.to(wide) + first.to(wide) + second.to(wide)
    _C.accumulate([total], [first], 1.0, False, [second])
    assert torch.equal(total, expected.to(total.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flat", range(3))
def test_layouts_of_two_terms(layout: str, flat: int) -> None:
    """One of the three lies in memory as in its shape, the others do not."""
    given = [LAYOUTS[layout](), *(like(LAYOUTS[layout](), torch.bfloat16) for _ in range(2))]
    given[flat] = given[flat].clone(memory_format=torch.contiguous_format)
    total, first, second = given
    expected = total + first.float() + second.float()
    _C.accumulate([total], [first], 1.0, False, [second])
    assert torch.equal(total, expected)


def test_threads_give_the_same_bits() -> None:
    term = torch.randn(1 << 20).to(torch.bfloat16)
    for more in (None, [term.flip(0)]):
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            total = torch.arange(1 << 20, dtype=torch.float32)
            _C.accumulate([total], [term], 1 / 3, False, more)
            found.append(total)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_what_is_started_is_not_read() -> None:
    total = torch.full((1000,), float("nan"))
    _C.accumulate([total], [torch.ones(1000, dtype=torch.bfloat16)], 2.0, True)
    assert torch.equal(total, torch.full((1000,), 2.0))


@pytest.mark.parametrize("shift", [0, 3, 16])
@pytest.mark.parametrize(("to", "of"), [(torch.float32, torch.bfloat16), (torch.float16,) * 2])
def test_a_large_sum_is_started(to: torch.dtype, of: torch.dtype, shift: int) -> None:
    """Past the caches, where it lies on whole cache lines; its neighbours stay as they are."""
    count = (1 << 19) + 5
    term = torch.randn(count).to(of)
    memory = torch.full((count + shift + 7,), float("nan"), dtype=to)
    _C.accumulate([memory[shift : shift + count]], [term], 1.0, True)
    assert torch.equal(memory[shift : shift + count], term.to(to))
    assert memory[:shift].isnan().all()
    assert memory[shift + count :].isnan().all()


@pytest.mark.parametrize(
    ("sums", "terms", "error", "text"),
    [
        ([torch.ones(3)], [], ValueError, "1 sums and 0 terms"),
        ([torch.ones(3)], [torch.ones(4)], TypeError, "term 0 is not of the sum's shape"),
        ([torch.ones(3)], [torch.ones(1, 3)], TypeError, "term 0 is not of the sum's shape"),
        ([torch.ones(3), 1.0], [torch.ones(3)] * 2, TypeError, "sum 1 is a float"),
        ([torch.ones(3)], [torch.ones(3, dtype=torch.int32)], TypeError, "term 0 is not of type"),
        ([torch.ones(1).expand(3)], [torch.ones(3)], TypeError, "sum 0 has several elements"),
        ([torch.ones(3)], [torch.eye(3).to_sparse()], TypeError, "term 0"),
    ],
)
def test_errors(sums: list, terms: list, error: type[Exception], text: str) -> None:
    before = sums[0].clone()
    with pytest.raises(error, match=text):
        _C.accumulate(sums, terms, 1.0)
    assert torch.equal(sums[0], before)


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ([], ValueError, "1 sums and 0 terms"),
        ([torch.ones(4)], TypeError, "further term 0 is not of the sum's shape"),
        ([1.0], TypeError, "further term 0 is a float"),
        ([torch.eye(3).to_sparse()], TypeError, "further term 0"),
        (5, TypeError, "not iterable"),
    ],
)
def test_errors_in_second_terms(more: Any, error: type[Exception], text: str) -> None:
    total = torch.ones(3)
    with pytest.raises(error, match=text):
        _C.accumulate([total], [torch.ones(3)], 1.0, False, more)
    assert torch.equal(total, torch.ones(3))


def test_a_sum_that_is_its_own_term() -> None:
    both, other = torch.ones(8), torch.ones(5)
    for terms in ([both[3:]], None), ([other], [both[3:]]):
        with pytest.raises(TypeError, match="sum 0 shares memory with its term"):
            _C.accumulate([both[:5]], terms[0], 1.0, False, terms[1])
