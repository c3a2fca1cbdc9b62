"""Lazily negated and conjugated tensors, of which the memory holds other elements."""

from typing import Any

import pytest
import torch
from torch import Tensor

from faststep import _C
from faststep.data import ArrayDataset, DataLoader
from faststep.data import transforms as T  # noqa: N812
from faststep.data.deliver import copies
from faststep.data.deliver.batch_buffers import BatchBuffers
from faststep.data.deliver.copies import page_locked


class Locked:
    """An arena that has everything page-locked."""

    def locked(self, storage: Any) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_a_page_locked_block_stands_for_plain_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "memory_owners", [Locked()])
    for x in (torch.arange(6.0), torch.randn(6, dtype=torch.complex64)):
        same = page_locked(x)
        assert same is not None
        assert torch.equal(same, x)
    assert page_locked(torch._neg_view(torch.arange(6.0))) is None
    assert page_locked(x.conj()) is None
    assert page_locked(x.conj().imag) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_lent_rows_that_were_changed_lazily_are_stacked(dtype: torch.dtype) -> None:
    buffers = BatchBuffers(lambda size: torch.empty(size, dtype=torch.uint8))
    for change in (None, torch._neg_view, torch.Tensor.conj):
        batch = buffers.lend((3, 4), None, dtype)
        assert batch is not None
        rows = list(batch.copy_(torch.randn(3, 4, dtype=dtype)))
        if change is not None:
            rows[1] = change(rows[1])
        plain = rows[1].is_conj() is rows[1].is_neg() is False
        expected = torch.stack(rows)
        assert (buffers.whole(rows) is batch) is plain
        assert torch.equal(buffers.stack(rows), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images(dtype: torch.dtype) -> None:
    """Transforms resolve a whole batch; the function below them refuses one."""
    x = torch.randint(1, 256, (2, 3, 8, 8)).to(dtype)
    compose = T.Compose([T.CenterCrop(6)])
    assert torch.equal(compose(torch._neg_view(-x)), compose(x))
    samples = torch.zeros(2, 17, dtype=torch.int32)
    ones, out = (1.0,) * 3, torch.zeros(2, 3, 8, 8)
    for images, to in ((torch._neg_view(x), out), (x, torch._neg_view(out))):
        with pytest.raises((TypeError, ValueError), match="is a lazily negated view"):
            _C.transform_images(images, to, samples, ones, ones, None, False)


def test_a_loss_scale() -> None:
    numbers = torch.tensor(1024.0), torch.zeros((), dtype=torch.int32), torch.zeros(())
    for index, name in enumerate(("scale", "growth_tracker", "found_inf")):
        given = [torch._neg_view(t) if i == index else t for i, t in enumerate(numbers)]
        with pytest.raises(TypeError, match=f"{name} must be a one-element .*not lazily negated"):
            _C.update_scale(*given[:2], None, given[2], 2.0, 0.5, 2000, 1, 0.0, 1e9)


def test_memory_that_was_taken_away() -> None:
    """A storage that was resized to nothing is refused by name, where torch itself would crash."""

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(0)
        return tensor

    samples = torch.zeros(2, 17, dtype=torch.int32)
    right = torch.ones(2, 3, 8, 8), torch.zeros(2, 3, 8, 8), samples
    for index, name in enumerate(("images", "out", "samples")):
        given = [emptied(t) if i == index else t for i, t in enumerate(right)]
        with pytest.raises(TypeError, match=f"{name} has no memory behind it"):
            _C.transform_images(*given, (1.0,) * 3, (0.0,) * 3, None, False)
    numbers = torch.tensor(1024.0), torch.zeros((), dtype=torch.int32), torch.zeros(())
    for index, name in enumerate(("scale", "growth_tracker", "found_inf")):
        given = [emptied(t) if i == index else t for i, t in enumerate(numbers)]
        with pytest.raises(TypeError, match=f"{name} has no memory behind it"):
            _C.update_scale(*given[:2], None, given[2], 2.0, 0.5, 2000, 1, 0.0, 1e9)
    indices = emptied(torch.arange(3))
    loader = DataLoader(ArrayDataset(torch.arange(3.0)), batch_sampler=[indices])
    for ask in (lambda: _C.permute(indices, 3, 1, 2, 0, 1), lambda: list(loader)):
        with pytest.raises(TypeError, match="the tensor has no memory behind it"):
            ask()
