"""Image folders: the pixels that Pillow gives, by each decoder, written into the batch."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset, default_collate

import faststep.data
from faststep import _C
from faststep.data import DataLoader, FormatError
from faststep.data.formats import ImageFolder, decode_image, jpeg
from faststep.data.formats.jpeg import decode_jpeg, jpeg_size, scaled
from faststep.data.workers import packed_batch

Image = pytest.importorskip("PIL.Image")
KINDS = ("jpg", "jpeg", "png", "webp", "bmp")
DECODERS = ["pillow"]
try:
    import simplejpeg  # noqa: F401

    DECODERS.append("simplejpeg")
except ImportError:
    pytest.skip("simplejpeg is missing", allow_module_level=True)


def picture(seed: int, width: int = 53, height: int = 37) -> Any:
    noise = np.random.default_rng(seed).integers(0, 255, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes; files of all kinds, some deeper, one that is no image."""
    for number, name in enumerate(("cat", "bird", "dog")):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for i, kind in enumerate(KINDS):
            place = tmp_path / name / ("deeper" if i % 2 else "")
            picture(10 * number + i).save(place / f"{i}.{kind.upper() if i else kind}")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


def by_pillow(path: str) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("decoder", DECODERS)
def test_samples(folder: Path, decoder: str) -> None:
    dataset: Any = faststep.data.open(folder, decoder=decoder)
    assert isinstance(dataset, ImageFolder)
    assert dataset.classes == ["bird", "cat", "dog"]
    assert dataset.class_to_idx == {"bird": 0, "cat": 1, "dog": 2}
    assert dataset.targets == [0] * 5 + [1] * 5 + [2] * 5
    names = [str(Path(path).relative_to(folder / "bird")) for path, _ in dataset.samples[:5]]
    assert names == ["0.jpg", "2.PNG", "4.BMP", "deeper/1.JPEG", "deeper/3.WEBP"]
    for i, (path, target) in enumerate(dataset.samples):
        image, number = dataset[i]
        assert (image.dtype, image.is_contiguous(), number) == (torch.uint8, True, target)
        assert torch.equal(image, by_pillow(path))
    with pytest.raises(IndexError):
        dataset[15]


def test_transforms_and_workers(folder: Path) -> None:
    dataset = ImageFolder(folder, lambda image: image.float().mean((1, 2)), lambda target: -target)
    assert dataset.decoder == "simplejpeg"
    batches = [*TorchLoader(dataset, 5, num_workers=2)]
    assert torch.equal(batches[1][1], torch.full((5,), -1))
    assert torch.equal(batches[2][0][4], dataset[14][0])


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_colours_and_scales(decoder: str, mode: str) -> None:
    for kind in ("JPEG", "PNG") if mode != "CMYK" else ("JPEG",):
        file = io.BytesIO()
        picture(3, 200, 120).convert(mode).save(file, kind)
        data = file.getvalue()
        want = torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))
        assert torch.equal(decode_image(data, decoder), want.permute(2, 0, 1))
        if kind == "JPEG" and mode == "RGB":
            assert decode_image(data, decoder, min_size=50).shape == (3, 60, 100)
            assert decode_image(data, decoder, min_size=500).shape == (3, 120, 200)


@pytest.mark.parametrize("decoder", DECODERS)
def test_damaged_images_are_named(folder: Path, decoder: str) -> None:
    dataset = ImageFolder(folder, decoder=decoder)
    for i, (path, _) in enumerate(dataset.samples[:5]):
        whole = Path(path).read_bytes()
        for cut in (0, 11, len(whole) // 2):
            Path(path).write_bytes(whole[:cut])
            with pytest.raises(FormatError, match=rf"{path} \(record {i}\): "):
                dataset[i]
    iterator = iter(TorchLoader(Subset(dataset, [0, 7]), None, num_workers=1))
    with pytest.raises(FormatError, match=r"0.jpg \(record 0\)"):
        next(iterator)
    assert len(list(iterator)) == 1


def test_noise_is_a_clear_error(folder: Path) -> None:
    dataset = ImageFolder(folder)
    path = Path(dataset.samples[0][0])
    whole, generator = path.read_bytes(), np.random.default_rng(5)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for at in generator.integers(2, len(whole), 4):
            damaged[at] = int(generator.integers(256))
        path.write_bytes(damaged)
        try:
            assert dataset[0][0].shape[0] == 3
        except FormatError:
            refused += 1
    assert refused > 10


def test_wrong_folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no image .* is in \['empty'\]"):
        ImageFolder(folder)
    with pytest.raises(FileNotFoundError, match="no folder of a class"):
        ImageFolder(tmp_path_factory.mktemp("none"))
    with pytest.raises(ValueError, match="decoder 'other'"):
        ImageFolder(folder, decoder="other")


def test_no_program_is_run_for_an_image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow tells a format by its content, and lets Ghostscript draw EPS."""
    plugin = pytest.importorskip("PIL.EpsImagePlugin")
    ran: list[Any] = []
    monkeypatch.setattr(plugin, "Ghostscript", lambda *given, **named: ran.append(given))
    dataset = ImageFolder(folder)
    head = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    Path(dataset.samples[0][0]).write_bytes(head)
    with pytest.raises(FormatError, match=r"\(record 0\): EPS is not read"):
        dataset[0]
    assert ran == []


pytest.importorskip("simplejpeg")
COUNT, SIZE = 14, (40, 24)


@pytest.fixture(scope="module")
def of_one_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_batches_are_those_of_torch(of_one_size: Path, transform: Any, memory_format: Any) -> None:
    dataset: Any = ImageFolder(of_one_size, transform, memory_format=memory_format)
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
    places = []

    def noting(data: bytes, pixels: Any) -> bool:
        places.append(pixels.ctypes.data)
        return decode_jpeg(data, pixels)

    monkeypatch.setattr("faststep.data.formats.images.decode_jpeg", noting)
    return places


@pytest.mark.parametrize("method", ["process", "thread"])
def test_the_decoder_writes_into_the_batch(
    of_one_size: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    places = addresses(monkeypatch)
    dataset = ImageFolder(of_one_size, decoder="simplejpeg", memory_format=torch.channels_last)
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


def test_a_worker_copies_nothing(of_one_size: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_batch._Contents, "replace_kept", leaves_at_once)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        dataset = ImageFolder(of_one_size, memory_format=memory_format)
        loader = DataLoader(Subset(dataset, range(COUNT)), 4, num_workers=1)
        assert len(list(loader)) == 4
        with pytest.raises(AssertionError):
            list(DataLoader(Kept(of_one_size), 4, num_workers=1))


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
def test_subclasses(of_one_size: Path, workers: int, method: str) -> None:
    """One that sees the samples has them for itself, and what it makes of them is what comes."""
    want = torch.stack([image for image, _ in ImageFolder(of_one_size)])
    options: Any = {"num_workers": min(workers, 1), "worker_method": method}
    kept = DataLoader(Kept(of_one_size, memory_format=torch.channels_last), 4, **options)
    assert torch.equal(torch.cat([images for images, _ in kept]), want)
    negative = DataLoader(Negative(of_one_size), 4, **options)
    assert torch.equal(torch.cat([images for images, _ in negative]), 255 - want)


def in_a_list(samples: Any) -> Any:
    return samples


def twice(samples: Any) -> Any:
    first = default_collate(samples)
    first[0].zero_()
    return first, default_collate(samples)


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_other_collate_functions_see_samples_of_their_own(
    of_one_size: Path, workers: int, method: str
) -> None:
    dataset = ImageFolder(of_one_size, memory_format=torch.channels_last)
    for collate in (in_a_list, twice):
        options: Any = {"num_workers": workers, "worker_method": method, "collate_fn": collate}
        for got, want in zip(
            DataLoader(dataset, 4, **options),
            TorchLoader(dataset, 4, collate_fn=collate),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("workers", "method"), WAYS)
def test_images_of_several_sizes(
    of_one_size: Path, tmp_path: Path, workers: int, method: str
) -> None:
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


def test_a_damaged_image_in_a_batch(of_one_size: Path, tmp_path: Path) -> None:
    for path in sorted(of_one_size.glob("0/*.jpg")):
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


def encoded(image: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def test_simplejpeg_writes_the_pixels_of_pillow() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (19, 23, 3), dtype=np.uint8)
    for mode in ("RGB", "L"):
        for sampling in (0, 1, 2):
            image = Image.fromarray(noise).resize((201, 133)).convert(mode)
            options = {"subsampling": sampling, "progressive": sampling == 1}
            data = encoded(image, **(options if mode == "RGB" else {}))
            want = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
            around = np.full(want.size + 64, 7, np.uint8)
            pixels = around[32:-32].reshape(want.shape)
            assert jpeg_size(data) == want.shape[:2]
            assert decode_jpeg(data, pixels)
            assert (pixels == want).all()
            assert (around[:32] == 7).all()
            assert (around[-32:] == 7).all()
            for least in (5, 17, 34, 67, 134):
                draft = Image.open(io.BytesIO(data))
                draft.draft(None, (least, least))
                assert scaled(*want.shape[:2], least) == draft.size[::-1]
                pixels = np.empty((*draft.size[::-1], 3), np.uint8)
                assert decode_jpeg(data, pixels)
                assert (pixels == np.array(draft.convert("RGB"))).all()
            assert not decode_jpeg(data[: len(data) // 2], np.empty_like(want))
            assert jpeg_size(data[:9]) is None
    assert jpeg_size(encoded(image.convert("CMYK"))) is None


def test_what_pillow_repairs_is_read(tmp_path: Path) -> None:
    """Bytes between the pixels and the mark of the end, as some images of ImageNet have."""
    data = encoded(Image.fromarray(np.full((16, 16, 3), 90, np.uint8)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(data[:-2] + b"\x7f\x7f\x7f" + data[-2:])
    dataset = ImageFolder(tmp_path, memory_format=torch.channels_last)
    want = torch.full((3, 16, 16), 90, dtype=torch.uint8)
    assert torch.equal(dataset[0][0], want)
    assert torch.equal(next(iter(DataLoader(dataset, 1)))[0][0], want)


def test_auto_is_what_is_installed(of_one_size: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = jpeg.decoder_name.__wrapped__
    assert name("auto") == "simplejpeg"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert name("auto") == "pillow"
    wrong: Any = {"memory_format": torch.preserve_format}, {"min_size": 0}, {"image_size": -1}
    for options in wrong:
        with pytest.raises(ValueError, match="must be"):
            ImageFolder(of_one_size, **options)


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
