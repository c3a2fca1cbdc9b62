"""Datasets that write their samples into the batch: torch's batches, without copies."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset, default_collate

from faststep import _C
from faststep.data import DataLoader
from faststep.data.formats import ImageFolder, jpeg
from faststep.data.formats.jpeg import jpeg_decoder, scaled
from faststep.data.workers import packed_batch

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("simplejpeg")
COUNT, SIZE = 14, (40, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG, and two PNG, of one size."""
    root = tmp_path_factory.mktemp("images")
    for i in range(COUNT):
        (root / f"{i % 2}").mkdir(exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 255, (6, 9, 3), dtype=np.uint8)
        kind = "png" if i in (3, 8) else "jpg"
        Image.fromarray(noise).resize(SIZE).save(root / f"{i % 2}" / f"{i:02}.{kind}")
    return root


def crop(image: torch.Tensor) -> torch.Tensor:
    return image[:, 3:20, 5:22]


def to_float(image: torch.Tensor) -> torch.Tensor:
    return image.float().flip(2)


def in_dict(image: torch.Tensor) -> Any:
    return {"image": image, "sum": image.sum()}


def with_gradient(image: torch.Tensor) -> torch.Tensor:
    return image.double().requires_grad_()


def mean(image: torch.Tensor) -> float:
    return float(image.float().mean())


TRANSFORMS = [None, crop, to_float, in_dict, with_gradient, mean]
WAYS = [(0, "process"), (2, "process"), (2, "thread")]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_batches_are_those_of_torch(folder: Path, transform: Any, memory_format: Any) -> None:
    dataset: Any = ImageFolder(folder, transform, memory_format=memory_format)
    want = [
        default_collate([dataset[i] for i in range(at, min(at + 4, COUNT))]) for at in (0, 4, 8, 12)
    ]
    for workers, method in WAYS:
        if workers and method == "process" and transform is with_gradient:
            continue  # an error of torch
        loader = DataLoader(dataset, 4, num_workers=workers, worker_method=method)
        got = [batch for _ in range(2) for batch in loader]
        for (images, labels), (wanted, targets) in zip(got, want * 2, strict=True):
            torch.testing.assert_close(images, wanted, rtol=0, atol=0)
            assert torch.equal(labels, targets)
            if transform in (None, crop):
                assert images.is_contiguous(memory_format=memory_format)


def addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the decoder writes."""
    decoder = jpeg_decoder("simplejpeg")
    decode, places = type(decoder).decode, []

    def noting(self: Any, data: bytes, pixels: Any) -> bool:
        places.append(pixels.ctypes.data)
        return decode(self, data, pixels)

    monkeypatch.setattr(type(decoder), "decode", noting)
    return places


@pytest.mark.parametrize("method", ["process", "thread"])
def test_the_decoder_writes_into_the_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    places = addresses(monkeypatch)
    dataset = ImageFolder(folder, decoder="simplejpeg", memory_format=torch.channels_last)
    workers = int(method == "thread")
    half = Subset(Subset(dataset, range(COUNT)), [0, 1, 2, 3])
    loader = DataLoader(half, 4, num_workers=workers, worker_method=method)
    for _ in range(3):
        (images, _), *rest = loader
        assert not rest
        step = images.stride(0)
        assert places == [images.data_ptr() + i * step for i in range(4)]
        places.clear()
    del images
    stats = loader.stats()
    assert stats is not None
    assert stats["slots"]["made"] <= 2  # used again by the next epoch
    assert stats["slots"]["held"] == 0


def leaves_at_once(self: Any) -> None:
    """In a worker: nobody else has a tensor over the block of images."""
    assert [self.memory.sent(self.blocks[place][0]) for place, _ in self.leaving] == [True]


def test_a_worker_copies_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_batch._Contents, "replace_kept", leaves_at_once)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        dataset = ImageFolder(folder, memory_format=memory_format)
        loader = DataLoader(Subset(dataset, range(COUNT)), 4, num_workers=1)
        assert len(list(loader)) == 4
        with pytest.raises(AssertionError):
            list(DataLoader(Kept(folder), 4, num_workers=1))


class Kept(ImageFolder):
    """Keeps its samples, and writes to them when the next ones are made."""

    kept: tuple[Any, ...] = ()

    def __getitems__(self, indices: Any) -> Any:
        for image, _ in self.kept:
            image.zero_()
        samples = super().__getitems__(indices)
        self.kept = tuple(samples)
        return samples


class Negative(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return 255 - image, target


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_subclasses(folder: Path, workers: int, method: str) -> None:
    """One that sees the samples has them for itself, and what it makes of them is what comes."""
    want = torch.stack([image for image, _ in ImageFolder(folder)])
    options: Any = {"num_workers": min(workers, 1), "worker_method": method}
    kept = DataLoader(Kept(folder, memory_format=torch.channels_last), 4, **options)
    assert torch.equal(torch.cat([images for images, _ in kept]), want)
    negative = DataLoader(Negative(folder), 4, **options)
    assert torch.equal(torch.cat([images for images, _ in negative]), 255 - want)


def in_a_list(samples: Any) -> Any:
    return samples


def twice(samples: Any) -> Any:
    first = default_collate(samples)
    first[0].zero_()
    return first, default_collate(samples)


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_other_collate_functions_see_samples_of_their_own(
    folder: Path, workers: int, method: str
) -> None:
    dataset = ImageFolder(folder, memory_format=torch.channels_last)
    for collate in (in_a_list, twice):
        options: Any = {"num_workers": workers, "worker_method": method, "collate_fn": collate}
        for got, want in zip(
            DataLoader(dataset, 4, **options),
            TorchLoader(dataset, 4, collate_fn=collate),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_images_of_several_sizes(folder: Path, tmp_path: Path, workers: int, method: str) -> None:
    """torch's error; and `image_size` makes them one size."""
    for i, size in enumerate([(40, 24), (30, 60), (20, 21)]):
        (tmp_path / "a").mkdir(exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 255, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(noise).resize(size).save(tmp_path / "a" / f"{i}.jpg")
    for memory_format in (torch.contiguous_format, torch.channels_last):
        options: Any = {"num_workers": workers, "worker_method": method}
        dataset = ImageFolder(tmp_path, memory_format=memory_format)
        with pytest.raises(RuntimeError, match="equal size"):
            next(iter(DataLoader(dataset, 3, **options)))
        square = ImageFolder(tmp_path, image_size=16, memory_format=memory_format)
        images, _ = next(iter(DataLoader(square, 3, **options)))
        assert images.shape == (3, 3, 16, 16)
        assert images.is_contiguous(memory_format=memory_format)
        tall = torch.nn.functional.interpolate(
            dataset[1][0][None].float(), (32, 16), mode="bilinear", antialias=True
        )
        assert (images[1].float() - tall[0, :, 8:24]).abs().max() <= 1


def test_a_damaged_image_in_a_batch(folder: Path, tmp_path: Path) -> None:
    for path in sorted(folder.glob("0/*.jpg")):
        (tmp_path / "0").mkdir(exist_ok=True)
        (tmp_path / "0" / path.name).write_bytes(path.read_bytes())
    paths = sorted(tmp_path.glob("0/*.jpg"))
    paths[2].write_bytes(paths[2].read_bytes()[:500])
    for workers, method in WAYS:
        dataset = ImageFolder(tmp_path, memory_format=torch.channels_last)
        iterator = iter(DataLoader(dataset, 2, num_workers=workers, worker_method=method))
        next(iterator)
        with pytest.raises(ValueError, match=rf"{paths[2].name} \(record 2\)"):
            next(iterator)
        assert torch.equal(next(iterator)[0][0], dataset[4][0])


def decoders() -> list[str]:
    return ["simplejpeg", *(["turbojpeg"] if jpeg._has_turbojpeg() else [])]


def encoded(image: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.parametrize("decoder", decoders())
def test_decoders_write_the_pixels_of_pillow(decoder: str) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (19, 23, 3), dtype=np.uint8)
    found = jpeg_decoder(decoder)
    assert found is not None
    for mode in ("RGB", "L"):
        for sampling in (0, 1, 2):
            image = Image.fromarray(noise).resize((201, 133)).convert(mode)
            options = {"subsampling": sampling, "progressive": sampling == 1}
            data = encoded(image, **(options if mode == "RGB" else {}))
            want = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
            around = np.full(want.size + 64, 7, np.uint8)
            pixels = around[32:-32].reshape(want.shape)
            assert found.size(data) == want.shape[:2]
            assert found.decode(data, pixels)
            assert (pixels == want).all()
            assert (around[:32] == 7).all()
            assert (around[-32:] == 7).all()
            for least in (5, 17, 34, 67, 134):
                draft = Image.open(io.BytesIO(data))
                draft.draft(None, (least, least))
                assert scaled(*want.shape[:2], least) == draft.size[::-1]
                pixels = np.empty((*draft.size[::-1], 3), np.uint8)
                assert found.decode(data, pixels)
                assert (pixels == np.array(draft.convert("RGB"))).all()
            assert not found.decode(data[: len(data) // 2], np.empty_like(want))
            assert found.size(data[:9]) is None
    assert found.size(encoded(image.convert("CMYK"))) is None


@pytest.mark.parametrize("decoder", decoders())
def test_what_pillow_repairs_is_read(tmp_path: Path, decoder: str) -> None:
    """Bytes between the pixels and the mark of the end, as some images of ImageNet have."""
    data = encoded(Image.fromarray(np.full((16, 16, 3), 90, np.uint8)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(data[:-2] + b"\x7f\x7f\x7f" + data[-2:])
    dataset = ImageFolder(tmp_path, decoder=decoder, memory_format=torch.channels_last)
    want = torch.full((3, 16, 16), 90, dtype=torch.uint8)
    assert torch.equal(dataset[0][0], want)
    assert torch.equal(next(iter(DataLoader(dataset, 1)))[0][0], want)


def test_auto_is_what_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = jpeg.decoder_name.__wrapped__
    assert name("auto") == "simplejpeg"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert name("auto") == ("turbojpeg" if jpeg._has_turbojpeg() else "pillow")
    monkeypatch.setattr(jpeg, "_has_turbojpeg", lambda: False)
    assert name("auto") == "pillow"

    def missing(file: str) -> None:
        raise OSError(f"{file} is not there")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(ImportError, match="needs the system's libturbojpeg"):
        jpeg._turbojpeg.__wrapped__()
    wrong: Any = {"memory_format": torch.preserve_format}, {"min_size": 0}, {"image_size": -1}
    for options in wrong:
        with pytest.raises(ValueError, match="must be"):
            ImageFolder(folder, **options)


def test_split_channels() -> None:
    generator = torch.Generator().manual_seed(1)
    for height, width in ((0, 3), (1, 1), (5, 7), (16, 64), (33, 31)):
        pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
        around = torch.full((pixels.numel() + 2,), 9, dtype=torch.uint8)
        out = around[1:-1].view(3, height, width)
        _C.split_channels(pixels, out)
        assert torch.equal(out, pixels.permute(2, 0, 1))
        assert (around[0], around[-1]) == (9, 9)
    with pytest.raises(ValueError, match="another height or width"):
        _C.split_channels(pixels, out.transpose(1, 2).contiguous())
    with pytest.raises(ValueError, match=r"pixels is not a packed \(height, width, 3\)"):
        _C.split_channels(out, pixels)
    with pytest.raises(ValueError, match="out overlaps"):
        _C.split_channels(around[2:].view(*pixels.shape), out)
