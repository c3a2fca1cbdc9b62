"""Peak memory of training, mode by mode, each in a process of its own.

    python benchmarks/memory.py                                  # a table
    python benchmarks/memory.py --plot docs/memory.png           # and the plot of the docs
    python benchmarks/memory.py MODEL MODE                       # bytes of one, as JSON

Two windows of two micro-steps are trained with AdamW on random data; the peak is that of the
process's resident memory (RSS), less what it was before the model was made. glibc's malloc may
give back blocks of 1 MB and more: its default is to keep those of up to 32 MB for later.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import faststep
from faststep.cli.console import table
from faststep.cli.plots import new_figure
from faststep.cli.scripts.gpt import GPT, GPTConfig

MICRO_STEPS = 2
MODES = (
    "torch AdamW, one batch",
    "torch AdamW, loss / N",
    "accumulate",
    "release_gradients",
)


class Peak(NamedTuple):
    """Bytes."""

    peak: int  # of training, above what Python and torch take
    gradients: int  # of the parameters: what release can save
    parameters: int
    largest: int  # of the gradients, which has to exist


def deep_mlp() -> tuple[nn.Module, Callable[[], Tensor]]:
    """32 layers of 1024: every gradient is small beside all of them."""
    layers = [layer for _ in range(32) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*layers)
    return model, lambda: model(torch.randn(8, 1024)).square().mean()


def gpt2_small(tied: bool = True) -> tuple[nn.Module, Callable[[], Tensor]]:
    config = GPTConfig(layers=12, heads=12, width=768, context=1024, vocabulary=50257)
    model = GPT(config)
    if tied:  # as in the paper: 124 M elements
        model.head.weight = model.token.weight

    def loss() -> Tensor:
        tokens = torch.randint(config.vocabulary, (1, 17))
        value: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return value

    return model, loss


def tiny() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Linear(8, 8)
    return model, lambda: model(torch.randn(2, 8)).square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "deep MLP": deep_mlp,
    "GPT-2 small": gpt2_small,
    "GPT-2 small, untied": lambda: gpt2_small(tied=False),
    "tiny": tiny,
}


def resident() -> int:
    """The peak of this program; getrusage would count what was there before it was executed."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell the peak of resident memory")


def train(model: nn.Module, loss: Callable[[], Tensor], mode: str) -> None:
    """Two windows; the first makes the states."""
    if mode.startswith("torch"):
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = faststep.optim.AdamW(model.parameters(), lr=1e-4)
    steps = 1 if mode in (MODES[0], MODES[3]) else MICRO_STEPS
    release = accum = None
    if mode == "accumulate":
        accum = faststep.accumulate(optimizer, steps, model=model)
    elif mode.startswith("release"):
        release = faststep.release_gradients(model, optimizer)
    for _ in range(2):
        for _ in range(steps):
            if accum is not None:
                with accum:
                    accum.backward(loss())
            else:
                (loss() / steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (release is None) == all(not p._post_accumulate_grad_hooks for p in model.parameters())


def one(model_name: str, mode: str) -> Peak:
    """Of this process."""
    torch.manual_seed(0)
    train(*tiny(), mode)  # libraries and thread pools
    before = resident()
    model, loss = MODELS[model_name]()
    sizes = [param.nbytes for param in model.parameters()]
    train(model, loss, mode)
    return Peak(resident() - before, sum(sizes), sum(sizes), max(sizes))


def of_new_process(script: str, *arguments: str) -> list[Any]:
    """What a script prints in JSON, in a process in which glibc gives large tensors back."""
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{', '.join(arguments)}: {done.stderr}")
    answer: list[Any] = json.loads(done.stdout)
    return answer


def measured(model_name: str, mode: str) -> Peak:
    """Of a new process."""
    return Peak(*of_new_process(__file__, model_name, mode))


def saved(plain: Peak, released: Peak) -> float:
    """The share of the gradients' bytes by which the peak is lower."""
    return (plain.peak - released.peak) / plain.gradients


def as_table(peaks: dict[tuple[str, str], Peak], markdown: bool = False) -> str:
    """One row per model and mode."""
    rows = []
    for (model, mode), peak in peaks.items():
        less = f"{100 * saved(peaks[model, MODES[0]], peak):.0f} %" if "release" in mode else ""
        ratio = f"{peak.peak / peak.parameters:.2f}"
        largest = f"{100 * peak.largest / peak.gradients:.0f} %" if less else ""
        rows.append([f"{model}: {mode}", f"{peak.peak / 2**20:.0f}", ratio, less, largest])
    header = [
        "training",
        "peak MiB",
        "x parameters",
        "gradients' bytes saved",
        "of them the largest",
    ]
    return table(header, rows, markdown)


def plot(output: Path, peaks: dict[tuple[str, str], Peak]) -> None:
    """Bars, in units of the parameters' bytes."""
    figure = new_figure(9.5, 2.6)
    models = list(dict.fromkeys(model for model, _ in peaks))
    for axes, model in zip(figure.subplots(1, len(models), sharey=True), models, strict=True):
        found = [peaks[model, mode] for mode in MODES]
        ratios = [peak.peak / peak.parameters for peak in found]
        colours = ["#1f77b4" if "release" in mode else "#8c8c8c" for mode in MODES]
        bars = axes.barh(range(len(MODES)), ratios, color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.set_yticks(range(len(MODES)), MODES)
        axes.tick_params(labelsize=8)
        axes.set_ylim(len(MODES) - 0.5, -0.5)
        axes.set_xlim(0, max(ratios) * 1.2)
        axes.set_title(f"{model}, {found[0].parameters / 2**20:.0f} MiB", fontsize=9)
        axes.set_xlabel("peak RSS / parameters", fontsize=8)
    figure.savefig(output, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("mode", nargs="?", choices=MODES)
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    if options.mode is not None:
        print(json.dumps(one(options.model, options.mode)))
        return
    names = [options.model] if options.model else [name for name in MODELS if name != "tiny"]
    peaks = {(name, mode): measured(name, mode) for name in names for mode in MODES}
    print(as_table(peaks, markdown=True))
    if options.plot is not None:
        plot(options.plot, peaks)


if __name__ == "__main__":
    main()
