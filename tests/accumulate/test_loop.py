"""accumulate() as a loop helper: the update of the joined batch, from every optimizer."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from optim.declarations import ADAMW, OTHERS

from .common import (
    OPTIMIZERS,
    Batch,
    Make,
    assert_close,
    assert_equal,
    batches,
    finish,
    grads,
    joined,
    loss_of,
    make_model,
    micro_steps,
    values,
)

over_optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def train(
    net: nn.Module, make: Make, windows: list[list[Batch]], normalize: str = "mean", **kwargs
) -> list[list[Tensor]]:
    """The parameters after each window."""
    model = net
    optimizer = make(model.parameters())
    accum = faststep.accumulate(optimizer, len(windows[0]), normalize=normalize, **kwargs)
    history = []
    for window in windows:
        for batch in window:
            assert not accum.ready or batch is window[0]
            with accum:
                if normalize == "tokens":
                    accum.add_count(len(batch[1]))
                    accum.backward(loss_of(model, batch, "sum"))
                else:
                    accum.backward(loss_of(model, batch))
        assert accum.ready or accum.flush()
        finish(optimizer)
        history.append(values(model))
    assert accum.windows == len(windows)
    assert accum.discarded == accum.empty == 0
    return history


def train_joined(model: nn.Module, make: Make, windows: list[list[Batch]]) -> list[list[Tensor]]:
    optimizer = make(model.parameters())
    history = []
    for window in windows:
        loss_of(model, joined(window)).backward()
        finish(optimizer)
        history.append(values(model))
    return history


@over_optimizers
def test_the_update_of_the_joined_batch(make: Make) -> None:
    windows = [batches([4] * 8, seed) for seed in range(3)]
    ours = train(make_model(), make, windows)
    theirs = train_joined(make_model(), make, windows)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 2e-5)


@over_optimizers
def test_uneven_batches_by_tokens(make: Make) -> None:
    """A mean of means would be wrong by far more than rounding."""
    windows = [batches([1, 9, 3, 5], seed) for seed in range(3)]
    ours = train(make_model(), make, windows, "tokens")
    theirs = train_joined(make_model(), make, windows)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 2e-5)
    wrong = train(make_model(), make, windows, "mean")
    with pytest.raises(AssertionError):
        assert_close(wrong[-1], theirs[-1], 1e-3)


@over_optimizers
def test_a_last_window_that_is_shorter(make: Make) -> None:
    windows = [batches([4] * 8, 0), batches([4] * 3, 1)]
    ours = train(make_model(), make, windows)
    theirs = train_joined(make_model(), make, windows)
    assert_close(ours[-1], theirs[-1], 2e-5)


def test_gradients_of_uneven_batches_to_1e_6() -> None:
    """normalize_() shows what the step divides."""
    model, reference = make_model(), make_model()
    optimizer = faststep.optim.AdamW(model.parameters())
    accum = faststep.accumulate(optimizer, 5, normalize="tokens")
    window = batches([1, 17, 2, 30, 5])
    for batch in window:
        with accum:
            accum.add_count(len(batch[1]))
            accum.backward(loss_of(model, batch, "sum"))
    accum.normalize_()
    loss_of(reference, joined(window)).backward()
    assert_close(grads(model), grads(reference), 1e-6)
    accum.normalize_()
    assert_close(grads(model), grads(reference), 1e-6)


OURS = {
    "SGD": OPTIMIZERS["faststep SGD"],
    **{d.name: functools.partial(d.ours, **d.kwargs) for d in (ADAMW, *OTHERS)},
}


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_the_bits_of_a_divided_loss(make: Make) -> None:
    """With 8 micro-steps all divisions are exact: the same bits as loss / 8."""
    windows = [batches([4] * 8, seed) for seed in range(3)]
    ours = train(make_model(), make, windows)
    model = make_model()
    optimizer = make(model.parameters())
    for window, after in zip(windows, ours, strict=True):
        for batch in window:
            (loss_of(model, batch) / 8).backward()
        finish(optimizer)
        assert_equal(values(model), after)


FUSED = {name: make for name, make in OPTIMIZERS.items() if "torch" not in name or "fused" in name}


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_the_division_is_no_pass(make: Make) -> None:
    """The sum stays what backward left, and nobody writes it before the step, or in it."""
    model, reference = make_model(), make_model()
    optimizer = make(model.parameters())
    accum = faststep.accumulate(optimizer, 3)
    for batch in batches([4] * 3):
        with accum:
            accum.backward(loss_of(model, batch))
            versions = [p.grad._version for p in model.parameters()]
        loss_of(reference, batch).backward()
    assert accum.ready
    assert_equal(grads(model), grads(reference))
    assert [p.grad._version for p in model.parameters()] == versions
    kept = [p.grad for p in model.parameters()]
    optimizer.step()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
    assert not torch.equal(values(model)[0], values(reference)[0])


class _OwnStep(faststep.optim.SGD):
    """Adds a penalty to the gradients before the step."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.grad.add_(param.detach(), alpha=0.5)
        return super().step(closure)


def test_a_step_that_reads_gradients_finds_the_mean() -> None:
    """A subclass of a script, which knows nothing of sums."""

    def make(params):
        return _OwnStep(params, lr=0.1, momentum=0.9)

    windows = [batches([4] * 3, seed) for seed in range(2)]
    mine, theirs = train(make_model(), make, windows), train_joined(make_model(), make, windows)
    for one, other in zip(mine, theirs, strict=True):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("clips", [{}, {"max_grad_norm": 100.0}, {"max_grad_norm": 0.1}])
def test_another_step_of_the_same_window(clips: dict[str, float]) -> None:
    """The mean again, also where the first step has left the sum in `.grad`."""
    model, reference = make_model(), make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1, **clips)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, 4)
    for batch in batches([4] * 4):
        with accum:
            accum.backward(loss_of(model, batch))
        (loss_of(reference, batch) / 4).backward()
    if clips:
        nn.utils.clip_grad_norm_(reference.parameters(), clips["max_grad_norm"])
    for _ in range(3):
        optimizer.step()
        theirs.step()
        assert_close(values(model), values(reference), 1e-6)


def test_fp64_divides_in_fp64() -> None:
    """Three micro-steps: 1/3 rounded to fp32 would be off by 3e-8."""
    window = batches([4] * 3, dtype=torch.float64)
    make = OPTIMIZERS["faststep SGD"]
    ours = train(make_model(torch.float64), make, [window])
    theirs = train_joined(make_model(torch.float64), make, [window])
    assert_close(ours[0], theirs[0], 1e-7)  # the loss itself is computed in fp32


def test_the_default_device_does_not_matter() -> None:
    """What a step reads on the host is made there."""
    found = []
    for device in ("cpu", "meta"):
        model = make_model()
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=0.1)
        accum = faststep.accumulate(optimizer, 2)
        data = batches([4] * 4)
        with torch.device(device):
            for batch in data:
                with accum:
                    accum.backward(loss_of(model, batch))
                if accum.ready:
                    norm = accum.clip_grad_norm_(0.2)
                    finish(optimizer)
        assert accum.discarded == 0
        found.append([*values(model), norm, optimizer.last_grad_norm])
    assert_equal(*found)


def test_sum_divides_nothing() -> None:
    model, reference = make_model(), make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, 3, normalize="sum")
    window = batches([4, 2, 7])
    micro_steps(accum, model, window)
    for batch in window:
        loss_of(reference, batch).backward()
    assert_equal(grads(model), grads(reference))
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_close(values(model), values(reference), 1e-6)


def test_windows_without_tokens_are_dropped() -> None:
    """No step, no NaN, and the next window is as if nothing had been."""
    model = make_model()
    optimizer = faststep.optim.AdamW(model.parameters())
    accum = faststep.accumulate(optimizer, 2, normalize="tokens")
    before = values(model)
    for batch in batches([4, 4]):
        with accum:
            accum.add_count(0)
            accum.backward(loss_of(model, batch, "sum") * 0.0)
    assert not accum.ready
    assert (accum.windows, accum.empty, accum.discarded) == (1, 1, 0)
    assert all(grad is None for grad in grads(model))
    assert_equal(values(model), before)
    assert not accum.flush()
    for batch in batches([4, 4]):
        with accum:
            accum.add_count(torch.tensor(4))
            accum.backward(loss_of(model, batch, "sum"))
    assert accum.ready


def test_one_micro_step_is_plain_training() -> None:
    windows = [batches([4], seed) for seed in range(3)]
    make = OPTIMIZERS["faststep AdamW"]
    ours = train(make_model(), make, windows)
    for a, b in zip(ours, train_joined(make_model(), make, windows), strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "one that clips"])
def test_clipping_between_the_steps_of_a_window_is_torchs(name: str) -> None:
    """The first has stepped: what it leaves in `.grad` is clipped once more, as in torch."""

    def make(params: Iterable[Any]) -> torch.optim.Optimizer:
        if name in OPTIMIZERS:
            return OPTIMIZERS[name](params)
        return faststep.optim.SGD(params, lr=0.1, max_grad_norm=1e9)  # leaves the sum

    def run(accumulated: bool) -> tuple[list[Tensor], list[Tensor]]:
        model = make_model()
        first, second = make(model[:3].parameters()), make(model[3:].parameters())
        accum = faststep.accumulate([first, second], 4) if accumulated else None
        for batch in batches([4, 4, 4, 4]):
            with accum or contextlib.nullcontext():
                (loss_of(model, batch) / (1 if accum else 4)).backward()

        def clip(limit: float) -> Tensor:
            if accum:
                return accum.clip_grad_norm_(limit)
            return nn.utils.clip_grad_norm_(model.parameters(), limit)

        norms = [clip(0.1)]
        first.step()
        norms.append(clip(0.05))
        second.step()
        return norms, values(model)

    (norms, params), (want_norms, want_params) = run(True), run(False)
    torch.testing.assert_close(norms, want_norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(params, want_params, rtol=1e-6, atol=1e-7)


def test_several_optimizers_on_one_model() -> None:
    def pair(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        first, last = list(model[:2].parameters()), list(model[2:].parameters())
        return [faststep.optim.AdamW(first), torch.optim.SGD(last, lr=0.1)]

    model, reference = make_model(), make_model()
    ours, theirs = pair(model), pair(reference)
    accum = faststep.accumulate(ours, 4)
    for seed in range(2):
        window = batches([4] * 4, seed)
        micro_steps(accum, model, window)
        for batch in window:
            (loss_of(reference, batch) / 4).backward()
        for optimizer in (*ours, *theirs):
            finish(optimizer)
        assert_equal(values(model), values(reference))


@over_optimizers
def test_frozen_and_unused_parameters(make: Make) -> None:
    """They get no gradient, no state and no update."""
    model = make_model()
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = make(model.parameters())
    accum = faststep.accumulate(optimizer, 2)
    before = model[0].weight.clone(), model.unused.detach().clone()
    micro_steps(accum, model, batches([4, 4]))
    finish(optimizer)
    assert_equal((model[0].weight, model.unused.detach()), before)
    for idle in (model[0].weight, model.unused):
        assert idle.grad is None
        assert float(optimizer.state.get(idle, {}).get("step", 0.0)) == 0.0


def test_a_parameter_used_in_one_micro_step_only() -> None:
    weight, once = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = faststep.optim.SGD([weight, once], lr=1.0)
    accum = faststep.accumulate(optimizer, 4)
    for index in range(4):
        with accum:
            loss = weight.sum() + (once.sum() if index == 1 else 0.0)
            accum.backward(loss)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.zeros(3))
    assert torch.equal(once.detach(), torch.full((3,), 0.75))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_activation_checkpointing(reentrant: bool, dtype: torch.dtype | None) -> None:
    from torch.utils.checkpoint import checkpoint

    low = torch.bfloat16 if dtype else torch.float32

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(low)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_(reentrant)
            first = checkpoint(self.inner[:2], x, use_reentrant=reentrant)
            return checkpoint(self.inner[2:], first, use_reentrant=reentrant)

    windows = [batches([4] * 4, seed, low) for seed in range(2)]
    make = OPTIMIZERS["faststep AdamW"]
    ours = train(Checkpointed(), make, windows, dtype=dtype)
    plain = train(make_model(low), make, windows, dtype=dtype)
    for a, b in zip(ours, plain, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("installed", [False, True])
def test_a_compiled_loop(installed: bool) -> None:
    """A script that compiles the whole micro-step: windows stay out of the compiler's way."""
    found = []
    for compiles in (False, True):
        model = make_model()
        optimizer = faststep.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accum = faststep.accumulate(optimizer, 2, model=model)
        if installed:
            accum.install()

        def micro_step(x, y, model=model, optimizer=optimizer, accum=accum) -> None:
            if installed:
                loss_of(model, (x, y)).backward()
                finish(optimizer)
                return
            with accum:
                accum.backward(loss_of(model, (x, y)))
            if accum.ready:
                finish(optimizer)

        call = torch.compile(micro_step, backend="eager") if compiles else micro_step
        for batch in batches([4] * 6):
            call(*batch)
        assert accum.windows == 3
        found.append(values(model))
        accum.remove()
    assert_close(*found, 1e-6)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_compiled_models(dtype: torch.dtype | None) -> None:
    low = torch.bfloat16 if dtype else torch.float32
    windows = [batches([4] * 4, seed, low) for seed in range(2)]
    make = OPTIMIZERS["faststep AdamW"]
    torch._dynamo.reset()
    compiled = torch.compile(make_model(low), backend="aot_eager")
    ours = train(compiled, make, windows, dtype=dtype, model=compiled)
    for a, b in zip(ours, train(make_model(low), make, windows, dtype=dtype), strict=True):
        assert_close(a, b, 1e-6 if dtype is None else 1e-2)
