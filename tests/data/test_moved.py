"""Tensors of a dataset that torch moves, shares, or takes away, while an epoch over them runs."""

import gc
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from faststep import _C
from faststep._torch import held as _held
from faststep.data import ArrayDataset, DataLoader, converted
from faststep.data import transforms as T  # noqa: N812

from .torch_and_ours import child, outcomes, plain, side_by_side

ROWS, WIDTH, BATCH = 12_000, 256, 512  # 12 MB, which malloc maps; batches that threads fill ahead
AHEAD = 4
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")


def rows(count: int = ROWS, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count).float().view(-1, 1).repeat(1, WIDTH)


def reuse_what_is_free() -> None:
    """What was freed and is still mapped gets other contents."""
    torch.full((ROWS, WIDTH), -7.0)


def put_into_queue(x: torch.Tensor) -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(x)
    torch.testing.assert_close(queue.get(), x)
    queue.close()
    queue.join_thread()


def enlarge_storage(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(2 * x.untyped_storage().nbytes())


def assign_data(x: torch.Tensor) -> None:
    x.data = x.clone()


def set_to_other(x: torch.Tensor) -> None:
    x.set_(x.clone())  # type: ignore[call-overload]


def resize_there_and_back(x: torch.Tensor) -> None:
    x.resize_(2 * ROWS, WIDTH)
    x.resize_(ROWS, WIDTH)


MOVES: list[Callable[[torch.Tensor], Any]] = [
    torch.Tensor.share_memory_,
    put_into_queue,
    enlarge_storage,
    assign_data,
    set_to_other,
    resize_there_and_back,
]


def wrong_rows(x: torch.Tensor, indices: torch.Tensor) -> int:
    return int((x != indices.view(-1, 1).to(x.dtype)).any(1).sum())


def check_epoch(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> None:
    """An epoch, after whose fourth batch something happens, has the right rows."""
    data = TensorDataset(x, torch.arange(ROWS))
    for number, (batch, indices) in enumerate(DataLoader(data, BATCH, shuffle=True)):
        assert wrong_rows(batch, indices) == 0
        if number == 3:
            change(x)
            reuse_what_is_free()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"device": "cpu"}], ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_rows_are_right_and_later_ones_are_of_the_new_memory(
    move: Callable[[torch.Tensor], Any], options: dict[str, Any]
) -> None:
    x = rows()
    data = TensorDataset(x, torch.arange(ROWS))
    ours = DataLoader(data, BATCH, shuffle=True, **options)
    assert ours.path == "arrays"
    for number, (batch, indices) in enumerate(ours):
        if number == 5:
            move(x)
            reuse_what_is_free()
            x.neg_()  # what was gathered before may be of either side
        if number <= 5:
            assert wrong_rows(batch, indices) == 0
        elif number > 5 + 2 * AHEAD + 3:
            assert wrong_rows(-batch, indices) == 0
        else:
            assert wrong_rows(batch.abs(), indices) == 0
    assert ours.path == "arrays"
    assert [wrong_rows(-batch, indices) for batch, indices in ours] == [0] * (number + 1)


@pytest.mark.parametrize("move", MOVES)
def test_a_move_before_the_first_batch(move: Callable[[torch.Tensor], Any]) -> None:
    x = rows()
    iterator = iter(DataLoader(TensorDataset(x, torch.arange(ROWS)), BATCH))
    move(x)
    reuse_what_is_free()
    x.neg_()
    assert all(wrong_rows(-batch, indices) == 0 for batch, indices in iterator)


def negate_some(x: torch.Tensor) -> None:
    x[::3].neg_()


def copy_to_detached(x: torch.Tensor) -> None:
    x.detach().copy_(-x)


@pytest.mark.parametrize("change", [torch.Tensor.neg_, negate_some, copy_to_detached])
@pytest.mark.parametrize("sampler", [range, torch.utils.data.SubsetRandomSampler, None])
def test_the_next_batch_shows_what_was_written(
    change: Callable[[torch.Tensor], Any], sampler: Any
) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(0)
        x, order = rows(), sampler(ROWS) if sampler is range else sampler and sampler(range(ROWS))
        loader: Any = kind(TensorDataset(x, torch.arange(ROWS)), BATCH, not order, order)
        sums = []
        for number, (batch, _) in enumerate(loader):
            sums.append(batch.sum(1))
            if number in (3, 7, 8):
                change(x)
        found.append(torch.cat(sums))
    assert torch.equal(*found)


def test_errors_come_as_from_a_worker() -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        data = TensorDataset(torch.arange(8))
        loader: Any = kind(data, batch_sampler=[[0], [9], [1, "x"], [2]], num_workers=2)
        found.append([[str(part).split("\n")[0] for part in one] for one in outcomes(loader)])
    assert found[0] == found[1]


def shrink(x: torch.Tensor) -> None:
    x.resize_(ROWS // 2, WIDTH)


def empty_storage(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)


def shrink_storage(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)


def error_of(loader: Any, change: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Exception:
    iterator = enumerate(loader)
    for number, (batch, indices) in iterator:
        assert wrong_rows(batch, indices) == 0
        if number == 3:
            change(x)
            reuse_what_is_free()
            break
    with pytest.raises((IndexError, RuntimeError)) as caught:
        assert all(wrong_rows(*batch) == 0 for _, batch in iterator)
    return caught.value


@pytest.mark.parametrize("change", [shrink, empty_storage, shrink_storage])
def test_rows_that_are_gone_are_torchs_error(change: Callable[[torch.Tensor], Any]) -> None:
    errors = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        x = rows()
        errors.append(error_of(kind(TensorDataset(x, torch.arange(ROWS)), BATCH), change, x))
    theirs, ours = errors
    assert type(ours) is type(theirs)
    assert str(ours).split()[:2] == str(theirs).split()[:2]  # they name the first row


def test_a_tensor_that_becomes_another_kind_is_left_to_torch() -> None:
    x = rows()
    seen = 0
    for number, (batch, indices) in enumerate(DataLoader(TensorDataset(x, torch.arange(ROWS)), 64)):
        if number == 3:
            x.data = x.double().t().contiguous().t()  # rows that are not contiguous
        seen += batch.dtype == torch.float64
        assert wrong_rows(batch, indices) == 0
    assert seen >= ROWS // 64 - 3 - AHEAD - 1


def test_moves_by_another_thread() -> None:
    x = rows()
    data, ended, moves = TensorDataset(x, torch.arange(ROWS)), threading.Event(), 0

    def move() -> None:
        nonlocal moves
        while not ended.is_set():
            x.untyped_storage().resize_((ROWS + moves % 64) * WIDTH * 4)
            moves += 1
        x.share_memory_()

    thread = threading.Thread(target=move)
    thread.start()
    try:
        for _ in range(2):
            for batch, indices in DataLoader(data, BATCH, shuffle=True):
                assert wrong_rows(batch, indices) == 0
    finally:
        ended.set()
        thread.join()
    assert moves > 5


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, DataLoader])
def test_validation_by_a_spawned_worker_in_the_middle(kind: Any) -> None:
    def validate(x: torch.Tensor) -> None:
        other: Any = Subset(StackDataset(x), range(8))  # of a kind that is read by a worker
        validation = kind(other, 4, num_workers=1, multiprocessing_context="spawn")
        found = torch.cat([batch for (batch,) in validation])
        assert wrong_rows(found, torch.arange(8)) == 0
        assert x.is_shared()  # it was moved

    check_epoch(rows(), validate)


class TestKinds:
    def test_nested_and_converted(self) -> None:
        x, y = rows().to(torch.int32), torch.arange(ROWS)
        part = {"x": converted(x, torch.float32, scale=0.5), "more": (rows(), y)}
        data = Subset(ConcatDataset([ArrayDataset(part), ArrayDataset(part)]), range(2 * ROWS))
        for number, batch in enumerate(DataLoader(data, BATCH, shuffle=True)):
            assert wrong_rows(batch["x"] * 2, batch["more"][1]) == 0
            assert wrong_rows(batch["more"][0], batch["more"][1]) == 0
            if number == 3:
                for tensor in (x, part["more"][0], y):
                    tensor.share_memory_()
                reuse_what_is_free()

    def test_one_of_many_tensors(self) -> None:
        count, size = 20, 600
        parts = [rows(size, i * size) for i in range(count)]
        places = [torch.arange(size) + i * size for i in range(count)]
        data = ConcatDataset(map(TensorDataset, parts, places))
        for number, (batch, indices) in enumerate(DataLoader(data, BATCH, shuffle=True)):
            assert wrong_rows(batch, indices) == 0
            parts[number % count].share_memory_()
        signs = []
        for number, (batch, indices) in enumerate(DataLoader(data, 200)):  # in order
            if number == 0:
                parts[7].set_(-parts[7])  # type: ignore[call-overload]
            assert wrong_rows(batch.abs(), indices) == 0
            signs += [int(i) for i in indices[batch[:, 0] < 0]]
        assert signs == [*range(7 * size, 8 * size)]
        others = [part.view(-1) for part in parts]  # keep the memory: nothing says that it is left
        late = DataLoader(Subset(data, range(7 * size, 8 * size)), 10)
        for number, (batch, _) in enumerate(late):
            if number == 0:
                parts[7].data = -parts[7]
            if number > count // 8 + 2 * AHEAD:
                assert (batch[:, 0] >= 0).all()
        assert len(others) == count

    @pytest.mark.parametrize("of", ["numpy", "bytes"])
    def test_memory_of_others(self, of: str) -> None:
        if of == "numpy":
            x = torch.from_numpy(rows().numpy().copy())
        else:
            buffer = bytearray(rows().numpy().tobytes())
            x = torch.frombuffer(buffer, dtype=torch.float32).view(ROWS, WIDTH)
            del buffer
        check_epoch(x, torch.Tensor.share_memory_)

    def test_images_that_are_read_in_place(self) -> None:
        def epoch(move: bool) -> list[Any]:
            torch.manual_seed(0)
            x = torch.arange(600 * 3 * 64 * 64).remainder_(251).byte().view(600, 3, 64, 64)
            compose = T.Compose([T.RandomResizedCrop(32), T.ToFloat(torch.float32)])
            ours = DataLoader(TensorDataset(x, torch.arange(600)), 32, True, transforms=compose)
            assert "where it lies" in ours.explain()
            found = []
            for number, batch in enumerate(ours):
                found.append(plain(batch))
                if move and number == 3:
                    x.share_memory_()
                    torch.full_like(x, 7)
                if move and number == 9:
                    x.set_(x.clone())  # type: ignore[call-overload]
            return found

        assert epoch(True) == epoch(False)

    def test_images_that_are_gone(self) -> None:
        x = torch.zeros(600, 3, 32, 32, dtype=torch.uint8)
        compose = T.Compose([T.ToFloat(torch.float32)])
        ours = DataLoader(TensorDataset(x, torch.arange(600)), 32, transforms=compose)
        iterator = iter(ours)
        assert not next(iterator)[0].any()
        empty_storage(x)
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            assert not any(batch.any() for batch, _ in iterator)

    def test_persistent_workers(self) -> None:
        x = rows()
        data = TensorDataset(x, torch.arange(ROWS))
        ours = DataLoader(data, BATCH, num_workers=2, persistent_workers=True)
        for move in (torch.Tensor.share_memory_, assign_data, set_to_other):
            assert all(wrong_rows(batch, indices) == 0 for batch, indices in ours)
            move(x)
            reuse_what_is_free()

    @on_linux
    def test_a_forked_child_goes_on(self) -> None:
        x = rows()
        iterator = iter(DataLoader(TensorDataset(x, torch.arange(ROWS)), BATCH))
        next(iterator)
        x.share_memory_()
        next(iterator)

        def work() -> None:
            torch.set_num_threads(1)  # those of torch's own pool are not there
            assert all(wrong_rows(batch, indices) == 0 for batch, indices in iterator)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are ours
            child(work)
        assert all(wrong_rows(batch, indices) == 0 for batch, indices in iterator)


class TestHolding:
    def test_what_is_moved_is_freed_once_it_was_read(self) -> None:
        gc.collect()
        before = _C.holds()
        x = rows()
        iterator = iter(DataLoader(TensorDataset(x, torch.arange(ROWS)), BATCH))
        next(iterator)
        assert _C.holds() == before + 1 + 1  # the numbers of the rows are the other
        x.share_memory_()
        assert _C.holds() == before + 2
        for _ in range(AHEAD + 2):
            next(iterator)
        assert _C.holds() == before + 1
        del iterator
        assert _C.holds() == before  # the numbers were of this epoch only

    def test_what_is_moved_is_freed_when_the_epoch_is_broken_off(self) -> None:
        x = rows()
        before = _C.holds()
        iterator = iter(DataLoader(TensorDataset(x), BATCH))
        next(iterator)
        x.share_memory_()
        assert _C.holds() == before + 1
        del iterator
        assert _C.holds() == before

    def test_a_tensor_is_the_same_after_it(self) -> None:
        x = rows()
        address, version = x.data_ptr(), x._version
        list(DataLoader(TensorDataset(x), BATCH))
        assert (x.data_ptr(), x._version, x.is_shared()) == (address, version, False)
        assert x.untyped_storage().resizable()
        x.resize_(ROWS + 1, WIDTH)
        assert wrong_rows(x[:ROWS], torch.arange(ROWS)) == 0

    def test_shared_memory_stays_shared(self) -> None:
        x = rows().share_memory_()
        address = x.data_ptr()
        check_epoch(x, put_into_queue)
        assert x.is_shared()
        assert x.data_ptr() == address

    def test_memory_that_is_copied_when_it_is_written(self) -> None:
        x = rows()
        clone = torch._lazy_clone(x)
        list(DataLoader(TensorDataset(x), BATCH))
        x.neg_()
        assert wrong_rows(clone, torch.arange(ROWS)) == 0

    def test_without_holding_torch_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_held, "_known", False)
        ours = DataLoader(TensorDataset(rows(), torch.arange(ROWS)), BATCH)
        assert ours.path == "torch"
        assert "does not let its memory be held" in ours.explain()
        assert all(wrong_rows(batch, indices) == 0 for batch, indices in ours)
        arrays = DataLoader(ArrayDataset(rows().numpy()), BATCH)
        assert arrays.path == "arrays"  # numpy's memory does not move

    @pytest.mark.parametrize("words", [[0] * 8, [5, 6, 7, 8, 9, 10, 11, 12], [1] * 8])
    def test_a_record_of_another_form_is_not_written(
        self, words: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_held, "_words", lambda tensor: words)
        assert _held._places() is None
        x = rows(2)
        _C.use_owners()
        try:
            assert not _held._find()
            with pytest.raises(RuntimeError, match="not known who owns"):
                _C.hold(x, _held.storage_record_of(x))
        finally:
            monkeypatch.undo()
            assert _held._find()

    def test_holds_from_many_threads(self) -> None:
        before, x = _C.holds(), rows(100)

        def hold() -> None:
            for _ in range(300):
                assert torch.equal(_held.hold(x), x)

        side_by_side(4, hold)
        assert _C.holds() == before + 1
        x.resize_(0)
        assert _C.holds() == before + 1
        x.untyped_storage().resize_(0)
        assert _C.holds() == before


def send(x: torch.Tensor) -> None:
    """What torch does with a tensor that it sends to a process."""
    ForkingPickler(io.BytesIO()).dump(x)


def epoch_with_a_sent_tensor(loader: DataLoader, x: torch.Tensor) -> list[torch.Tensor]:
    batches = []
    for number, (batch,) in enumerate(loader):
        batches.append(batch)
        if number == 2:
            send(x)
            reuse_what_is_free()
    return batches


def names() -> set[str]:
    """The files in memory that this process has made."""
    return {name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name}


@pytest.fixture
def file_system() -> Iterator[None]:
    """What is sent and received by nobody keeps its name until the process ends, or this does."""
    before = torch.multiprocessing.get_sharing_strategy()
    there = names()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)
    for name in names() - there:
        os.unlink(f"/dev/shm/{name}")


STRATEGIES = ["file_descriptor", "file_system"]


def shared(folder: Path) -> torch.Tensor:
    return rows().share_memory_()


def mapped(folder: Path) -> torch.Tensor:
    rows().numpy().tofile(folder / "rows.bin")
    return torch.from_file(str(folder / "rows.bin"), size=ROWS * WIDTH).view(ROWS, WIDTH)


def loaded(folder: Path) -> torch.Tensor:
    torch.save(rows(), folder / "rows.pt")
    found: torch.Tensor = torch.load(folder / "rows.pt", mmap=True)
    return found


@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize(
    ("make", "shares", "sends"),
    [
        *((shared, one, other) for one in STRATEGIES for other in STRATEGIES),
        *((loaded, one, one) for one in STRATEGIES),
        (mapped, "file_system", "file_system"),
    ],
)
def test_memory_that_is_shared_in_some_way_and_sent_in_some_way(
    tmp_path: Path, make: Callable[[Path], torch.Tensor], shares: str, sends: str
) -> None:
    """torch moves shared memory when it is to be sent in another way than it is shared in."""
    torch.multiprocessing.set_sharing_strategy(shares)
    x = make(tmp_path)
    torch.multiprocessing.set_sharing_strategy(sends)
    stays = make is loaded or (make is shared and sends == shares)
    ours = DataLoader(TensorDataset(x), BATCH)
    assert ours.path == ("arrays" if stays else "torch")
    assert ("tensors[0]: its memory is shared" in ours.explain()) is not stays
    address = x.data_ptr()
    assert torch.equal(torch.cat(epoch_with_a_sent_tensor(ours, x)), rows())
    assert make is loaded or (x.data_ptr() == address) is stays


class TestMemoryWithoutAnOwner:
    """As extensions make it with torch::from_blob: nobody frees it when the storage moves."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_moves(self, workers: int) -> None:
        memory = rows()
        storage = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr(), torch.device("cpu"), memory.nbytes
        )
        x = torch.empty(0, dtype=torch.float32).set_(storage, 0, (ROWS, WIDTH), (WIDTH, 1))
        ours = DataLoader(
            TensorDataset(x), BATCH, num_workers=workers, persistent_workers=workers > 0
        )
        assert ours.path == "arrays"
        assert torch.equal(torch.cat([batch for (batch,) in ours]), rows())
        x.share_memory_()
        assert x.data_ptr() != memory.data_ptr()
        memory.fill_(-7)
        assert torch.equal(torch.cat([batch for (batch,) in ours]), rows())
