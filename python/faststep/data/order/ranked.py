"""Orders of samplers that several ranks share. A state counts the samples of all ranks."""

from __future__ import annotations

import copy
from itertools import cycle, islice

import torch
from torch.utils.data.distributed import DistributedSampler

from ..types import State
from .keyed import KeyedSampler
from .orders import Order, Run, SequentialOrder, other_epoch


class RankedOrder(Order):
    """With a position that all ranks share."""

    position = 0

    def _load(self, state: State) -> None:
        self.position = state["position"]
        self.state["epoch"] = state["epoch"]

    def _position_after(self, length: int, batches: int) -> int:
        """How many samples all ranks had, if each had so many batches since it was taken up."""
        ranks: int = self.sampler.num_replicas
        return min(length, self.position + (self.samples_in(batches) - self.skipped) * ranks)


class KeyedOrder(RankedOrder, SequentialOrder):
    """Of a KeyedSampler."""

    sampler: KeyedSampler

    def _identity(self) -> dict[str, tuple[object, str]]:
        return {
            "length": (len(self.sampler.data_source), "a number of samples of"),
            "seed": (self.sampler.seed, "the seed"),
        }

    def _count(self) -> int:
        return self.sampler.count_from(self.position)

    def _draw(self) -> None:
        super()._draw()
        self.epoch = self.state.get("epoch", self.sampler.epoch)
        if self.sampler.epoch != self.epoch:
            raise other_epoch(self.epoch, self.sampler.epoch)
        self.sampler.epoch += 1
        self.state.update(epoch=self.epoch)

    def _compute(self, start: int, stop: int) -> torch.Tensor:
        return self.sampler.indices(self.epoch, self.position, start, stop)

    def state_after(self, batches: int) -> State:
        return {
            **self.finished_state(),
            "epoch": self.state.get("epoch", self.sampler.epoch),
            "position": self._position_after(len(self.sampler.data_source), batches),
            "samples_yielded": self.samples_in(batches),
        }

    def finished_state(self) -> State:
        return {**self.state, "epoch": self.sampler.epoch}


class DistributedOrder(RankedOrder):
    """Of a DistributedSampler."""

    sampler: DistributedSampler[object]
    in_lists = True

    def _length(self) -> int:
        return len(self.sampler.dataset)  # type: ignore[arg-type]

    def _identity(self) -> dict[str, tuple[object, str]]:
        keys = ((key, getattr(self.sampler, key)) for key in ("seed", "shuffle", "drop_last"))
        return {
            "length": (self._length(), "a number of samples of"),
            **{key: (value, f"a DistributedSampler's {key}") for key, value in keys},
        }

    def _count(self) -> int:
        if not self.position:
            return len(self.sampler)
        left, ranks = self._length() - self.position, self.sampler.num_replicas
        return left // ranks if self.sampler.drop_last else -(-left // ranks)

    def _draw(self) -> None:
        epoch = self.state.setdefault("epoch", self.sampler.epoch)
        if self.sampler.epoch != epoch:
            raise other_epoch(epoch, self.sampler.epoch)
        self._list = self._rest() if self.position else [*self.sampler]

    def _rest(self) -> list[int]:
        """This rank's part of what all ranks have left, filled up as torch fills up an epoch."""
        alone = copy.copy(self.sampler)
        alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
        alone.num_samples = alone.total_size = self._length()
        everything = [*alone]
        ranks, rest = self.sampler.num_replicas, everything[self.position :]
        total = self._samples * ranks
        rest += islice(cycle(everything), max(0, total - len(rest)))
        return rest[self.sampler.rank : total : ranks]

    def _indices(self, start: int, count: int) -> Run:
        return self._list[start : start + count], 0, count

    def state_after(self, batches: int) -> State:
        return {
            "epoch": self.sampler.epoch,
            **super().state_after(batches),
            "position": self._position_after(self._length(), batches),
        }
