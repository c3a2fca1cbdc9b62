"""TFRecord: against checksums and messages that are written the slow way, and damaged anywhere."""

import contextlib
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import faststep.data
from faststep import _C
from faststep.data import FormatError
from faststep.data.formats import TFRecordDataset, TFRecordStream
from faststep.data.formats.example import parse_example


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def part(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(value: Any, packed: bool = True) -> bytes:
    if isinstance(value, bytes):
        value = [value]
    if isinstance(value, list) and all(isinstance(item, bytes) for item in value):
        return part(1, b"".join(part(1, item) for item in value))
    if value.dtype == torch.float32:
        items = [struct.pack("<f", item) for item in value.tolist()]
        loose = [varint(1 << 3 | 5) + item for item in items]
        return part(2, part(1, b"".join(items)) if packed else b"".join(loose))
    items = [varint(item) for item in value.tolist()]
    loose = [varint(1 << 3) + item for item in items]
    return part(3, part(1, b"".join(items)) if packed else b"".join(loose))


def example(features: dict[str, Any], packed: bool = True) -> bytes:
    entries = [part(1, n.encode()) + part(2, feature(v, packed)) for n, v in features.items()]
    return part(1, b"".join(part(1, entry) for entry in entries))


def sequence_example(
    context: dict[str, Any], lists: dict[str, list[Any]], packed: bool = True
) -> bytes:
    """A tf.train.SequenceExample; its context is what the features of an Example are."""
    entries = [
        part(1, n.encode()) + part(2, b"".join(part(1, feature(step, packed)) for step in steps))
        for n, steps in lists.items()
    ]
    return example(context, packed) + part(2, b"".join(part(1, entry) for entry in entries))


def write(path: Path, records: list[bytes]) -> Path:
    path.write_bytes(b"".join(map(record, records)))
    return path


def equal(got: Any, want: Any) -> bool:
    if isinstance(want, list):
        return isinstance(got, list) and all(equal(g, w) for g, w in zip(got, want, strict=True))
    if isinstance(want, torch.Tensor):
        return got.dtype == want.dtype and torch.equal(got, want)
    return bool(got == want)


def test_checksums() -> None:
    assert _C.crc32c(b"123456789") == 0xE3069283
    data = bytes(range(256)) * 3
    for start in range(9):
        assert _C.crc32c(data[start : -start or None]) == crc32c(data[start : -start or None])
    for wrong in (1, "text", None, bytearray(3)):
        with pytest.raises(TypeError):
            _C.crc32c(wrong)  # type: ignore[arg-type]


SAMPLES = [
    {
        "image": bytes([i]) * i,
        "label": torch.tensor([i, -i, 2**62 + i]),
        "x": torch.arange(i, dtype=torch.float32) / 3,
        "words": [b"a", b"", b"c" * i],
    }
    for i in range(9)
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_examples(tmp_path: Path, packed: bool, workers: int) -> None:
    for shard in range(3):
        samples = SAMPLES[3 * shard : 3 * shard + 3]
        write(tmp_path / f"{shard}.tfrecord", [example(s, packed) for s in samples])
    dataset: Any = faststep.data.open(tmp_path)
    assert isinstance(dataset, TFRecordDataset)
    assert len(dataset) == 9
    assert len(dataset[-1]["words"]) == 3
    loader = DataLoader(dataset, None, num_workers=workers)
    stream = TFRecordStream(tmp_path / "{0..2}.tfrecord")
    for got in ([*loader], [pickle.loads(pickle.dumps(dataset))[i] for i in range(9)], [*stream]):
        for sample, want in zip(got, SAMPLES, strict=True):
            want = {**want, "x": want["x"] if len(want["x"]) else sample["x"]}
            assert list(sample) == sorted(want)
            assert all(equal(sample[name], want[name]) for name in want), (sample, want)
    many = [s["label"][0] for s in DataLoader(stream, None, num_workers=workers)]
    assert sorted(many) == list(range(9))
    with pytest.raises(IndexError, match="no record 9 among 9"):
        dataset[9]


def test_bytes_as_they_are(tmp_path: Path) -> None:
    records = [bytes([i]) * (i * 700) for i in range(20)]
    path = write(tmp_path / "x", records)
    assert [*TFRecordDataset(path, bytes)] == records
    assert [*TFRecordStream(path, bytes)] == records
    begun, other = iter(TFRecordStream(path, bytes)), iter(TFRecordStream(path, bytes))
    assert [next(begun) for _ in range(7)] == records[:7]
    other.load_state_dict(begun.state_dict())  # type: ignore[attr-defined]
    assert [*other] == records[7:]
    (tmp_path / "none").write_bytes(b"")
    assert len(TFRecordDataset([tmp_path / "none", path], bytes)) == 20
    with pytest.raises(FileNotFoundError):
        TFRecordDataset(tmp_path / "other*")


def test_damage_is_named(tmp_path: Path) -> None:
    records = [b"first", b"second", b"third"]
    whole = write(tmp_path / "x", records).read_bytes()
    begin = len(record(b"first"))

    def faults(data: bytes, message: str) -> None:
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(FormatError, match=rf"bad: record 1, at byte {begin}: .*{message}"):
            list(TFRecordStream(tmp_path / "bad", bytes))
        with pytest.raises(FormatError, match=rf"bad: record 1, at byte {begin}: .*{message}"):
            TFRecordDataset(tmp_path / "bad", bytes)[1]

    def flipped(at: int) -> bytes:
        return whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]

    faults(whole[: begin + 5], "ends in the record's length")
    faults(whole[: begin + 14], "ends in the record's data")
    faults(flipped(begin + 2), "checksum of the record's length")
    faults(flipped(begin + 14), "checksum of the record's data")
    assert TFRecordDataset(tmp_path / "bad", bytes)[2] == b"third"
    write(tmp_path / "y", [b"", b"\x0a\x03abc"])
    with pytest.raises(FormatError, match=r"y: record 1, at byte 16: .*byte"):
        TFRecordDataset(tmp_path / "y")[1]


@pytest.mark.parametrize("length", [9, 1 << 30, 1 << 63, 2**64 - 16, 2**64 - 1])
def test_a_length_beyond_the_end_of_the_file(tmp_path: Path, length: int) -> None:
    """With the checksum that belongs to it."""
    head = struct.pack("<Q", length)
    (tmp_path / "x").write_bytes(record(b"first") + head + masked(head) + bytes(12))
    for kind in (TFRecordDataset, TFRecordStream):
        with pytest.raises(FormatError, match=r"record 1, at byte 21: .*ends in the record's data"):
            list(kind(tmp_path / "x", bytes))


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_any_damage_is_a_clear_error(records: list[bytes], data: Any) -> None:
    """Through the C reader, on memory of exactly the file's size."""
    whole = bytearray(b"".join(map(record, records)))
    end = data.draw(st.integers(0, len(whole)), "end")
    file = bytearray(whole[:end])
    if file and data.draw(st.booleans(), "flip"):
        file[data.draw(st.integers(0, len(file) - 1), "at")] ^= 1 << data.draw(st.integers(0, 7))
    memory = torch.tensor(list(file), dtype=torch.uint8)
    places = torch.empty(2 * len(records) + 2, dtype=torch.int64)
    found, at, fault = _C.scan_tfrecords(memory.data_ptr(), len(file), 0, True, places)
    got = [bytes(file[s : s + n]) for s, n in places[: 2 * found].view(-1, 2).tolist()]
    assert got == records[:found]
    assert (fault == 0) == (at == len(file))
    assert fault or bytes(file) == bytes(whole[:at])


@settings(max_examples=150)
@given(st.binary(max_size=80))
def test_noise_is_no_record(noise: bytes) -> None:
    memory = torch.tensor(list(noise), dtype=torch.uint8)
    places = torch.empty(8, dtype=torch.int64)
    found, at, fault = _C.scan_tfrecords(memory.data_ptr(), len(noise), 0, True, places)
    assert (found, at) == (0, 0)
    assert bool(fault) == bool(noise)


FEATURES = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.binary(max_size=9),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9).map(torch.tensor),
        st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5).map(
            lambda values: torch.tensor(values, dtype=torch.float32)
        ),
    ),
    max_size=4,
)


def test_the_scan_checks_its_arguments() -> None:
    places = torch.empty(4, dtype=torch.int64)
    assert _C.scan_tfrecords(0, 0, 0, True, places) == (0, 0, 0)
    for wrong in (torch.empty(4), torch.empty(2, 2, dtype=torch.int64), None):
        with pytest.raises(TypeError):
            _C.scan_tfrecords(0, 0, 0, True, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("now", [[], [b"a"], [b"a", b"other", b"c"], [b"a", b"b", b"longer"]])
def test_a_file_that_changed_after_it_was_indexed(tmp_path: Path, now: list[bytes]) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(map(record, [b"a", b"b", b"c"])))
    pickled = pickle.dumps(TFRecordDataset(path, bytes))
    path.unlink()
    path.write_bytes(b"".join(map(record, now)))
    with pytest.raises(FormatError, match=r"x\.tfrecord: .*"):
        pickle.loads(pickled)[2]


def test_sequence_examples(tmp_path: Path) -> None:
    context = {"id": torch.tensor([7]), "title": b"a film"}
    lists = {
        "frames": [b"jpeg", b"", [b"two", b"parts"]],
        "sizes": [torch.tensor([1, 2]), torch.tensor([3])],
        "scores": [torch.tensor([0.5]), torch.tensor([1.5, -2.0])],
        "none": [],
    }
    messages = [
        sequence_example(context, lists),
        sequence_example({}, lists),
        sequence_example(context, {}),
    ]
    wanted = [{**context, **lists}, lists, context]
    path = write(tmp_path / "x", messages)
    for dataset in (TFRecordDataset(path), TFRecordStream(path)):
        for got, want in zip(dataset, wanted, strict=True):
            assert list(got) == sorted(want)
            assert all(equal(got[name], value) for name, value in want.items()), got
    (batch,) = DataLoader(TFRecordDataset(write(tmp_path / "one", messages[2:])))
    assert batch["id"].tolist() == [[7]]


def test_a_step_without_values_is_kept() -> None:
    steps = part(1, b"") + part(1, feature(torch.tensor([1]))) + part(1, part(3, b""))
    message = part(2, part(1, part(1, b"x") + part(2, steps)))
    got = parse_example(message)["x"]
    assert got[0] == []
    assert [got[1].tolist(), got[2].tolist()] == [[1], []]
    assert got[2].dtype == torch.int64


def test_a_name_in_both_parts_is_an_error(tmp_path: Path) -> None:
    message = sequence_example({"x": b"1", "y": b"2"}, {"x": [b"3"], "z": [b"4"]})
    path = write(tmp_path / "both", [b"", message])
    with pytest.raises(FormatError, match=r"both: record 1, at byte 16: \['x'\] are names of the"):
        TFRecordDataset(path)[1]


STEPS = st.one_of(
    st.binary(max_size=5),
    st.lists(st.binary(max_size=3), min_size=2, max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4).map(torch.tensor),
)


@settings(max_examples=300)
@given(
    FEATURES,
    st.dictionaries(st.text(max_size=4), st.lists(STEPS, max_size=4)),
    st.booleans(),
    st.data(),
)
def test_any_message_is_read_or_refused(
    context: dict[str, Any], lists: dict[str, Any], packed: bool, data: Any
) -> None:
    lists = {name: steps for name, steps in lists.items() if name not in context}
    message = sequence_example(context, lists, packed)
    got = parse_example(message)
    assert all(equal(got[name], value) for name, value in (context | lists).items())
    assert len(got) == len(context) + len(lists)
    damaged = bytearray(message[: data.draw(st.integers(0, len(message)), "end")])
    if damaged:
        at = data.draw(st.integers(0, len(damaged) - 1), "at")
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ValueError):  # UnicodeDecodeError is one
        parse_example(bytes(damaged))
