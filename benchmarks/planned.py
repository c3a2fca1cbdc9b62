"""The peaks that `python -m faststep plan` counts, beside those that ranks measure.

    python benchmarks/planned.py                    # a table, in Markdown
    python benchmarks/planned.py MODEL STAGE KEEPS  # what ranks.py starts: bytes, as JSON

Three steps of AdamW on two ranks with gloo. The peak is that of the resident memory (RSS) of the
rank that takes most, in the third step, less what it was before the model was made. glibc's malloc
gives back blocks of 32 KiB and more at once, so that a peak has what tensors need.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from faststep import optim, zero
from faststep._torch.fake import NoMemory
from faststep.cli.console import table
from faststep.cli.scripts.gpt import GPT, GPTConfig
from faststep.memory.recompute import Recomputed
from faststep.sizing.dry_run import dry_run
from faststep.sizing.formats import formats_of
from faststep.zero.estimate import Layout, count
from faststep.zero.stage3.blocks import blocks_of
from ranks import answer_of, run_on_ranks
from sharded import memory, reset_peak

RANKS = 2
STAGES = (1, 2, 3)
Made = tuple[nn.Module, Callable[[], Tensor]]


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()

        def conv(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(after))

        self.body = nn.Sequential(
            conv(inside, width, 1),
            nn.ReLU(inplace=True),
            conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            conv(width, 4 * width, 1),
        )
        is_same = stride == 1 and inside == 4 * width
        self.skip = nn.Identity() if is_same else conv(inside, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x) + self.skip(x), inplace=True)


def resnet() -> Made:
    """ResNet-50 on eight images of 64 x 64."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(depth):
            layers.append(Bottleneck(inside, width, 1 if number else stride))
            inside = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))
    images, labels = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.int64)
    return model, lambda: cross_entropy(model(images), labels)


def gpt(layers: int = 8, width: int = 512, batch: int = 4) -> Made:
    """The GPT of 27 million parameters, and four sequences of 128 tokens."""
    config = GPTConfig(layers=layers, heads=8, width=width, vocabulary=2048)
    model, tokens = GPT(config), torch.randint(config.vocabulary, (batch, config.context + 1))
    return model, lambda: model(tokens[:, :-1], tokens[:, 1:])


MODELS: dict[str, Callable[[], Made]] = {
    "GPT, 27M": gpt,
    "ResNet-50": resnet,
    "tiny": lambda: gpt(2, 64, 1),
}
KEEPS = {"all": False, "checkpoints": True}


def planned(name: str, stage: int, keeps: str) -> int:
    """What `plan` counts."""
    with NoMemory():
        model, loss = MODELS[name]()
        if KEEPS[keeps]:
            for block in blocks_of(model):
                Recomputed(block).put()
        run = dry_run(model, loss)
    (kept, *_) = formats_of("AdamW", [torch.float32])
    layout = Layout(RANKS, stage, 25 * 2**20, False, False, run.live, run.forward)
    return count(model, kept.bytes, layout).peak


def measured(name: str, stage: int, keeps: str) -> int:
    """The part of a rank."""
    model = optimizer = loss = before = None
    for steps in (1, 3):  # the first run imports, connects, and lets kernels take their memory
        del model, optimizer, loss
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = memory("VmRSS")
        torch.manual_seed(0)
        model, loss = MODELS[name]()
        if KEEPS[keeps]:
            for block in blocks_of(model):
                Recomputed(block).put()
        optimizer = zero.shard(model, optim.AdamW(model.parameters()), stage=stage)  # type: ignore[arg-type]
        for step in range(steps):
            if step == steps - 1:
                reset_peak()
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            dist.barrier()
    peak = torch.tensor(memory("VmHWM") - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def main() -> None:
    if len(sys.argv) == 4:
        assert ctypes.CDLL(None).mallopt(-3, 2**15)  # M_MMAP_THRESHOLD
        answer_of(lambda: measured(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
        return
    rows = []
    for name in (name for name in MODELS if name != "tiny"):
        for stage in STAGES:
            for keeps in KEEPS:
                found = run_on_ranks(Path(__file__).name, RANKS, name, stage, keeps)
                counted = planned(name, stage, keeps)
                sizes = [f"{size / 1e6:.1f}" for size in (counted, found)]
                difference = f"{100 * (counted / found - 1):+.1f} %"
                rows.append([f"{name}, stage {stage}, keeps {keeps}", *sizes, difference])
    print(table(["peak of a rank, MB", "planned", "measured", "difference"], rows, markdown=True))


if __name__ == "__main__":
    main()
