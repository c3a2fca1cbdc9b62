"""What scripts do to tensors between steps: a cached plan must see every one of these."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from .common import (
    TOLERANCE,
    assert_as_torchs,
    assert_near,
    assert_same_bits,
    parameters,
    set_gradients,
    train,
)
from .declarations import ADAMW, ALL, TORCHS, Declaration

SHAPES = ((17,), (4, 5), ())
Optimizer = torch.optim.Optimizer
Change = Callable[[Optimizer, list[Parameter]], None]

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
over_torchs = pytest.mark.parametrize("declaration", TORCHS, ids=lambda d: d.name)


def replace_data(optimizer: Optimizer, params: list[Parameter]) -> None:
    params[0].data = torch.linspace(-1, 1, 17)
    params[1].data = params[1].data.clone()


def replace_data_by_a_view(optimizer: Optimizer, params: list[Parameter]) -> None:
    flat = torch.linspace(-1, 1, 37)
    params[0].data = flat[:17]
    params[1].data = flat[17:].view(4, 5)


def replace_data_with_other_strides(optimizer: Optimizer, params: list[Parameter]) -> None:
    params[1].data = params[1].data.t().contiguous().t()


def set_storage(optimizer: Optimizer, params: list[Parameter]) -> None:
    with torch.no_grad():
        params[0].set_(torch.linspace(-1, 1, 20).untyped_storage(), 3, (17,), (1,))


def copy_into(optimizer: Optimizer, params: list[Parameter]) -> None:
    with torch.no_grad():
        for p in params:
            p.copy_(torch.full_like(p, 0.25))


def move_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        for key, value in values.items():
            values[key] = value.clone()


def restride_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for key, value in optimizer.state[params[1]].items():
        if value.dim() == 2:
            optimizer.state[params[1]][key] = value.t().contiguous().t()


def zero_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        for value in values.values():
            value.zero_()


def replace_data_of_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        for value in values.values():
            value.data = value.data.clone()


def set_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        for value in values.values():
            value.set_(value.clone())


def grow_storage_of_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        for key, value in values.items():
            try:
                value.untyped_storage().resize_(1 << 23)
            except RuntimeError:  # a storage that small states share
                values[key] = value.clone()
                values[key].untyped_storage().resize_(1 << 23)


def share_memory_of_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        for value in values.values():
            value.share_memory_()


def rename_keys_of_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    """Equal names that are other objects, as in a state dict that was unpickled."""
    for p, values in optimizer.state.items():
        optimizer.state[p] = {"".join([*key]): value for key, value in values.items()}


def reorder_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    for p, values in optimizer.state.items():
        optimizer.state[p] = {"first": torch.zeros(()), **dict(reversed(values.items()))}


def exchange_states(optimizer: Optimizer, params: list[Parameter]) -> None:
    """The same tensors at each other's places."""
    for values in optimizer.state.values():
        names = [name for name, value in values.items() if value.dim()]
        exchanged = [values[name].abs_() for name in reversed(names)]
        values.update(zip(names, exchanged, strict=True))


def halve_steps(optimizer: Optimizer, params: list[Parameter]) -> None:
    for values in optimizer.state.values():
        if "step" in values:
            values["step"] = torch.tensor(1.0)


def clear_state(optimizer: Optimizer, params: list[Parameter]) -> None:
    optimizer.state.clear()


def clear_state_of_one(optimizer: Optimizer, params: list[Parameter]) -> None:
    del optimizer.state[params[1]]


def edit_group(optimizer: Optimizer, params: list[Parameter]) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = 0.5
    group["weight_decay"] = 0.25
    group["maximize"] = True


def replace_group(optimizer: Optimizer, params: list[Parameter]) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.125}


def freeze_one(optimizer: Optimizer, params: list[Parameter]) -> None:
    params[0].requires_grad_(False)


def drop_last(optimizer: Optimizer, params: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].pop()


def reverse_params(optimizer: Optimizer, params: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def split_group(optimizer: Optimizer, params: list[Parameter]) -> None:
    group = optimizer.param_groups[0]
    rest = {**group, "params": group["params"][2:], "lr": 0.5}
    group["params"] = group["params"][:2]
    optimizer.param_groups.append(rest)


def exchange_param(optimizer: Optimizer, params: list[Parameter]) -> None:
    """A layer grown between steps: another Parameter of another shape takes the place."""
    params[1] = parameters((6, 7), seed=5)[0]
    optimizer.param_groups[0]["params"][1] = params[1]


CHANGES: tuple[Change, ...] = (
    replace_data,
    replace_data_by_a_view,
    replace_data_with_other_strides,
    set_storage,
    copy_into,
    move_states,
    restride_states,
    zero_states,
    replace_data_of_states,
    set_states,
    grow_storage_of_states,
    share_memory_of_states,
    rename_keys_of_states,
    reorder_states,
    exchange_states,
    halve_steps,
    clear_state,
    clear_state_of_one,
    edit_group,
    replace_group,
    freeze_one,
    drop_last,
    reverse_params,
    split_group,
    exchange_param,
)


def changing(change: Change) -> Change:
    """Some steps, the change, some more."""

    def work(optimizer: Optimizer, params: list[Parameter]) -> None:
        train(optimizer, params, steps=3)  # enough to recognize tensors by their records
        change(optimizer, params)
        train(optimizer, params, steps=3, seed=2)

    return work


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@over_torchs
def test_change_between_steps(declaration: Declaration, change: Change) -> None:
    """The same as torch's for-loop at every parameter."""
    assert_as_torchs(declaration, changing(change), *SHAPES, foreach=False)


LONG = (1025, 1025)  # more elements than a step works on with the GIL held


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_between_long_steps(change: Change) -> None:
    assert_as_torchs(ADAMW, changing(change), *SHAPES, LONG, foreach=False)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@over_all
def test_old_plan_is_as_good_as_a_new_one(declaration: Declaration, change: Change) -> None:
    """After any change a fresh optimizer with the same state takes the same steps, bit for bit."""
    params = parameters(*SHAPES)
    optimizer = declaration.ours(params, **declaration.kwargs)
    train(optimizer, params, steps=3)
    change(optimizer, params)
    copies = [Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in params]
    place = {p: copies[i] for i, p in enumerate(params)}
    groups = [
        {**group, "params": [place[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    fresh = declaration.ours(groups)
    for p, values in optimizer.state.items():
        if p in place:
            fresh.state[place[p]] = {key: value.clone() for key, value in values.items()}
    train(optimizer, params, steps=2, seed=2)
    train(fresh, copies, steps=2, seed=2)
    assert_same_bits(params, copies, change.__name__)


@pytest.mark.parametrize("set_to_none", [True, False])
@over_torchs
def test_zero_grad(declaration: Declaration, set_to_none: bool) -> None:
    """Real backward passes, gradients dropped or zeroed in place between them."""

    def work(optimizer: Optimizer, params: list[Parameter]) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            used = params if step != 2 else params[:1]
            sum((p * p).sum() for p in used).backward()
            addresses = [p.grad.data_ptr() for p in params if p.grad is not None]
            optimizer.step()
            assert [p.grad.data_ptr() for p in params if p.grad is not None] == addresses

    assert_as_torchs(declaration, work, (3, 4), (3,))


@over_torchs
def test_gradient_that_is_part_of_a_graph(declaration: Declaration) -> None:
    """backward(create_graph=True) leaves gradients with a grad_fn; zero_grad detaches them."""

    def work(optimizer: Optimizer, params: list[Parameter]) -> None:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (params[0] ** 3).sum().backward(create_graph=True)
            optimizer.step()
            assert params[0].grad_fn is None
            optimizer.zero_grad(set_to_none=False)
            assert params[0].grad.grad_fn is None

    assert_as_torchs(declaration, work, (5,))


@over_torchs
def test_one_gradient_for_two_parameters(declaration: Declaration) -> None:
    def work(optimizer: Optimizer, params: list[Parameter]) -> None:
        for step in range(3):
            set_gradients(params[:1], step)
            params[1].grad = params[0].grad
            optimizer.step()

    assert_as_torchs(declaration, work, (6,), (6,))


@over_torchs
def test_one_gradient_for_two_parameters_written_back(declaration: Declaration) -> None:
    """Unscaling writes the shared gradient once or per parameter: the same as torch's fused."""
    written = []

    def work(optimizer: Optimizer, params: list[Parameter]) -> None:
        set_gradients(params[:1], 0)
        params[1].grad = params[0].grad
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        written.append(params[0].grad)

    assert_as_torchs(declaration, work, (600,), (600,), fused=True)
    assert_near(*written, TOLERANCE, "shared gradient with a scale")


@over_torchs
def test_two_parameters_over_one_storage(declaration: Declaration) -> None:
    """Overlapping views step one after the other, in the order of the list."""
    results = []
    for cls, extra in ((declaration.ours, {}), (declaration.torchs, {"foreach": False})):
        base = torch.linspace(-1, 1, 50_000)
        params = [Parameter(base[:40_000]), Parameter(base[10_000:]), Parameter(base)]
        optimizer = cls(params, **declaration.kwargs, **extra)
        train(optimizer, params, steps=3)
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert_near(p, q, TOLERANCE, "overlapping parameters")


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@over_torchs
def test_duplicate_parameter(declaration: Declaration) -> None:
    """torch warns and steps it twice; so do we, also for large tensors and many threads."""
    counts = []

    def work(optimizer: Optimizer, params: list[Parameter]) -> None:
        train(optimizer, params, steps=3)
        counts.append(optimizer.state[params[0]].get("step"))

    def twice(params: list[Parameter]) -> list[Parameter]:
        return [params[0], params[1], params[0]]

    assert_as_torchs(declaration, work, (30_000,), (5,), groups=twice, foreach=False)
    assert counts[0] == counts[1]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        declaration.ours(twice(parameters((1,), (1,))))


@over_all
def test_parameter_changes_dtype(declaration: Declaration) -> None:
    """model.bfloat16() after some steps leaves moments of the old dtype, which go on."""
    params: Any = parameters((8,))
    optimizer = declaration.ours(params, **declaration.kwargs)
    train(optimizer, params)
    params[0].data = params[0].data.bfloat16()
    params[0].grad = None
    set_gradients(params, 1)
    before = params[0].detach().clone()
    keys = declaration.moments(optimizer.param_groups[0])
    optimizer.step()
    assert not torch.equal(params[0], before)
    assert {optimizer.state[params[0]][key].dtype for key in keys} == {torch.float32}
    optimizer.load_state_dict(optimizer.state_dict())
    assert {optimizer.state[params[0]][key].dtype for key in keys} == {torch.bfloat16}
    optimizer.step()
