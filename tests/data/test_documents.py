"""Windows that know where documents begin, and token files of any content."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import ConcatDataset, Subset

from faststep.data import DataLoader, TokenDataset, TokenWindow, cu_seqlens

from .torch_and_ours import assert_same

MARK = 5


def write(path: Path, length: int, token: str = "uint16") -> list[int]:
    tokens = np.random.default_rng(length).integers(0, 12, length).astype(token)
    tokens.tofile(path)
    return [int(t) for t in tokens]


def divided(x: list[int], side: str) -> tuple[list[int], list[int]]:
    """Position and document ids, one token after another."""
    positions, documents = [0], [0]
    for before, here in itertools.pairwise(x):
        new = (before if side == "eos" else here) == MARK
        positions.append(0 if new else positions[-1] + 1)
        documents.append(documents[-1] + new)
    return positions, documents


@pytest.mark.parametrize("side", ["eos", "bos"])
@pytest.mark.parametrize(
    ("token", "dtype"),
    [("uint16", torch.int32), ("uint16", torch.int64), ("uint32", torch.int64)],
)
def test_positions_and_documents(tmp_path: Path, side: str, token: str, dtype: torch.dtype) -> None:
    tokens = write(tmp_path / "t", 1000, token)
    write(tmp_path / "u", 90, token)
    options: Any = {side: MARK, "token_dtype": token, "dtype": dtype, "stride": 7}

    def make() -> tuple[Any, dict[str, Any]]:
        data = TokenDataset([tmp_path / "t", tmp_path / "u"], 40, **options)
        return data, {"batch_size": 8, "shuffle": True}

    assert_same(make)
    dataset = make()[0]
    for i in (0, 1, 50):
        x, y, positions, documents = sample = dataset[i]
        assert type(sample) is TokenWindow
        assert x.tolist() == tokens[7 * i : 7 * i + 40]
        assert y.tolist() == tokens[7 * i + 1 : 7 * i + 41]
        assert (positions.tolist(), documents.tolist()) == divided(x.tolist(), side)
        assert {part.dtype for part in sample} == {dtype}
    batch = next(iter(DataLoader(dataset, 3)))
    assert type(batch) is TokenWindow
    assert pickle.loads(pickle.dumps(dataset))[3].document_ids.equal(dataset[3].document_ids)
    assert_same(lambda: (Subset(ConcatDataset([dataset, dataset]), [3, 150]), {"batch_size": 2}))


def test_other_marks_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "t", 100)
    parts = [TokenDataset(tmp_path / "t", 10, eos=mark) for mark in (5, 6)]
    assert DataLoader(ConcatDataset(parts)).path == "torch"
    assert_same(lambda: (ConcatDataset(parts), {"batch_size": 4}), path="torch")


def test_attention_stays_within_documents(tmp_path: Path) -> None:
    """The mask of the ids, and the pieces of cu_seqlens one by one, give the same attention."""
    write(tmp_path / "t", 200)
    batch = next(iter(DataLoader(TokenDataset(tmp_path / "t", 32, eos=MARK), 4)))
    ends, longest = cu_seqlens(batch.position_ids)
    assert (ends.dtype, int(ends[0]), int(ends[-1])) == (torch.int32, 0, 128)
    assert longest == int(batch.position_ids.max()) + 1
    q, k, v = torch.randn(3, 4, 32, 8)
    same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
    want = scaled_dot_product_attention(q, k, v, attn_mask=same & torch.ones(32, 32).tril().bool())
    pieces = [
        scaled_dot_product_attention(
            *(t.reshape(128, 8)[None, a:b] for t in (q, k, v)), is_causal=True
        )
        for a, b in itertools.pairwise(ends)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1).view(4, 32, 8), want)


def test_wrong_marks(tmp_path: Path) -> None:
    write(tmp_path / "t", 100)
    for options, message in (
        ({"eos": 1, "bos": 2}, "eos 1 and bos 2: give one"),
        ({"eos": 1 << 16}, "eos 65536: .*t has tokens from 0 to 65535"),
        ({"bos": -1}, "bos -1: .*t has tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenDataset(tmp_path / "t", 8, **options)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_files_of_any_content(tmp_path: Path, data: Any) -> None:
    """A clear error that names the file, or windows of exactly what is in it."""
    is_npy = data.draw(st.booleans(), "npy")
    path = tmp_path / ("t.npy" if is_npy else "t.bin")
    if is_npy:
        kind = data.draw(st.sampled_from(["<u2", "<u4", ">u2", "<i2", "<f4"]))
        np.save(path, np.arange(data.draw(st.integers(0, 30)), dtype=kind))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 2), "flips")):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        content = content[: data.draw(st.integers(0, len(content)), "end")]
    else:
        content = bytearray(data.draw(st.binary(max_size=90)))
    path.write_bytes(content)
    try:
        dataset = TokenDataset(path, 4, stride=data.draw(st.integers(1, 9)), eos=3)
    except ValueError as error:
        assert "TokenDataset" in str(error) or str(path) in str(error)  # noqa: PT017
        return
    tokens = np.load(path) if is_npy else np.frombuffer(bytes(content), np.uint16)
    batches = [*DataLoader(dataset, 3)]
    windows = zip(torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches]), strict=True)
    starts = range(0, len(tokens) - 4, dataset.stride)
    for start, (x, y) in zip(starts, windows, strict=True):
        assert x.tolist() == tokens[start : start + 4].tolist()
        assert y.tolist() == tokens[start + 1 : start + 5].tolist()
