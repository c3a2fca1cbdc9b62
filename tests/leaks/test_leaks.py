"""No public function of faststep._C keeps memory or references, whatever it is called with.

The fuzzer makes the calls, the same ones again and again. C memory is what glibc says is in use,
Python's own is its count of allocated blocks, and tensors must go with the case that made them.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from faststep import _C
from fuzz import child
from fuzz.world import FaultError

CALLS = 64
ROUNDS = 10
SLACK = 16  # bytes for each call, of which malloc hands out no less than 24; half a block
CASES = 8  # of each function of the fuzzer, repeated so often:
TIMES = 16


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """Bytes that malloc has handed out; 0 under a sanitizer or a libc that does not say."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def assert_no_growth(*calls: Callable[[], Any], times: int = CALLS) -> None:
    """One round without growth is enough: caches fill up for a while, a leak grows each time."""
    gc.collect()
    gc.freeze()  # what is there now need not be looked at again
    grown = []
    try:
        for _ in range(ROUNDS):
            before = bytes_in_use(), sys.getallocatedblocks()
            for call in calls:
                for _ in range(times):
                    call()
            gc.collect()
            grown.append((bytes_in_use() - before[0], sys.getallocatedblocks() - before[1]))
            if grown[-1][0] < SLACK * times and grown[-1][1] < times // 2:
                return
    finally:
        gc.unfreeze()
    raise AssertionError(f"grew by (bytes, blocks) in each round of {times} calls: {grown}")


def assert_references_stay(call: Callable[[], Any], arguments: Iterable[Any]) -> None:
    arguments = list(arguments)
    for _ in range(3):  # what is remembered of the tensors is there then
        call()
    before = [sys.getrefcount(argument) for argument in arguments]
    for _ in range(20):
        call()
    assert [sys.getrefcount(argument) for argument in arguments] == before


def failing(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """A call that must raise, without the bookkeeping of pytest.raises."""

    def call() -> None:
        try:
            function(*arguments)
        except Exception:
            return
        pytest.fail(f"{function} took {arguments}")

    return call


@pytest.mark.parametrize("name", child.TARGETS)
def test_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without calls in the fuzzer fails the fuzzer's own tests."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # hostile finalizers raise
    counts: Counter[tuple[str, bool]] = Counter()

    def case(number: int) -> None:
        try:
            counts.update(child.run_case(name, number, lambda line: None, (name,) * 3))
        except FaultError:
            raise
        except Exception:
            counts["not made", False] += 1  # what a call was to be made of cannot be made
        _C.end_retaining()

    try:
        assert_no_growth(*(functools.partial(case, n) for n in range(CASES)), times=TIMES)
    finally:
        gc.enable()
    assert counts["not made", False] < 0.5 * counts.total()


def test_the_measure_notices_a_leak() -> None:
    """The check itself: a call that keeps 64 bytes of C memory, or one object, fails it."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    kept: list[Any] = []
    if bytes_in_use():
        with pytest.raises(AssertionError, match="grew by"):
            assert_no_growth(lambda: malloc(64))
    with pytest.raises(AssertionError, match="grew by"):
        assert_no_growth(lambda: kept.append(object()))
    with pytest.raises(AssertionError):
        assert_references_stay(lambda: kept.append(malloc), [malloc])
