"""Tensors that are saved on the CPU, from a device whose streams run as late as they may."""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from faststep.memory import activations, saving

from . import fake, late

SIZE = 40
NBYTES = 4 * SIZE


class Saver:
    """A context, and how to fill tensors of the device."""

    def __init__(self, device: late.Late, pin_memory: bool = False) -> None:
        self.device = device
        self.made = 0
        self.sources: list[Tensor] = []
        context = saving.save_on_cpu(pin_memory)
        self.pack, self.unpack = context.pack_hook, context.unpack_hook

    def new(self, *shape: int) -> tuple[Tensor, Tensor]:
        """A tensor, whose elements will be there late, and these."""
        tensor = torch.empty(*(shape or (SIZE,)), device="cuda")
        return tensor, self.write(tensor)

    def write(self, tensor: Tensor) -> Tensor:
        """New elements, as an operation in place writes them; returns them."""
        self.made += 1000
        values = torch.arange(self.made, self.made + tensor.numel()).float().view(tensor.shape)
        source = torch.empty_like(values, pin_memory=True).copy_(values)
        self.sources.append(source)
        self.device.upload(tensor, source)
        torch.autograd.graph.increment_version(tensor)
        return values

    def copies(self) -> saving._Copies:
        [copies] = saving._all_copies.values()
        return copies

    def host(self) -> tuple[int, int]:
        """Bytes of the pool, and those of them that are taken."""
        return counts(self.copies())


def counts(copies: saving._Copies) -> tuple[int, int]:
    copies.slabs.take_back()
    whole = sum(slab.memory.numel() for slab in copies.slabs.slabs)
    return whole, whole - sum(
        end - start for slab in copies.slabs.slabs for start, end in slab.free
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "KINDS", (*saving.KINDS, fake.OnCuda))
    monkeypatch.setattr(saving, "SMALL", 1)
    monkeypatch.setattr(saving, "AHEAD", 3 * NBYTES)


@pytest.fixture
def saver(device: late.Late, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saver]:
    monkeypatch.setattr(saving, "_all_copies", {})
    made = Saver(device)
    yield made
    device.machine.synchronize()
    made.sources.clear()
    del made.pack, made.unpack
    for copies in saving._all_copies.values():
        copies._let_go_of_dropped()
        assert counts(copies)[1] == 0
        assert copies._bytes_back == 0
    saving._all_copies.clear()


def test_elements_come_back_when_their_memory_was_used_again(saver: Saver) -> None:
    """In the order of saving, in the other one, and out of order; late, each stream first."""
    device = saver.device
    orders = [range(20), range(19, -1, -1), random.Random(0).sample(range(20), 20)]
    for order in orders:
        packed, values = [], []
        for _ in range(20):
            tensor, value = saver.new()
            packed.append(saver.pack(tensor))
            values.append(value)
            del tensor
        found = [(device.read(saver.unpack(packed[i])), values[i]) for i in order]
        (saver.copies()._copying if order is orders[0] else device.default).synchronize()
        device.machine.synchronize()
        assert all(torch.equal(*pair) for pair in found)


def test_the_device_holds_two_windows_and_the_host_never_waits(saver: Saver) -> None:
    device = saver.device
    waits = device.machine.calls("cuEventSynchronize"), device.machine.calls("cuEventQuery")
    for _ in range(3):
        packed = [saver.pack(saver.new()[0]) for _ in range(20)]
        while packed:
            saver.unpack(packed.pop())
    assert device.machine.calls("cuEventSynchronize") == waits[0]
    assert device.allocated <= 2 * 3 + 2
    assert saver.host() == (64 << 20, 0)


def test_elements_are_back_before_they_are_asked_for(saver: Saver) -> None:
    device = saver.device
    packed = [saver.pack(saver.new()[0]) for _ in range(20)]
    uploads = device.machine.calls("cuMemcpyHtoDAsync_v2")
    counts = []
    while packed:
        saver.unpack(packed.pop())
        counts.append(device.machine.calls("cuMemcpyHtoDAsync_v2") - uploads)
    # The last three are still on the device. Meanwhile three others come, and more one by one.
    assert counts == [3, 3, 3, *range(4, 18), 17, 17, 17]


def test_a_guess_that_was_wrong_makes_room(saver: Saver) -> None:
    packed = [saver.pack(saver.new()[0]) for _ in range(20)]
    for i in (10, 4, 15, 9, 0):
        saver.unpack(packed[i])
        assert saver.copies()._bytes_back <= 3 * NBYTES
        assert i == 0 or packed[i - 1]._copy.device is not None


@pytest.mark.parametrize("gap", [False, True])
def test_one_copy_for_elements_that_are_saved_twice(saver: Saver, gap: bool) -> None:
    device = saver.device
    tensor, values = saver.new(5, 8)
    packed = [saver.pack(one) for one in (tensor, tensor.t(), tensor.view(-1), tensor[:2])]
    others = [saver.pack(saver.new()[0]) for _ in range(5)]
    assert saver.host()[1] == (5 + 2) * 512
    changed = saver.write(tensor)
    packed.append(saver.pack(tensor))  # these are other elements
    assert saver.host()[1] == (5 + 3) * 512
    del tensor
    if gap:
        others += [saver.pack(saver.new()[0]) for _ in range(5)]
    uploads = device.machine.calls("cuMemcpyHtoDAsync_v2")
    found = [saver.unpack(one) for one in packed]
    expected = [values, values.t(), values.view(-1), values[:2], changed]
    read = [device.read(one) for one in found]
    device.machine.synchronize()
    for one, got, want in zip(found, read, expected, strict=True):
        assert torch.equal(got, want)
        assert one.stride() == want.stride()
    assert device.machine.calls("cuMemcpyHtoDAsync_v2") - uploads <= 3 + 3
    del others


def test_backward_may_write_to_what_it_gets(saver: Saver) -> None:
    """Another operation that has saved the same gets what was saved."""
    device = saver.device
    tensor, values = saver.new()
    packed = [saver.pack(tensor) for _ in range(2)]
    others = [saver.pack(saver.new()[0]) for _ in range(5)]
    del tensor
    saver.write(saver.unpack(packed[0]))
    found = [device.read(saver.unpack(one)) for one in (*packed, *packed)]
    device.machine.synchronize()
    assert all(torch.equal(one, values) for one in found)
    del others


def test_a_source_that_is_changed_while_it_is_copied(saver: Saver) -> None:
    """And written by backward, where the script still has it."""
    device = saver.device
    tensor, values = saver.new()
    first = saver.pack(tensor)
    changed = saver.write(tensor)
    second = saver.pack(tensor)
    got = saver.unpack(second)
    found = device.read(saver.unpack(first)), device.read(got), device.read(tensor)
    saver.write(got)
    after = device.read(tensor)
    device.machine.synchronize()
    assert torch.equal(found[0], values)
    assert all(torch.equal(one, changed) for one in (*found[1:], after))


FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x.view(-1),
    lambda x: x[1:3],
    lambda x: x[:1],
]


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(saver: Saver, seed: int) -> None:
    """Tensors are saved, changed, forgotten and asked for, in any order; all at its time."""
    draws = random.Random(seed)
    live = [saver.new(5, 8) for _ in range(3)]
    packed: list[tuple[Any, Tensor]] = []
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(300):
        what = draws.choice(
            ["new", "save", "save", "save", "write", "forget", "ask", "ask", "drop"]
        )
        if what == "new" or len(live) < 2:
            live.append(saver.new(5, 8))
        elif what == "save":
            tensor, values = draws.choice(live)
            form = draws.choice(FORMS)
            packed.append((saver.pack(form(tensor)), form(values)))
        elif what == "write":
            place = draws.randrange(len(live))
            live[place] = live[place][0], saver.write(live[place][0])
        elif what == "forget":
            live.pop(draws.randrange(len(live)))
        elif packed:
            place = max(draws.randrange(len(packed)), draws.randrange(len(packed)))
            if what == "ask":
                one, values = packed[place]
                got = saver.unpack(one)
                found.append((saver.device.read(got), values))
                if draws.random() < 0.2 and got.is_contiguous():
                    saver.write(got)
            if what == "drop" or draws.random() < 0.7:
                packed.pop(place)
    for one, values in packed:
        found.append((saver.device.read(saver.unpack(one)), values))
    found += [(saver.device.read(tensor), values) for tensor, values in live]
    draws.choice([saver.copies()._copying, saver.device.default]).synchronize()
    saver.device.machine.synchronize()
    assert all(torch.equal(*pair) for pair in found)
    packed.clear()
    del one


@pytest.mark.parametrize("pin_memory", [False, True])
def test_forms_of_tensors(device: late.Late, saver: Saver, pin_memory: bool) -> None:
    """Shape, strides and dtype are those of torch's copies."""
    device.machine.lag(0)
    saver = Saver(device, pin_memory)
    base = torch.empty(2, 3, 4, 5, device="cuda")
    values = saver.write(base)
    forms = [
        lambda x: x,
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x[1:],
        lambda x: x[:1],
        lambda x: x[..., 0],
        lambda x: x[:, 1],
        lambda x: x[:, :, ::2],
        lambda x: x[:, :1].expand(2, 3, 4, 5),
        lambda x: x.view(torch.int16),
        lambda x: x.view(-1, 1, 2).transpose(0, 1),
        lambda x: x.as_strided((3, 3), (2, 2)),
        lambda x: x[:0],
        lambda x: x[0, 0, 0, 0],
    ]
    form = torch.contiguous_format if pin_memory else torch.preserve_format
    for number, change in enumerate(forms):
        want = change(values).clone(memory_format=form)
        for _ in range(2):
            packed = saver.pack(change(base))
            others = [saver.pack(saver.new()[0]) for _ in range(8)]
            for _ in range(2):
                got = saver.unpack(packed)
                assert got.stride() == want.stride(), number
                assert got.dtype == want.dtype
                assert torch.equal(fake.plain(got), want), number
            del packed, others


def test_leaves_stay_where_they_are(saver: Saver) -> None:
    weight, leaf = (  # nn.Parameter makes a view of what only claims to be on a device
        Tensor._make_subclass(fake.OnCuda, fake.plain(saver.new(5, 8)[0]), True) for _ in range(2)
    )
    frozen = nn.Parameter(saver.new(5, 8)[0], requires_grad=False)
    packed = [(saver.pack(one), one) for one in (weight, frozen, leaf, weight.t(), leaf[1:])]
    for one, tensor in packed:
        got = saver.unpack(one)
        assert got.data_ptr() == tensor.data_ptr()
        assert (got is tensor) == tensor.is_leaf
    assert not saving._all_copies
    with torch.no_grad():
        saver.write(weight)
    for one in (packed[0][0], packed[3][0]):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[.*version"):
            saver.unpack(one)


def test_small_tensors_stay_on_the_device(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SMALL", NBYTES + 1)
    tensor, values = saver.new()
    packed = saver.pack(tensor)
    saver.write(tensor)
    del tensor
    got = saver.unpack(packed)
    saver.write(got)
    found = saver.device.read(saver.unpack(packed))
    saver.device.machine.synchronize()
    assert torch.equal(found, values)
    assert not saving._all_copies


def test_a_graph_that_no_backward_runs(saver: Saver) -> None:
    """Also one of which something was copied back already."""
    for asked in (False, True):
        packed = [saver.pack(saver.new()[0]) for _ in range(20)]
        if asked:
            saver.unpack(packed[12])
            assert saver.copies()._bytes_back
        del packed
        gc.collect()
        assert saver.host()[1] == 0
        assert len(saver.copies()._back) == 0
    taken = saver.device.allocated
    packed = [saver.pack(saver.new()[0])]
    tensors = [saver.new() for _ in range(taken)]
    assert saver.device.allocated <= taken + 3 + 3  # on their way when the graph was gone
    saver.device.default.synchronize()
    saver.device.machine.synchronize()
    assert all(torch.equal(fake.plain(tensor), values) for tensor, values in tensors)
    del packed


def test_streams(saver: Saver) -> None:
    """Saved on one stream, and asked for on another one."""
    device, other = saver.device, late.Stream(saver.device)
    packed, values = [], []
    for i in range(12):
        with device.use(other if i % 3 else device.default):
            tensor, value = saver.new()
            packed.append(saver.pack(tensor))
            values.append(value)
            del tensor
    device.default.wait_stream(other)
    other.wait_stream(device.default)
    found = []
    for i in reversed(range(12)):
        with device.use(other if i % 2 else device.default):
            found.append(device.read(saver.unpack(packed.pop())))
            saver.new()
    other.synchronize()
    device.machine.synchronize()
    assert all(map(torch.equal, found, reversed(values)))


def test_threads(saver: Saver) -> None:
    """They save and ask at once."""
    errors: list[object] = []

    def work() -> None:
        for _ in range(5):
            packed = [saver.pack(saver.new()[0]) for _ in range(10)]
            while packed:
                saver.unpack(packed.pop())

    def run() -> None:
        try:
            work()
        except BaseException as error:  # for the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors


class Product(torch.autograd.Function):
    """Of a weight and a constant, which it saves."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return fake.plain(weight) * fake.plain(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, x = ctx.saved_tensors
        return fake.claim(grad * fake.plain(x)), None


def test_backward(device: late.Late, saver: Saver) -> None:
    device.machine.lag(0)
    weight = fake.claim(torch.ones(SIZE)).requires_grad_()
    values = torch.zeros(SIZE)
    losses = []
    with saving.save_on_cpu():
        for _ in range(8):
            x, value = saver.new()
            values += value
            losses.append(Product.apply(weight, x).sum())
            del x
    loss: Tensor = sum(losses)  # type: ignore[assignment]
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    assert torch.equal(fake.plain(weight.grad), values)
    loss.backward()
    assert torch.equal(fake.plain(weight.grad), 2 * values)
    del losses, loss


def test_the_pool_keeps_its_memory(saver: Saver) -> None:
    locks = saver.device.machine.calls("cuMemHostAlloc")
    packed = [saver.pack(torch.empty(SIZE, device="cuda")) for _ in range(30)]
    random.Random(0).shuffle(packed)
    while packed:
        packed.pop()
    packed = [saver.pack(torch.empty(SIZE * 30, device="cuda"))]
    assert saver.device.machine.calls("cuMemHostAlloc") - locks == 1
    assert saver.host() == (64 << 20, 30 * NBYTES // 512 * 512 + 512)


def test_a_device_without_memory_to_copy_ahead(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, values = [], []
    for _ in range(10):
        tensor, value = saver.new()
        packed.append(saver.pack(tensor))
        values.append(value)
        del tensor
    empty, uploads = torch.empty, saver.device.machine.calls("cuMemcpyHtoDAsync_v2")

    def full(*size: Any, device: Any = None, **rest: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    saver.unpack(packed[9])  # what is still on the device
    assert saver.device.machine.calls("cuMemcpyHtoDAsync_v2") == uploads
    with pytest.raises(torch.OutOfMemoryError):
        saver.unpack(packed[2])
    monkeypatch.setattr(torch, "empty", empty)
    found = saver.device.read(saver.unpack(packed[2]))
    saver.device.machine.synchronize()
    assert torch.equal(found, values[2])


def test_a_child_leaves_the_pool_to_its_parent(saver: Saver) -> None:
    copies = saving._copies_of(torch.device("cuda", 0))
    assert saving._copies_of(torch.device("cuda", 0)) is copies
    saving._leave_to_parent()
    assert not saving._all_copies
    assert saving._copies_of(torch.device("cuda", 0)) is not copies


def test_the_rate_of_copies(device: late.Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: machine.synchronize())
    monkeypatch.setattr(activations, "COPIED", 1000)
    machine = device.machine
    uploads = machine.calls("cuMemcpyHtoDAsync_v2")
    seconds = activations.seconds_per_byte(torch.device("cuda", 0))
    assert seconds is not None
    assert 0 < seconds < 1
    assert machine.calls("cuMemcpyHtoDAsync_v2") == uploads + 1
    assert activations.seconds_per_byte(torch.device("cpu")) is None


def test_a_capture_is_left_to_torch(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    packed = saver.pack(saver.new()[0])
    assert isinstance(packed, tuple)
