"""The order of torch's RandomSampler, in parts where torch draws in parts."""

from __future__ import annotations

from collections import deque

import torch

from ..types import State
from .draws import generator_of
from .orders import Order, Run

PART = 1 << 14  # about so many indices are drawn at once
PARTS_NOTED = 64  # states of the generator that are kept, for batches not delivered yet
OF_AN_EPOCH = ("seed", "generator", "global", "drawn", "then")  # in a state


class RandomOrder(Order):
    """As torch.utils.data.RandomSampler draws (torch/utils/data/sampler.py, RandomSampler).

    With replacement that sampler draws 32 indices at a time. Without, it draws permutations of all
    samples until it has `num_samples`. If there is more than one draw, indices are drawn in parts
    of about PART. A state then has the generator as it was before the part of its position. This
    needs a generator that nothing else draws from: the one that is made for an epoch if
    `sampler.generator` is None.
    """

    def _identity(self) -> dict[str, tuple[object, str]]:
        return {
            "length": (len(self.sampler.data_source), "a number of samples of"),
            "num_samples": (self.sampler.num_samples, "num_samples"),
        }

    def _load(self, state: State) -> None:
        if ("drawn" in state) != ("then" in state):
            raise KeyError("drawn" if "then" in state else "then")
        self.state.update({k: state[k] for k in OF_AN_EPOCH if k in state})

    def _draw(self) -> None:
        self._indices_from = self.state.get("drawn", 0)  # samples of the epoch before these
        self._drawn = torch.empty(0, dtype=torch.int64, device="cpu")
        self._noted: deque[tuple[int, torch.Tensor]] = deque(maxlen=PARTS_NOTED)
        self._is_torn = False  # an exception may have come between the lines that draw a part
        generator = self.sampler.generator
        if generator is None:
            if not self.state.keys() & {"seed", "generator"}:
                self.state["seed"] = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            self._to_start(generator)
            if "drawn" in self.state:
                generator.set_state(self.state["then"])
        elif "generator" in self.state:
            generator.set_state(self.state["generator"])
        else:
            self.state["generator"] = generator.get_state()
        self._generator = generator
        self._n, self._all = len(self.sampler.data_source), self.sampler.num_samples
        at_once = max(PART, 64 * self.batch_size)
        # torch's generator gives the same numbers, however many are asked for at once
        self._part = -(-at_once // 32) * 32 if self.sampler.replacement else self._n
        self._passes = 1 if self.sampler.replacement else max(1, at_once // self._n)
        if not self._is_in_parts:
            self._draw_part()

    def _to_start(self, generator: torch.Generator) -> None:
        """Brings the epoch's generator to its start."""
        if "seed" in self.state:
            generator.manual_seed(self.state["seed"])
        else:  # a state of a sampler with a generator
            generator.set_state(self.state["generator"])

    @property
    def _is_in_parts(self) -> bool:
        return bool(self.sampler.replacement) or self._all > self._n

    def _draw_part(self) -> None:
        """Goes on to the next part; of the one before it keeps what is asked for."""
        end = self._indices_from + len(self._drawn)
        if self._is_in_parts:
            self._noted.append((end, self._generator.get_state()))
        if self.sampler.replacement:
            size = min(self._part, self._all - end)
            drawn = torch.randint(
                self._n, (size,), dtype=torch.int64, generator=self._generator, device="cpu"
            )
        else:
            passes = min(self._passes, -(-(self._all - end) // self._n))
            permutations = [
                torch.randperm(self._n, generator=self._generator, device="cpu")
                for _ in range(passes)
            ]
            drawn = permutations[0] if passes == 1 else torch.cat(permutations)
        self._drawn = torch.cat((self._drawn, drawn)) if len(self._drawn) else drawn

    def _indices(self, start: int, count: int) -> Run:
        start += self.skipped
        if self._is_torn or start < self._indices_from:
            self._is_torn = True
            self._go_back(start)
        while start + count > self._indices_from + len(self._drawn):
            self._is_torn = True
            done = min(start - self._indices_from, len(self._drawn))
            self._drawn = self._drawn[done:].clone()  # without the memory of those before
            self._indices_from += done
            self._draw_part()
        self._is_torn = False
        return self._drawn, start - self._indices_from, count

    def _go_back(self, start: int) -> None:
        """To the part that has a sample, or to the first one if it is not known any more."""
        place = max((i for i, (at, _) in enumerate(self._noted) if at <= start), default=None)
        if place is None:
            self._indices_from = 0
            self._to_start(self._generator)
            self._noted.clear()
        else:
            self._indices_from, then = self._noted[place]
            self._generator.set_state(then)
            while len(self._noted) > place:
                self._noted.pop()
        self._drawn = self._drawn[:0]

    def _draw_at_end(self) -> None:
        """RandomSampler ends with the missing part of one more permutation."""
        n, generator = len(self.sampler.data_source), self.sampler.generator
        if generator is not None and self.sampler.num_samples % n == 0:
            torch.randperm(n, generator=generator)

    def state_after(self, batches: int) -> State:
        state = {**not_drawn(self), **super().state_after(batches)}
        if self.drawn:
            of_place = [each for each in self._noted if each[0] <= state["samples_yielded"]]
            for key in ("drawn", "then") if self._noted else ():
                state.pop(key, None)
            if of_place and of_place[-1][0]:
                state["drawn"], state["then"] = of_place[-1]
        return state

    def finished_state(self) -> State:
        return between_epochs(self)


def not_drawn(order: Order) -> State:
    """The state of the sampler's own generator where the epoch has not drawn from it yet."""
    own = generator_of(order.sampler)
    return {} if own is None or order.drawn else {"generator": own.get_state()}


def between_epochs(order: Order) -> State:
    state = {k: v for k, v in order.state.items() if k not in OF_AN_EPOCH}
    own = generator_of(order.sampler)
    if own is not None:
        state["generator"] = own.get_state()
    return state
