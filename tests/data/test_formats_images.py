"""Image folders: the pixels that Pillow gives, by each decoder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import faststep.data
from faststep.data import FormatError
from faststep.data.formats import ImageFolder, decode_image

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
    batches = [*DataLoader(dataset, 5, num_workers=2)]
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
    iterator = iter(DataLoader(Subset(dataset, [0, 7]), None, num_workers=1))
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
