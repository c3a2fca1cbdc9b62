"""Calls of the functions of faststep._C for the loader."""

from typing import Any

import torch

from faststep import _C

from .arguments import FLOATS, Raw, maybe_bad, odd_int
from .functions import Target
from .odd_tensors import any_tensor
from .world import FaultError, World


def permute(world: World) -> None:
    rng = world.rng
    length = rng.choice((1, 2, 3, 10, 255, 256, 257, 2**31, 2**62, 2**63 - 1, 2**63, 0))
    out = world.track(torch.zeros(rng.choice((0, 1, 10)), dtype=torch.int64))
    numbers = [odd_int(rng) % 2**64 for _ in range(4)]

    def check(_: Any) -> None:
        if not bool(((out >= 0) & (out < length)).all()):
            raise FaultError(f"permute of {length} gave {out}")

    args, good = maybe_bad(world, (out, length, *numbers))
    world.call("permute", _C.permute, args, check=check if good and length < 2**63 else None)


def crc32c(world: World) -> None:
    data = world.rng.randbytes(3) * world.rng.choice((0, 1, 100))
    args, _ = maybe_bad(world, (data,))
    world.call("crc32c", _C.crc32c, args)


def scan_tfrecords(world: World) -> None:
    rng = world.rng
    size = rng.choice((0, 1, 11, 12, 16, 100, 1000))
    data = world.track(torch.randint(0, 256, (size,), dtype=torch.uint8))
    if size >= 16 and world.chance(0.5):
        data[1:8] = 0  # a record of at most 255 bytes
    places = world.track(torch.zeros(rng.choice((0, 1, 6)), dtype=torch.int64))
    at = rng.choice((0, 0, 1, size, odd_int(rng)))
    args, _ = maybe_bad(world, (Raw(data.data_ptr()), Raw(size), at, world.chance(0.5), places))
    world.call("scan_tfrecords", _C.scan_tfrecords, args)
    del data


def transform_images(world: World) -> None:
    rng = world.rng
    count, channels, height, width = 2, rng.choice((1, 3, 3, 4)), 4, rng.choice((4, 5))
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)
    if world.chance(0.3):
        images = images.to(memory_format=torch.channels_last)
    if world.chance(0.3):
        images = images.float()
    out = torch.zeros(count, channels, 2, 2, dtype=rng.choice((torch.float32, torch.bfloat16)))
    words = [0, 0, height, width, 2, 2] + [0] * 11
    samples = torch.tensor([words, words], dtype=torch.int32)
    if world.chance(0.5):  # windows, weights and partners that are not there
        for _ in range(rng.choice((1, 3))):
            samples[rng.randrange(2), rng.randrange(17)] = rng.choice(
                (-1, 1, 2, 5, 10**6, 2**31 - 1, -(2**31))
            )
    for tensor in (images, out, samples):
        world.track(tensor)
    if world.chance(0.1):
        images = world.track(any_tensor(rng, (count, channels, height, width)))
    if world.chance(0.1):
        out = world.track(any_tensor(rng, (count, channels, 2, 2)))
    factors = tuple(rng.choice(FLOATS) for _ in range(channels))
    right = (images, out, samples, factors, (0.0,) * channels, None, world.chance(0.5))
    args, _ = maybe_bad(world, right)
    world.call("transform_images", _C.transform_images, args, kept=[images, out, samples])


def split_channels(world: World) -> None:
    height, width = world.rng.choice(((4, 5), (1, 1), (0, 3), (40, 40)))
    pixels = world.track(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8))
    out = world.track(torch.zeros(3, height, width, dtype=torch.uint8))

    def check(_: Any) -> None:
        if not torch.equal(out, pixels.permute(2, 0, 1)):
            raise FaultError("split_channels: other pixels")

    args, good = maybe_bad(world, (pixels, out))
    world.call("split_channels", _C.split_channels, args, check=check if good else None)


DATA_FUNCTIONS: dict[str, Target] = {
    "crc32c": crc32c,
    "permute": permute,
    "scan_tfrecords": scan_tfrecords,
    "split_channels": split_channels,
    "transform_images": transform_images,
}
