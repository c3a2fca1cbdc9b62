"""Transforms of images: the bits of the CPU backend, and nothing is waited for."""

from typing import Any

import pytest
import torch

from data.image_lists import LISTS, bits, generator, images, layouts
from faststep import _C
from faststep.data import transforms as T  # noqa: N812

from .common import CUDA, no_synchronization


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float32"])
@pytest.mark.parametrize("name", LISTS)
def test_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    compose = T.Compose(LISTS[name])
    last = compose.transforms[-1] if compose.transforms else None
    for seed, x in enumerate(layouts(images(4, 3, 45, 70, dtype=dtype))[:2]):
        labels = torch.tensor([3, 0, 1, 4]) if hasattr(last, "num_classes") else None
        want: Any = compose(x, labels, generator=generator(seed))
        moved = x.to(CUDA), None if labels is None else labels.to(CUDA)
        before = _C.device_counts()
        with no_synchronization():
            got: Any = compose(*moved, generator=generator(seed))
        if labels is not None:
            (want, want_labels), (got, got_labels) = want, got
            torch.testing.assert_close(got_labels.cpu(), want_labels)
        launches, uploads, size = (b - a for a, b in zip(before, _C.device_counts(), strict=True))
        assert (launches, uploads, size) == (1, 1, 4 * 68)
        assert got.device == CUDA
        assert bits(got.cpu()) == bits(want)
