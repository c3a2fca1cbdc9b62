"""What an offloaded step costs where the device is simulated: its memory is ordinary memory.

    python benchmarks/offload.py                 # all rows
    python benchmarks/offload.py --elements 8e6 --rounds 1   # a quick look

The link is real copies that take as long as over a link of that rate, in each direction. A host
step is measured in seconds of the processor, which other programs change less than the time of day;
of the rest the best of some rounds is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import faststep
from faststep.cli.console import table

FEW_BITS: dict[str, Any] = {"master_weights": "remainder16", "state_dtype": "int8"}
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    # dtype, options, and the bytes of an element that a step reads and writes, copies included
    "fp32": (torch.float32, {}, 8 + 28 + 8),
    "few bits": (torch.bfloat16, FEW_BITS, 4 + 14.1 + 4),
}


class Run(NamedTuple):
    """Parameters with gradients, their optimizer and its threads."""

    params: list[nn.Parameter]
    grads: list[Tensor]
    optimizer: Any
    pipe: Any


class Times(NamedTuple):
    """Seconds of each engine, of the step, and of the backward before it."""

    copy_in: float
    update: float
    copy_out: float
    step: float
    backward: float


def make(name: str, elements: int, max_norm: float | None = None) -> Run:
    dtype, options, _ = FORMATS[name]
    sizes = [1 << 20] * max(1, elements >> 20)
    params = [nn.Parameter(torch.full((size,), 0.5, dtype=dtype)) for size in sizes]
    optimizer = faststep.optim.AdamW(params, betas=(0.9, 0.95), max_grad_norm=max_norm, **options)
    offloaded = faststep.offload(optimizer, threads=1)
    grads = [torch.full_like(param, 1e-3).detach() for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()
    return Run(params, grads, optimizer, offloaded._copies.pipe)


def busy(run: Run, step: Callable[..., float], *arguments: float) -> Times:
    before = run.pipe.busy()
    start = time.perf_counter()
    backward = step(run, *arguments)
    took = time.perf_counter() - start
    spent = [now - was for now, was in zip(run.pipe.busy(), before, strict=True)]
    return Times(*spent, took - backward, backward)


def at_once(run: Run) -> float:
    """A step whose gradients are all there, and go to the host in it."""
    run.optimizer.step()
    return 0.0


def after_backward(run: Run, seconds: float) -> float:
    """A step behind a backward pass of sleeps, in which the gradients arrive by their hooks."""
    start = time.perf_counter()
    for param, grad in zip(reversed(run.params), reversed(run.grads), strict=True):
        param.grad = None
        time.sleep(seconds / len(run.params))
        param.backward(grad)
    took = time.perf_counter() - start
    run.optimizer.step()
    return took


def hidden(times: Times) -> float:
    """The share of the two shorter engines' time that does not lengthen a step at once."""
    engines = times[:3]
    return (sum(engines) - times.step) / (sum(engines) - max(engines))


def hidden_behind_backward(times: Times) -> float:
    """The same where copies in belong to backward, and updates begin behind it."""
    behind = times.update, times.copy_out
    return 1.0 - (times.step - max(behind)) / (times.copy_in + min(behind))


def stream_rate(source: Tensor, target: Tensor) -> float:
    """Bytes that copy_ reads and writes per second of the processor."""
    start = time.process_time()
    target.copy_(source)
    return 2 * source.nbytes / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=float, default=1.25e8)
    parser.add_argument("--link-elements", type=float, default=2.5e7)
    parser.add_argument("--rate", type=float, default=5e8, help="bytes per second of the link")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = host_steps(int(asked.elements), asked.rounds)
    for name in FORMATS:
        rows += link(name, int(asked.link_elements), asked.rate, asked.rounds)
    print(table(["row", "value"], [[name, value] for name, value in rows]))


def host_steps(elements: int, rounds: int) -> list[tuple[str, str]]:
    best: dict[str, float] = {}
    rate, source = 0.0, torch.ones(elements)
    target = source.clone()
    runs = {name: make(name, elements) for name in FORMATS}
    for _ in range(rounds):  # in turns
        rate = max(rate, stream_rate(source, target))
        for name, run in runs.items():
            start = time.process_time()
            at_once(run)
            best[name] = min(best.get(name, 1e9), time.process_time() - start)
    rows = [("copy_", f"{rate / 1e9:.1f} GB/s")]
    for name, (_, _, size) in FORMATS.items():
        count = sum(param.numel() for param in runs[name].params)
        least = size * count / rate
        text = f"{best[name]:.3f} s for {count / 1e6:.0f}M, {best[name] / least:.2f}x copy_"
        rows.append((f"host step, {name}", text))
    rows.append(("few bits against fp32", f"{best['fp32'] / best['few bits']:.2f}x faster"))
    return rows


def link(name: str, elements: int, rate: float, rounds: int) -> list[tuple[str, str]]:
    rows = []
    for what, max_norm in (("no clipping", None), ("clipping", 0.5)):
        run = make(name, elements, max_norm)
        size = sum(param.nbytes for param in run.params)
        run.pipe.pace(rate, rate)
        found = []
        for _ in range(rounds):
            if max_norm is None:
                times = busy(run, at_once)
                found.append((hidden(times), times))
            else:
                times = busy(run, after_backward, 1.1 * size / rate)
                found.append((hidden_behind_backward(times), times))
        share, times = max(found)
        rows.append((f"{what}, {name}", f"{100 * share:.0f} % hidden; {shown(times)}"))
    return rows


def shown(times: Times) -> str:
    names = ("in", "update", "out", "step", "backward")
    return ", ".join(f"{name} {1e3 * t:.0f}" for name, t in zip(names, times, strict=True)) + " ms"


if __name__ == "__main__":
    main()
