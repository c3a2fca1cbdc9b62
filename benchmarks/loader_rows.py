"""What loaders are measured on, and who loads: each contender is an endless stream of batches."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import faststep.data
from bench_rows import SMOKE
from contenders import OURS, UnavailableError
from faststep.data import transforms
from faststep.data.formats.images import ImageFolder

COPY = "bare copy"
BEST = "torch, best of these"
Stream = Generator[Any, None, None]


@dataclass(frozen=True)
class LoaderWork:
    """One row of the benchmarks.

    Args:
        label: what is loaded.
        batch_size: samples per batch.
        dataset: makes the dataset, in an empty folder that stays.
        batches: per block of a contender.
        at_least: how many times as fast as torch's loader, at its best of 0, 1 and 2 workers.
        plain: the same samples as a script without faststep would read them; default: the dataset.
        options: of faststep's loader only.
        others: contenders besides faststep's and torch's loaders: name -> stream of batches of the
            plain dataset; they raise UnavailableError where what they need is missing.
        in_slices: measure faststep and torch at their best again, in slices of time
            (time_slices.py).
    """

    label: str
    batch_size: int
    dataset: Callable[[Path], Dataset[Any]]
    batches: int
    at_least: float
    plain: Callable[[Any], Dataset[Any]] = lambda dataset: dataset
    options: tuple[tuple[str, Any], ...] = ()
    others: tuple[tuple[str, Callable[[LoaderWork, Any], Stream]], ...] = ()
    in_slices: bool = False

    def streams(self, dataset: Any) -> dict[str, Callable[[], Stream]]:
        """Everyone who takes part, by name, ours first."""
        plain = self.plain(dataset)
        make = functools.partial(DataLoader, plain, self.batch_size, True)
        ours = functools.partial(
            faststep.data.DataLoader, dataset, self.batch_size, True, **dict(self.options)
        )
        streams: dict[str, Callable[[], Stream]] = {}
        for workers, method in self._workers(dataset):
            what = f"{workers} workers" if method == "process" else f"{workers} threads"
            name = OURS if method == "arrays" else f"{OURS}, {what}"
            options = {} if method == "arrays" else {"worker_method": method}
            streams[name] = functools.partial(_epochs, ours, workers, **options)
        for workers in (0, 1, 2):
            streams[f"torch, {workers} workers"] = functools.partial(_epochs, make, workers)
        for name, stream in self.others:
            streams[name] = functools.partial(stream, self, plain)
        return streams

    def _workers(self, dataset: Any) -> tuple[tuple[int, str], ...]:
        if faststep.data.DataLoader(dataset, self.batch_size).path == "arrays":
            return ((0, "arrays"),)
        return ((0, "process"), (1, "process"), (2, "process"), (2, "thread"))


def _epochs(make: Callable[..., Any], workers: int, **options: Any) -> Stream:
    loader = make(num_workers=workers, persistent_workers=workers > 0, drop_last=True, **options)
    while True:
        yield from loader


def _module(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"not installed (pip install {distribution})") from error


def bare_copy(work: LoaderWork, dataset: TensorDataset) -> Stream:
    """What a loader can reach: rows copied by torch's threads into one buffer, again and again."""
    (rows,) = dataset.tensors
    out = rows.new_empty((work.batch_size, *rows.shape[1:]))
    while True:
        order = torch.randperm(len(rows))
        for indices in order.split(work.batch_size):
            if len(indices) == work.batch_size:
                yield torch.index_select(rows, 0, indices, out=out)


def stateful(work: LoaderWork, dataset: Any) -> Stream:
    make = _module("torchdata.stateful_dataloader", "torchdata").StatefulDataLoader
    loader = make(dataset, work.batch_size, True, drop_last=True)
    while True:
        yield from loader


def spdl_threads(work: LoaderWork, dataset: Any) -> Stream:
    """SPDL: two threads call the dataset and collate."""
    builder = _module("spdl.pipeline", "spdl").PipelineBuilder

    def indices() -> Iterator[list[int]]:
        for epoch in itertools.count():
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(dataset), generator=generator)
            full = len(dataset) // work.batch_size * work.batch_size
            yield from (part.tolist() for part in order[:full].split(work.batch_size))

    def load(batch: list[int]) -> Any:
        return torch.utils.data.default_collate([dataset[i] for i in batch])

    pipeline = builder().add_source(indices()).pipe(load, concurrency=2).add_sink(3)
    running = pipeline.build(num_threads=2)
    with running.auto_stop():
        yield from running.get_iterator()


def grain_threads(work: LoaderWork, dataset: Any) -> Stream:
    """Grain: threads read the samples, numpy stacks them."""
    grain = _module("grain", "grain")

    class Source:
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            sample = dataset[index]
            parts = sample if isinstance(sample, tuple) else (sample,)
            return tuple(np.asarray(part) for part in parts)

    samples = grain.MapDataset.source(Source()).shuffle(seed=0).repeat(None)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * work.batch_size)
    yield from samples.to_iter_dataset(options).batch(work.batch_size)


LIBRARIES = (("StatefulDataLoader", stateful), ("SPDL", spdl_threads), ("Grain", grain_threads))


def table(_: Path) -> TensorDataset:
    rows = 2000 if SMOKE else 100_000
    return TensorDataset(torch.randn(rows, 32), torch.randint(10, (rows,)))


def images(_: Path) -> TensorDataset:
    size, count = (8, 256) if SMOKE else (224, 1024)
    return TensorDataset(torch.randint(256, (count, 3, size, size), dtype=torch.uint8))


def tokens(folder: Path) -> Dataset[Any]:
    path = folder / "tokens.bin"
    count = 10_000 if SMOKE else 20_000_000
    np.random.default_rng(0).integers(0, 50257, count, dtype=np.uint16).tofile(path)
    return faststep.data.TokenDataset(path, 64 if SMOKE else 1024)


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """x and, a token later, y, as scripts read them from a memory map."""

    def __init__(self, tokens: faststep.data.TokenDataset) -> None:
        self.tokens = np.memmap(tokens.files[0], dtype=np.uint16, mode="r")
        self.window = tokens.window

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.window

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.window
        both = torch.from_numpy(self.tokens[start : start + self.window + 1].astype(np.int64))
        return both[:-1], both[1:]


class Megabytes(Dataset[torch.Tensor]):
    """Samples of 1 MB that a Python function makes."""

    def __init__(self) -> None:
        self.source = torch.randint(256, (64, 1 << (10 if SMOKE else 20)), dtype=torch.uint8)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.source[index % 64].clone()


class PythonBound(Dataset[torch.Tensor]):
    """Samples that take some 1.7 ms of Python each."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        number = index
        for _ in range(250 if SMOKE else 25_000):
            number = (number * 1103515245 + 12345) & 0x7FFFFFFF
        return torch.full((64,), float(number))


CROP, STORED, JPEGS = (6, 8, 4) if SMOKE else (224, 256, 64)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def larger_images(_: Path) -> TensorDataset:
    count = 256 if SMOKE else 1024
    return TensorDataset(torch.randint(256, (count, 3, STORED, STORED), dtype=torch.uint8))


def random_crop(image: torch.Tensor) -> torch.Tensor:
    top, left = (int(n) for n in torch.randint(STORED - CROP + 1, (2,)))
    return image[:, top : top + CROP, left : left + CROP]


class PerSample(Dataset[torch.Tensor]):
    """Crop, flip, conversion and normalization by torch's operators, a sample at a time."""

    def __init__(self, stored: TensorDataset) -> None:
        (self.images,) = stored.tensors
        self.mean = torch.tensor(MEAN)[:, None, None]
        self.std = torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = random_crop(self.images[index])
        if float(torch.rand(())) < 0.5:
            image = image.flip(-1)
        return (image.float() / 255 - self.mean) / self.std


def compose() -> transforms.Compose:
    return transforms.Compose(
        [
            transforms.RandomCrop(CROP),
            transforms.RandomHorizontalFlip(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def jpegs(folder: Path) -> Dataset[Any]:
    image = _module("PIL.Image", "Pillow")
    for name in ("a", "b"):
        (folder / name).mkdir()
        for i in range(4 if SMOKE else 128):
            noise = torch.rand(1, 3, 16, 16) * 255
            pixels = torch.nn.functional.interpolate(noise, (256, 256), mode="bicubic")
            array = pixels[0].clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
            image.fromarray(array).save(folder / name / f"{i}.jpg", quality=90)
    return ImageFolder(folder, _crop_of_256)


def _crop_of_256(image: torch.Tensor) -> torch.Tensor:
    top, left = (int(n) for n in torch.randint(256 - 224 + 1, (2,)))
    return image[:, top : top + 224, left : left + 224]


class WithPillow(Dataset[tuple[torch.Tensor, int]]):
    """The folder as torchvision reads it."""

    def __init__(self, folder: ImageFolder) -> None:
        self.samples = folder.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with _module("PIL.Image", "Pillow").open(path) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        return _crop_of_256(pixels).contiguous(), label


LOADER_WORKS = (
    LoaderWork("table 256 x 32", 256, table, 300, 25.0, others=LIBRARIES),
    LoaderWork("token windows 12 x 1024", 12, tokens, 1000, 10.0, Windows, others=LIBRARIES),
    LoaderWork(
        "images 128 x 3 x 224 x 224", 128, images, 24, 1.3, others=((COPY, bare_copy), *LIBRARIES)
    ),
    LoaderWork(
        "images 256 x 256, cropped, flipped, normalized",
        128,
        larger_images,
        12,
        5.0,
        PerSample,
        (("transforms", compose()),),
    ),
    LoaderWork(
        "JPEG folder 256 x 256, cropped",
        4 if SMOKE else 64,
        jpegs,
        8,
        1.3,
        WithPillow,
        (),
        LIBRARIES,
    ),
    LoaderWork("Python samples of 1 MB", 32, lambda _: Megabytes(), 16, 1.4, others=LIBRARIES),
    LoaderWork(
        "Python samples of 1.7 ms",
        32,
        lambda _: PythonBound(),
        24,
        1.0,
        others=LIBRARIES,
        in_slices=True,
    ),
)


def work_of(label: str) -> LoaderWork:
    (work,) = (work for work in LOADER_WORKS if work.label == label)
    return work
