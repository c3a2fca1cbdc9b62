"""The offsets of the fields of torch's TensorImpl and StorageImpl, measured at import.

A step reads thousands of small tensors, and asking torch about each takes longer than the update.
Most of them are as they were in the step before. To see that, the C side compares some 8-byte
words of these records with what they were when torch
was asked (csrc/py/torch/tensor_record.h), and needs their offsets. Nothing here depends on a
version of torch. `find` makes tensors with known sizes, strides and addresses, and searches their
records for these numbers. It then checks that every known way to change a tensor changes a word
that is compared, and that no two tensors of kinds.py have equal words. If a check fails, `find`
says why, and torch is asked every time: slower, but the same results.
FASTSTEP_RECORDS=0 chooses that.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .kinds import different_tensors
from .library import address_of
from .tensors import lazy_clone, neg_view, record_of, storage_record_of

_WORDS = 22  # that a tensor's record has at least: 176 bytes in torch 2.13, and 184 in 2.11
_META_WORDS = 12
_STORAGE_WORDS = 8
_ATTEMPTS = 5  # what is not in use in a record may by chance be a number that is looked for


class RecordLayout(NamedTuple):
    """Places in words of 8 bytes; see fst_record_layout."""

    impl_in_object: int
    storage_in_impl: int
    data_in_storage: int
    meta_in_impl: int
    grad_in_meta: int
    counter_in_impl: int
    ndim: int
    sizes: int
    strides: int
    offset: int
    numel: int
    kind: int  # this word and the next one are compared under masks
    kind_mask: int
    next_mask: int
    countable: int  # the bits of the next one that say that a tensor has a version counter
    negated: int  # the bit that says that it is a lazily negated view, or 0
    move_version: int  # the address of torch's function, or 0


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _place(words: Sequence[int], wanted: Sequence[int]) -> int:
    """Where `wanted` stands in `words`; ValueError unless it is there exactly once."""
    size = len(wanted)
    places = [i for i in range(len(words) - size + 1) if list(words[i : i + size]) == list(wanted)]
    if len(places) != 1:
        raise ValueError(f"the numbers {list(wanted)} are in {len(places)} places of a record")
    return places[0]


def _search() -> RecordLayout:
    """The layout; ValueError where something is not to be found."""
    memory = torch.empty(150_000, dtype=torch.uint8)
    strange = memory.as_strided((13, 17, 19), (1009, 53, 1), 100_003)
    impl = _words(record_of(strange), _WORDS)
    storage = _words(storage_record_of(strange), _STORAGE_WORDS)
    sizes, strides = _place(impl, (13, 17, 19)), _place(impl, (1009, 53, 1))
    offset, numel = _place(impl, (100_003,)), _place(impl, (13 * 17 * 19,))
    kind = max(sizes, strides, offset, numel) + 1
    # The two words of the kind are behind those that were found, however long the record is.
    if impl[sizes - 1] != 3:
        raise ValueError("the record is not laid out as it should be")
    leaf = torch.empty(2, requires_grad=True)
    leaf.grad = torch.empty(2)
    with_meta, without = _words(record_of(leaf), _WORDS), _words(record_of(leaf.grad), _WORDS)
    (meta,) = [i for i in range(min(sizes, strides) - 1) if with_meta[i] and not without[i]]
    return RecordLayout(
        _place(_words(id(strange), torch.Tensor.__basicsize__ // 8), (record_of(strange),)),
        _place(impl, (storage_record_of(strange),)),
        storage.index(memory.data_ptr()),  # the owner may be the same again
        meta,
        _place(_words(with_meta[meta], _META_WORDS), (record_of(leaf.grad),)),
        _place_of_counter(min(sizes, strides) - 1),
        sizes - 1,
        sizes,
        strides,
        offset,
        numel,
        kind,
        _mask(kind),
        _mask(kind + 1),
        _countable(kind + 1),
        _negated(kind + 1),
        address_of("bump_version"),
    )


def _place_of_counter(end: int) -> int:
    """Where a record refers to the version counter, which detach() shares and .data does not.

    Before `end`: what is behind that may not be in use.
    """
    tensor = torch.zeros(4)
    shared, own = tensor.detach(), tensor.data
    words, same, other = (_words(record_of(t), _WORDS) for t in (tensor, shared, own))
    (place,) = [i for i in range(end) if words[i] == same[i] != other[i]]
    return place


def _countable(place: int) -> int:
    """The bits of a word that only tensors with a version counter have."""
    with torch.inference_mode():
        without = torch.zeros(4)
    tensor = torch.zeros(4)
    has, has_not = (_words(record_of(t), place + 1)[place] for t in (tensor, without))
    return has & ~has_not


def _negated(place: int) -> int:
    """The bit of a word that all negated views have and no other tensor; 0 if it is not one."""
    tensor, conjugate = torch.zeros(4), torch.zeros(4, dtype=torch.complex64).conj()
    others = [tensor, tensor[1:], tensor[0], torch.nn.Parameter(tensor), conjugate, conjugate.real]
    others += [*(tensor for _, tensor in different_tensors()), *_equal_tensors()]
    others += [conjugate.imag.resolve_neg()]
    views = [neg_view(tensor), neg_view(tensor[0]), torch.nn.Parameter(neg_view(tensor))]
    views += [conjugate.imag, conjugate.imag[0], conjugate.imag.data, neg_view(tensor.double())]
    with_it, without = (
        [_words(record_of(t), place + 1)[place] for t in tensors if t.is_neg() == negated]
        for tensors, negated in ((views, True), (others, False))
    )
    bits = functools.reduce(operator.and_, with_it) & ~functools.reduce(operator.or_, without)
    return bits if bits.bit_count() == 1 else 0


def _equal_tensors() -> Iterator[Tensor]:
    """Tensors without any difference but what their memory had before they were made."""
    program = ctypes.CDLL(None)  # Python's own functions may write to what they free
    allocate, free = program.malloc, program.free
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    sizes = range(8 * _WORDS, 16 * _WORDS, 16)
    for byte in (0x00, 0xFF, 0x55, 0xAA):
        blocks = [(allocate(size), size) for size in sizes for _ in range(2)]
        for block, size in blocks:
            if block:
                ctypes.memset(block, byte, size)
            free(block)
        yield torch.zeros(4)


def _differences(tensors: Iterable[Tensor], place: int) -> int:
    """The bits of a word that are not the same in all the tensors' records."""
    words = [_words(record_of(tensor), place + 1)[place] for tensor in tensors]
    return functools.reduce(operator.or_, (word ^ words[0] for word in words))


def _mask(place: int) -> int:
    """The bits of a word that are compared: all but those that torch leaves as memory had them."""
    return (1 << 64) - 1 & ~_differences(_equal_tensors(), place)


def _seen(layout: RecordLayout, tensor: Tensor) -> tuple[int, ...]:
    """The words that the C side compares."""
    impl = _words(id(tensor), layout.impl_in_object + 1)[-1]
    words = _words(impl, layout.kind + 2)
    storage, meta = words[layout.storage_in_impl], words[layout.meta_in_impl]
    memory = _words(storage, _STORAGE_WORDS)[layout.data_in_storage :][:3] if storage else []
    grad = _words(meta, _META_WORDS)[layout.grad_in_meta] if meta else 0
    ndim = words[layout.ndim]
    shape = [*words[layout.sizes :][:ndim], *words[layout.strides :][:ndim]]
    kind = words[layout.kind] & layout.kind_mask, words[layout.kind + 1] & layout.next_mask
    numbers = ndim, words[layout.offset], words[layout.numel]
    return (impl, storage, grad, *memory, *numbers, *shape, *kind)


_OF_A_PARAMETER: dict[str, Callable[[Tensor], object]] = {
    "new data": lambda t: setattr(t, "data", torch.zeros_like(t)),
    "that it is negated": lambda t: setattr(t, "data", neg_view(t.data)),
    "a new gradient": lambda t: setattr(t, "grad", torch.ones_like(t)),
    "that its gradient is gone": lambda t: setattr(t, "grad", None),
}
_OF_ANY: dict[str, Callable[[Tensor], object]] = {
    "new data": _OF_A_PARAMETER["new data"],
    "that it is negated": _OF_A_PARAMETER["that it is negated"],
    "a storage of another size": lambda t: t.untyped_storage().resize_(1 << 16),
    "that it shares its memory with a lazy clone": lazy_clone,
    "another storage": lambda t: t.set_(torch.zeros(2, 3)),  # type: ignore[call-overload]
    "another shape": lambda t: t.resize_(3, 2),
    "transposition": lambda t: t.t_(),
    "another place in its storage": lambda t: t.as_strided_((2, 2), (3, 1), 1),
    "another dimension": lambda t: t.unsqueeze_(0),
}


def _notices(layout: RecordLayout, change: Callable[[Tensor], object], requires_grad: bool) -> bool:
    tensor = torch.zeros(2, 3, requires_grad=requires_grad)
    tensor.grad = torch.zeros(2, 3) if requires_grad else None
    before = _seen(layout, tensor)
    if before != _seen(layout, tensor):
        return False
    with torch.no_grad():
        kept = change(tensor)
    noticed = before != _seen(layout, tensor)
    del kept  # not before: a clone shares the memory only as long as it lives
    return noticed


def _unnoticed(layout: RecordLayout) -> str:
    """Which change of a tensor, or difference between two, would not be seen; "" if all would."""
    for name, change in _OF_A_PARAMETER.items():
        if not _notices(layout, change, True):
            return f"a parameter's record does not show {name}"
    for name, change in _OF_ANY.items():
        if not _notices(layout, change, False):
            return f"a tensor's record does not show {name}"
    seen: dict[tuple[int, ...], str] = {}
    for name, tensor in different_tensors():
        other = seen.setdefault(_seen(layout, tensor)[-2:], name)
        if other != name:
            return f"{name} has a record like that of {other}"
    return ""


def _moves_versions(layout: RecordLayout) -> bool:
    """True if torch's function moves the version counters of tensors that have one."""
    if not layout.countable or not layout.move_version:
        return False
    move = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(layout.move_version)
    tensor = torch.zeros(4)
    for moved in (tensor, torch.nn.Parameter(tensor.clone()), tensor.clone()[1:]):
        before = moved._version
        move(id(moved) + 8 * layout.impl_in_object)
        if moved._version != before + 1:
            return False
    return tensor._version == 1


def find() -> tuple[RecordLayout | None, str]:
    """The layout of this torch's records; or None, and why they cannot be relied on."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None, "addresses do not have 8 bytes"
    reason, others = "", []
    for _ in range(_ATTEMPTS):
        with torch.inference_mode(False), torch.device("cpu"):  # scripts may have set others
            try:
                layout = _search()
                if not (reason := _unnoticed(layout)):
                    moves = _moves_versions(layout)
                    return (layout if moves else layout._replace(move_version=0)), ""
                return None, reason
            except (ValueError, AttributeError, RuntimeError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
        others.append(torch.empty(3))  # so that the next attempt gets other memory
    return None, reason
