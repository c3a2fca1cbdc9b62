"""Windows of token files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..arrays.columns import CONVERSIONS, DOCUMENTS, POSITIONS, Column, ColumnDataset
from ..arrays.structure import LEAF, Structure
from ..types import Array, State
from .handles import located
from .mapped import map_array, map_npy

TOKEN_BYTES = {"uint16": 2, "uint32": 4}


class TokenWindow(NamedTuple):
    """A sample, or a batch, of a TokenDataset that knows where documents begin.

    Args:
        x: tokens.
        y: the tokens after these.
        position_ids: how many tokens of its document come before each token of x in the window.
        document_ids: the number of each token's document in the window, from 0.
    """

    x: torch.Tensor
    y: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor


def cu_seqlens(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where documents begin in a batch of windows that are laid end to end.

    Args:
        position_ids: of one window or a batch, (window,) or (batch, window).

    Returns:
        An int32 tensor with the place of each document's first token and, last, the number of all
        tokens; and the length of the longest document: what FlashAttention's functions for
        sequences of varying length take as `cu_seqlens` and `max_seqlen`.
    """
    flat = position_ids.reshape(-1)
    starts = torch.nonzero(flat == 0).reshape(-1).to(torch.int32)
    ends = torch.cat((starts, starts.new_tensor([flat.numel()])))
    return ends, int(ends.diff().max()) if len(starts) else 0


class TokenDataset(ColumnDataset):
    """Windows x and y of token files, y one token later, for training a language model.

    Args:
        files: one file or several (shards): `.npy` with one dimension of uint16 or uint32, or
            anything else as bare tokens in the machine's byte order. A window never crosses from
            one file to the next; what is left at a file's end is not used.
        window: tokens of x, and of y.
        stride: tokens from window to window; None, the default, is `window`. With 1 every place
            where a window fits is a sample.
        token_dtype: "uint16" or "uint32", of bare files. Default "uint16".
        dtype: of x and y: torch.int64, or torch.int32 for uint16 tokens. Default torch.int64.
        eos: the token that is the last of each document; samples are then of type TokenWindow, with
            position ids that begin again at 0 after it, and document ids. Default None: samples
            are (x, y).
        bos: the same for a token that is the first of each document; only one of the two.

    Windows are cut without regard to documents, and the part of a document that a window begins
    with counts as one. For attention within documents, `document_ids[q] == document_ids[k]` is the
    mask, and `cu_seqlens(position_ids)` tells FlashAttention the same. Where x is `eos`, y is of
    the next document: `y.masked_fill(x == eos, -100)` leaves that out of the loss.

    Files are mapped, not read. A pickled dataset holds the paths only.

    Raises:
        ValueError: a file is of another type or shape, or no file has room for a window.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        window: int,
        *,
        stride: int | None = None,
        token_dtype: str = "uint16",
        dtype: torch.dtype = torch.int64,
        eos: int | None = None,
        bos: int | None = None,
    ) -> None:
        if isinstance(files, (str, os.PathLike)):
            files = [files]
        self.files = [Path(file) for file in files]
        self.window = window
        self.stride = window if stride is None else stride
        self.token_dtype = token_dtype
        self.dtype = dtype
        self.eos, self.bos = eos, bos
        if eos is not None and bos is not None:
            raise ValueError(f"TokenDataset: eos {eos} and bos {bos}: give one of the two")
        if window < 1 or self.stride < 1:
            raise ValueError(f"TokenDataset: window {window} and stride {self.stride} must be >= 1")
        if token_dtype not in TOKEN_BYTES:
            raise ValueError(f"TokenDataset: token_dtype {token_dtype!r} is not in {TOKEN_BYTES}")
        self._open()
        if not len(self):
            longest = max((len(shard) for shard in self.shards), default=0)
            raise ValueError(
                f"TokenDataset: a window takes {window + 1} tokens, the longest of "
                f"{len(self.files)} files has {longest}"
            )

    def _open(self) -> None:
        self.shards = [self._map(file) for file in self.files]
        windows = [max(0, (len(s) - self.window - 1) // self.stride + 1) for s in self.shards]
        self.ends = list(itertools.accumulate(windows))

    def _map(self, file: Path) -> Array:
        import numpy

        if file.suffix == ".npy":
            tokens = map_npy(os.fspath(file))
            if tokens.ndim != 1:
                raise ValueError(f"TokenDataset: {file} has the shape {tokens.shape}")
        else:
            size, item = file.stat().st_size, TOKEN_BYTES[self.token_dtype]
            if size % item:
                raise ValueError(f"TokenDataset: {file}: {size} bytes are not whole tokens")
            if not size:  # nothing to map
                return numpy.empty(0, self.token_dtype)
            tokens = map_array(os.fspath(file), self.token_dtype, (size // item,))
        if (tokens.dtype.name, self.dtype) not in CONVERSIONS or not tokens.dtype.isnative:
            raise ValueError(
                f"TokenDataset: {file}: tokens of {tokens.dtype.str} as {self.dtype}; there are "
                "uint16 as torch.int32 or torch.int64, and uint32 as torch.int64"
            )
        largest = (1 << 8 * tokens.itemsize) - 1
        for name, token in (("eos", self.eos), ("bos", self.bos)):
            if token is not None and not 0 <= token <= largest:
                raise ValueError(
                    f"TokenDataset: {name} {token}: {file} has tokens from 0 to {largest}"
                )
        return tokens

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> Any:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        shard, window = located(self.ends, at)
        at = window * self.stride
        tokens = self.shards[shard][at : at + self.window + 1].astype("int64")
        both = torch.from_numpy(tokens).to(self.dtype)
        x, y = both[:-1].clone(), both[1:].clone()
        if self.eos is None and self.bos is None:
            return x, y
        return TokenWindow(x, y, *self._divide(x))

    def _divide(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Position ids and document ids of a window."""
        begins = x.eq(self.bos) if self.bos is not None else x.eq(self.eos or 0).roll(1)
        begins[0] = True
        places = torch.arange(len(x))
        starts = torch.where(begins, places, 0).cummax(0).values
        return (places - starts).to(self.dtype), (begins.cumsum(0) - 1).to(self.dtype)

    def _structure(self) -> tuple[Structure, list[str]]:
        """The containers of a sample, and the names of its parts."""
        if self.eos is None and self.bos is None:
            return Structure(tuple, (), (LEAF, LEAF)), ["x", "y"]
        return Structure(TokenWindow, (), (LEAF,) * 4), list(TokenWindow._fields)

    def _columns(self) -> list[tuple[Column, ...]]:
        """The parts of each file's samples as rows, which overlap."""
        parts = [(0, 0), (1, 0)]  # tokens after the window's first, what becomes of them
        if self.eos is not None or self.bos is not None:
            parts += [(0, POSITIONS), (0, DOCUMENTS)]
        boundary = (self.bos or 0, True) if self.eos is None else (self.eos, False)
        prototype = torch.empty((0, self.window), dtype=self.dtype, device="cpu")
        found = []
        for shard, end, before in zip(self.shards, self.ends, [0, *self.ends], strict=False):
            item = shard.itemsize
            columns = (
                Column(
                    prototype,
                    shard.ctypes.data + shift * item,
                    self.stride * item,
                    end - before,
                    shard,
                    mapped=True,
                    conversion=CONVERSIONS[shard.dtype.name, self.dtype] + division,
                    boundary=boundary if division else (0, False),
                )
                for shift, division in parts
            )
            found.append(tuple(columns))
        return found

    def __getstate__(self) -> State:
        return {k: v for k, v in vars(self).items() if k != "shards"}

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)
        before = self.ends
        self._open()
        if self.ends != before:
            raise ValueError(
                f"TokenDataset: {', '.join(map(str, self.files[:3]))}: the files are not what they "
                "were when the dataset was made"
            )
