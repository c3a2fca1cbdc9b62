"""Windows of token files."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .columns import CONVERSIONS, Column

__all__ = ["TokenDataset"]

TOKEN_BYTES = {"uint16": 2, "uint32": 4}


class TokenDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
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
    ) -> None:
        if isinstance(files, (str, os.PathLike)):
            files = [files]
        self.files = [Path(file) for file in files]
        self.window = window
        self.stride = window if stride is None else stride
        self.token_dtype = token_dtype
        self.dtype = dtype
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

    def _map(self, file: Path) -> Any:
        import numpy

        if file.suffix == ".npy":
            tokens = numpy.load(file, mmap_mode="r")
            if tokens.ndim != 1:
                raise ValueError(f"TokenDataset: {file} has the shape {tokens.shape}")
        else:
            size, item = file.stat().st_size, TOKEN_BYTES[self.token_dtype]
            if size % item:
                raise ValueError(f"TokenDataset: {file}: {size} bytes are not whole tokens")
            if not size:  # nothing to map
                return numpy.empty(0, self.token_dtype)
            tokens = numpy.memmap(file, self.token_dtype, mode="r")
        if (tokens.dtype.name, self.dtype) not in CONVERSIONS or not tokens.dtype.isnative:
            raise ValueError(
                f"TokenDataset: {file}: tokens of {tokens.dtype.str} as {self.dtype}; there are "
                "uint16 as torch.int32 or torch.int64, and uint32 as torch.int64"
            )
        return tokens

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        shard = bisect.bisect_right(self.ends, at)
        at = (at - (self.ends[shard - 1] if shard else 0)) * self.stride
        tokens = self.shards[shard][at : at + self.window + 1].astype("int64")
        both = torch.from_numpy(tokens).to(self.dtype)
        return both[:-1].clone(), both[1:].clone()

    def columns(self) -> list[tuple[Column, Column]]:
        """x and y of each file as rows, which overlap."""
        prototype = torch.empty((0, self.window), dtype=self.dtype, device="cpu")
        found = []
        for shard, end, before in zip(self.shards, self.ends, [0, *self.ends], strict=False):
            item = shard.itemsize
            x, y = (
                Column(
                    prototype,
                    shard.ctypes.data + shift * item,
                    self.stride * item,
                    end - before,
                    shard,
                    mapped=True,
                    conversion=CONVERSIONS[shard.dtype.name, self.dtype],
                )
                for shift in (0, 1)
            )
            found.append((x, y))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("shards", "ends")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()
