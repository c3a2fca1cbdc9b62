"""What training waits for on a slow network: delayed.py STEPS, for ranks.py.

Every collective, and every message of an all-gather, takes 5 ms longer than over loopback. A layer
takes 10 ms forward and 20 ms backward, in which it sleeps: so neither other programs nor the ranks
themselves, which share the cores, change the figures. Prints what rank 0 measured, as JSON: the
seconds per step that were waited for, and those that the same collectives take one after another
while nothing else runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import answer_of

DELAY, FORWARD, BACKWARD = 0.005, 0.010, 0.020  # seconds
LAYERS, WIDTH = 16, 64
WARM = 2  # steps before those that are measured


class Waited(NamedTuple):
    """What rank 0 found, in seconds per step."""

    in_forward: float  # for parameters
    gathering: float  # the all-gathers alone
    exposed: float  # for parameters, and from the last gradient to the end of the step
    everything: float  # reductions and all-gathers alone


class _Busy(torch.autograd.Function):
    """Takes the time of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(BACKWARD)
        return grad


class _Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Busy.apply(super().forward(x))
        return out


class _Late:
    """A message that arrives some milliseconds later than it does."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._at = time.perf_counter() + DELAY

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._at and self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


def plant_delay() -> None:
    """Delay what sharding sends from here on."""
    for name in ("all_to_all_single", "all_reduce", "isend", "irecv"):
        send = getattr(dist, name)

        def late(*args: Any, send: Callable[..., Any] = send, **options: Any) -> Any:
            work = send(*args, **options)
            return None if work is None else _Late(work)  # None: it has been waited for

        setattr(dist, name, late)


class _Clock:
    """Adds up the seconds spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*args)
        finally:
            self.seconds += time.perf_counter() - start


def _sharded(**options: Any) -> tuple[Any, Any]:
    from faststep.optim import AdamW
    from faststep.zero import shard

    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer(WIDTH, WIDTH) for _ in range(LAYERS)))
    bucket_mb = WIDTH * WIDTH * 4 / 2**20  # a layer
    return model, shard(model, AdamW(model.parameters()), bucket_mb=bucket_mb, **options)


def _train(model: Any, optimizer: Any, steps: int, clocks: list[_Clock]) -> float:
    """The median over the steps, after the first, of the seconds of these clocks in a step.

    Of the rank with the fewest: the other one also waits for that rank to get so far.
    """
    seconds = []
    for _ in range(WARM + steps):
        before = sum(clock.seconds for clock in clocks)
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(sum(clock.seconds for clock in clocks) - before)
    optimizer.wait()
    least = torch.tensor(seconds[WARM:])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return median(least.tolist())


def _alone(engine: Any, steps: int) -> tuple[float, float]:
    """Seconds of one all-gather of everything, and of one reduction, bucket after bucket."""
    gathering = reducing = 0.0
    for _ in range(steps):
        for number, bucket in enumerate(engine.buckets):
            for slot in bucket.slots:
                slot.arrived = False
            dist.barrier()
            start = time.perf_counter()
            bucket.send()
            bucket.receive()
            middle = time.perf_counter()
            bucket.gather(number).wait()
            gathering += time.perf_counter() - middle
            reducing += middle - start
    return gathering / steps, reducing / steps


def measure(steps: int) -> Waited:
    """The part of one rank."""
    plant_delay()
    model, optimizer = _sharded(gather="forward")
    engine = optimizer._engine
    engine.waits._wait = waits = _Clock(engine.wait)
    in_forward = _train(model, optimizer, steps, [waits])
    engine.gradients.finish = _Clock(engine.gradients.finish)
    engine.step = _Clock(engine.step)
    exposed = _train(model, optimizer, steps, [waits, engine.gradients.finish, engine.step])
    gathering, reducing = _alone(engine, steps)
    return Waited(in_forward, gathering, exposed, gathering + reducing)


if __name__ == "__main__":
    answer_of(lambda: measure(int(sys.argv[1]))._asdict())
