"""From pixels to the numbers that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True)
class ToFloat:
    """The look of the result; bytes become numbers between 0 and 1, floats stay as they are.

    Args:
        dtype: torch.float32, torch.bfloat16 or torch.float16. All arithmetic is fp32, and rounded
            to it once.
        memory_format: torch.contiguous_format or torch.channels_last.
    """

    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, not {self.dtype!r}")
        if self.memory_format not in FORMATS:
            raise ValueError(f"memory_format must be one of {FORMATS}, not {self.memory_format!r}")


@dataclass(frozen=True)
class Normalize:
    """(x - mean) / std, for numbers between 0 and 1: a number per channel, or one for all.

    Computed as scale * x + bias in fp32, with 1 / 255 in the scale where the images are bytes.
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not len(self.mean):
            raise ValueError(
                f"mean and std must have a number per channel each, not {len(self.mean)} and "
                f"{len(self.std)}"
            )
        if any(s == 0 for s in self.std):
            raise ValueError(f"std must not be 0: {self.std!r}")

    def factors(self, channels: int, unit: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Scale and bias for pixels whose 1 / unit is 1.

        Raises:
            ValueError: it is for another number of channels.
        """
        if len(self.mean) not in (1, channels):
            raise ValueError(f"Normalize is for {len(self.mean)} channels, images has {channels}")
        means, stds = ([*map(float, n)] * (channels // len(n)) for n in (self.mean, self.std))
        return (
            tuple(unit / std for std in stds),
            tuple(-mean / std for mean, std in zip(means, stds, strict=True)),
        )
