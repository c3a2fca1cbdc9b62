"""Every class of elementwise optimizers, sharded at each stage, beside DDP with torch's class."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep import zero
from faststep._torch.dtensor import full_tensor
from faststep.optim.base import FusedOptimizer
from faststep.run.optimizers import CLASSES
from ranks import on_ranks

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 0.01, "amsgrad": True, "fused": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "Adadelta": ("Adadelta", {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adamax": ("Adamax", {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "ASGD": ("ASGD", {"lr": 0.1, "lambd": 0.01, "alpha": 0.5, "t0": 1, "weight_decay": 0.1}),
    "NAdam": ("NAdam", {"lr": 0.01, "momentum_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "eps": 1e-3}),
    "centered RMSprop": ("RMSprop", {"lr": 0.01, "centered": True, "eps": 0.1}),
    "Rprop": ("Rprop", {"lr": 0.01, "etas": (0.4, 1.1), "step_sizes": (1e-4, 0.02)}),
}


class _Net(nn.Module):
    """With a scale of one element, and a layer that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 40), nn.Linear(40, 2)
        self.extra = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.extra(x) if uses_extra else x) * self.scale  # type: ignore[no-any-return]


def _step(model: nn.Module, optimizer: Any, rank: int, step: int, clips: bool) -> None:
    made = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 8, generator=made), torch.randn(4, 2, generator=made)
    nn.functional.mse_loss(model(x, step != 1), y).backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:  # as a scheduler
        group["lr"] *= 0.9


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "weight_decay": 0.0}, {"params": others}]


@on_ranks(2, name=CASES)
def test_a_run_of_ddp_goes_on_sharded(rank: int, world: int, name: str) -> None:
    """The largest difference, after an unsharded run of two steps that is taken over."""
    kind, options = CASES[name]
    torchs = getattr(torch.optim, kind)
    model = _Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    groups = _groups(model) if kind != "Rprop" else model.parameters()
    reference = torchs(groups, **options)
    for step in range(2):
        _step(ddp, reference, rank, step, clips=step == 1)
    begun, before = copy.deepcopy(model), copy.deepcopy(reference.state_dict())
    for step in range(2, 5):
        _step(ddp, reference, rank, step, clips=False)
    said = {}
    for stage in (1, 2, 3):
        for module in (torch.optim, faststep.optim):
            mine = copy.deepcopy(begun)
            made = getattr(module, kind)(
                _groups(mine) if kind != "Rprop" else mine.parameters(), **options
            )
            made.load_state_dict(copy.deepcopy(before))
            sharded = zero.shard(mine, made, stage=stage, bucket_mb=1e-3)  # type: ignore[arg-type]
            for step in range(2, 5):
                _step(mine, sharded, rank, step, clips=False)
            where = f"{module.__name__}, stage {stage}"
            pairs = zip(mine.parameters(), model.parameters(), strict=True)
            said[where] = max(
                float((full_tensor(a.detach()) - b).detach().abs().max()) for a, b in pairs
            )
            if stage == 3:
                continue
            saved = sharded.state_dict()
            if rank == 0:  # back into torch's class
                again = torchs(copy.deepcopy(begun).parameters(), **options)
                if kind != "Rprop":
                    again = torchs(_groups(copy.deepcopy(begun)), **options)
                again.load_state_dict(saved)
                for one, other in zip(again.state.values(), reference.state.values(), strict=True):
                    assert list(one) == list(other)
                    for key, value in other.items():
                        torch.testing.assert_close(one[key], value, rtol=1e-4, atol=1e-5)
    assert len(said) == 6
    assert max(said.values()) < 1e-5, said


def test_all_classes_of_the_package_are_sharded() -> None:
    for name in faststep.optim.__all__:
        kind, model = getattr(faststep.optim, name), nn.Linear(3, 2)
        if issubclass(kind, FusedOptimizer):
            assert type(zero.shard(model, kind(model.parameters(), lr=0.1))._owned) is kind


@pytest.mark.parametrize("torchs", CLASSES)
def test_optimizers_that_run_makes(torchs: Any) -> None:
    model = nn.Linear(3, 2)
    made = CLASSES[torchs](model.parameters(), lr=0.1)
    if torchs is torch.optim.Adafactor:
        with pytest.raises(TypeError, match=r"not a .*Adafactor"):
            zero.shard(model, made)
    else:
        ours = getattr(faststep.optim, torchs.__name__)
        assert type(zero.shard(model, made, master_weights=True)._owned) is ours


# ---- classes of a script


class _WithDefaults(torch.optim.NAdam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class _WithStep(torch.optim.NAdam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _WithPart(faststep.optim.ASGD):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class _WithZeroGrad(faststep.optim.Lion):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("stage", [2, 3])
def test_classes_of_a_script(stage: Any) -> None:
    model = nn.Linear(3, 2)
    sharded = zero.shard(model, _WithDefaults(model.parameters()))
    assert isinstance(sharded._owned, faststep.optim.NAdam)
    assert sharded.param_groups[0]["lr"] == 0.5
    for kind, method in (
        (_WithStep, "step"), (_WithPart, "_init_group"), (_WithZeroGrad, "zero_grad")
    ):  # fmt: skip
        made: Any = kind(model.parameters())
        text = rf"test_classes\.{kind.__name__} has a {method}\(\) of its own, which would not be"
        with pytest.raises(TypeError, match=text):
            zero.shard(model, made, stage=stage)
    patched = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(patched, 1)  # whose wrapper only counts
    zero.shard(model, patched)
    patched = torch.optim.SGD(model.parameters(), lr=0.1)
    patched.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"SGD has a step\(\) of its own"):
        zero.shard(model, patched, stage=stage)
    for other in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(TypeError, match=rf"RMSprop or Rprop of .*, not a .*\.{other.__name__}"):
            zero.shard(model, other(model.parameters()), stage=stage)
    with pytest.raises(TypeError, match="differentiable=True"):
        zero.shard(model, torch.optim.Adam(model.parameters(), differentiable=True), stage=stage)
