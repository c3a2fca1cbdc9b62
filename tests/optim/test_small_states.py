"""Small states lie side by side in blocks; nothing else may tell them from tensors of their own."""

import copy
import io
import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter

import faststep
from faststep.optim.zeros import SLAB, SMALL, Zeros

from .common import assert_same_bits, parameters

SMALL_SHAPES = ((3, 4), (64,), (), (1, 7, 1), (5, 4, 3, 2), (SMALL // 4,))


def stepped(params: list[Parameter], steps: int = 2) -> faststep.optim.AdamW:
    optimizer = faststep.optim.AdamW(params, amsgrad=True)
    step(optimizer, params, steps)
    return optimizer


def step(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: int) -> None:
    for i in range(steps):
        for p in params:
            p.grad = torch.full_like(p, 0.5 + i)
        optimizer.step()


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for values in optimizer.state.values() for value in values.values()]


def layouts() -> dict[str, Callable[[torch.dtype], Tensor]]:
    return {
        "contiguous": lambda dtype: torch.ones(3, 4, 5, dtype=dtype),
        "transposed": lambda dtype: torch.ones(3, 4, dtype=dtype).t(),
        "channels_last": lambda dtype: torch.ones(2, 3, 4, 5, dtype=dtype).to(
            memory_format=torch.channels_last
        ),
        "sliced": lambda dtype: torch.ones(6, 6, dtype=dtype)[::2, 1:4],
        "expanded": lambda dtype: torch.ones(1, 3, dtype=dtype).expand(4, 3),
        "empty": lambda dtype: torch.ones(0, 3, dtype=dtype),
        "scalar": lambda dtype: torch.ones((), dtype=dtype),
        "large": lambda dtype: torch.ones(SMALL // 2 + 1, dtype=dtype),
        "meta": lambda dtype: torch.ones(3, 4, dtype=dtype, device="meta"),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", layouts())
def test_zeros_are_those_of_torch(layout: str, dtype: torch.dtype) -> None:
    zeros = Zeros()
    tensor = layouts()[layout](dtype)
    expected = torch.zeros_like(tensor, memory_format=torch.preserve_format)
    for made in (zeros.like(tensor), zeros.like(tensor)):
        assert (made.size(), made.stride()) == (expected.size(), expected.stride())
        assert (made.dtype, made.device) == (expected.dtype, expected.device)
        assert made.is_meta or torch.equal(made, expected)
        assert made.is_leaf
        assert not made.requires_grad
        if not made.is_meta and made.numel():
            assert made.data_ptr() % 64 == 0
            made.fill_(1.0)  # the next one must not be over the same memory


def test_states_do_not_overlap_and_slabs_are_bounded() -> None:
    params = parameters(*SMALL_SHAPES * 40)
    states = states_of(stepped(params))
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in states)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in states}
    assert max(storages.values()) <= SLAB
    assert len(storages) < len(states) // 2


@pytest.mark.parametrize("size", [1, 10, 64, 500])
def test_a_block_has_few_tensors_of_a_size(size: int) -> None:
    states = states_of(stepped(parameters(*[(size,)] * 300), 1))
    storages = {t.untyped_storage().data_ptr() for t in states}
    assert len(states) // 20 < len(storages) < len(states) // 2
    assert all(t.untyped_storage().nbytes() <= 16 * max(t.nbytes, 64) for t in states)


@pytest.mark.parametrize("size", [0, 10**6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_storage_that_states_share_is_not_resized(dtype: torch.dtype, size: int) -> None:
    """It would take the memory of the others, and torch crashes when these are read."""
    params = parameters(*SMALL_SHAPES, dtype=dtype)
    optimizer = stepped(params)
    states = [state for state in states_of(optimizer) if state.nbytes <= SMALL]
    before = [state.clone() for state in states]
    counts = Counter(state.untyped_storage().data_ptr() for state in states)
    assert max(counts.values()) > 1
    for state in states:
        with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
            state.untyped_storage().resize_(size)
    assert_same_bits(states, before)
    step(optimizer, params, 1)
    alone = copy.deepcopy(states[1])
    alone.untyped_storage().resize_(0)
    states[1].share_memory_()
    step(optimizer, params, 1)
    assert [state["step"].item() for state in optimizer.state.values()] == [4.0] * len(params)


def test_a_large_state_has_memory_of_its_own() -> None:
    moments = [t for t in states_of(stepped(parameters((SMALL // 4 + 1,)), 1)) if t.dim()]
    assert [t.untyped_storage().nbytes() for t in moments] == [SMALL + 4] * 3


def test_an_optimizer_per_parameter_takes_no_more_memory() -> None:
    optimizers = [stepped([p]) for p in parameters(*[(64,)] * 5)]
    for optimizer in optimizers:
        states = states_of(optimizer)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in states}
        assert sum(storages.values()) <= 2 * sum(t.nbytes for t in states)


def copied(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return copy.deepcopy(optimizer.state_dict())


def saved(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert len(file.getvalue()) < 2 * sum(t.nbytes for t in states_of(optimizer)) + 50_000
    file.seek(0)
    state_dict: dict[str, object] = torch.load(file, weights_only=True)
    return state_dict


def pickled(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """As broadcast_object_list() sends it: a storage is written for every tensor that is in it."""
    data = pickle.dumps(optimizer.state_dict())
    assert len(data) < (SLAB + 1000) * len(states_of(optimizer))
    state_dict: dict[str, object] = pickle.loads(data)
    return state_dict


@pytest.mark.parametrize("route", [copied, saved, pickled])
@pytest.mark.parametrize("cls", [faststep.optim.AdamW, torch.optim.AdamW])
def test_states_go_on_after_a_copy(
    route: Callable[[torch.optim.Optimizer], dict[str, object]], cls: type[torch.optim.AdamW]
) -> None:
    params = parameters(*SMALL_SHAPES)
    optimizer = stepped(params)
    twins = [Parameter(p.detach().clone()) for p in params]
    other = cls(twins, amsgrad=True)
    other.load_state_dict(route(optimizer))
    step(optimizer, params, 3)
    step(other, twins, 3)
    if cls is faststep.optim.AdamW:
        assert_same_bits([*params, *states_of(optimizer)], [*twins, *states_of(other)])
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q)


def test_one_states_file_is_small() -> None:
    params = parameters(*[(64,)] * 3000)
    optimizer = stepped(params, 1)
    file = io.BytesIO()
    torch.save(optimizer.state[params[7]], file)
    assert len(file.getvalue()) < 3 * SLAB


def test_a_pickle_of_states_stays_small() -> None:
    params = parameters(*[(64,)] * 500)
    optimizers = [cls(params) for cls in (faststep.optim.AdamW, torch.optim.AdamW)]
    for optimizer in optimizers:
        step(optimizer, params, 1)
    ours, torchs = (len(pickle.dumps(optimizer.state_dict())) for optimizer in optimizers)
    assert ours < 8 * torchs


def test_autograd_takes_them_for_tensors_of_their_own() -> None:
    """As scripts do that differentiate through an optimizer's states."""
    params = parameters((3, 4), (5,))
    moment = stepped(params).state[params[1]]["exp_avg"]
    assert not moment._is_view()
    assert moment._base is None
    moment.detach_()
    weight = torch.ones(5, requires_grad=True)
    moment.add_(weight)
    moment.sum().backward()
    assert weight.grad is not None
    moment.detach_()
    assert not moment.requires_grad


class Interrupted(dict[object, tuple[Tensor, int]]):
    """Of the blocks: lets another thread go on where one has looked for a place."""

    other: threading.Thread | None = None

    def get(self, *args: object) -> tuple[Tensor, int]:  # type: ignore[override]
        found: tuple[Tensor, int] = super().get(*args)  # type: ignore[call-overload]
        if self.other is not None:
            other, self.other = self.other, None
            other.start()
            other.join(0.3)  # it waits for this thread, or takes the same place
        return found


def test_two_threads_do_not_take_the_same_place() -> None:
    zeros, param, taken = Zeros(), torch.ones(64), []
    for _ in range(5):
        zeros.like(param)
    blocks = Interrupted(zeros._slabs)
    zeros._slabs = blocks  # type: ignore[assignment]
    other = blocks.other = threading.Thread(target=lambda: taken.append(zeros.like(param)))
    taken.append(zeros.like(param))
    other.join()
    assert len({t.data_ptr() for t in taken}) == 2


def test_what_a_mode_makes_is_not_used_after_it() -> None:
    (param,) = parameters((5,))
    param.grad = torch.ones(5)
    optimizer = faststep.optim.AdamW([param])
    with FakeTensorMode(), pytest.raises(AssertionError, match="FakeTensor"):  # torch's own
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()
    assert all(type(state) is Tensor for state in states_of(optimizer))


def test_safetensors_takes_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    params = parameters(*SMALL_SHAPES)
    optimizer = stepped(params)
    named = {
        f"{i}.{key}": value
        for i, values in enumerate(optimizer.state.values())
        for key, value in values.items()
    }
    safetensors.save_file(named, tmp_path / "states.safetensors")
    loaded = safetensors.load_file(tmp_path / "states.safetensors")
    assert_same_bits(list(named.values()), [loaded[name] for name in named])
