"""Peak memory of training GPT-2 small with each format of states, and the size of its checkpoints.

    python benchmarks/state_memory.py [PEAKS.png]       # a table and a plot, in bytes per parameter
    python benchmarks/state_memory.py --one FORMAT KIND # bytes of one, as JSON

A peak is that of the resident memory of a new process in two steps of 16 tokens with AdamW, less
what it was before the model was made. The head is not tied to the embedding: torch has three
tensors of its size at once where it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import faststep
from faststep.cli.console import table
from faststep.cli.scripts.gpt import GPT, GPTConfig
from memory import MODELS, of_new_process, resident

KINDS = ("plain", "release")


class Format(NamedTuple):
    """What a format is, and what the documentation says that it takes."""

    options: dict[str, Any]
    sums: tuple[float, float]  # bytes per parameter, with gradients and with release
    is_narrow: bool = False  # bf16 parameters


FORMATS = {
    "fp32": Format({}, (16, 12)),
    "fp32, bf16 states": Format({"state_dtype": "bf16"}, (12, 8)),
    "fp32, int8 states": Format({"state_dtype": "int8"}, (10.06, 6.06)),
    "bf16, fp32 masters": Format({"master_weights": "fp32"}, (16, 14), True),
    "bf16, remainders": Format({"master_weights": "remainder16"}, (14, 12), True),
    "bf16, remainders, bf16 states": Format(
        {"master_weights": "remainder16", "state_dtype": "bf16"}, (10, 8), True
    ),
    "bf16, remainders, int8 states": Format(
        {"master_weights": "remainder16", "state_dtype": "int8"}, (8.06, 6.06), True
    ),
}


class Found(NamedTuple):
    """Bytes per parameter."""

    peak: float
    largest: float  # of the gradients, which has to exist
    file: float  # what the states of model and optimizer take when they are saved


def tiny() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = GPT(GPTConfig(layers=1, heads=1, width=8, context=8))
    return model, lambda: model(*torch.randint(256, (2, 1, 8)))


def train(
    name: str, kind: str, made: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
) -> tuple[nn.Module, Any]:
    """Two steps."""
    chosen = FORMATS[name]
    model, loss = made()
    if chosen.is_narrow:
        model.bfloat16()
    optimizer = faststep.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), **chosen.options
    )
    release = faststep.release_gradients(model, optimizer) if kind == "release" else None
    for _ in range(2):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    if release is not None:
        release.remove()
    return model, optimizer


def one(name: str, kind: str) -> Found:
    """Of this process."""
    torch.manual_seed(0)
    train(name, kind, tiny)  # libraries and thread pools
    before = resident()
    model, optimizer = train(name, kind, MODELS["GPT-2 small, untied"])
    peak = resident() - before
    count = sum(param.numel() for param in model.parameters())
    largest = max(param.nbytes for param in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save([model.state_dict(), optimizer.state_dict(native=True)], path)
        file = path.stat().st_size
    return Found(peak / count, largest / count, file / count)


def measured(name: str, kind: str) -> Found:
    """Of a new process."""
    return Found(*of_new_process(__file__, "--one", name, kind))


def plot(found: Sequence[tuple[str, Found, Found]], output: str) -> None:
    """The peaks of each format, with gradients and with release."""
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for kind, offset, colour in (("plain", -0.2, "tab:blue"), ("release", 0.2, "tab:orange")):
        places = [number + offset for number in range(len(found))]
        peaks = [one[1 + KINDS.index(kind)].peak for one in found]
        sums = [FORMATS[name].sums[KINDS.index(kind)] for name, *_ in found]
        label = "gradients stay" if kind == "plain" else "gradients are released"
        axes.barh(places, peaks, height=0.38, color=colour, label=f"peak, {label}")
        axes.scatter(sums, places, color="black", marker="|", s=90)
    axes.scatter([], [], color="black", marker="|", s=90, label="sum of the tensors")
    axes.set_yticks(range(len(found)), [name for name, *_ in found])
    axes.invert_yaxis()
    axes.set_xlabel("bytes per parameter, GPT-2 small, AdamW")
    axes.legend(fontsize=8)
    figure.savefig(output, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", help="file of the plot")
    parser.add_argument("--one", nargs=2, metavar=("FORMAT", "KIND"))
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one(*options.one)))
        return
    rows, found, whole = [], [], 0.0
    for name in FORMATS:
        plain, released = (measured(name, kind) for kind in KINDS)
        found.append((name, plain, released))
        whole = whole or plain.file
        with_grads, without = FORMATS[name].sums
        rows.append(
            [
                name,
                f"{with_grads:g}",
                f"{plain.peak:.2f}",
                f"{without:g}",
                f"{released.peak:.2f}",
                f"{released.largest:.2f}",
                f"{plain.file:.2f}",
                f"{100 * plain.file / whole:.0f} %",
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    header = ["parameters, states", "sum", "peak", "sum, release", "peak, release"]
    header += ["largest gradient", "native checkpoint", "of fp32's"]
    print(table(header, rows, markdown=True))
    if options.output is not None:
        plot(found, options.output)


if __name__ == "__main__":
    main()
