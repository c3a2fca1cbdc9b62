"""Arrays that are converted and normalized while they are gathered: torch's bits, on each path."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from faststep.data import ArrayDataset, DataLoader, convert, converted, open

from .torch_and_ours import assert_same, plain

SHAPE = (3, 5, 7)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TARGETS = [torch.float32, torch.bfloat16, torch.float16]
WIDER = [(dtype, torch.int64) for dtype in (*INTEGERS, torch.uint16, torch.uint32)]
WIDER.append((torch.uint16, torch.int32))
EVERY: list[dict[str, Any]] = [
    {},
    {"scale": 1 / 255},
    {"mean": 0.1},
    {"std": (0.5, -3.0, 1e-3), "scale": -2},
    {"scale": 1 / 255, "mean": np.array(MEAN), "std": torch.tensor(STD)},
]


def array_of(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, rows: int = 12) -> torch.Tensor:
    """Random bits; where these would be of floats, a part are numbers of ordinary size."""
    generator = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        return torch.rand(rows, *shape, generator=generator) < 0.5
    size = rows * int(np.prod(shape))
    drawn = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    found = drawn.view(dtype)
    if dtype.is_floating_point:
        found[::2] = torch.randn(len(found[::2]), generator=generator).to(dtype)
        found = found.nan_to_num(1.5, float("inf"), float("-inf"))  # which NaN is nobody's business
    return found.view(rows, *shape)


def by_torch(
    x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0, mean: Any = 0.0, std: Any = 1.0
) -> torch.Tensor:
    """What the docstring says, for a batch of three dimensions and more."""
    per_channel = [torch.as_tensor(v, dtype=torch.float32) for v in (mean, std)]
    mean, std = (v.view(-1, *(1,) * (x.dim() - 2)) if v.dim() else v for v in per_channel)
    return ((x.to(torch.float32) * scale - mean) / std).to(dtype)


def gathered(dataset: Any) -> Any:
    loader = DataLoader(dataset, len(dataset))
    assert loader.path == "arrays", loader.explain()
    return next(iter(loader))


@pytest.mark.parametrize("options", EVERY)
@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("source", [torch.bool, *INTEGERS, *FLOATS])
def test_the_bits_are_torchs(
    source: torch.dtype, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x = array_of(source)
    dataset = ArrayDataset(converted(x, dtype, **options))
    want = x if source == dtype and not options else by_torch(x, dtype, **options)
    assert plain(gathered(dataset)) == plain(want)
    assert plain(torch.stack([dataset[i] for i in range(len(dataset))])) == plain(want)


def test_what_scripts_do_with_images() -> None:
    x, mean, std = array_of(torch.uint8), torch.tensor(MEAN), torch.tensor(STD)
    divided = ArrayDataset(converted(x, torch.float32, std=255))
    assert torch.equal(gathered(divided), x.float().div(255))
    like_torchvision = x.to(torch.float32).mul_(1.0 / 255)
    like_torchvision = like_torchvision.sub(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
    normalized = ArrayDataset(converted(x, torch.float32, scale=1 / 255, mean=MEAN, std=STD))
    assert torch.equal(gathered(normalized), like_torchvision)


@pytest.mark.parametrize(("source", "dtype"), WIDER)
def test_integers_become_wider(source: torch.dtype, dtype: torch.dtype) -> None:
    x = array_of(source, (9,))
    dataset = ArrayDataset({"x": converted(x, dtype)})
    assert plain(gathered(dataset)["x"]) == plain(x.to(dtype))
    assert plain(dataset[3]["x"]) == plain(x[3].to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (6,), (700,), (2, 0), (0,), (4, 300), (1300, 2)])
def test_rows_of_every_shape(shape: tuple[int, ...]) -> None:
    x = array_of(torch.int16, shape, 3)
    many = [0.25 * i for i in range(shape[0])] if shape else 0.25
    options = {"scale": 0.5, "mean": many, "std": 1.7}
    dataset = ArrayDataset(converted(x, torch.float32, **options))
    want = (
        ((x.to(torch.float32) * 0.5 - 0.25) / 1.7)
        if not shape
        else by_torch(x, torch.float32, **options)
    )
    assert plain(gathered(dataset)) == plain(want)
    assert plain(dataset[-1]) == plain(want[-1])


def test_a_batch_that_is_written_past_the_caches() -> None:
    x = array_of(torch.uint8, (3, 257, 255), 50)  # 39 MB of floats
    options: dict[str, Any] = {"scale": 1 / 255, "mean": MEAN, "std": STD}
    for dtype in TARGETS:
        got = gathered(ArrayDataset(converted(x, dtype, **options)))
        assert torch.equal(got, by_torch(x, dtype, **options))
    labels = converted(torch.arange(50, dtype=torch.uint8), torch.int64)
    both = ArrayDataset((converted(x, torch.float32), labels))
    assert torch.equal(gathered(both)[1], torch.arange(50))


def test_every_path_gives_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array_of(torch.uint8).numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    labels = np.arange(12, dtype=np.uint8)

    def make() -> tuple[Any, dict[str, Any]]:
        image = converted(mapped, torch.bfloat16, scale=1 / 255, mean=MEAN, std=STD)
        data = ArrayDataset({"image": image, "label": converted(labels, torch.int64)})
        both = ConcatDataset([Subset(data, [3, 1, 4]), data])
        return both, {"batch_size": 4, "shuffle": True}

    assert_same(make)
    assert_same(make, workers=2)


def test_a_pickled_one_is_the_same() -> None:
    x = array_of(torch.uint8)
    dataset = pickle.loads(pickle.dumps(ArrayDataset(converted(x, torch.float32, mean=MEAN))))
    want = by_torch(x, torch.float32, mean=MEAN)
    assert torch.equal(gathered(dataset), want)
    assert torch.equal(dataset[5], want[5])


def test_the_way_is_explained() -> None:
    x = array_of(torch.uint8)
    loader = DataLoader(ArrayDataset({"x": converted(x, torch.bfloat16)}))
    assert "data['x'] (torch.bfloat16, (3, 5, 7))" in loader.explain()


def test_what_is_not_packed_is_torchs() -> None:
    x = array_of(torch.uint8).permute(0, 2, 3, 1)
    dataset = ArrayDataset(converted(x, torch.float32, scale=0.1))
    loader = DataLoader(dataset, 12)
    assert loader.path == "torch"
    assert torch.equal(next(iter(loader)), by_torch(x, torch.float32, 0.1))


@pytest.mark.parametrize("other", [{"mean": MEAN}, {"scale": 0.5}, {}])
def test_other_conversions_are_not_joined(other: dict[str, Any]) -> None:
    x = array_of(torch.uint8)
    parts = [ArrayDataset(converted(x, torch.float32, **o)) for o in ({"mean": 1.0}, other)]
    loader = DataLoader(ConcatDataset(parts), 24)
    assert loader.path == "torch"
    assert "another shape or type" in loader.explain()
    assert torch.equal(next(iter(loader))[12:], by_torch(x, torch.float32, **other))


def test_the_numbers_are_copied() -> None:
    x, mean = array_of(torch.uint8), torch.tensor(MEAN, requires_grad=True)
    dataset = ArrayDataset(converted(x, torch.float32, mean=mean))
    with torch.no_grad():
        mean.zero_()
    assert torch.equal(gathered(dataset), by_torch(x, torch.float32, mean=MEAN))
    assert not dataset[0].requires_grad


def test_other_defaults_of_torch_change_nothing() -> None:
    x = array_of(torch.uint8)
    torch.set_default_dtype(torch.float16)
    try:
        dataset = ArrayDataset(converted(x, torch.float32, scale=1 / 255, mean=MEAN, std=STD))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(gathered(dataset), by_torch(x, torch.float32, 1 / 255, MEAN, STD))


def test_converted_arrays_are_written_as_they_come_out(tmp_path: Path) -> None:
    x = array_of(torch.uint8)
    convert(ArrayDataset({"x": converted(x, torch.float32, scale=0.5)}), tmp_path / "new")
    assert torch.equal(gathered(open(tmp_path / "new"))["x"], by_torch(x, torch.float32, 0.5))


BYTES = np.zeros((2, 3, 4), np.uint8)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (converted(BYTES, torch.int32), TypeError, r"uint8 as torch.int32; there are bool, uint8"),
    (converted(BYTES, torch.float64), TypeError, "uint8 as torch.float64"),
    (converted(BYTES.astype("i8"), torch.float32), TypeError, "int64 as torch.float32"),
    (converted(BYTES, "float32"), TypeError, "uint8 as float32"),  # type: ignore[arg-type]
    (converted(BYTES.astype(">i4"), torch.float32), TypeError, "byte order"),
    (converted("text", torch.float32), TypeError, "is a str"),
    (converted(torch.ones(()), torch.float32), TypeError, "has no rows"),
    (converted(BYTES, torch.int64, scale=2), TypeError, "for numbers that become floats"),
    (converted(BYTES, torch.uint8, mean=1), TypeError, "not for uint8 as torch.uint8"),
    (converted(BYTES, torch.float32, mean="a"), TypeError, "mean: "),
    (converted(BYTES, torch.float32, std=[1.0, "a"]), TypeError, "std: "),
    (converted(BYTES, torch.float32, scale=[1.0]), ValueError, r"scale has the shape \(1,\)"),
    (
        converted(BYTES, torch.float32, mean=(1, 2)),
        ValueError,
        r"mean has the shape \(2,\), a sample \(3, 4\): expected a number, or 3 of them",
    ),
    (converted(BYTES, torch.float32, std=[[1.0]]), ValueError, r"std has the shape \(1, 1\)"),
    (converted(BYTES[:, 0, 0], torch.float32, std=[1]), ValueError, r"a sample \(\)"),
    (converted(BYTES, torch.float32, std=(1, 0, 1)), ValueError, r"std is 0 .*\(1, 0, 1\)"),
    (converted(BYTES, torch.float32, std=1e-50), ValueError, "std is 0 in float32: 1e-50"),
    (converted(BYTES, torch.float32, mean=float("nan")), ValueError, "mean is not finite"),
    (converted(BYTES, torch.float32, scale=1e39), ValueError, "scale is not finite .*1e[+]39"),
    (converted(BYTES, torch.float32, std=(1, float("inf"), 1)), ValueError, "std is not finite"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_errors_name_the_array(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"data\['x'\]:? .*{message}|data\['x'\]: {message}"):
        ArrayDataset({"x": wrong, "y": BYTES})
