"""The memory that worker processes fill and the main process reads."""

from __future__ import annotations

import atexit
import itertools
import os
import select
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from ... import _C
from ..deliver.copies import memory_owners

_keys = itertools.count(1)
_arenas: weakref.WeakValueDictionary[int, KeyedArena] = weakref.WeakValueDictionary()


class KeyedArena:
    """A _C.Arena with a key, by which packed batches find it, and counts of what came through it.

    Raises:
        MemoryError: there is no shared memory.
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.memory = _C.Arena()
        self.process = os.getpid()
        self.in_blocks = 0  # tensors and arrays of the batches that came
        self.otherwise: Counter[str] = Counter()  # tensors that torch transported, by reason
        self.locks = False  # whether blocks are page-locked for a device
        self.unlocked: str | None = None  # why one is not
        self.lost = 0  # blocks that are held because nobody can tell when a child has ended
        self._kept: list[tuple[_Child, list[int]]] = []  # blocks that children see
        _arenas[self.key] = self

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """For workers that are not forked; only while one is started."""
        return _Attached, (self.key, DupFd(self.memory.fileno()), self.memory.reserve())

    def keep(self, child: _Child, blocks: list[int]) -> None:
        """Keeps blocks that `memory.pin` returned until a child has ended."""
        self._kept.append((child, blocks))

    def unpin_what_no_child_sees(self) -> None:
        for entry in list(self._kept):
            child, blocks = entry
            if child.has_ended():
                self._kept.remove(entry)
                for block in blocks:
                    self.memory.unpin(block)

    def prepare_locks(self, device: int) -> bool:
        """True if blocks can be page-locked for a CUDA device; if not, `unlocked` says why."""
        try:
            self.memory.prepare_locks(device)
        except (RuntimeError, MemoryError) as error:
            self.unlocked = str(error)
        else:
            self.locks, self.unlocked = True, None
            memory_owners.add(self)
        return self.locks

    def locked(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """The bytes of a storage where they are page-locked, if they are in a block that is."""
        if not self.locks:
            return None
        try:
            return self.memory.locked(storage.data_ptr(), storage.nbytes())
        except (RuntimeError, MemoryError) as error:
            self.unlocked = str(error)
            return None


class _Attached:
    """An arena of the main process in a worker that was not forked."""

    def __init__(self, key: int, file: Any, reserve: int) -> None:
        self.key = key
        self.memory = _C.Arena(file.detach(), reserve)


def arena_of(key: int) -> KeyedArena:
    """The arena of this process with that key.

    Raises:
        RuntimeError: a batch came to a process that did not start its worker.
    """
    arena = _arenas.get(key)
    if arena is None or arena.process != os.getpid():
        raise RuntimeError("a batch of a DataLoader worker came to another process than its own")
    return arena


atexit.register(_C.keep_locked_memory, True)


class _Child:
    """The end of a pipe. A forked child has the other end as long as it lives."""

    def __init__(self, read_end: int) -> None:
        self._read_end = read_end

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._read_end, 0)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        os.close(self._read_end)


# A forked child shares the memory of the batches that its parent holds: they must stay as they are
# while it lives. It has one end of a pipe that nobody writes to; when that is closed, the other end
# says so.
_forking = threading.Lock()
_write_ends: list[int] = []


def _before_fork() -> None:
    own = [arena for arena in list(_arenas.values()) if arena.process == os.getpid()]
    seen = [(arena, blocks) for arena in own if (blocks := arena.memory.pin())]
    if not seen:
        return
    try:
        read_end, write_end = os.pipe()
    except OSError:  # no descriptor is left: the blocks stay as they are as long as the arena
        for arena, blocks in seen:
            arena.lost += len(blocks)
        return
    child = _Child(read_end)
    _write_ends.append(write_end)
    for arena, blocks in seen:
        arena.keep(child, blocks)


def _after_fork_in_parent() -> None:
    while _write_ends:
        os.close(_write_ends.pop())


def _after_fork_in_child() -> None:
    _write_ends.clear()  # they are open until the child ends
    for arena in list(_arenas.values()):
        arena._kept = []  # the blocks are its parent's


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
# Held around the three. It is released where an interrupt ends one of them: these are no functions
# of Python's.
os.register_at_fork(
    before=_forking.acquire,
    after_in_parent=_forking.release,
    after_in_child=_forking.release,
)


class Workers:
    """What a loader keeps for its workers from epoch to epoch.

    Those that are processes get its arena, which is lent to one iterator at a time.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._idle: KeyedArena | None = None
        self._latest: KeyedArena | None = None
        self.reason: str | None = None  # why torch's own iterator has to do it

    def prepare(self) -> bool:
        """Has an arena to lend; False, and `reason` says why, if there is no shared memory."""
        self.reason = None
        if self._idle is None or self._idle.process != os.getpid():
            try:
                self._idle = KeyedArena()
            except MemoryError as error:
                self.reason = str(error)
        return self.reason is None

    def lend(self) -> KeyedArena:
        """The arena that was prepared."""
        arena, self._idle = self._idle, None
        assert arena is not None
        self._latest = arena
        return arena

    def give_back(self, arena: KeyedArena) -> None:
        """`arena` may be used again: none of its iterator's workers lives."""
        arena.memory.sweep()
        arena.unpin_what_no_child_sees()
        self._idle = arena

    @property
    def path(self) -> str:
        if self._method == "thread":
            return "threads"
        return "workers" if self.reason is None else "torch"

    def slots(self) -> dict[str, int] | None:
        """How many blocks of memory there are for the newest iterator; None if it has none."""
        if self._latest is None:
            return None
        counts = self._latest.memory.counts()
        return {key: counts[key] for key in ("made", "free", "taken", "held")}

    def explain(self) -> str:
        if self._method == "thread":
            return "threads fetch and collate the samples"
        if self.reason is not None:
            return f"torch's own iterator loads the batches: {self.reason}"
        text = "processes fetch the samples; batches come through shared memory that is used again"
        if self._latest is None:
            return text
        count, others = self._latest.in_blocks, self._latest.otherwise
        text += f" ({count} tensors and arrays did so far)"
        if self._latest.locks:
            text += "; a device reads it where it is, page-locked"
        if self._latest.unlocked is not None:
            text += f"; not all of it is page-locked: {self._latest.unlocked}"
        if self._latest.lost:
            text += f"; {self._latest.lost} blocks stay unused, as a fork found no free descriptor"
        if others:
            reasons = "; ".join(f"{number}: {reason}" for reason, number in others.most_common(5))
            text += f"; torch transported {sum(others.values())} tensors by itself ({reasons})"
        return text
