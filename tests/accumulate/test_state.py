"""state_dict() and load_state_dict(): a run goes on inside a window with the same bits."""

import io

import pytest
import torch

import faststep

from .common import (
    OPTIMIZERS,
    Make,
    assert_equal,
    batches,
    loss_of,
    make_model,
    micro_steps,
    values,
)

MODES = {
    "mean": {"normalize": "mean"},
    "tokens": {"normalize": "tokens"},
    "fp32 sums": {"normalize": "tokens", "dtype": torch.float32},
    "in pairs": {"normalize": "tokens", "dtype": torch.float32, "in_pairs": True},
}


class Run:
    """A training script that can be saved and started again."""

    def __init__(self, make: Make, mode: dict, installed: bool = False) -> None:
        self.low = torch.bfloat16 if "dtype" in mode else torch.float32
        self.model = make_model(self.low)
        self.optimizer = make(self.model.parameters())
        self.accum = faststep.accumulate(self.optimizer, 3, **mode)
        self.installed = installed
        if installed:
            self.accum.install()

    def micro_step(self, seed: int) -> None:
        (batch,) = batches([4 + seed % 3], seed, self.low)
        if self.installed:
            self.forward(batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        with self.accum:
            self.forward(batch)
        if self.accum.ready:
            self.step()

    def forward(self, batch) -> None:
        tokens = self.accum._window.normalize == "tokens"
        if tokens:
            self.accum.add_count(len(batch[1]))
        self.accum.backward(loss_of(self.model, batch, "sum" if tokens else "mean"))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.accum.state_dict())
        torch.save(parts, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        model, optimizer, accum = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.accum.load_state_dict(accum)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    "make", [OPTIMIZERS["faststep AdamW"], OPTIMIZERS["torch SGD"]], ids=["AdamW", "torch's SGD"]
)
def test_same_bits(make: Make, mode: dict, at: int, installed: bool) -> None:
    whole, first, second = (Run(make, mode, installed) for _ in range(3))
    for seed in range(9):
        whole.micro_step(seed)
    for seed in range(at):
        first.micro_step(seed)
    second.load(first.save())
    assert second.accum.micro_step == at % 3
    for seed in range(at, 9):
        second.micro_step(seed)
    assert_equal(values(second.model), values(whole.model))
    for run in (whole, second):
        assert not run.accum.flush()
        assert (run.accum.windows, run.accum.discarded) == (3, 0)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_between_the_last_micro_step_and_the_step(make: Make, mode: dict) -> None:
    """The division that waits for the step is kept too."""
    first, second = Run(make, mode), Run(make, mode)
    step, first.step = first.step, lambda: None
    for seed in range(3):
        first.micro_step(seed)
    second.load(first.save())
    step()
    assert second.accum.ready
    second.step()
    assert_equal(values(second.model), values(first.model))


def test_what_does_not_fit() -> None:
    model = make_model()
    state = faststep.accumulate(faststep.optim.SGD(model.parameters()), 3).state_dict()
    for steps, normalize, text in ((4, "mean", "steps=3"), (3, "sum", "normalize='mean'")):
        other = faststep.accumulate(
            faststep.optim.SGD(make_model().parameters()), steps, normalize=normalize
        )
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)
    fewer = faststep.accumulate(faststep.optim.SGD(make_model()[0].parameters()), 3)
    with pytest.raises(ValueError, match="6 gradients, for 2 parameters"):
        fewer.load_state_dict(state)


def test_a_state_that_is_refused_changes_nothing() -> None:
    """One that lacks something, or is of other optimizers of the same parameters."""
    model = make_model()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, 2)
    micro_steps(accum, model, batches([4] * 2))
    state = accum.state_dict()
    model = make_model()
    halves = [faststep.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]
    accum = faststep.accumulate(halves, 2)
    with pytest.raises(ValueError, match="of 1 optimizers, this accumulation of 2"):
        accum.load_state_dict(state)
    del state["windows"]
    with pytest.raises(ValueError, match="it has no 'windows'"):
        accum.load_state_dict(state)
    assert not accum.ready
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        (torch.ones(4), r"gradient of 'weight' has shape \(4,\) in the state, the parameter \(3,"),
        (torch.ones(3), "gradient of 'weight' is torch.float32 in the state, .*dtype="),
    ],
)
def test_gradients_that_do_not_fit(gradient: torch.Tensor, text: str) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    accum = faststep.accumulate(faststep.optim.SGD(module.parameters()), 3, model=module)
    state = {**accum.state_dict(), "micro_step": 1, "gradients": [gradient]}
    with pytest.raises(ValueError, match=text):
        accum.load_state_dict(state)
    assert accum.micro_step == 0
    assert module.weight.grad is None
