"""Transforms of whole batches of images, fused into one pass over memory.

Names and arguments are torchvision's (transforms.v2). What differs is said in docs/loader.md.
"""

from .compose import Compose
from .geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from .mixing import CutMix, MixUp, OneHot, RandomChoice
from .pixels import Normalize, ToFloat

__all__ = [
    "CenterCrop",
    "Compose",
    "CutMix",
    "MixUp",
    "Normalize",
    "OneHot",
    "RandomChoice",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "ToFloat",
]
