"""Training steps that are measured as a whole, each small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from faststep.cli.gpt import GPT, GPTConfig

__all__ = ["WORKS", "Work"]


class Work(NamedTuple):
    """A model and how it makes the loss of one step."""

    model: nn.Module
    loss: Callable[[], Tensor]


def cnn() -> Work:
    """Five convolutions, on a batch of 32 x 3 x 64 x 64."""
    widths = (3, 32, 64, 64, 128, 128)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))
    return Work(model, lambda: functional.cross_entropy(model(images), labels))


def gpt() -> Work:
    """Four layers of 256, on 8 x 256 tokens of a vocabulary of 8192."""
    model = GPT(GPTConfig(layers=4, heads=4, width=256, context=256, vocabulary=8192))
    tokens = torch.randint(8192, (8, 257))

    def loss() -> Tensor:
        value: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return value

    return Work(model, loss)


def mlp() -> Work:
    """1024-2048-2048-1024, on a batch of 256."""
    widths = (1024, 2048, 2048, 1024)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    model = nn.Sequential(*layers[:-1])
    inputs, targets = torch.randn(256, 1024), torch.randn(256, 1024)
    return Work(model, lambda: functional.mse_loss(model(inputs), targets))


WORKS: dict[str, Callable[[], Work]] = {"CNN": cnn, "GPT": gpt, "MLP": mlp}
