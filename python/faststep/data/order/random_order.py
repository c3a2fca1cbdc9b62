"""The order of torch's RandomSampler."""

from __future__ import annotations

import torch

from ..types import State
from .draws import generator_of
from .orders import Order, Run

OF_AN_EPOCH = ("seed", "generator", "global")  # in a state


class RandomOrder(Order):
    """As torch.utils.data.RandomSampler draws (torch/utils/data/sampler.py, RandomSampler).

    With replacement that sampler draws 32 indices at a time; torch's generator gives the same
    numbers, however many are asked for at once. Without, it draws permutations of all samples until
    it has `num_samples`.
    """

    def _identity(self) -> dict[str, tuple[object, str]]:
        return {
            "length": (len(self.sampler.data_source), "a number of samples of"),
            "num_samples": (self.sampler.num_samples, "num_samples"),
        }

    def _load(self, state: State) -> None:
        self.state.update({k: state[k] for k in OF_AN_EPOCH if k in state})

    def _draw(self) -> None:
        generator = self.sampler.generator
        if generator is None:
            if not self.state.keys() & {"seed", "generator"}:
                self.state["seed"] = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            if "seed" in self.state:
                generator.manual_seed(self.state["seed"])
            else:  # a state of a sampler with a generator
                generator.set_state(self.state["generator"])
        elif "generator" in self.state:
            generator.set_state(self.state["generator"])
        else:
            self.state["generator"] = generator.get_state()
        n, count = len(self.sampler.data_source), self.sampler.num_samples
        if self.sampler.replacement:
            self._drawn = torch.randint(
                n, (count,), dtype=torch.int64, generator=generator, device="cpu"
            )
        else:
            passes = [
                torch.randperm(n, generator=generator, device="cpu")
                for _ in range(max(1, -(-count // n)))
            ]
            self._drawn = passes[0] if len(passes) == 1 else torch.cat(passes)

    def _indices(self, start: int, count: int) -> Run:
        return self._drawn, self.skipped + start, count

    def _draw_at_end(self) -> None:
        """RandomSampler ends with the missing part of one more permutation."""
        n, generator = len(self.sampler.data_source), self.sampler.generator
        if generator is not None and self.sampler.num_samples % n == 0:
            torch.randperm(n, generator=generator)

    def state_after(self, batches: int) -> State:
        return {**not_drawn(self), **super().state_after(batches)}

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
