"""What only some optimizers have: states that do not begin as zeros, and torch's own classes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import faststep
import faststep.optim as optim

from .common import assert_same_bits, parameters, set_gradients, train
from .declarations import ADAGRAD, ALL, OTHERS, RPROP, Declaration

OURS = {declaration.name for declaration in ALL + OTHERS}


def test_the_module_takes_the_place_of_torchs() -> None:
    """Every public name is there: ours where we have the class, torch's object where not."""
    for name in dir(torch.optim):
        if not name.startswith("_"):
            same = getattr(optim, name) is getattr(torch.optim, name)
            assert same == (name not in OURS), name
            assert name in dir(optim)
    assert {"Adafactor", "LBFGS", "Muon", "Optimizer", "SparseAdam"} <= {*dir(optim)} - OURS
    with pytest.raises(AttributeError, match=r"'faststep\.optim' has no attribute 'NoSuch'"):
        _ = optim.NoSuch
    assert not hasattr(optim, "_adafactor")


def test_submodules_are_imported_as_of_torch() -> None:
    lines = (
        "import faststep.optim as optim, torch",
        "p = torch.nn.Parameter(torch.ones(3))",
        "scheduler = optim.lr_scheduler.StepLR(optim.RMSprop([p], lr=0.1), 1)",
        "from faststep.optim import LBFGS, Optimizer, lr_scheduler, swa_utils",
        "assert issubclass(LBFGS, Optimizer) and swa_utils.AveragedModel",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=120)


@pytest.mark.parametrize("declaration", [RPROP, ADAGRAD], ids=lambda d: d.name)
def test_skipped_first_step(declaration: Declaration) -> None:
    """What the first step that happens begins with: Rprop's states with the learning rate then."""
    results = []
    for skips in (True, False):
        params = parameters((33,), (4, 5))
        optimizer = declaration.ours(params, **declaration.kwargs)
        if skips:
            set_gradients(params, 9)
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            del optimizer.found_inf
        optimizer.param_groups[0]["lr"] = 0.25
        train(optimizer, params, steps=2)
        results.append(params)
    assert_same_bits(*results, "training after a skipped first step")


def test_a_later_skip_keeps_rprops_states() -> None:
    params = parameters((33,))
    optimizer = RPROP.ours(params, lr=0.25)
    train(optimizer, params, steps=3)
    before = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    scaler = faststep.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    params[0].grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert {*before} == {*optimizer.state[params[0]]}
    for key, value in before.items():
        assert torch.equal(optimizer.state[params[0]][key], value), key


def test_adagrads_states_of_a_later_group() -> None:
    """torch reads the value of the defaults, not of the group."""
    results = []
    for cls in (ADAGRAD.ours, ADAGRAD.torchs):
        params = parameters((3,), (4, 2))
        optimizer = cls(params[:1], initial_accumulator_value=0.5)
        optimizer.add_param_group({"params": params[1:], "initial_accumulator_value": 7.0})
        train(optimizer, params, steps=2)
        results.append([*params, *(optimizer.state[p]["sum"] for p in params)])
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_rmsprops_options_may_begin_later() -> None:
    """A buffer that a state lacks is refused, as torch's loop does, and nothing moves."""
    params = parameters((5,))
    optimizer = optim.RMSprop(params)
    train(optimizer, params)
    optimizer.param_groups[0]["momentum"] = 0.9
    before = params[0].detach().clone()
    with pytest.raises(KeyError, match="momentum_buffer"):
        train(optimizer, params)
    assert torch.equal(params[0], before)
