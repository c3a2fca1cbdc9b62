"""Memory of tensors that stays while it is read without the GIL, whatever becomes of the tensor.

torch moves a storage in place, and frees what was there: `share_memory_()` and pickling for a
worker or queue do so, and `resize_`. A reference to the tensor does not prevent that. The record of
a storage names who owns its memory and how that is freed; the C side (csrc/py/load/hold.c) puts a
count there. Where these words are is found by experiment, as in records.py: a tensor whose
record must have certain numbers shows it, and then one is held, moved and let go. If anything comes
out otherwise `hold` raises, and nothing of torch's is ever written.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Literal

import torch
import torch.multiprocessing

from .. import _C
from .tensors import storage_record_of

_lock = threading.Lock()
# what _places says; False: memory cannot be held; None: it was not tried yet
_known: tuple[int, int, int] | Literal[False] | None = None
_WORDS = 8  # of a storage's record that are looked at; it has more


class NotHeld(Exception):  # noqa: N818 - it says why another way is taken, and is not an error
    """Why the memory of tensors cannot be held."""


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, over the same memory, which stays as long as it lives.

    Of shared or page-locked memory only a reference to the storage is kept, because torch
    recognizes such memory by its owner. So it is for memory without an owner, which is never freed.

    Args:
        tensor: a dense torch.Tensor in CPU memory, of a type that DLPack knows.

    Raises:
        NotHeld: this torch keeps the owner of memory in a way that is not known; or the memory is
            shared in another way than torch sends tensors to processes in, and moves then.
    """
    if not tensor.numel() or tensor.is_pinned():
        return tensor.detach()
    places = _places_if_known()
    if not places:
        raise NotHeld(f"torch {torch.__version__} does not let its memory be held")
    _, free, owner = places
    if tensor.untyped_storage().is_shared():
        strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        if _words(tensor)[free] != _freed_by(strategy, free):
            raise NotHeld(
                "its memory is shared, but not as torch.multiprocessing's sharing strategy "
                f"{strategy!r} does it: torch moves it when it is sent to a process"
            )
        return tensor.detach()
    tensor.data_ptr()  # memory that is shared until it is written gets its own copy
    if not _words(tensor)[owner]:
        return tensor.detach()
    return _C.hold(tensor, storage_record_of(tensor))


@functools.cache
def _freed_by(strategy: str, place: int) -> int:
    """The function that frees memory shared by the strategy in use; at `place` in a record."""
    with torch.inference_mode(False):
        sample = torch.empty(1, dtype=torch.uint8, device="cpu")
        sample.share_memory_()  # type: ignore[no-untyped-call]
    return _words(sample)[place]


def _words(tensor: torch.Tensor) -> list[int]:
    record = storage_record_of(tensor)
    return list((ctypes.c_uint64 * _WORDS).from_address(record))


def _places() -> tuple[int, int, int] | None:
    """Of the address, of what frees the memory, and of its owner, which follow each other."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (1000, 3000)]
    a, b = ([word == t.data_ptr() for word in _words(t)] for t in tensors)
    if a != b or a.count(True) != 2:
        return None
    first, last = a.index(True), _WORDS - 1 - a[::-1].index(True)  # memory is its own owner
    of_a, of_b = map(_words, tensors)
    free = {1: first + 2, 2: first + 1}.get(last - first)
    if free is None or free >= _WORDS or not of_a[free] == of_b[free] != 0:
        return None
    return first, free, last


def _works(places: tuple[int, int, int]) -> bool:
    """True if memory is held when its tensor moves, and freed when both have let go."""
    before, tensor = _C.holds(), torch.arange(4096)
    address, freed_by = tensor.data_ptr(), _words(tensor)[places[1]]
    first = _C.hold(tensor, storage_record_of(tensor))
    second = _C.hold(tensor, storage_record_of(tensor))
    if _C.holds() != before + 1 or tensor.data_ptr() != address:
        return False
    tensor.untyped_storage().resize_(1 << 16)
    words = _words(tensor)
    if words[places[0]] == address or words[places[1]] != freed_by:
        return False
    right = first.data_ptr() == address and bool(torch.equal(second, torch.arange(4096)))
    del first
    right = right and _C.holds() == before + 1
    del second
    return right and _C.holds() == before


def _places_if_known() -> tuple[int, int, int] | Literal[False]:
    global _known
    with _lock:  # nobody else holds anything before this is known
        if _known is None:
            _known = _find()
        return _known


def _find() -> tuple[int, int, int] | Literal[False]:
    with torch.inference_mode(False), torch.device("cpu"):  # scripts may have set another default
        places = _places() if ctypes.sizeof(ctypes.c_void_p) == 8 else None
        if places is None:
            return False
        _C.use_owners(*places)
        if _works(places):
            return places
    _C.use_owners()
    return False
