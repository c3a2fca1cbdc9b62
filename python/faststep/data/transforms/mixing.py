"""Transforms of labels, and of images together with them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mix:
    """How the images and labels of a batch are mixed with those of the sample before each."""

    own: float = 1.0  # of the result: own * x + other * (x of the sample before)
    other: float = 0.0
    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, left, bottom, right: theirs alone
    share: float = 1.0  # of the own label in the result's

    @property
    def mixes(self) -> bool:
        return self.share != 1.0


def _check_classes(num_classes: int) -> None:
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(f"num_classes must be a positive int, not {num_classes!r}")


def _seed(u: Tensor) -> int:
    """All bits of the first of some numbers in [0, 1)."""
    return int(float(u[0]) * 2**53)


def _beta(alpha: float, u: Tensor) -> float:
    """A number with the distribution Beta(alpha, alpha), from the first of some in [0, 1)."""
    return random.Random(_seed(u)).betavariate(alpha, alpha)


class Labels:
    """A transform of labels. `uniforms` says how many rows of random numbers it takes."""

    num_classes: int

    @property
    def uniforms(self) -> int:
        return 0

    def mix(self, u: Tensor, height: int, width: int) -> Mix:
        """How a batch of images of this size is mixed; `u` is (uniforms, N) float64, in [0, 1)."""
        return Mix()

    def one_hot(self, labels: Tensor) -> Tensor:
        """(N, num_classes) float32, from (N,) whole numbers, or of what is that already.

        Raises:
            ValueError: another shape, or a label that is no class.
        """
        classes = self.num_classes
        if labels.dim() == 2 and labels.is_floating_point() and labels.shape[1] == classes:
            return labels.float()
        if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
            raise ValueError(
                f"labels must be (N,) integers or (N, {classes}) floats, not "
                f"{tuple(labels.shape)} {labels.dtype}"
            )
        if labels.is_cpu and labels.numel():
            low, high = (int(n) for n in labels.aminmax())
            if low < 0 or high >= classes:
                raise ValueError(f"labels are from {low} to {high}; there are {classes} classes")
        hot = torch.zeros(len(labels), classes, device=labels.device)
        return hot.scatter_(1, labels.long()[:, None], 1.0)

    def apply(self, labels: Tensor, mix: Mix) -> Tensor:
        hot = self.one_hot(labels)
        if not mix.mixes:
            return hot
        return hot * mix.share + hot.roll(1, 0) * (1.0 - mix.share)


@dataclass(frozen=True)
class OneHot(Labels):
    """Labels (N,) become (N, num_classes) float32."""

    num_classes: int

    def __post_init__(self) -> None:
        _check_classes(self.num_classes)


@dataclass(frozen=True)
class _OfTwoSamples(Labels):
    alpha: float
    num_classes: int

    def __post_init__(self) -> None:
        _check_classes(self.num_classes)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be positive, not {self.alpha!r}")


@dataclass(frozen=True)
class MixUp(_OfTwoSamples):
    """Mixes each sample with the one before, by one Beta(alpha, alpha) number per batch.

    Labels become (N, num_classes) float32, mixed alike (Zhang et al. 2018, arXiv:1710.09412).
    """

    @property
    def uniforms(self) -> int:
        return 1

    def mix(self, u: Tensor, height: int, width: int) -> Mix:
        share = _beta(self.alpha, u[0])
        return Mix(share, 1.0 - share, share=share)


@dataclass(frozen=True)
class CutMix(_OfTwoSamples):
    """Puts a box of the sample before into each, the same one in the whole batch.

    A Beta(alpha, alpha) number is the share of the image outside; labels become (N, num_classes)
    float32, mixed by the area (Yun et al. 2019, arXiv:1905.04899).
    """

    @property
    def uniforms(self) -> int:
        return 3

    def mix(self, u: Tensor, height: int, width: int) -> Mix:
        half = 0.5 * math.sqrt(1.0 - _beta(self.alpha, u[0]))
        row, column = int(float(u[1][0]) * height), int(float(u[2][0]) * width)
        rows, columns = int(half * height), int(half * width)
        top, bottom = max(row - rows, 0), min(row + rows, height)
        left, right = max(column - columns, 0), min(column + columns, width)
        share = 1.0 - (bottom - top) * (right - left) / (height * width)
        return Mix(box=(top, left, bottom, right), share=share)


@dataclass(frozen=True)
class RandomChoice(Labels):
    """One of several MixUp, CutMix and OneHot, chosen anew for each batch.

    Args:
        transforms: of the same number of classes.
        p: how often each; all alike where nothing is said.
    """

    transforms: Sequence[Labels]
    p: Sequence[float] | None = None
    kinds: ClassVar[tuple[type[Labels], ...]] = (OneHot, MixUp, CutMix)

    def __post_init__(self) -> None:
        if not self.transforms or not all(isinstance(t, self.kinds) for t in self.transforms):
            raise ValueError(f"transforms must be some of OneHot, MixUp, CutMix: {self.transforms}")
        if len({t.num_classes for t in self.transforms}) != 1:
            raise ValueError(f"transforms differ in num_classes: {self.transforms}")
        if self.p is not None and (
            len(self.p) != len(self.transforms) or min(self.p) < 0 or not 0 < sum(self.p) < math.inf
        ):
            raise ValueError(f"p must have a number per transform, not {self.p!r}")

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return self.transforms[0].num_classes

    @property
    def uniforms(self) -> int:
        return 1 + max(t.uniforms for t in self.transforms)

    def mix(self, u: Tensor, height: int, width: int) -> Mix:
        (chosen,) = random.Random(_seed(u[0])).choices(self.transforms, self.p)
        return chosen.mix(u[1:], height, width)
