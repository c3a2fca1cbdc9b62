"""``python -m faststep demo``: trains one small GPT twice, with torch alone and with faststep."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import faststep

from . import plots
from .busy import Watch, busy_note
from .console import CommandError, Progress, table
from .gpt import GPT, GPTConfig, standard_library_text, windows
from .report import times

__all__ = ["HELP", "Run", "add_arguments", "run", "train"]

HELP = "train a small GPT twice from one seed, with torch and with faststep, and compare"

CHAIN = "optimizer chain"
WHOLE = "whole step"
PHASES = ("data", "forward", "backward", CHAIN)
MAX_NORM = 1.0
LEARNING_RATE = 5e-4

_PLOT = "demo.png"
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``demo``."""
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument(
        "--precision",
        choices=list(_PRECISIONS),
        default="fp32",
        help="autocast of the forward pass; 16-bit types are slow on many CPUs; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--torch-fused", action="store_true", help="compare with torch.optim.AdamW(fused=True)"
    )
    plots.add_arguments(parser, _PLOT)


@dataclass
class Run:
    """One of the two trainings: its model, its optimizer chain and what it recorded."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    chain: Callable[[], None]
    batches: Iterator[tuple[Tensor]]
    losses: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: int = 0

    def step(self, precision: torch.dtype | None) -> None:
        """Train one step and record its loss and the time of each phase."""
        clock = [time.perf_counter()]
        (batch,) = next(self.batches)
        tokens, targets = batch[:, :-1].long(), batch[:, 1:].long()
        clock.append(time.perf_counter())
        with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
            loss = self.model(tokens, targets)
        clock.append(time.perf_counter())
        self.scaler.scale(loss).backward()
        clock.append(time.perf_counter())
        scale = self.scaler.get_scale()
        chain_start = time.perf_counter()
        self.chain()
        clock.append(clock[-1] + time.perf_counter() - chain_start)
        self.skipped += self.scaler.get_scale() < scale
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        for phase, start, end in zip(PHASES, clock, clock[1:], strict=False):
            self.seconds.setdefault(phase, []).append(end - start)
        self.seconds.setdefault(WHOLE, []).append(clock[-1] - clock[0])

    def scaling(self) -> str:
        """What the loss scaling did."""
        return f"loss scale {self.scaler.get_scale():g} at the end, {self.skipped} steps skipped"

    def medians(self) -> dict[str, float]:
        """The median seconds of each phase, without the first steps, which warm up."""
        return {
            phase: statistics.median(seconds[min(3, len(seconds) // 2) :])
            for phase, seconds in self.seconds.items()
        }


def _model(seed: int, config: GPTConfig) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def _batches(
    loader: type[DataLoader[Any]], dataset: TensorDataset, batch_size: int, seed: int
) -> Iterator[tuple[Tensor]]:
    """Yield batches without end, in an order that follows from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    made = loader(dataset, batch_size, shuffle=True, drop_last=True, generator=generator)
    while True:
        yield from made


def torch_run(
    seed: int, config: GPTConfig, dataset: TensorDataset, batch_size: int, fused: bool
) -> Run:
    """The script as it is written with torch alone."""
    model = _model(seed, config)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused or None)
    scaler = torch.amp.GradScaler("cpu")

    def chain() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    name = "torch, fused=True" if fused else "torch"
    batches = _batches(DataLoader, dataset, batch_size, seed)
    return Run(name, model, optimizer, scaler, chain, batches)


def faststep_run(seed: int, config: GPTConfig, dataset: TensorDataset, batch_size: int) -> Run:
    """The same script with faststep's classes, clipping inside the step."""
    model = _model(seed, config)
    optimizer = faststep.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = faststep.amp.GradScaler("cpu")

    def chain() -> None:
        scaler.step(optimizer, max_norm=MAX_NORM)
        scaler.update()

    batches = _batches(faststep.data.DataLoader, dataset, batch_size, seed)
    return Run("faststep", model, optimizer, scaler, chain, batches)


def train(arguments: argparse.Namespace) -> tuple[Run, Run]:
    """Train both runs. They take turns, so that other programs slow both alike."""
    if arguments.steps < 1 or arguments.batch_size < 1:
        raise CommandError("--steps and --batch-size must be at least 1")
    text, config = standard_library_text(), GPTConfig()
    what = (arguments.seed, config, windows(text, config.context), arguments.batch_size)
    if len(what[2]) < arguments.batch_size:
        raise CommandError(f"--batch-size: the text has {len(what[2])} windows")
    ours, theirs = faststep_run(*what), torch_run(*what, arguments.torch_fused)
    parameters = list(theirs.model.parameters())
    print(
        f"A GPT of {sum(p.numel() for p in parameters) / 1e6:.1f} M parameters in "
        f"{len(parameters)} tensors learns {len(text) / 1e6:.1f} MB of the standard library's "
        f"source:\n{arguments.steps} steps of {arguments.batch_size} x {config.context} bytes, "
        f"{arguments.precision}, seed {arguments.seed}, {torch.get_num_threads()} threads.",
        flush=True,
    )
    precision = _PRECISIONS[arguments.precision]
    progress = Progress(arguments.steps)
    for i in range(arguments.steps):
        for each in (theirs, ours) if i % 2 == 0 else (ours, theirs):
            each.step(precision)
        progress.show(i + 1, f"loss {theirs.losses[-1]:.4f} / {ours.losses[-1]:.4f}")
    progress.close()
    return theirs, ours


def report(theirs: Run, ours: Run) -> str:
    """The table of phases, the losses and a summary, as text."""
    a, b = theirs.medians(), ours.medians()
    rows = [
        [phase, f"{1e3 * a[phase]:.2f}", f"{1e3 * b[phase]:.2f}", times(a[phase] / b[phase])]
        for phase in (*PHASES, WHOLE)
    ]
    gaps = [abs(x - y) for x, y in zip(theirs.losses, ours.losses, strict=True)]
    # max() ignores NaN, and a diverged run must show it.
    gap = math.nan if any(map(math.isnan, gaps)) else max(gaps)
    other = 100 * (1 - a[CHAIN] / a[WHOLE])
    chain, whole = times(a[CHAIN] / b[CHAIN]), times(a[WHOLE] / b[WHOLE])
    return "\n".join(
        [
            table(["median ms per step", theirs.name, ours.name, "ratio"], rows),
            "(optimizer chain: unscale, inf check, clip by global norm, AdamW, scale update)",
            "",
            *(
                f"Loss with {x.name}: {x.losses[0]:.4f} -> {x.losses[-1]:.4f}; " + x.scaling()
                for x in (theirs, ours)
            ),
            f"Largest difference between the loss curves: {gap:.2e}",
            "",
            f"Data, forward and backward take {other:.0f} % of torch's step on this CPU; faststep "
            f"does not change forward and backward.",
            f"The optimizer chain is {chain} as fast as torch's, the whole step {whole}.",
        ]
    )


def run(arguments: argparse.Namespace) -> None:
    """Train, print the comparison, and write the plot."""
    output = plots.plot_path(arguments, _PLOT)
    watch = Watch()
    theirs, ours = train(arguments)
    note = busy_note(watch.others())
    print("\n" + report(theirs, ours))
    if note:
        print(note)
    if output is not None:
        plots.plot_curves(
            output,
            "A small GPT on the standard library's source, from one seed",
            {theirs.name: theirs.losses, ours.name: ours.losses},
            {theirs.name: theirs.medians(), ours.name: ours.medians()},
        )
        print(f"Plot: {output}")
