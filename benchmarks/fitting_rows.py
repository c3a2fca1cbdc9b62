"""Peaks and times of steps that `faststep.memory.fit` keeps within a limit.

    python benchmarks/fitting_rows.py               # a table
    python benchmarks/fitting_rows.py MODEL SHARE   # figures of one, as JSON

A limit is a share of what the peak of plain steps takes above the memory before a step. Each is
that of a new process, which calls `retain()`. Steps with AdamW run plain, fitted and with all
blocks checkpointed in turn. They have one thread; a time is the least of the processor's, and a
peak the highest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import faststep
from faststep.cli.console import table
from faststep.cli.scripts.gpt import GPT, GPTConfig
from faststep.memory.activations import step_memory
from faststep.memory.recompute import Recomputed
from faststep.zero.stage3.blocks import blocks_of

SHARES = (0.8, 0.6, 0.45)
ROUNDS = 4
KINDS = ("plain", "fitted", "all")


class BasicBlock(nn.Module):
    """Two convolutions with a residual (He et al., 2015)."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.down = nn.Sequential()
        if before != width:
            conv = nn.Conv2d(before, width, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inside = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inside)) + self.down(x))


def gpt() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Eight layers of 256, 8 x 256 tokens."""
    model = GPT(GPTConfig(layers=8, width=256, context=256))
    tokens, targets = torch.randint(256, (2, 8, 256))
    return model, lambda: model(tokens, targets)


def resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    """ResNet-18 for small images, 16 x 3 x 64 x 64."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [BasicBlock(*pair) for pair in pairwise(widths)]
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    model = nn.Sequential(*stem, *blocks, *head)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    return model, lambda: functional.cross_entropy(model(images), labels)


MODELS = {"GPT": gpt, "ResNet-18": resnet}


class Row(NamedTuple):
    """Bytes above the memory before a step, and seconds, by kind of step; none if nothing fits."""

    limit: float
    peaks: dict[str, float]
    seconds: dict[str, float]
    blocks: int
    checkpointed: int
    largest: int  # bytes that a block saves: how fine a limit can be met
    text: str  # the table of fit(), or why no choice of blocks fits


def one(name: str, share: float) -> Row:
    """Of this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    faststep.memory.retain()
    model, loss = MODELS[name]()
    optimizer = faststep.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    step()
    update()
    nothing = faststep.memory.fit(model, step, "1TB")
    start, peak = step_memory(step, torch.device("cpu"))
    update()
    largest = max(row.saved for row in nothing.rows)
    limit = share * (peak - start)
    try:
        fitted = faststep.memory.fit(model, step, int(start + limit))
    except MemoryError as error:
        return Row(limit, {}, {}, len(nothing.rows), 0, largest, f"{error}; {start / 2**20:.1f}")
    chosen = {row.name for row in fitted.rows if row.checkpointed}
    fitted.remove()
    names = {id(module): path for path, module in model.named_modules()}
    blocks = [(names[id(block)], block) for block in blocks_of(model)]
    peaks, seconds = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, float("inf"))
    buffers = [(each, "num_batches_tracked") for each in model.modules() if is_norm(each)]
    for _ in range(ROUNDS):
        for kind in KINDS:
            put = [
                Recomputed(block, [pair for pair in buffers if pair[0] in set(block.modules())])
                for path, block in blocks
                if kind == "all" or (kind == "fitted" and path in chosen)
            ]
            for each in put:
                each.put()
            timed: list[float] = []

            def step_and_time(timed: list[float] = timed) -> None:
                begun = time.process_time()
                step()
                timed.append(time.process_time() - begun)

            before, top = step_memory(step_and_time, torch.device("cpu"))
            update()
            peaks[kind] = max(peaks[kind], top - before)
            seconds[kind] = min(seconds[kind], *timed, float("inf"))
            for each in put:
                each.take_off()
    return Row(limit, peaks, seconds, len(blocks), len(chosen), largest, str(fitted))


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


def cells(row: Row) -> list[str]:
    """Of the table, after the first two."""
    fine = f"{row.largest / row.limit:.0%}"
    if not row.peaks:
        return ["no choice fits", fine, *["-"] * 5]
    plain = row.seconds["plain"]
    return [
        f"{row.checkpointed} of {row.blocks}",
        fine,
        f"{row.peaks['fitted'] / row.limit:.0%}",
        f"{row.peaks['fitted'] / 2**20:.0f}",
        f"{row.peaks['all'] / 2**20:.0f}",
        f"{row.seconds['fitted'] / plain:.2f}x",
        f"{row.seconds['all'] / plain:.2f}x",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("share", nargs="?", type=float)
    options = parser.parse_args()
    if options.share is not None:
        print(json.dumps(one(options.model, options.share)))
        return
    rows = []
    for name in MODELS:
        for share in SHARES:
            command = [sys.executable, __file__, name, str(share)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = Row(*json.loads(done.stdout))
            print(row.text, file=sys.stderr, flush=True)
            rows.append([name, f"{share:.0%}", *cells(row)])
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["model", "limit", "checkpointed", "largest block of limit", "peak of limit"]
    header += ["peak MiB", "peak MiB, all", "time", "time, all"]
    print(table(header, rows, markdown=True))


if __name__ == "__main__":
    main()
