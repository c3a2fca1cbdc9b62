"""Images that transforms read where the dataset has them, with the bits of gathered batches."""

import gc
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from faststep.data import ArrayDataset, DataLoader, converted
from faststep.data import transforms as T  # noqa: N812
from faststep.data.arrays.in_place import ImageRows

from .image_lists import FLIP, LISTS, NORMALIZE, images
from .torch_and_ours import is_error, outcomes, plain, saved

ROWS, BATCH = 11, 4
X = images(ROWS, 3, 16, 22)
FLOATS = images(ROWS, 3, 16, 22, dtype=torch.float32)
Y = torch.arange(ROWS) % 5
DATA = TensorDataset(X, Y)
MIXED = [T.RandomCrop((9, 13)), FLIP, NORMALIZE, T.CutMix(1.0, 5)]
Pair = namedtuple("Pair", ["pixels", "kind"])


class Gathering(T.Compose):
    """The same, of batches that are gathered: a subclass may do anything."""


def loader(kind: Any, data: Any, chosen: list[Any], fields: Any = None, **more: Any) -> Any:
    torch.default_generator.manual_seed(3)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, **more}
    if "batch_sampler" in options:
        del options["batch_size"], options["shuffle"]
    return DataLoader(data, transforms=kind(chosen, fields), **options)


def epochs(of: Any, count: int = 2) -> list[Any]:
    """Batches, or errors; and what was drawn."""
    torch.default_generator.manual_seed(3)
    found: list[Any] = []
    for _ in range(count):
        found += [*outcomes(of), torch.get_rng_state().tolist()]
    return found


def stays(of: Any) -> bool:
    return "where it lies" in of.explain()


def assert_same(data: Any, chosen: list[Any], fields: Any = None, **options: Any) -> list[Any]:
    """Read in place, and as it is gathered."""
    in_place = loader(T.Compose, data, chosen, fields, **options)
    gathered = loader(Gathering, data, chosen, fields, **options)
    assert (stays(in_place), stays(gathered)) == (True, False)
    got = epochs(in_place)
    assert got == epochs(gathered)
    return got


@pytest.mark.parametrize("x", [X, FLOATS], ids=["uint8", "float32"])
@pytest.mark.parametrize("name", LISTS)
def test_the_bits_of_a_gathered_batch(name: str, x: torch.Tensor) -> None:
    assert_same(TensorDataset(x, Y), LISTS[name])


def structured() -> Any:
    """Pixels and labels beside each other, row by row."""
    kind = np.dtype([("pixels", np.float32, (3, 16, 22)), ("label", np.int64)])
    rows = np.zeros(ROWS, kind)
    rows["pixels"] = FLOATS.numpy()
    return rows["pixels"]


Source = Callable[[], tuple[Any, Any]]
SOURCES: dict[str, Source] = {
    "images alone": lambda: (TensorDataset(X), None),
    "a tensor": lambda: (ArrayDataset(X), None),
    "dict": lambda: (ArrayDataset({"label": Y, "image": X}), None),
    "dict with names": lambda: (ArrayDataset({"a": {"b": Y}, "c": X, "d": Y}), ("c", "d")),
    "list": lambda: (ArrayDataset([[Y, (Y, Y)], X, Y]), (-2, 2)),
    "named tuple": lambda: (ArrayDataset(Pair(X, Y)), None),
    "subset": lambda: (Subset(DATA, [3, -1, 0, 5, 5]), None),
    "subset of a subset": lambda: (Subset(Subset(DATA, range(9, 0, -2)), [4, 0, -2]), None),
    "joined alone": lambda: (ConcatDataset([DATA]), None),
    "every second": lambda: (TensorDataset(X[::2], Y[::2]), None),
    "one for all": lambda: (TensorDataset(X[:1].expand(ROWS, -1, -1, -1), Y), None),
    "numpy": lambda: (ArrayDataset((X.numpy(), Y.numpy())), None),
    "numpy with gaps": lambda: (ArrayDataset((structured(), Y)), None),
    "converted to itself": lambda: (ArrayDataset((converted(X, torch.uint8), Y)), None),
    "shared memory": lambda: (TensorDataset(X.clone().share_memory_(), Y), None),
    "no pixels": lambda: (TensorDataset(X[:, :, :0], Y), None),
}


@pytest.mark.parametrize("name", SOURCES)
def test_datasets(name: str) -> None:
    data, fields = SOURCES[name]()
    has_labels = name not in ("images alone", "a tensor")
    chosen = [FLIP, NORMALIZE, *([T.MixUp(1.0, 5)] if has_labels else [])]
    assert not any(map(is_error, assert_same(data, chosen, fields)))


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"drop_last": True},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1},
        {"batch_size": ROWS},
        {"batch_sampler": [[3, -1], (0, 3), [7], torch.tensor([2, -3])]},
        {"batch_sampler": [[1, 2], np.array([3, 4]), [], [5]]},  # torch fetches what it can
        {"shuffle": None, "sampler": torch.utils.data.WeightedRandomSampler([1.0] * ROWS, 9)},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert_same(DATA, MIXED, **options)


def test_errors_are_those_of_a_gathered_batch() -> None:
    batches = [[0, 1], [2, ROWS], [3, -ROWS - 1], [4, 5]]
    got = assert_same(DATA, MIXED, batch_sampler=batches)
    assert [*map(is_error, got[:4])] == [False, True, True, False]
    for chosen in ([T.RandomCrop(30)], [T.MixUp(1.0, 4)], [T.Normalize((1.0, 2.0), (1.0, 2.0))]):
        assert all(item[0] is ValueError for item in assert_same(DATA, chosen)[:2])
    many = TensorDataset(torch.zeros(ROWS, 33, 2, 2))
    assert "33 channels" in assert_same(many, [])[0][1]


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def unaligned() -> Any:
    rows = np.zeros(ROWS, np.dtype([("label", np.int8), ("pixels", np.float32, (3, 16, 22))]))
    return rows["pixels"]


def read_only() -> Any:
    array = X.numpy().copy()
    array.flags.writeable = False
    return array


GATHERED: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "on the cpu ahead": lambda: (DATA, {"device": "cpu"}),
    "two tensors": lambda: (ConcatDataset([DATA, DATA]), {}),
    "converted": lambda: (ArrayDataset((converted(X, torch.float32, scale=0.5), Y)), {}),
    "backwards": lambda: (ArrayDataset((X.numpy()[::-1], Y)), {}),
    "unaligned": lambda: (ArrayDataset((unaligned(), Y)), {}),
    "read-only": lambda: (ArrayDataset((read_only(), Y)), {}),
    "code of its own": lambda: (Own(X, Y), {}),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_cannot_stay_is_gathered(name: str) -> None:
    data, options = GATHERED[name]()
    both = [loader(kind, data, MIXED, **options) for kind in (T.Compose, Gathering)]
    assert not any(map(stays, both))
    found = [epochs(each) for each in both]
    assert found[0] == found[1]
    assert not any(map(is_error, found[0]))


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (TensorDataset(X[0], Y[:3]), None),
        (TensorDataset(X.double(), Y), None),
        (ArrayDataset({"pixels": X, "label": Y}), None),
        (ArrayDataset([[X], Y]), None),
        (TensorDataset(X, Y), (2, 1)),
        (TensorDataset(X, Y), (0, 0)),
        (TensorDataset(X, Y), ("image", "label")),
        (ArrayDataset({"image": X, "label": Y}), ([], "label")),
    ],
)
def test_what_is_no_batch_of_images_has_the_same_errors(data: Any, fields: Any) -> None:
    both = [loader(kind, data, MIXED, fields) for kind in (T.Compose, Gathering)]
    assert not any(map(stays, both))
    found = [epochs(each, 1)[0] for each in both]
    assert found[0] == found[1]
    assert issubclass(found[0][0], (TypeError, ValueError))


def files(folder: Path) -> Iterator[Any]:
    """The same pixels in memory of a file."""
    np.save(folder / "x.npy", X.numpy())
    yield np.load(folder / "x.npy", mmap_mode="r+")
    yield torch.from_numpy(np.load(folder / "x.npy", mmap_mode="r+"))
    X.numpy().tofile(folder / "x.bin")
    name = str(folder / "x.bin")
    yield torch.from_file(name, size=X.numel(), dtype=torch.uint8).view(X.shape)


def test_threads_read_files_ahead(tmp_path: Path) -> None:
    for mapped in files(tmp_path):
        of_file = loader(T.Compose, ArrayDataset((mapped, Y)), MIXED)
        assert not stays(of_file)
        assert epochs(of_file) == epochs(loader(T.Compose, DATA, MIXED))


def test_no_image_is_gathered() -> None:
    iterator = iter(loader(T.Compose, DATA, MIXED, shuffle=False))
    rows, labels = next(iterator._batches)
    assert isinstance(rows, ImageRows)
    assert rows.images.data_ptr() == X.data_ptr()
    assert rows.rows.tolist() == [0, 1, 2, 3]
    assert torch.equal(labels, Y[:BATCH])


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_states_are_those_of_gathered_batches(options: dict[str, Any]) -> None:
    """Saved in the middle of an epoch by the one, and loaded by the other too."""
    whole = loader(T.Compose, DATA, MIXED, **options)
    batches, states = [], []
    for batch in whole:
        batches.append(plain(batch))
        states.append(saved(whole.state_dict()))
    other = loader(Gathering, DATA, MIXED, **options)
    assert [saved(other.state_dict()) for _ in other] == states
    for kind in (T.Compose, Gathering):
        again = loader(kind, DATA, MIXED, **options)
        again.load_state_dict(states[0])
        assert [plain(batch) for batch in again] == batches[1:]


def test_an_epoch_goes_on_with_the_tensors_it_began_with() -> None:
    want = outcomes(loader(T.Compose, DATA, MIXED))
    data = TensorDataset(X.clone(), Y.clone())
    of = loader(T.Compose, data, MIXED)
    iterator = iter(of)
    got = [plain(next(iterator))]
    data.tensors = (torch.zeros_like(X), torch.zeros_like(Y))
    gc.collect()
    got += [plain(batch) for batch in iterator]
    assert got == want
    assert not next(iter(loader(T.Compose, data, [])))[0].any()  # the next one has the new ones


def test_batches_are_tensors_of_their_own() -> None:
    of = loader(T.Compose, TensorDataset(FLOATS), [], shuffle=False)
    kept = [batch[0] for _ in range(2) for batch in of]
    assert torch.equal(torch.cat(kept), torch.cat([FLOATS, FLOATS]))
    for batch in kept:
        batch.zero_()
    assert len({batch.data_ptr() for batch in kept}) == len(kept)
    assert FLOATS.any()
