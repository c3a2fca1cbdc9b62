"""Loss curves of a small GPT with each format of the optimizer's states.

    python benchmarks/loss_curves.py CURVES.csv            # train what it lacks; a table
    python benchmarks/loss_curves.py CURVES.csv --plot docs/loss-curves.png

All trainings run under bf16 autocast, with AdamW and one thread, on the text of Python's reference,
which comes with Python. A seed draws the weights and the order of the text, so the formats of one
seed see the same batches. The last loss is that of text that was not trained on.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import pydoc_data.topics
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import faststep
from faststep.cli.console import table
from faststep.cli.plots import new_figure
from faststep.cli.scripts.gpt import GPT, GPTConfig

STEPS, WARM_UP, EVERY = 1000, 50, 10
SEEDS = (0, 1, 2)
BETAS = (0.95, 0.999)
ROWS, CONTEXT = 16, 64
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_dtype": "bf16"},
    "bf16, stochastic": {"state_dtype": "bf16", "rounding": "stochastic"},
    "int8": {"state_dtype": "int8"},
    "int8 and remainders": {"state_dtype": "int8", "master_weights": "remainder16"},
}
COLOURS = ("#8c8c8c", "#d62728", "#ff7f0e", "#17becf", "#1f77b4")

Run = tuple[str, float, int]  # format, second beta, seed


def text() -> tuple[Tensor, Tensor]:
    """What is trained on, and what is not, as bytes."""
    pages = "".join(page for _, page in sorted(pydoc_data.topics.topics.items()))
    tokens = torch.tensor(list(pages.encode("ascii", "ignore")))
    kept = len(tokens) // 10
    return tokens[:-kept], tokens[-kept:]


def batches(tokens: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.Generator().manual_seed(seed)
    within = torch.arange(CONTEXT + 1)
    while True:
        begins = torch.randint(len(tokens) - CONTEXT, (ROWS, 1), generator=order)
        rows = tokens[begins + within]
        yield rows[:, :-1], rows[:, 1:]


def rate(step: int) -> float:
    """Of the learning rate: up in a line, then down to a tenth as a cosine."""
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return (step + 1) / WARM_UP if done < 0 else 0.55 + 0.45 * math.cos(math.pi * done)


def train(name: str, beta: float, seed: int, steps: int = STEPS) -> list[float]:
    """The mean losses of each ten steps, and at last that of text not trained on."""
    torch.manual_seed(seed)
    trained, kept = text()
    model = GPT(GPTConfig(layers=2, heads=4, width=64, context=CONTEXT, vocabulary=128))
    options = FORMATS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of betas[1] = 0.999, which is what is measured
        optimizer = faststep.optim.AdamW(
            model.parameters(),
            lr=2e-3,
            betas=(0.9, beta),
            weight_decay=0.1,
            max_grad_norm=1.0,
            **options,
        )
    if "master_weights" in options:
        faststep.amp.low_precision_weights(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(*batch)
        return loss

    losses = []
    for batch in itertools.islice(batches(trained, seed), steps):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    means = [statistics.fmean(losses[i : i + EVERY]) for i in range(0, steps, EVERY)]
    with torch.no_grad():
        last = [loss_of(batch).item() for batch in itertools.islice(batches(kept, 7), 64)]
    return [*means, statistics.fmean(last)]


def read(path: Path) -> dict[Run, list[float]]:
    """The curves of a file; none of one that is not there."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return {(row[0], float(row[1]), int(row[2])): list(map(float, row[3:])) for row in rows}


def complete(path: Path) -> dict[Run, list[float]]:
    """The curves of a file, to which those that it lacks are appended."""
    known = read(path)
    runs = [(name, beta, seed) for beta in BETAS for seed in SEEDS for name in FORMATS]
    with path.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if not known:
            steps = [f"steps to {step}" for step in range(EVERY, STEPS + 1, EVERY)]
            rows.writerow(["states", "betas[1]", "seed", *steps, "not trained on"])
        for run in runs:
            if run not in known:
                known[run] = train(*run)
                rows.writerow([*run, *(f"{loss:.5f}" for loss in known[run])])
                file.flush()
    return known


def as_table(curves: dict[Run, list[float]]) -> str:
    """The last losses of each seed, and how far they are from those of fp32 states."""
    rows = []
    for beta, name in itertools.product(BETAS, FORMATS):
        last = [curves[name, beta, seed][-1] for seed in SEEDS]
        plain = [curves["fp32", beta, seed][-1] for seed in SEEDS]
        apart = [f"{mine - other:+.4f}" for mine, other in zip(last, plain, strict=True)]
        rows.append(
            [
                name,
                f"{beta}",
                ", ".join(f"{loss:.4f}" for loss in last),
                "" if name == "fp32" else ", ".join(apart),
            ]
        )
    return table(["states", "betas[1]", "loss, seeds 0, 1, 2", "less fp32's"], rows, markdown=True)


def _smooth(curve: list[float], width: int = 5) -> list[float]:
    return [statistics.fmean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]


def plot(output: Path, curves: dict[Run, list[float]]) -> None:
    """The band of fp32's seeds, and the mean curve of each format; and its last losses."""
    figure = new_figure(10, 7)
    grid = figure.subplots(2, len(BETAS), height_ratios=(3, 2), squeeze=False)
    steps = range(EVERY, STEPS + 1, EVERY)
    for column, beta in enumerate(BETAS):
        above, below = grid[0][column], grid[1][column]
        for number, (name, colour) in enumerate(zip(FORMATS, COLOURS, strict=True)):
            smooth = [_smooth(curves[name, beta, seed][:-1]) for seed in SEEDS]
            if name == "fp32":
                least, most = (list(map(pick, zip(*smooth, strict=True))) for pick in (min, max))
                above.fill_between(steps, least, most, color=colour, alpha=0.5, label="fp32, band")
            else:
                mean = list(map(statistics.fmean, zip(*smooth, strict=True)))
                above.plot(steps, mean, color=colour, linewidth=1, label=name)
            last = [curves[name, beta, seed][-1] for seed in SEEDS]
            below.scatter(last, [number] * len(last), color=colour, s=18)
            if name == "fp32":
                below.axvspan(min(last), max(last), color=colour, alpha=0.25, linewidth=0)
        above.set_title(f"betas = (0.9, {beta})", fontsize=10)
        above.set_xlabel("step")
        above.set_yscale("log")
        above.set_yticks([2, 2.5, 3, 4], ["2", "2.5", "3", "4"])
        above.minorticks_off()
        above.legend(fontsize=8)
        below.set_yticks(range(len(FORMATS)), list(FORMATS))
        below.invert_yaxis()
        below.set_xlabel("loss of other text after 1000 steps, three seeds")
    grid[0][0].set_ylabel("loss, mean of 50 steps")
    figure.savefig(output, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curves", type=Path, metavar="CSV")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = complete(options.curves)
    print(as_table(curves))
    if options.plot is not None:
        plot(options.plot, curves)


if __name__ == "__main__":
    main()
