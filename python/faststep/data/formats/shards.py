"""Streams of samples from many files, each read by one worker of one rank."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..._torch.ranks import rank_and_world_size
from ..types import State
from .common import SHOWN, FormatError, PathLike

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST_FILES = 1_000_000  # of one pattern


def shard_names(paths: PathLike | Sequence[PathLike]) -> list[str]:
    """File names: one, a list, or a pattern as "train-{000..041}.tar" or with * and ?.

    Raises:
        FileNotFoundError: nothing fits a pattern with * or ?.
        FormatError: the list is empty, or the ranges of a pattern stand for no file, or for more
            than a million.
    """
    if not isinstance(paths, (str, os.PathLike)):
        if not paths:
            raise FormatError("no file was given")
        return [name for path in paths for name in shard_names(path)]
    name = os.fspath(paths)
    if os.path.exists(name):
        return [name]
    if found := RANGE.search(name):
        _check_ranges(name)
        first, last = found.groups()
        numbers = range(int(first), int(last) + 1)
        names = [RANGE.sub(str(i).zfill(len(first)), name, count=1) for i in numbers]
        return shard_names(names)
    if glob.has_magic(name):
        if not (matching := sorted(glob.glob(name))):
            raise FileNotFoundError(f"no file fits {name}")
        return matching
    return [name]


def _check_ranges(name: str) -> None:
    count = 1
    for first, last in RANGE.findall(name):
        is_short = max(len(first), len(last)) < 19
        count *= int(last) - int(first) + 1 if is_short else MOST_FILES + 1
        if count < 1:
            raise FormatError(f"{name[:SHOWN]}: {{{first}..{last}}} stands for no file")
        if count > MOST_FILES:
            raise FormatError(
                f"{name[:SHOWN]}: its ranges stand for more than {MOST_FILES} files; a list can "
                "have more"
            )


class ShardedStream(IterableDataset[Any]):
    """Samples of files, one after another. Each file is read by one worker of one rank.

    Rank r of n takes every n-th file from the r-th on, and of these worker w of m every m-th. Files
    of different lengths give ranks different numbers of samples: where ranks must take the same
    number of steps, stop all of them at a count that each has (`itertools.islice`), or use
    torch's `Join`. The iterators have `state_dict` and `load_state_dict`.

    Args:
        paths: as for `shard_names`.
        shuffle_shards: another order of the files in each epoch, the same on all ranks; call
            `set_epoch` before each.
        seed: of that order.
        rank: which part of the files; None, the default: that of torch.distributed, if it is
            initialized.
        world_size: of how many parts.

    Raises:
        FormatError: there are fewer files than ranks.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        shuffle_shards: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.paths = shard_names(paths)
        self.shuffle_shards = shuffle_shards
        self.seed = seed
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank {rank} and world_size {world_size}: give both or none")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not among {world_size}")
        self.rank, self.world_size = rank, world_size
        # in shared memory: persistent workers have copies of this object
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the files, in workers that are running too."""
        self._epoch.fill_(epoch)

    def _place(self) -> tuple[int, int]:
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        return rank_and_world_size()

    @property
    def epoch(self) -> int:
        """The value that was set last."""
        return int(self._epoch)

    def shards(self, epoch: int | None = None) -> list[str]:
        """The files that this process reads in this epoch, or another one, in their order."""
        rank, world_size = self._place()
        if len(self.paths) < world_size:
            raise FormatError(
                f"{len(self.paths)} files for {world_size} ranks: some would have none to read "
                f"({', '.join(self.paths[:3])})"
            )
        paths = self.paths
        if self.shuffle_shards:
            generator = torch.Generator()
            generator.manual_seed(self.seed * 1_000_003 + (self.epoch if epoch is None else epoch))
            paths = [paths[i] for i in torch.randperm(len(paths), generator=generator).tolist()]
        worker = get_worker_info()
        mine = paths[rank::world_size]
        return mine if worker is None else mine[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[Any]:
        return _Reading(self)

    def samples(self, path: str, first: int) -> Iterator[Any]:
        """Of one file, from number `first` on; what is before is not decoded."""
        raise NotImplementedError

    def __getstate__(self) -> State:
        rank, world_size = self._place()  # a spawned worker does not know them
        return {**vars(self), "rank": rank, "world_size": world_size}


class _Reading(Iterator[Any]):
    """One worker's part of an epoch. Its state is how many files, and samples of one, it read."""

    def __init__(self, stream: ShardedStream) -> None:
        self._stream = stream
        self._epoch: int | None = None  # known with the first sample, or from a state
        self._paths: list[str] | None = None
        self._shard = self._sample = 0
        self._samples: Iterator[object] | None = None  # of the file that is being read

    def __next__(self) -> object:
        if self._paths is None:
            self._epoch = self._stream.epoch if self._epoch is None else self._epoch
            self._paths = self._stream.shards(self._epoch)
        while self._shard < len(self._paths):
            if self._samples is None:
                path = self._paths[self._shard]
                self._samples = self._stream.samples(path, self._sample)
            try:
                sample = next(self._samples, self)
            except Exception:
                self._shard = len(self._paths)  # it ends with an error
                raise
            if sample is not self:
                self._sample += 1
                return sample
            self._shard, self._sample, self._samples = self._shard + 1, 0, None
        raise StopIteration

    def state_dict(self) -> State:
        """For `load_state_dict` of a new iterator; small."""
        return {
            "epoch": self._epoch,
            "files": len(self._stream.paths),
            "shard": self._shard,
            "sample": self._sample,
        }

    def load_state_dict(self, state: State) -> None:
        """Goes on in the epoch of the state, whatever `set_epoch` has set.

        Raises:
            ValueError: the state is of another number of files.
        """
        files = len(self._stream.paths)
        if state["files"] != files:
            raise ValueError(f"this state is of a stream of {state['files']} files, not {files}")
        self._epoch, self._shard, self._sample = state["epoch"], state["shard"], state["sample"]
        self._paths = self._samples = None
