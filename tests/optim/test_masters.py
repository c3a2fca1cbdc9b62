"""master_weights=True in one process, against fp32 copies that are stepped and rounded."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

import faststep
from faststep.optim.base import FusedOptimizer
from faststep.optim.masters import MASTER

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(30, 7), (33000,), (), (0, 4), (5, 4, 3, 3), (3,), (40, 50), (9,)]
DTYPES = [BF16, BF16, F16, BF16, F16, F32, BF16, F64]

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 0.01}),
    "Adam": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Lion": ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    "Adadelta": ("Adadelta", {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adamax": ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    "ASGD": ("ASGD", {"lr": 0.1, "lambd": 0.01, "alpha": 0.5, "t0": 2}),
    "NAdam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "eps": 0.1}),
    "Rprop": ("Rprop", {"lr": 0.01, "step_sizes": (1e-4, 0.1)}),
}


def _params() -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(7)
    params = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        value = torch.randn(shape, generator=made).to(dtype)
        if len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        params.append(nn.Parameter(value))
    return params


def wide_copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    types = [torch.promote_types(param.dtype, F32) for param in params]
    return [nn.Parameter(p.detach().to(t, copy=True)) for p, t in zip(params, types, strict=True)]


def _give(params: list[nn.Parameter], wide: list[nn.Parameter], seed: int) -> None:
    """The same gradients to both; in every third step one has none."""
    made = torch.Generator().manual_seed(seed)
    for number, (param, copied) in enumerate(zip(params, wide, strict=True)):
        param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
        if number == 6 and seed % 3 == 1:
            param.grad = None
        copied.grad = None if param.grad is None else param.grad.to(copied.dtype, copy=True)


def _both(name: str, **options: Any) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    kind, own = CLASSES[name]
    params = _params()
    wide = wide_copies(params)
    options = {**own, **options}
    cls = getattr(faststep.optim, kind)
    return params, cls(params, **options, master_weights=True), wide, cls(wide, **options)


def _unlike(params: Any, optimizer: Any, wide: Any, reference: Any) -> list[str]:
    """What is not as of a process that keeps fp32 parameters, and rounds them."""
    wrong = []
    for number, (param, copied) in enumerate(zip(params, wide, strict=True)):
        if not torch.equal(param, copied.to(param.dtype)):
            wrong.append(f"{number}")
        expected = dict(reference.state.get(copied, {}))
        mine = optimizer.state.get(param, {})
        if param.dtype in (BF16, F16) and (mine or copied.grad is not None):
            expected[MASTER] = copied.detach()
        if list(mine) != list(expected):
            wrong.append(f"{number} has {list(mine)}, not {list(expected)}")
            continue
        for key, value in expected.items():
            same = torch.equal(mine[key], value) and mine[key].dtype == value.dtype
            if not same or mine[key].stride() != value.stride():
                wrong.append(f"{number} {key}")
    return wrong


def _step(both: Any, *seeds: int) -> list[str]:
    params, optimizer, wide, reference = both
    for seed in seeds:
        _give(params, wide, seed)
        optimizer.step()
        reference.step()
    return _unlike(*both)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", CLASSES)
def test_bits_of_fp32_copies(name: str, clip: float | None) -> None:
    both = _both(name, max_grad_norm=clip)
    for seed in range(7):
        assert _step(both, seed) == []
    if clip is not None:
        assert torch.equal(both[1].last_grad_norm, both[3].last_grad_norm)


def test_every_class_has_them() -> None:
    for name in faststep.optim.__all__:
        kind = getattr(faststep.optim, name)
        if issubclass(kind, FusedOptimizer):
            assert not kind(_params(), lr=0.1)._keeps_masters
            wide = kind(_params(), lr=0.1, master_weights=True)
            assert wide._keeps_masters
            assert not wide._has_remainders
            halves = kind(wide_copies(_params()), lr=0.1, master_weights="remainder16")
            assert halves._has_remainders
    with pytest.raises(TypeError, match="master_weights"):
        faststep.optim.Adafactor(_params(), master_weights=True)


@pytest.mark.parametrize("value", ["bf16", "fp16", 2, None, 1.0, "True", [True]])
def test_other_values_are_refused(value: Any) -> None:
    for kind, _ in CLASSES.values():
        with pytest.raises(ValueError, match=r'master_weights must be True, False, "fp32" or "rem'):
            getattr(faststep.optim, kind)(_params(), lr=0.1, master_weights=value)


def test_it_is_no_option_of_a_group() -> None:
    text = "master_weights is an option .* pass it to the optimizer"
    with pytest.raises(ValueError, match=text):
        faststep.optim.AdamW([{"params": _params(), "master_weights": True}])
    made = faststep.optim.AdamW(_params(), master_weights=True)
    with pytest.raises(ValueError, match=text):
        made.add_param_group({"params": _params(), "master_weights": "fp32"})


# ---- saved, loaded and copied


def _reloaded(saved: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "same":
        return saved
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("how", ["same", "file"])
@pytest.mark.parametrize("name", CLASSES)
def test_state_dict_goes_on(name: str, how: str) -> None:
    both = _both(name)
    _step(both, 0, 1, 2)
    params, optimizer, wide, reference = both
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = [nn.Parameter(param.detach().clone()) for param in params]
    kind, own = CLASSES[name]
    new = getattr(faststep.optim, kind)(fresh, **own, master_weights=True)
    called: list[Any] = []
    new.register_load_state_dict_pre_hook(lambda o, d: called.append(d["state"].keys()))
    new.register_load_state_dict_post_hook(lambda o: called.append(o.state[fresh[0]].get(MASTER)))
    new.load_state_dict(_reloaded(saved, how))
    assert isinstance(called[1], Tensor)  # hooks see the states themselves
    assert called[1].dtype == F32
    reference.load_state_dict(reference.state_dict())  # torch casts the numbers of float64
    assert _unlike(fresh, new, wide, reference) == []
    assert _step((fresh, new, wide, reference), 3, 4, 5) == []


@pytest.mark.parametrize("name", ["AdamW", "momentum", "Adagrad", "ASGD"])
def test_states_of_a_run_without(name: str) -> None:
    """Of torch's class: they become fp32, and masters begin as the parameters."""
    kind, own = CLASSES[name]
    params = _params()
    plain = getattr(torch.optim, kind)(params, **own)
    _give(params, wide_copies(params), 0)
    plain.step()
    mine = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = getattr(faststep.optim, kind)(mine, **own, master_weights=True)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    wide = wide_copies(params)
    reference = getattr(faststep.optim, kind)(wide, **own)
    reference.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert _step((mine, optimizer, wide, reference), 1, 2, 3) == []
    again = getattr(faststep.optim, kind)(params, **own)
    again.load_state_dict(optimizer.state_dict())  # masters are dropped where none are kept
    assert all(MASTER not in state for state in again.state.values())
    assert again.state[params[0]][next(iter(set(again.state[params[0]]) - {"step"}))].dtype == BF16
    getattr(torch.optim, kind)(params, **own).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, True) for name in ("AdamW", "SGD", "Adagrad", "NAdam")),
        *((name, "remainder16") for name in ("AdamW", "SGD")),
    ],
)
def test_torchs_checkpoints(name: str, kept: Any, begun: bool, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    kind, own = CLASSES[name]

    def made() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16())
        if kept is True:
            model.append(nn.Linear(2, 2).half())
        return model, getattr(faststep.optim, kind)(model.parameters(), **own, master_weights=kept)

    def train(model: nn.Module, optimizer: Any, seed: int) -> None:
        torch.manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    train(model, optimizer, 1)
    train(model, optimizer, 2)
    dcp.save({"of": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "kept")
    new, other = made()
    if begun:
        train(new, other, 3)
    states = {"of": get_optimizer_state_dict(new, other)}
    dcp.load(states, checkpoint_id=tmp_path / "kept")
    new.load_state_dict(model.state_dict())  # first: remainders belong to the parameters
    set_optimizer_state_dict(new, other, states["of"])
    optimizer.load_state_dict(optimizer.state_dict())  # torch casts the numbers of parameters
    for param, copied in zip(model.parameters(), new.parameters(), strict=True):
        assert list(optimizer.state[param]) == list(other.state[copied])
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, other.state[copied][key]), key
    train(model, optimizer, 4)
    train(new, other, 4)
    assert all(map(torch.equal, model.parameters(), new.parameters()))


# ---- with the other parts


def test_new_groups_and_frozen_parameters() -> None:
    both = _both("AdamW")
    assert _step(both, 0) == []
    params, optimizer, wide, reference = both
    more = _params()
    more_wide = wide_copies(more)
    optimizer.add_param_group({"params": more, "lr": 0.1})
    reference.add_param_group({"params": more_wide, "lr": 0.1})
    assert _step(([*params, *more], optimizer, [*wide, *more_wide], reference), 1, 2) == []


def test_written_parameters_count() -> None:
    both = _both("momentum")
    _step(both, 0, 1)
    params, _, wide, _ = both
    params[0].data[3] *= 0.5
    params[1].data = params[1].data.clamp(-0.1, 0.1)
    with torch.no_grad():
        for number in (0, 1):
            moved = wide[number].to(BF16) != params[number]
            wide[number].copy_(torch.where(moved, params[number].float(), wide[number]))
    assert _step(both, 2, 3) == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 50).bfloat16(), nn.Linear(50, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return model(x).float().square().sum()  # type: ignore[no-any-return]


def test_accumulated_in_fp32() -> None:
    model = Net()
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.01, master_weights=True)
    wide = wide_copies(list(model.parameters()))
    reference = faststep.optim.AdamW(wide, lr=0.01)
    accumulation = faststep.accumulate(optimizer, 4, model=model, dtype=torch.float32)
    sums = [torch.zeros_like(param) for param in wide]
    for seed in range(4):
        loss = loss_of(model, seed)
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for total, grad in zip(sums, grads, strict=True):
            total += grad.float()
        with accumulation:
            accumulation.backward(loss)
    assert accumulation.ready
    optimizer.step()
    for param, total in zip(wide, sums, strict=True):
        param.grad = total / 4
    reference.step()
    for param, copied in zip(model.parameters(), wide, strict=True):
        torch.testing.assert_close(optimizer.state[param][MASTER], copied.detach())


def test_compiled_and_scheduled() -> None:
    both = _both("AdamW")
    params, optimizer, wide, reference = both
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, reference)]
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(3):
        _give(params, wide, seed)
        step()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert _unlike(*both) == []


# ---- what torch's operators would have to do


class _Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _OfScript(faststep.optim.AdamW):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


def test_steps_by_torch_are_refused() -> None:
    params = _params()
    before = [param.detach().clone() for param in params]
    optimizer: Any = faststep.optim.AdamW(params, master_weights=True)
    _give(params, wide_copies(params), 0)
    text = "AdamW keeps masters .* and this step needs them: {}; nothing was updated"
    with _Counting(), pytest.raises(RuntimeError, match=text.format("in a TorchDispatchMode")):
        optimizer.step()
    scripts: Any = _OfScript(params, master_weights=True)
    with pytest.raises(RuntimeError, match=r"_OfScript keeps masters .* with code of the script"):
        scripts.step()
    other: Any = faststep.optim.AdamW(params, differentiable=True, master_weights=True)
    with pytest.raises(RuntimeError, match=text.format("differentiable=True")):
        other.step()
    params[6].grad = torch.randn(40, 50).bfloat16().to_sparse()
    sparse: Any = faststep.optim.SGD(params, lr=0.1, master_weights=True)
    with pytest.raises(RuntimeError, match=r"SGD keeps masters .* gradient of parameter 6 .*spars"):
        sparse.step()
    assert all(map(torch.equal, params, before))
    plain = [nn.Parameter(torch.ones(3))]
    plain[0].grad = torch.ones(3)
    alone = faststep.optim.AdamW(plain, master_weights=True)  # nothing has a master
    with _Counting():
        alone.step()


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Adamax"])
def test_updates_that_bf16_loses(kind: str) -> None:
    """A warning, once, of the first parameter that hardly moves; warm-ups do not count."""

    def first_step(value: float, dtype: torch.dtype, lr: float, **options: Any) -> list[str]:
        params = [nn.Parameter(torch.full((9000,), one, dtype=dtype)) for one in (0.0, value)]
        named = list(zip(("zero", "scale"), params, strict=True))
        group = {"params": named}
        optimizer = getattr(faststep.optim, kind)([group], lr=lr, weight_decay=0.0, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer.step()
        moved = bool((params[1] != value).any())
        assert moved or caught or options.get("master_weights")
        return [str(one.message) for one in caught]

    (text,) = first_step(1.0, torch.bfloat16, 1e-3)
    assert "lr = 0.001 are lost in most elements of parameter 1 in group 0 ('scale'" in text
    assert first_step(1.0, torch.float16, 1e-5)
    for value, dtype, lr, options in (
        (1.0, torch.bfloat16, 1e-2, {}),
        (0.01, torch.bfloat16, 1e-3, {}),
        (1.0, torch.float16, 1e-3, {}),
        (1.0, torch.float32, 1e-5, {}),
        (1.0, torch.bfloat16, 1e-3, {"master_weights": True}),
    ):
        assert not first_step(value, dtype, lr, **options)
    params = [nn.Parameter(torch.ones(9, dtype=torch.bfloat16))]
    optimizer = getattr(faststep.optim, kind)([{"params": params, "initial_lr": 1e-2}], lr=1e-6)
    params[0].grad = torch.ones_like(params[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    sgd = faststep.optim.SGD(params, lr=1e-9)  # an update may be large by its gradient
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgd.step()
