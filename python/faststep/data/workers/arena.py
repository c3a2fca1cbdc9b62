"""The memory that worker processes fill and the main process reads."""

from __future__ import annotations

import itertools
import os
import select
import threading
import weakref
from collections import Counter
from multiprocessing.reduction import DupFd
from typing import Any

from faststep import _C

__all__ = ["Arena", "ArenaPool", "arena_of"]

_keys = itertools.count(1)
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


class Arena:
    """A _C.Arena that parcels find by its key, and what came through it.

    Raises:
        MemoryError: there is no shared memory.
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.memory = _C.Arena()
        self.process = os.getpid()
        self.in_blocks = 0  # tensors and arrays of the batches that came
        self.otherwise: Counter[str] = Counter()  # tensors that torch transported, by reason
        self._pinned: list[tuple[int, list[int]]] = []  # ends of pipes, and blocks
        _arenas[self.key] = self

    def __reduce__(self) -> Any:
        """For workers that are not forked; only while one is started."""
        return _Attached, (self.key, DupFd(self.memory.fileno()), self.memory.reserve())

    def pin(self) -> int | None:
        """Keeps the blocks that a child is about to see until all copies of an end are closed."""
        blocks = self.memory.pin()
        if not blocks:
            return None
        read_end, write_end = os.pipe()  # if that fails the blocks stay as they are for ever
        self._pinned.append((read_end, blocks))
        return write_end

    def unpin_what_no_child_sees(self) -> None:
        for entry in list(self._pinned):
            read_end, blocks = entry
            if _is_closed(read_end):
                self._pinned.remove(entry)
                os.close(read_end)
                for block in blocks:
                    self.memory.unpin(block)

    def forget_pins(self) -> None:
        """In a child: the blocks are its parent's."""
        for read_end, _ in self._pinned:
            os.close(read_end)
        self._pinned = []

    def __del__(self) -> None:
        for read_end, _ in getattr(self, "_pinned", []):
            os.close(read_end)


class _Attached:
    """An arena of the main process in a worker that was not forked."""

    def __init__(self, key: int, file: Any, reserve: int) -> None:
        self.key = key
        self.memory = _C.Arena(file.detach(), reserve)


def arena_of(key: int) -> Arena:
    """The arena of this process with that key.

    Raises:
        RuntimeError: a batch came to a process that did not start its worker.
    """
    arena = _arenas.get(key)
    if arena is None or arena.process != os.getpid():
        raise RuntimeError("a batch of a DataLoader worker came to another process than its own")
    return arena


def _is_closed(read_end: int) -> bool:
    poll = select.poll()
    poll.register(read_end, 0)
    return bool(poll.poll(0))


# A forked child shares the memory of the batches that its parent holds: they must stay as they are
# while it lives. It has one end of a pipe that nobody writes to; when that is closed, the other end
# says so.
_forking = threading.Lock()
_write_ends: list[int] = []


def _before_fork() -> None:
    _forking.acquire()
    for arena in list(_arenas.values()):
        write_end = arena.pin() if arena.process == os.getpid() else None
        if write_end is not None:
            _write_ends.append(write_end)


def _after_fork_in_parent() -> None:
    while _write_ends:
        os.close(_write_ends.pop())
    _forking.release()


def _after_fork_in_child() -> None:
    _write_ends.clear()  # they are open until the child ends
    _forking.release()
    for arena in list(_arenas.values()):
        arena.forget_pins()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


class ArenaPool:
    """The arena of a loader, lent to one of its iterators at a time."""

    def __init__(self) -> None:
        self._idle: Arena | None = None
        self._latest: Arena | None = None

    def prepare(self) -> None:
        """Has an arena to lend.

        Raises:
            MemoryError: there is no shared memory.
        """
        if self._idle is None or self._idle.process != os.getpid():
            self._idle = Arena()

    def lend(self) -> Arena:
        self.prepare()
        arena, self._idle = self._idle, None
        assert arena is not None
        self._latest = arena
        return arena

    def give_back(self, arena: Arena) -> None:
        """`arena` may be used again: none of its iterator's workers lives."""
        arena.memory.sweep()
        arena.unpin_what_no_child_sees()
        self._idle = arena

    def explain(self) -> str:
        text = "processes fetch the samples; batches come through shared memory that is used again"
        if self._latest is None:
            return text
        count, others = self._latest.in_blocks, self._latest.otherwise
        text += f" ({count} tensors and arrays did so far)"
        if others:
            reasons = "; ".join(f"{number}: {reason}" for reason, number in others.most_common(5))
            text += f"; torch transported {sum(others.values())} tensors by itself ({reasons})"
        return text
