"""Constructors, groups and errors: what torch's class of the same name does, ours does too."""

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import faststep
from faststep.optim.base import FusedOptimizer
from faststep.optim.checks import OPTIONS

from .common import Snapshot, outcome, parameters, set_gradients
from .declarations import ADAM, ADAMW, ALL, LION, OTHERS, SGD, TORCHS, Declaration

Call = Callable[[type[torch.optim.Optimizer]], Any]


def tensors() -> list[torch.nn.Parameter]:
    return parameters((3,), (2, 2))


def non_leaf() -> torch.Tensor:
    return tensors()[0] * 2


def named(count: int) -> list[Any]:
    return [(f"w{i}", p) if i < count else p for i, p in enumerate(tensors())]


def shared(cls: type[torch.optim.Optimizer]) -> Any:
    p = tensors()[0]
    return cls([{"params": [p]}, {"params": [p]}])


def mixed_names(cls: type[torch.optim.Optimizer]) -> Any:
    optimizer = cls(named(2))
    optimizer.add_param_group({"params": parameters((3,))})


def undecided_betas(*betas: Any) -> Call:
    return lambda cls: cls(tensors(), betas=betas)


BASE_CALLS: dict[str, Call] = {
    "raw_tensor": lambda cls: cls(torch.zeros(3)),
    "set": lambda cls: cls([{"params": set(tensors())}]),
    "empty_list": lambda cls: cls([]),
    "empty_generator": lambda cls: cls(p for p in []),
    "empty_group": lambda cls: cls([{"params": []}]),
    "non_leaf": lambda cls: cls([non_leaf()]),
    "not_a_tensor": lambda cls: cls([1.0]),
    "group_not_a_dict": lambda cls: cls(tensors()).add_param_group([1]),
    "group_without_params": lambda cls: cls([{"lr": 0.1}]),
    "duplicate_in_group": lambda cls: cls(tensors()[:1] * 2),
    "duplicate_over_groups": shared,
    "names_missing": lambda cls: cls(named(1)),
    "names_mixed_over_groups": mixed_names,
    "lr_negative": lambda cls: cls(tensors(), lr=-0.1),
    "lr_nan": lambda cls: cls(tensors(), lr=float("nan")),
    "lr_infinite": lambda cls: cls(tensors(), lr=float("inf")),
    "lr_two_elements": lambda cls: cls(tensors(), lr=torch.tensor([0.1, 0.2])),
    "lr_negative_tensor": lambda cls: cls(tensors(), lr=torch.tensor(-0.1)),
    "weight_decay_negative": lambda cls: cls(tensors(), weight_decay=-1.0),
    "unknown_keyword": lambda cls: cls(tensors(), no_such_option=1),
    "unknown_group_key_is_kept": lambda cls: cls([{"params": tensors(), "tag": 1}]),
}
TORCH_CALLS: dict[str, Call] = {
    "foreach_and_fused": lambda cls: cls(tensors(), foreach=True, fused=True),
}
ADAM_CALLS: dict[str, Call] = {
    "eps_negative": lambda cls: cls(tensors(), eps=-1.0),
    "beta1_one": undecided_betas(1.0, 0.9),
    "beta1_negative": undecided_betas(-0.1, 0.9),
    "beta2_one": undecided_betas(0.9, 1.0),
    "betas_float_and_tensor": undecided_betas(0.9, torch.tensor(0.9)),
    "betas_tensor_and_float": undecided_betas(torch.tensor(0.9), 0.9),
    "betas_two_elements": undecided_betas(torch.tensor([0.9]), torch.tensor([0.9, 0.8])),
    "betas_int": undecided_betas(0, 0.9),
    "lr_tensor_foreach": lambda cls: cls(tensors(), lr=torch.tensor(0.1), foreach=True),
    "betas_tensor_foreach": lambda cls: cls(
        tensors(), betas=(torch.tensor(0.9), torch.tensor(0.9)), foreach=True
    ),
    "positional": lambda cls: cls(tensors(), 0.1, (0.9, 0.99), 1e-6, 0.1, True, False),
}
SGD_CALLS: dict[str, Call] = {
    "momentum_negative": lambda cls: cls(tensors(), momentum=-0.5),
    "nesterov_without_momentum": lambda cls: cls(tensors(), nesterov=True),
    "nesterov_with_dampening": lambda cls: cls(
        tensors(), momentum=0.9, dampening=0.1, nesterov=True
    ),
    "positional": lambda cls: cls(tensors(), 0.1, 0.9, 0.0, 0.1, True, False),
}
CALLS = [
    pytest.param(declaration, call, id=f"{declaration.name}-{name}")
    for declaration in TORCHS
    for name, call in {
        **BASE_CALLS,
        **TORCH_CALLS,
        **(SGD_CALLS if declaration is SGD else ADAM_CALLS),
    }.items()
]
BETAS = [
    undecided_betas(*betas) for betas in ((1.0, 0.9), (-0.1, 0.9), (0.9, 1.0), (0.9, -1.0), (0.9,))
]
CALLS += [pytest.param(LION, call) for call in (*BASE_CALLS.values(), *BETAS)]
CALLS += [
    pytest.param(
        declaration,
        lambda cls, wrong=wrong: cls(tensors(), **wrong),
        id=f"{declaration.name}-{name}",
    )
    for declaration in OTHERS
    for name, wrong in {
        "lr_negative": {"lr": -0.1},
        "weight_decay_negative": {"weight_decay": -1.0},
        "unknown_keyword": {"no_such_option": 1},
        "lr_two_elements": {"lr": torch.tensor([0.1, 0.2])},
        **declaration.errors,
    }.items()
]


@pytest.mark.parametrize(("declaration", "call"), CALLS)
def test_errors_and_warnings_are_torchs(declaration: Declaration, call: Call) -> None:
    """Same exception type, same text, same warnings: the class name is the same as well.

    Lion has no counterpart in torch: it words its errors as torch.optim.Adam does.
    """
    ours = outcome(lambda: call(declaration.ours))
    torchs = outcome(lambda: call(declaration.torchs or torch.optim.Adam))
    assert ours[0] is torchs[0]
    assert ours[2] == torchs[2]
    if ours[0] is not TypeError or "unexpected keyword" not in torchs[1]:
        assert ours[1] == torchs[1]


def begins_early(declaration: Declaration) -> bool:
    """Whether states are there before the first step."""
    return bool(declaration.ours(tensors()).state)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_max_grad_norm_out_of_range(declaration: Declaration, value: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        declaration.ours(tensors(), max_grad_norm=value)


@pytest.mark.parametrize("declaration", TORCHS + OTHERS, ids=lambda d: d.name)
def test_signature_extends_torchs(declaration: Declaration) -> None:
    """The same parameters in the same order with the same defaults, then our seven by keyword."""
    ours = dict(inspect.signature(declaration.ours.__init__).parameters)
    torchs = dict(inspect.signature(declaration.torchs.__init__).parameters)
    extra = [name for name in ours if name not in torchs]
    assert sorted(extra) == sorted(OPTIONS)
    for name in extra:
        assert ours.pop(name).kind is inspect.Parameter.KEYWORD_ONLY
    positional = [n for n, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert set(ours) == set(torchs)
    for name, parameter in torchs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_help_explains_every_argument(declaration: Declaration) -> None:
    text = inspect.getdoc(declaration.ours) or ""
    _, *arguments = inspect.signature(declaration.ours).parameters.values()
    for argument in arguments:
        entry = re.search(rf"^    {argument.name} \(.*(\n {{8}}.*)*", text, re.MULTILINE)
        assert entry, argument.name
        assert " ".join(entry[0].split()).endswith(f" Default: {argument.default!r}.")


@pytest.mark.parametrize("declaration", TORCHS + OTHERS, ids=lambda d: d.name)
def test_missing_arguments_are_torchs_error(declaration: Declaration) -> None:
    ours, torchs = outcome(lambda: declaration.ours()), outcome(lambda: declaration.torchs())
    assert ours == torchs
    assert ours[0] is TypeError


def test_a_pair_of_three() -> None:
    """torch's error is that of Python for too many values."""
    params = tensors()
    optimizer = faststep.optim.AdamW(params)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99, 0.999)  # torch 2.14 makes two of an argument
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="'betas' of a parameter group has 3 values, not 2"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_hyper_parameters_that_require_a_gradient_are_read_without_a_warning() -> None:
    params = tensors()
    beta = torch.tensor(0.9, requires_grad=True)
    set_gradients(params, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        faststep.optim.AdamW(params, betas=(beta, beta)).step()


@pytest.mark.parametrize("declaration", TORCHS + OTHERS, ids=lambda d: d.name)
def test_groups_and_defaults_are_torchs(declaration: Declaration) -> None:
    """No key of ours in the groups: a checkpoint must not tell which class wrote it."""
    groups = [{"params": parameters((3,))}, {"params": parameters((2,)), **declaration.other}]
    ours = declaration.ours([dict(g) for g in groups], max_grad_norm=1.0, keep_grads=True)
    torchs = declaration.torchs([dict(g) for g in groups])
    assert ours.defaults == torchs.defaults
    assert list(ours.defaults) == list(torchs.defaults)
    for left, right in zip(ours.param_groups, torchs.param_groups, strict=True):
        left.pop("params"), right.pop("params")
        assert left == right
        assert list(left) == list(right)


@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_class(declaration: Declaration) -> None:
    optimizer = declaration.ours(tensors())
    assert issubclass(declaration.ours, declaration.torchs or torch.optim.Optimizer)
    assert isinstance(optimizer, FusedOptimizer)
    assert "grad_scaler" not in inspect.signature(optimizer.step).parameters
    assert "closure" in inspect.signature(optimizer.step).parameters
    assert getattr(faststep.optim, declaration.name) is declaration.ours
    assert optimizer.last_grad_norm is None
    assert optimizer.step_was_skipped is False


def test_adamw_is_an_adam_as_in_torch() -> None:
    """Code that asks isinstance(optimizer, torch.optim.Adam) sees the same answer."""
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        assert isinstance(ADAMW.ours(tensors()), cls) == isinstance(ADAMW.torchs(tensors()), cls)
        assert isinstance(ADAM.ours(tensors()), cls) == isinstance(ADAM.torchs(tensors()), cls)


@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_no_gradient_at_all(declaration: Declaration) -> None:
    optimizer = declaration.ours(tensors(), max_grad_norm=1.0)
    before = Snapshot(optimizer)
    assert optimizer.step() is None
    before.assert_unchanged()
    assert begins_early(declaration) or not any(optimizer.state.values())


@pytest.mark.parametrize("declaration", TORCHS + OTHERS, ids=lambda d: d.name)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [None, True])
def test_state_is_torchs(declaration: Declaration, default: torch.dtype, fused: Any) -> None:
    """Keys in torch's order, dtypes, shapes, strides and devices after the first step."""
    torch.set_default_dtype(default)
    for dtype in (torch.float32, torch.bfloat16):
        states = []
        for cls in (declaration.ours, declaration.torchs):
            value = torch.zeros(2, 3, 4, 5, dtype=dtype)
            p = torch.nn.Parameter(value.to(memory_format=torch.channels_last))
            set_gradients([p], 0)
            fusing = {"fused": fused} if declaration.takes("fused") else {}
            optimizer = cls([p], **declaration.kwargs, **fusing)
            optimizer.step()
            states.append(optimizer.state[p])
        assert list(states[0]) == list(states[1])
        for key, value in states[1].items():
            mine = states[0][key]
            assert type(mine) is torch.Tensor
            for attribute in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
                assert getattr(mine, attribute) == getattr(value, attribute), (key, attribute)
            assert mine.stride() == value.stride(), key


@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_step_runs_without_a_warning(declaration: Declaration) -> None:
    params = tensors()
    set_gradients(params, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = declaration.ours(params, max_grad_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.last_grad_norm.shape == ()
