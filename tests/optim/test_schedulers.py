"""Every learning-rate scheduler of torch drives our optimizers as it drives torch's."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from .common import TOLERANCE, assert_near, parameters, set_gradients
from .declarations import LION, TORCHS, Declaration

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.8),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3], gamma=0.1),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.3, total_iters=3),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.2, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.7),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.5)],
        milestones=[3],
    ),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=4, eta_min=1e-4),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-1, step_size_up=2, step_size_down=3),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=5, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_here() -> None:
    of_torch = set(schedulers.__all__) - {"LRScheduler"}
    assert of_torch <= set(SCHEDULERS)


def run(
    cls: type[torch.optim.Optimizer], declaration: Declaration, make: Make, steps: int
) -> tuple[list[Any], list[torch.nn.Parameter]]:
    """Trains in two groups; returns the hyper-parameters of each step and the parameters."""
    params = parameters((9,), (3, 2))
    first, second = ({"params": [p]} for p in params)
    kwargs = {**declaration.kwargs, "lr": 0.05}
    optimizer = cls([first, {**second, "lr": 0.01}], **kwargs)
    scheduler = make(optimizer)
    seen = []
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
        plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
        scheduler.step(*([1.0] if plateau else []))
        cycled = ("lr", "betas", "momentum", "initial_lr", "max_lr")
        seen.append([{k: g[k] for k in cycled if k in g} for g in optimizer.param_groups])
    return seen, params


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
def test_scheduler(declaration: Declaration, name: str) -> None:
    """The same trajectory of hyper-parameters and the same parameters, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.optim.lr_scheduler")
        theirs = run(declaration.torchs, declaration, SCHEDULERS[name], steps=7)
        ours = run(declaration.ours, declaration, SCHEDULERS[name], steps=7)
    assert ours[0] == theirs[0]
    assert len({group[0]["lr"] for group in ours[0]}) > 1, "the schedule must move the lr"
    for p, q in zip(ours[1], theirs[1], strict=True):
        assert_near(p, q, TOLERANCE, name)


@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "SequentialLR", "SWALR"])
def test_lion_follows_the_schedule(name: str) -> None:
    """Lion's lr moves as SGD's does, and an unclipped update is lr * sign."""
    kwargs = {"lr": 0.05}
    theirs = parameters((9,))
    reference = torch.optim.SGD(theirs, **kwargs)
    ours = parameters((9,))
    optimizer = LION.ours(ours, **kwargs)
    pair = [(reference, SCHEDULERS[name](reference)), (optimizer, SCHEDULERS[name](optimizer))]
    for step in range(5):
        before = ours[0].detach().clone()
        lr = optimizer.param_groups[0]["lr"]
        assert lr == reference.param_groups[0]["lr"]
        for o, scheduler in pair:
            set_gradients(o.param_groups[0]["params"], step)
            o.step()
            scheduler.step()
        torch.testing.assert_close((ours[0] - before).abs(), torch.full((9,), lr))


@pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)
def test_scheduler_with_lr_tensor(declaration: Declaration) -> None:
    """With a tensor the schedulers write into it in place; the step must read it every time."""
    results = []
    for cls in (declaration.ours, declaration.torchs):
        params = parameters((9,))
        lr = torch.tensor(0.05, dtype=torch.float64)
        optimizer = cls(params, **{**declaration.kwargs, "lr": lr})
        scheduler = schedulers.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
        results.append((params[0], optimizer.param_groups[0]["lr"]))
    assert torch.is_tensor(results[0][1])
    assert results[0][1].item() == results[1][1].item()
    assert_near(results[0][0], results[1][0], TOLERANCE, "tensor lr")
