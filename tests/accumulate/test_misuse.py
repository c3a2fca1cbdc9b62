"""What would be silently wrong elsewhere raises an error that says what to do."""

import copy
import gc
import re
import weakref

import pytest
import torch
from torch import nn

import faststep

from .common import OPTIMIZERS, assert_equal, batches, loss_of, make_model, values

DATA = batches([4] * 4)
Loop = tuple[nn.Module, torch.optim.Optimizer, faststep.accumulation.Accumulation]


def start(steps: int = 2, **kwargs) -> Loop:
    model = make_model()
    optimizer = faststep.optim.AdamW(model.parameters())
    return model, optimizer, faststep.accumulate(optimizer, steps, model=model, **kwargs)


def micro_step(loop: Loop, index: int = 0) -> None:
    model, _, accum = loop
    with accum:
        accum.backward(loss_of(model, DATA[index]))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1, not 0"),
        ({"steps": 2.0}, TypeError, "steps must be an int, not float"),
        ({"steps": True}, TypeError, "steps must be an int, not bool"),
        ({"normalize": "token"}, ValueError, 'must be "mean", "sum" or "tokens", not \'token\''),
        ({"dtype": torch.float64}, ValueError, "dtype must be None or torch.float32"),
        ({"model": 5}, TypeError, "model must be a torch.nn.Module, not int"),
        ({"optimizer": []}, ValueError, "no optimizer"),
        ({"optimizer": [5]}, TypeError, "must be a torch.optim.Optimizer, not int"),
    ],
)
def test_arguments(arguments: dict, error: type[Exception], text: str) -> None:
    optimizer = faststep.optim.SGD(make_model().parameters())
    with pytest.raises(error, match=re.escape(text)):
        faststep.accumulate(**{"optimizer": optimizer, "steps": 2, **arguments})
    faststep.accumulate(optimizer, 2)  # nothing was left behind


def test_sharded_models_are_refused() -> None:
    class Sharded(nn.Linear):
        def no_sync(self) -> None: ...

    model = Sharded(2, 2)
    with pytest.raises(TypeError, match="does not support Sharded models"):
        faststep.accumulate(faststep.optim.SGD(model.parameters()), 2, model=model)


def test_models_with_a_sharded_or_wrapped_part_are_refused() -> None:
    class Sharded(nn.Linear):
        def set_requires_gradient_sync(self) -> None: ...

    model = nn.Sequential(nn.Linear(2, 2), Sharded(2, 2))
    with pytest.raises(TypeError, match=r"Sharded models \(its submodule '1'\)"):
        faststep.accumulate(faststep.optim.SGD(model.parameters()), 2, model=model)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    params = list(make_model().parameters())
    optimizers = [torch.optim.SGD(params), torch.optim.Adagrad(params[2:3])]
    with pytest.raises(ValueError, match=r"parameter 0 of optimizer 1 \(Adagrad\)"):
        faststep.accumulate(optimizers, 2)
    faststep.accumulate(optimizers[0], 2)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_inside_a_window(make) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    loop = (model, optimizer, faststep.accumulate(optimizer, 3))
    micro_step(loop)
    before = values(model)
    with pytest.raises(RuntimeError, match=r"step\(\) after 1 of 3 micro-steps.*accum\.ready"):
        optimizer.step()
    assert_equal(values(model), before)


def test_clipping_and_clearing_between_micro_steps() -> None:
    for change, what in (
        (lambda model, optimizer: optimizer.zero_grad(), "cleared"),
        (lambda model, optimizer: model.zero_grad(set_to_none=False), "changed"),
        (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1), "changed"),
    ):
        loop = start()
        micro_step(loop)
        change(*loop[:2])
        with pytest.raises(RuntimeError, match=f"gradients were {what} between micro-steps"):
            micro_step(loop)


def test_clipping_the_sum_inside_a_compiled_function() -> None:
    """torch's function is what is compiled, so faststep's own is no way out there."""
    loop = start()
    model, optimizer, _ = loop
    clip = torch.compile(lambda params: faststep.clip_grad_norm_(params, 0.1), backend="eager")
    for index in range(2):
        micro_step(loop, index)
    clip(list(model.parameters()))
    before = values(model)
    with pytest.raises(RuntimeError, match=r"or, outside torch\.compile, of faststep"):
        optimizer.step()
    assert_equal(values(model), before)


def test_a_missing_zero_grad() -> None:
    loop = start()
    for index in range(2):
        micro_step(loop, index)
    loop[1].step()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad"):
        micro_step(loop)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_closure(make) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    loop = (model, optimizer, faststep.accumulate(optimizer, 2))
    for index in range(2):
        micro_step(loop, index)
    with pytest.raises(RuntimeError, match="a closure computes new gradients"):
        optimizer.step(lambda: None)
    optimizer.step()


def stepped_window() -> Loop:
    """The gradients of its window are still there."""
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=100.0)
    loop = model, optimizer, faststep.accumulate(optimizer, 2)
    for index in range(2):
        micro_step(loop, index)
    optimizer.step()
    return loop


def test_a_closure_after_the_step_of_a_window() -> None:
    """It computes gradients of its own, which are no sum to divide."""
    model, optimizer, _kept = stepped_window()
    before = values(model)

    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model, DATA[2]).backward()

    optimizer.step(closure)
    for param, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.detach(), value - 0.1 * param.grad)


def test_an_exception_inside_the_block() -> None:
    loop = start(3)
    model, optimizer, accum = loop
    micro_step(loop)

    def half_a_micro_step() -> None:
        with accum:
            loss_of(model, DATA[1]).backward()
            raise KeyError

    with pytest.raises(KeyError):
        half_a_micro_step()
    for call in (accum.__enter__, accum.flush, accum.state_dict):
        with pytest.raises(RuntimeError, match=r"half added: call accum\.reset"):
            call()
    accum.reset()
    assert accum.micro_step == 0
    assert all(p.grad is None for p in model.parameters())
    for index in range(3):
        micro_step(loop, index)
    optimizer.step()
    assert accum.discarded == 0


def test_counts() -> None:
    _, _, accum = loop = start(normalize="tokens")
    with pytest.raises(RuntimeError, match=r"add_count\(\) was not called in this micro-step"):
        micro_step(loop)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and at least 0"):
            accum.add_count(bad)
    with pytest.raises(RuntimeError, match='is for normalize="tokens", not "mean"'):
        start()[2].add_count(1)


def test_order_of_calls() -> None:
    loop = start()
    _, _, accum = loop
    with pytest.raises(RuntimeError, match="belongs inside"):
        accum.backward(torch.ones((), requires_grad=True))
    for call in (accum.normalize_, lambda: accum.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="needs a complete window"):
            call()
    with accum:
        for call in (accum.__enter__, accum.flush, lambda: accum.load_state_dict({})):
            with pytest.raises(RuntimeError, match="inside `with accum:` already"):
                call()
        with pytest.raises(RuntimeError, match="a micro-step is under way"):
            accum.state_dict()
    with pytest.raises(RuntimeError, match="accumulated already; call remove"):
        faststep.accumulate(loop[1], 2)


def test_a_grad_scale_of_somebody_else() -> None:
    loop = start()
    loop[1].grad_scale = torch.tensor(2.0)
    micro_step(loop)
    with pytest.raises(RuntimeError, match=r"AdamW\.grad_scale is set already"):
        micro_step(loop, 1)


def test_a_window_that_the_script_skips() -> None:
    """No step, as after a bad norm: counted, and the next window is right."""
    loop = start()
    model, optimizer, accum = loop
    for index in range(2):
        micro_step(loop, index)
    optimizer.zero_grad()
    assert accum.discarded == 0
    before = values(model)
    for index in range(2):
        micro_step(loop, index)
    assert accum.discarded == 1
    assert_equal(values(model), before)
    optimizer.step()
    assert not accum.flush()
    assert (accum.windows, accum.discarded) == (2, 1)


def test_training_goes_on_without_blocks() -> None:
    """An optimizer between windows is an ordinary one."""
    loop = start()
    model, optimizer, _ = loop
    for index in range(2):
        micro_step(loop, index)
    optimizer.step()
    optimizer.zero_grad()
    other = make_model()
    other.load_state_dict(model.state_dict())
    reference = faststep.optim.AdamW(other.parameters())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, reference)):
        loss_of(m, DATA[2]).backward()
        o.step()
    assert_equal(values(model), values(other))


def test_later_gradients_in_the_memory_of_those_of_a_window() -> None:
    """They are not taken for the sum, even if they were written as often."""
    model, optimizer, _kept = stepped_window()
    wanted = []
    for param in model.parameters():
        later = torch.from_numpy(param.grad.numpy())
        while later._version < param.grad._version:
            torch.autograd.graph.increment_version(later)
        param.grad = later
        wanted.append(param.detach() - 0.1 * later)
    optimizer.step()
    for param, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(param.detach(), value)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_dropped_accumulation_leaves_nothing(dtype: torch.dtype | None) -> None:
    """Without remove(): when it dies its hooks go too, and it keeps no optimizer alive."""
    model = make_model(torch.float32 if dtype is None else torch.bfloat16)
    optimizer = faststep.optim.SGD(model.parameters())
    accum = faststep.accumulate(optimizer, 2, model=model, dtype=dtype)
    x, y = DATA[0]
    with accum:
        loss_of(model, (x.to(model[0].weight.dtype), y)).backward()
    dead = [weakref.ref(accum._window)]
    del accum
    gc.collect()
    assert dead[0]() is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    accum = faststep.accumulate(optimizer, 2, model=model, dtype=dtype)
    dead = [weakref.ref(o) for o in (optimizer, model, accum)]
    del optimizer, model, accum
    gc.collect()
    assert [reference() for reference in dead] == [None] * 3
