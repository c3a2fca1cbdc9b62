"""Lists of transforms, and images, for the tests of the CPU and of devices."""

from typing import Any

import torch
from torch import Tensor

from faststep.data import transforms as T  # noqa: N812

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FLIP = T.RandomHorizontalFlip()
BF16 = T.ToFloat(torch.bfloat16, torch.channels_last)
F16 = T.ToFloat(torch.float16)
LAST = T.ToFloat(memory_format=torch.channels_last)
LISTS: dict[str, list[Any]] = {
    "nothing": [],
    "normalize": [NORMALIZE],
    "crop": [T.RandomCrop((9, 11)), FLIP, NORMALIZE],
    "flip first": [FLIP, T.RandomCrop((9, 11)), FLIP, NORMALIZE, LAST],
    "padding": [T.RandomCrop(17, padding=4), FLIP, NORMALIZE],
    "padding twice": [T.RandomCrop(20, padding=5), FLIP, T.RandomCrop(21, padding=3), F16],
    "less and more": [T.RandomCrop(10), FLIP, T.CenterCrop(19), T.RandomCrop(15), T.CenterCrop(30)],
    "center": [T.CenterCrop((13, 6)), BF16],
    "center of more": [T.CenterCrop((25, 30)), NORMALIZE],
    "resize": [T.Resize(9), NORMALIZE],
    "larger": [T.Resize((30, 41)), FLIP, LAST],
    "resize and crop": [T.Resize(20), T.CenterCrop(16), NORMALIZE, BF16],
    "resize and pad": [T.Resize(12), FLIP, T.RandomCrop(13, padding=2), FLIP, NORMALIZE],
    "crop and resize": [T.CenterCrop((11, 12)), T.Resize((7, 19)), NORMALIZE, F16],
    "random resize": [T.RandomResizedCrop(8), FLIP, NORMALIZE],
    "random resize larger": [T.RandomResizedCrop((24, 19), (0.3, 0.9), (0.5, 2.0)), FLIP, BF16],
    "odd ratio": [T.RandomResizedCrop(8, (0.9, 1.0), (3.0, 4.0)), NORMALIZE],
    "one column": [T.RandomResizedCrop(6, (0.01, 0.02)), F16],
    "resize plainly": [T.Resize((5, 7), antialias=False), FLIP, NORMALIZE, LAST],
    "plainly larger": [T.Resize((30, 41), antialias=False), NORMALIZE],
    "random resize plainly": [T.RandomResizedCrop(8, antialias=False), FLIP, NORMALIZE, BF16],
    "to a pixel": [T.Resize(1), F16],
    "to a row": [T.Resize((1, 30)), FLIP],
    "mixup, resized plainly": [T.RandomResizedCrop(8, antialias=False), FLIP, T.MixUp(1.0, 5)],
    "one hot": [FLIP, T.OneHot(5)],
    "mixup": [T.RandomCrop(9), FLIP, NORMALIZE, T.MixUp(0.4, 5)],
    "mixup, resized": [T.RandomResizedCrop(8), FLIP, NORMALIZE, BF16, T.MixUp(1.0, 5)],
    "cutmix": [T.RandomCrop((9, 13)), FLIP, NORMALIZE, F16, T.CutMix(1.0, 5)],
    "cutmix, resized": [T.RandomResizedCrop(18), FLIP, LAST, T.CutMix(2.0, 5)],
    "choice": [FLIP, NORMALIZE, T.RandomChoice([T.MixUp(1.0, 5), T.CutMix(1.0, 5)], p=[1, 2])],
}


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator())
    return pixels if dtype == torch.uint8 else torch.randn(shape, generator=generator()) * 3


def bits(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), flat.tolist()


def layouts(x: Tensor) -> list[Tensor]:
    """The same images with other strides, and lazily negated."""
    wide = torch.zeros(*x.shape[:3], x.shape[3] * 2, dtype=x.dtype)
    wide[..., ::2] = x
    turned = x.mT.contiguous().mT
    channels_last = x.to(memory_format=torch.channels_last)
    return [x, channels_last, wide[..., ::2], turned, torch._neg_view(-x)]
