"""Python code that runs inside a call of the extension, and arguments that it must not believe."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import faststep
import faststep.optim
from faststep import _C


def gather(data: torch.Tensor) -> Any:
    fields = ((torch.empty(0, data.shape[1]), 0),)
    rows = (0, len(data), ((data.data_ptr(), 4 * data.shape[1]),))
    return _C.Gather(_C.Slots(), fields, (rows,), 0, False, data)


def test_a_batch_that_is_taken_is_not_there_once_more_meanwhile() -> None:
    data = torch.arange(12.0).view(3, 4)
    gatherer, found = gather(data), []

    class Taking(tuple):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            found.extend((batch.take(), gatherer.close()))
            return super().__iter__()

    out = torch.zeros(1, 4)
    batch, other = gatherer.submit([2], 0, -1, Taking((out,))), gatherer.submit([1])
    assert batch.take()[0] is out
    assert found == [None, None]
    assert torch.equal(out, data[2:])
    assert torch.equal(other.take()[0], data[1:2])


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ((5,), ((0, 3, ((1, 1),)),)),
        (((torch.empty(0), 0),), ((0, 3, (5,)),)),
    ],
)
def test_fields_and_columns_are_tuples(fields: Any, nodes: Any) -> None:
    with pytest.raises(TypeError, match="expected a tuple"):
        _C.Gather(_C.Slots(), fields, nodes, 0, False, None)


@pytest.mark.parametrize("strides", [(1000, 1000), (0, 1 << 60), (1 << 62, 1)])
def test_memory_has_room_for_the_strides_of_a_prototype(strides: tuple[int, int]) -> None:
    like = torch.empty(0).as_strided((0, 3), strides)
    with pytest.raises(ValueError, match="no memory has 2 rows of that form"):
        _C.Slots().empty(like, 2)


def test_a_prototype_with_a_huge_shape() -> None:
    like = torch.empty(0).as_strided((0, 1 << 40, 1 << 40), (1, 1, 1))
    with pytest.raises(ValueError, match="no memory"):
        _C.Slots().empty(like, 7)


def test_a_row_with_more_bytes_than_numbers_count() -> None:
    like = torch.empty(0, 1 << 61, dtype=torch.float64)
    with pytest.raises(ValueError, match="no memory"):
        _C.Slots().empty(like, 1)
    with pytest.raises(ValueError, match="a row of a field is larger than memory"):
        _C.Gather(_C.Slots(), ((like, 0),), ((0, 1, ((1, 1),)),), 0, False, None)


def test_no_code_runs_for_the_numbers_of_new_states() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)

    class Moving:
        def __index__(self) -> int:
            param.data = torch.zeros(3)
            return 0

    number, _, _ = _C.rules()["sgd"]
    specs = [(number, (), False, (0.5, 0.0, 0.0, 0.0, 0.0), False, None)]
    fresh: list[Any] = [(Moving(), 0)]
    scalars = {-1: (None, None, None)}
    with pytest.raises(TypeError, match="expected a tuple of 2 ints"):
        _C.Plan().step([[param]], specs, {}, fresh, scalars, 0, float("nan"), False, 0)
    assert bool((param == 1).all())


def test_images_that_move_while_the_factors_are_read() -> None:
    images = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    out = torch.zeros(1, 1, 2, 2)
    samples = torch.tensor([[0, 0, 2, 2, 2, 2] + [0] * 11], dtype=torch.int32)
    _C.transform_images(images, out, samples, (1.0,), (7.0,))

    class Moving:
        def __float__(self) -> float:
            out.data = torch.zeros(1, 1, 2, 2)
            return 7.0

    before = out.data_ptr()
    expected = out.clone()
    _C.transform_images(images, out, samples, (1.0,), (Moving(),))  # type: ignore[arg-type]
    assert out.data_ptr() != before
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="bias has 2 values for 1 channels"):
        _C.transform_images(images, out, samples, (1.0,), (1.0, 2.0))


def test_a_group_of_a_hook_that_is_replaced_while_it_is_looked_up() -> None:
    class Owner:
        pass

    class Group:
        def __hash__(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            hook.group = None
            return False

    owner, seen = Owner(), []
    hook = _C.ReleaseHook(seen.append, weakref.ref(owner), {0: 1})
    hook.group, hook.plain = Group(), True
    param = torch.nn.Parameter(torch.ones(3))
    hook(param)
    assert seen == [param]


def acting_when_learnt(values: torch.Tensor, actions: list[Callable[[], None]]) -> torch.Tensor:
    """A tensor of a class that does these things, once, when C looks at the class."""

    class Meta(type(torch.Tensor)):  # type: ignore[misc]
        def __getattribute__(cls, name: str) -> Any:
            if name == "__dlpack_c_exchange_api__" and actions:
                actions.pop()()
            return super().__getattribute__(name)

    class Learnt(torch.Tensor, metaclass=Meta):
        pass

    return values.as_subclass(Learnt)


DEEP = (2, 1, 1, 2, 1, 1, 3)  # of so many dimensions torch keeps the shape in memory of its own


def replace(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    tensor.data = torch.ones(shape)


def replaced_while_learnt(shape: tuple[int, ...]) -> torch.nn.Parameter:
    """A parameter that gets other memory while C learns the type of its gradient."""
    param = torch.nn.Parameter(torch.zeros(DEEP))
    param.grad = acting_when_learnt(torch.ones(DEEP), [lambda: replace(param, shape)])
    return param


@pytest.mark.parametrize("shape", [DEEP, (12,)], ids=["alike", "flat"])
def test_a_parameter_that_is_replaced_while_its_gradient_is_learnt(shape: tuple[int, ...]) -> None:
    param = replaced_while_learnt(shape)
    optimizer = faststep.optim.SGD([param], lr=0.5)
    if shape == DEEP:
        optimizer.step()
        assert torch.equal(param, torch.full(shape, 0.5))
    else:
        with pytest.raises(RuntimeError, match=r"gradient.*shape"):
            optimizer.step()
        assert torch.equal(param, torch.ones(shape))


@pytest.mark.parametrize("shape", [DEEP, (12,)], ids=["alike", "flat"])
def test_a_sum_that_is_replaced_while_its_term_is_learnt(shape: tuple[int, ...]) -> None:
    total = torch.zeros(DEEP)
    term = acting_when_learnt(torch.ones(DEEP), [lambda: replace(total, shape)])
    if shape == DEEP:
        _C.accumulate([total], [term], 1.0, False)
        assert torch.equal(total, torch.full(DEEP, 2.0))
    else:
        with pytest.raises(TypeError, match="shape"):
            _C.accumulate([total], [term], 1.0, False)
        assert torch.equal(total, torch.ones(shape))


def test_a_step_counter_that_is_replaced_while_it_is_asked() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = faststep.optim.AdamW([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    with torch.inference_mode():  # so that torch is asked whether it may be written
        counter = torch.ones((1,) * 7)
    optimizer.state[param]["step"] = counter
    done: list[int] = []

    class Replacing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.is_inference and not done:
                done.append(1)
                with torch._C.DisableTorchFunction(), torch.inference_mode():
                    counter.data = torch.ones(())
            return func(*args, **(kwargs or {}))

    with Replacing(), torch.inference_mode():
        optimizer.step()
    assert done
    assert counter.item() == 2.0


def test_pixels_that_are_replaced_while_the_copy_is_learnt() -> None:
    pixels = torch.zeros(256, 256, 3, dtype=torch.uint8)

    def replace() -> None:
        pixels.data = torch.ones(256, 256, 3, dtype=torch.uint8)

    out = acting_when_learnt(torch.zeros(3, 256, 256, dtype=torch.uint8), [replace])
    _C.split_channels(pixels, out)
    assert bool((out == 1).all())
