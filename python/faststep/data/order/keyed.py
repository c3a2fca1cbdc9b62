"""KeyedSampler: a shuffle that is computed index by index."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from ... import _C
from ..._torch.ranks import rank_and_world_size

AT_ONCE = 4096  # indices computed at a time


class KeyedSampler(Sampler[int]):
    """Shuffles any number of samples in no memory, by a permutation keyed by (seed, epoch).

    Takes no random numbers from torch. Each iteration is an epoch: `epoch` counts them by itself,
    and `set_epoch` sets the number of the next one.

    Args:
        data_source: the dataset, or anything with a length.
        seed: of all epochs. Default 0.
        num_replicas, rank: ranks that share the samples, and which of them this is. None, the
            default, takes them from torch.distributed where that is initialized, else 1 and 0.
        drop_last: leave out samples that do not make a whole round over the ranks, instead of
            giving some ranks a sample of the epoch's start again. Default False.

    The permutation is a Feistel network with cycle walking (csrc/io/shuffle.h).
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise ValueError("KeyedSampler takes both of num_replicas and rank, or neither")
        if num_replicas is None or rank is None:
            rank, num_replicas = rank_and_world_size()
        if not 0 <= rank < num_replicas:
            raise ValueError(f"KeyedSampler: rank {rank} is not one of {num_replicas}")
        self.data_source = data_source
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number `epoch`."""
        self.epoch = epoch

    def count_from(self, position: int) -> int:
        """How many samples this rank has from a place of the permutation, shared by all, on."""
        left = len(self.data_source) - position
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __len__(self) -> int:
        return self.count_from(0)

    def indices(self, epoch: int, position: int, start: int, stop: int) -> torch.Tensor:
        """Numbers start to stop of those that this rank has from `position` on: int64, 1-d."""
        found = torch.empty(stop - start, dtype=torch.int64, device="cpu")
        first = position + self.rank + start * self.num_replicas
        _C.permute(found, len(self.data_source), self.seed, epoch, first, self.num_replicas)
        return found

    def __iter__(self) -> Iterator[int]:
        epoch, count = self.epoch, len(self)
        self.epoch += 1
        for start in range(0, count, AT_ONCE):
            yield from self.indices(epoch, 0, start, min(start + AT_ONCE, count)).tolist()
