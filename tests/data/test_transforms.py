"""Transforms of batches: the bits of the same, done one after another in plain torch."""

import copy
import hashlib
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from faststep import _C
from faststep.data import transforms as T  # noqa: N812
from faststep.data.transforms.framing import Framing
from programs import Programs

from . import slow_transforms
from .image_lists import FLIP, LISTS, NORMALIZE, bits, generator, images, layouts

ROOT = Path(__file__).parents[2]


def assert_like_one_after_another(
    transforms: list[Any], x: Tensor, labels: Tensor | None = None, seed: int = 5
) -> None:
    got = T.Compose(transforms)(x, labels, generator=generator(seed))
    want, want_labels = slow_transforms.apply(transforms, x, labels, generator(seed))
    if labels is not None:
        got, got_labels = got
        assert want_labels is not None
        torch.testing.assert_close(got_labels, want_labels, rtol=1e-6, atol=1e-7)
    assert bits(got) == bits(want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float32"])
@pytest.mark.parametrize("name", LISTS)
def test_the_bits_of_one_after_another(name: str, dtype: torch.dtype) -> None:
    transforms = LISTS[name]
    labels = torch.tensor([3, 0, 1, 4]) if hasattr((transforms or [0])[-1], "num_classes") else None
    for seed, x in enumerate(layouts(images(4, 3, 16, 22, dtype=dtype))):
        assert_like_one_after_another(transforms, x, labels, seed)


@pytest.mark.parametrize("crop", [T.Resize((13, 9)), T.RandomResizedCrop(24)])
def test_a_flip_before_resizing(crop: Any) -> None:
    """Positions are then counted from the other side, which rounds differently."""
    for seed in range(4):
        transforms = [FLIP, crop, NORMALIZE]
        got = T.Compose(transforms)(images(4, 3, 16, 22), generator=generator(seed))
        want, _ = slow_transforms.apply(transforms, images(4, 3, 16, 22), None, generator(seed))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_size(data: st.DataObject) -> None:
    size = st.integers(1, 40)
    height, width = data.draw(size), data.draw(size)
    target = data.draw(size), data.draw(size)
    channels = data.draw(st.sampled_from([1, 2, 3, 4]))
    pad = data.draw(st.integers(0, 3))
    inner = min(target[0], height + 2 * pad), min(target[1], width + 2 * pad)
    steps: list[Any] = data.draw(
        st.sampled_from(
            [
                [T.RandomCrop(inner, pad), FLIP],
                [T.Resize(target), FLIP],
                [T.Resize(target, antialias=False), FLIP],
                [T.RandomResizedCrop(target, antialias=False), FLIP],
                [T.RandomResizedCrop(target), FLIP],
                [T.Resize(target), FLIP, T.CenterCrop((target[1], target[0]))],
            ]
        )
    )
    form = T.ToFloat(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
    )
    x = images(3, channels, height, width)
    assert_like_one_after_another([*steps, form, T.Normalize((0.4,), (0.3,))], x)


@pytest.mark.parametrize("size", [(50, 75), (61, 33), (224, 224), (7, 300)])
def test_antialias_is_torchvisions(size: tuple[int, int]) -> None:
    """Within 1e-5 of it in double. torchvision rounds bytes twice: half each time, and a little."""
    smooth = torch.nn.functional.interpolate(
        images(2, 3, 25, 37).float(), (200, 301), mode="bicubic"
    )
    x = smooth.clamp(0, 255).byte()
    got = T.Compose([T.Resize(size)])(x) * 255
    exact = torch.nn.functional.interpolate(x.double(), size, mode="bilinear", antialias=True)
    torch.testing.assert_close(got, exact.float(), rtol=1e-5, atol=1e-3)
    rounded = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)
    assert (got - rounded).abs().max() <= 1.1
    plain = T.Compose([T.Resize(size, antialias=False)])(x) * 255
    is_smaller = size[0] < 200 or size[1] < 301
    assert bool((plain - got).abs().max() > 1.0) == is_smaller


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_large_batches(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """They are written with non-temporal stores, from lines that begin anywhere."""
    compose = T.Compose([T.CenterCrop((99, 171)), NORMALIZE, T.ToFloat(dtype, memory_format)])
    x = images(2, 3, 120, 180).repeat(84, 1, 1, 1)
    x[:, 0, 60] = torch.arange(len(x), dtype=torch.uint8)[:, None]
    whole = compose(x)
    assert whole.nbytes > 1 << 23
    for begin in range(0, len(x), 21):
        assert torch.equal(whole[begin : begin + 21], compose(x[begin : begin + 21]))


def test_what_is_not_covered_does_not_matter() -> None:
    x = torch.ones(1, 1, 4, 9)
    x[..., 8] = float("nan")
    x[..., 0] = float("inf")
    out = T.Compose([T.Resize((2, 3))])(x)[0, 0, 0]
    assert out[0] == float("inf")
    assert out[1] == pytest.approx(1.0)
    assert out[2].isnan()


THREADED = [
    [crop, FLIP, T.ToFloat(dtype), T.MixUp(1.0, 3)]
    for crop in (
        T.RandomCrop(96),
        T.RandomResizedCrop(96),
        T.RandomResizedCrop(96, antialias=False),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


def large() -> list[str]:
    """Digests of batches that threads share."""
    x, y = images(9, 3, 130, 97), torch.arange(9) % 3
    results = [T.Compose(list_)(x, y, generator=generator())[0] for list_ in THREADED]
    return [hashlib.sha256(r.flatten().view(torch.uint8).numpy()).hexdigest() for r in results]


def test_one_thread_without_simd_gives_the_same_bits(programs: Programs) -> None:
    script = (
        f"import sys, torch; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "torch.set_num_threads(1)\n"
        "from tests.data import test_transforms as t; print(t._C._isa, *t.large())"
    )
    done = programs.run(script, FASTSTEP_CPU="base")
    assert done.stdout.split() == ["base", *large()], done.stderr


def test_draws_are_those_of_the_generator_and_nothing_else() -> None:
    x = images(4, 3, 16, 22)
    compose = T.Compose([T.RandomCrop(9), FLIP])
    before = torch.get_rng_state()
    own = generator()
    first = compose(x, generator=own)
    second = compose(x, generator=own)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert torch.equal(own.get_state(), _after_rand(generator(), 2))
    torch.default_generator.manual_seed(5)
    assert torch.equal(compose(x), first)


def _after_rand(used: torch.Generator, times: int) -> Tensor:
    for _ in range(times):
        torch.rand(3, 4, dtype=torch.float64, generator=used)
    return used.get_state()


def test_how_often_and_where() -> None:
    """Half of the images are flipped, and crops are everywhere alike."""
    x = torch.arange(8, dtype=torch.float32).expand(20000, 1, 1, 8)
    out = T.Compose([T.RandomCrop((1, 5)), FLIP])(x, generator=generator()).view(-1, 5)
    flipped = out[:, 0] > out[:, -1]
    assert 0.48 < float(flipped.double().mean()) < 0.52
    share = torch.bincount(out.amin(1).long(), minlength=4).double() / 20000
    assert share.tolist() == pytest.approx([0.25] * 4, abs=0.02)
    for p in (0.0, 1.0):
        out = T.Compose([T.RandomHorizontalFlip(p)])(x)
        assert torch.equal(out, x.flip(3) if p else x)


def test_shapes_of_random_resized_crops() -> None:
    crop = T.RandomResizedCrop(4, (0.2, 0.6), (0.5, 2.0))
    framing = Framing(100, 80)
    crop.apply(framing, torch.rand(22, 3000, dtype=torch.float64, generator=generator()))
    top, left, height, width = (torch.as_tensor(n).double() for n in framing.source)
    area, ratio = height * width / 8000, width / height
    assert 0.18 < area.min() < 0.22 < 0.55 < area.max() < 0.62
    assert 0.49 < ratio.min() < 0.55 < 1.8 < ratio.max() < 2.05
    assert top.min() == left.min() == 0
    assert (top + height).max() == 100
    assert (left + width).max() == 80


Pair = namedtuple("Pair", ["x", "y"])


def test_containers_come_back_as_they_were() -> None:
    x, y = images(3, 3, 8, 8), torch.tensor([0, 1, 2])
    compose = T.Compose([T.CenterCrop(4), T.OneHot(3)])
    a, b = compose(x, y)
    for batch in ([x, y], (x, y), Pair(x, y), [x, y, "more"], {"image": x, "label": y, "id": 7}):
        out = compose(batch)
        assert type(out) is type(batch)
        values = [*out.values()] if isinstance(out, dict) else [*out]
        assert torch.equal(values[0], a)
        assert torch.equal(values[1], b)
        assert values[2:] == ([*batch.values()] if isinstance(batch, dict) else [*batch])[2:]
    named = T.Compose([T.CenterCrop(4), T.OneHot(3)], fields=("input", "target"))
    out = named({"target": y, "input": x})
    assert [*out] == ["target", "input"]
    assert torch.equal(out["input"], a)
    assert torch.equal(T.Compose([T.CenterCrop(4)])([x])[0], a)
    assert T.Compose([T.CenterCrop(4)])(x, y)[1] is y
    assert torch.equal(compose(x, torch.eye(3).double())[1], torch.eye(3))


def test_empty_batches_and_images() -> None:
    for name, transforms in LISTS.items():
        labels = torch.empty(0, dtype=torch.int64)
        out = T.Compose(transforms)(images(0, 3, 16, 22), labels)[0]
        assert out.shape[:2] == (0, 3), name
    assert T.Compose([NORMALIZE])(images(2, 3, 0, 5)).shape == (2, 3, 0, 5)
    assert torch.equal(T.Compose([T.CenterCrop(2)])(images(2, 0, 0, 5)), torch.zeros(2, 0, 2, 2))
    assert torch.equal(T.Compose([T.CenterCrop(2)])(images(2, 1, 0, 5)), torch.zeros(2, 1, 2, 2))


def test_memory_is_used_again_and_never_too_early() -> None:
    compose = T.Compose([NORMALIZE])
    x = images(2, 3, 8, 8)
    first = compose(x)
    row, place = first[0], first.data_ptr()
    want = row.clone()
    del first
    others = [compose(x.flip(0)) for _ in range(3)]
    assert torch.equal(row, want)
    del row
    assert compose(x).data_ptr() == place
    del others


def test_copies_and_pickles() -> None:
    compose = T.Compose([T.RandomCrop(4), NORMALIZE])
    x = images(2, 3, 8, 8)
    want = compose(x, generator=generator())
    for other in (copy.deepcopy(compose), pickle.loads(pickle.dumps(compose))):
        assert torch.equal(other(x, generator=generator()), want)
        assert repr(other) == repr(compose)


X = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
WRONG: dict[str, tuple[Any, str]] = {
    "size": (lambda: T.RandomCrop(0), "size must be a positive int"),
    "three sizes": (lambda: T.Resize((1, 2, 3)), "size must be"),  # type: ignore[arg-type]
    "padding": (lambda: T.RandomCrop(3, -1), "padding must not be negative"),
    "p": (lambda: T.RandomHorizontalFlip(1.5), "p must be between"),
    "scale": (lambda: T.RandomResizedCrop(3, (0.5, 0.1)), "scale must be"),
    "ratio": (lambda: T.RandomResizedCrop(3, ratio=(0.0, 1.0)), "ratio must be"),
    "std": (lambda: T.Normalize((1.0,), (0.0,)), "std must not be 0"),
    "mean": (lambda: T.Normalize((1.0,), (1.0, 2.0)), "a number per channel each"),
    "dtype": (lambda: T.ToFloat(torch.float64), "dtype must be one of"),
    "format": (lambda: T.ToFloat(memory_format=torch.preserve_format), "memory_format"),
    "alpha": (lambda: T.MixUp(0.0, 3), "alpha must be positive"),
    "classes": (lambda: T.CutMix(1.0, 0), "num_classes must be"),
    "other classes": (lambda: T.RandomChoice([T.OneHot(2), T.OneHot(3)]), "num_classes"),
    "choices": (lambda: T.RandomChoice([T.OneHot(2)], p=[1, 2]), "p must have"),
    "foreign": (lambda: T.Compose([torch.nn.Identity()]), r"transforms\[0\] is a Identity"),
    "two resizes": (lambda: T.Compose([T.Resize(3), T.RandomResizedCrop(3)]), "only once"),
    "padded": (lambda: T.Compose([T.RandomCrop(3, 1), T.Resize(3)])(X), "that adds zeros"),
    "center": (lambda: T.Compose([T.CenterCrop(9), T.Resize(3)])(X), "that adds zeros"),
    "padded later": (
        lambda: T.Compose([T.Resize(5), T.RandomCrop(3), T.CenterCrop(4)])(X),
        "comes after another crop of resized images",
    ),
    "after": (lambda: T.Compose([T.OneHot(3), FLIP]), r"transforms\[1\].*comes after"),
    "twice": (lambda: T.Compose([NORMALIZE, NORMALIZE]), "more than one Normalize"),
    "fields": (lambda: T.Compose([], fields=("image",)), "fields must be"),  # type: ignore[arg-type]
    "not images": (lambda: T.Compose([])(3), "batch is a int"),
    "no field": (lambda: T.Compose([])({"x": X}), "no 'image' in it"),
    "no label": (lambda: T.Compose([T.OneHot(3)])([X]), "batch has no labels"),
    "no labels": (lambda: T.Compose([T.OneHot(3)])(X), "OneHot needs labels"),
    "labels twice": (lambda: T.Compose([])([X], torch.zeros(2)), "labels are given twice"),
    "dims": (lambda: T.Compose([])(X[0]), r"images must be \(N, C, H, W\)"),
    "type": (lambda: T.Compose([])(X.double()), "images must be uint8 or float32"),
    "gradient": (lambda: T.Compose([])(X.float().requires_grad_()), "requires a gradient"),
    "too small": (lambda: T.Compose([T.RandomCrop(9)])(X), "size .* is larger than the images"),
    "channels": (lambda: T.Compose([NORMALIZE])(X[:, :1]), "for 3 channels, images has 1"),
    "many channels": (lambda: T.Compose([])(torch.zeros(1, 33, 2, 2)), "33 channels"),
    "fewer labels": (lambda: T.Compose([T.OneHot(3)])(X, torch.zeros(1)), "labels must be 2"),
    "float labels": (lambda: T.Compose([T.OneHot(3)])(X, torch.zeros(2)), "labels must be"),
    "no class": (lambda: T.Compose([T.OneHot(3)])(X, torch.tensor([0, 3])), "from 0 to 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_what_is_wrong(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def rows(count: int, **words: int) -> Tensor:
    """Samples that show all of an image of 8 by 8, but for some words."""
    names = ["top", "left", "height", "width", "grid_height", "grid_width", "first_row"]
    names += ["first_column", "flip", "partner", "source", "own", "other", "t", "l", "b", "r"]
    whole = dict.fromkeys(names, 0) | {"height": 8, "width": 8, "grid_height": 8, "grid_width": 8}
    return torch.tensor([[*(whole | words).values()]] * count, dtype=torch.int32)


def test_samples_that_would_read_elsewhere_are_refused() -> None:
    out = torch.full((2, 3, 4, 4), 7.0)
    one = (1.0,) * 3
    for words in (
        {"top": 1, "grid_height": 4},
        {"left": -1, "grid_width": 4},
        {"height": 0, "grid_width": 4},
        {"width": 9},
        {"grid_height": 0},
        {"first_row": 1 << 24},
        {"partner": 2},
        {"partner": -1},
        {"source": 2},
        {"source": -1},
        {"b": 5},
        {"l": -1},
    ):
        with pytest.raises(ValueError, match="sample 0"):
            _C.transform_images(X, out, rows(2, **words), one, one)
    for bad in (rows(1), rows(2).long(), rows(2)[:, :8], rows(4)[::2]):
        with pytest.raises(ValueError, match="samples is not a packed"):
            _C.transform_images(X, out, bad, one, one)
    assert (out == 7.0).all()
    _C.transform_images(X, out, rows(2, top=100, left=-100), one, one)  # all of it outside
    assert (out == 1.0).all()


def test_the_default_device_does_not_matter() -> None:
    x, labels = images(4, 3, 9, 8), torch.arange(4)
    transforms = [T.RandomResizedCrop(6), FLIP, T.MixUp(0.5, 4)]
    want, want_labels = T.Compose(transforms)(x, labels, generator=generator(1))
    with torch.device("meta"):
        got, got_labels = T.Compose(transforms)(x, labels, generator=generator(1))
    assert bits(got) == bits(want)
    assert torch.equal(got_labels, want_labels)
