"""Optimizers of parameters that are DTensors: the bits of a step on the plain local shards."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.overrides import TorchFunctionMode

import faststep.optim
from ranks import on_ranks

from .common import Twins, backward, check_close, fully_sharded, local, locals_of, net, whole

STEPS = 2
FIVE = ("adamw", "adam", "sgd", "momentum", "lion")
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "lion": ("Lion", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "rmsprop": ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True, "eps": 0.1}),
    "adamax": ("Adamax", {"lr": 0.1}),
    "adadelta": ("Adadelta", {"lr": 0.1}),
    "radam": ("RAdam", {"lr": 0.1}),
    "nadam": ("NAdam", {"lr": 0.1}),
    "asgd": ("ASGD", {"lr": 0.1, "t0": 0.0}),
    "rprop": ("Rprop", {"lr": 0.1}),
}


def check_training(make: Callable[[], nn.Module], rank: int, names: Any = CLASSES) -> None:
    """Some steps of each class on a sharded model, against torch's and against plain shards.

    torch's Rprop cannot step DTensors.
    """
    for name in names:
        cls, options = CLASSES[name]
        ours = make()
        optimizer = getattr(faststep.optim, cls)(ours.parameters(), **options)
        twins = Twins(ours.parameters(), getattr(faststep.optim, cls), **options)
        theirs = make() if hasattr(torch.optim, cls) and cls != "Rprop" else None
        if theirs is not None:
            torchs = getattr(torch.optim, cls)(theirs.parameters(), **options)
        for step in range(STEPS):
            backward(ours, rank, step)
            twins.step()
            optimizer.step()
            twins.check(optimizer)
            optimizer.zero_grad()
            if theirs is not None:
                backward(theirs, rank, step)
                torchs.step()
                torchs.zero_grad()
        if theirs is not None:
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                check_close(mine, other)
                check_states_are_alike(optimizer.state[mine], torchs.state[other])


def check_states_are_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert [key for key, value in ours.items() if value is not None] == [
        key for key, value in theirs.items() if value is not None
    ]
    for key, value in ours.items():
        assert type(value) is type(theirs[key])
        if isinstance(value, DTensor):
            assert (value.placements, value.device_mesh) == (
                theirs[key].placements,
                theirs[key].device_mesh,
            )
            assert (value.shape, value.stride()) == (theirs[key].shape, theirs[key].stride())


@on_ranks(2, 4)
def test_fsdp2(rank: int, world: int) -> None:
    check_training(fully_sharded, rank, CLASSES if world == 2 else FIVE)


@on_ranks(2)
def test_offloaded(rank: int, world: int) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    check_training(lambda: fully_sharded(offload_policy=policy), rank, ["adamw"])


@on_ranks(4)
def test_hybrid(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_training(lambda: fully_sharded(mesh=mesh), rank, ["adamw", "momentum"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(6), nn.Linear(8, 6)
        self.plain = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x) * self.plain)))
        return out


@on_ranks(2, 4)
def test_tensor_parallel(rank: int, world: int) -> None:
    """Sharded parameters beside plain ones, which all ranks have."""
    mesh = init_device_mesh("cpu", (world,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    make = lambda: parallelize_module(Block(), mesh, plan)  # noqa: E731
    kinds = {type(param) for param in make().parameters()}
    assert kinds == {DTensor, nn.Parameter}
    # The plain ones get equal gradients everywhere.
    check_training(make, 0, ["adamw", "momentum", "rprop"])


@on_ranks(2)
def test_sequence_parallel(rank: int, world: int) -> None:
    """The gradients of a norm's replicated parameters arrive as sums that wait to be added."""
    mesh = init_device_mesh("cpu", (world,))

    def make() -> nn.Module:
        model = nn.Sequential(nn.LayerNorm(6))
        torch.manual_seed(1)
        nn.init.normal_(model[0].weight)
        return parallelize_module(model, mesh, {"0": SequenceParallel(sequence_dim=0)})

    model = make()
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1)
    plain = nn.LayerNorm(6)
    plain.load_state_dict({k: whole(v) for k, v in model[0].state_dict().items()})
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        out: Any = model(distribute_tensor(x, mesh, [Shard(0)]))
        out.to_local().square().sum().backward()
        assert any(p.is_partial() for p in model[0].weight.grad.placements)
        plain(x).square().sum().backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.data, rtol=1e-5, atol=1e-6)


def _param(mesh: Any, placements: Any, shape: tuple[int, ...] = (5, 3)) -> nn.Parameter:
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return nn.Parameter(distribute_tensor(values, mesh, placements))


@on_ranks(2, 4)
def test_other_placements(rank: int, world: int) -> None:
    """A gradient is divided as its parameter first, and a sum is added up."""
    mesh = init_device_mesh("cpu", (world,))
    for of_param, of_grad in (
        ([Shard(0)], [Shard(1)]),
        ([Shard(0)], [Replicate()]),
        ([Replicate()], [Shard(0)]),
        ([Shard(0)], [Partial()]),
        ([Replicate()], [Partial()]),
    ):
        param = _param(mesh, of_param)
        optimizer = faststep.optim.AdamW([param], lr=0.1)
        twins = Twins([param], faststep.optim.AdamW, lr=0.1)
        for step in range(STEPS):
            values = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            if of_grad[0].is_partial():
                param.grad = DTensor.from_local(values * (rank + 1), mesh, of_grad)
            else:
                param.grad = distribute_tensor(values, mesh, of_grad)
            twins.step()
            optimizer.step()
            twins.check(optimizer)
            assert param.grad.placements == param.placements


@on_ranks(2, 4)
def test_states_with_other_placements(rank: int, world: int) -> None:
    """A state is divided as its parameter first, even if parts of other rows have its shape."""
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    values = torch.arange(12.0).reshape(4, 3)
    for mesh, of_param, of_state in (
        (line, [Shard(0)], [Replicate()]),
        (line, [Replicate()], [Partial()]),
        (square, [Shard(0), Replicate()], [Replicate(), Shard(0)]),
        (square, [Replicate(), Shard(0)], [Shard(0), Replicate()]),
    ):
        both: list[list[Tensor]] = []
        for cls in (faststep.optim.SGD, torch.optim.SGD):
            param = nn.Parameter(distribute_tensor(values.clone(), mesh, of_param))
            optimizer: Any = cls([param], lr=0.1, momentum=0.9)
            for step in range(4):
                param.grad = distribute_tensor(values.cos(), mesh, of_param)
                if step == 2:
                    moment = DTensor.from_local(values * (rank + 1), mesh, of_state)
                    if not any(one.is_partial() for one in of_state):
                        moment = distribute_tensor(values.clone(), mesh, of_state)
                    optimizer.state[param]["momentum_buffer"] = moment
                optimizer.step()
            both.append([whole(param), whole(optimizer.state[param]["momentum_buffer"])])
        for mine, theirs in zip(*both, strict=True):
            torch.testing.assert_close(mine, theirs)


@on_ranks(2, 4)
def test_several_meshes(rank: int, world: int) -> None:
    """Of different shapes, and plain parameters, in several groups of one optimizer."""
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    params = [
        _param(line, [Shard(0)]),
        _param(square, [Shard(0), Shard(1)]),
        nn.Parameter(torch.ones(3)),
        _param(square, [Replicate(), Shard(0)]),
        _param(square, [Shard(1), Replicate()]),
        _param(square["a"], [Shard(0)]),
        _param(line, [Shard(0)], ()) if world == 1 else _param(line, [Replicate()], ()),
    ]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.2}]
    optimizer = faststep.optim.AdamW(groups, lr=0.1)
    twins = Twins(params, faststep.optim.AdamW, lr=0.1)
    twins.optimizer = faststep.optim.AdamW(
        [{"params": twins.plain[:3]}, {"params": twins.plain[3:], "lr": 0.2}], lr=0.1
    )
    for step in range(STEPS):
        for at, param in enumerate(params):
            param.grad = torch.zeros_like(param)
            local(param.grad).fill_(at + step + 1.0)
        if step == 1:
            params[0].grad = params[2].grad = None
        twins.step()
        optimizer.step()
        twins.check(optimizer)


def _new_local(param: Any, optimizer: Any) -> None:
    param._local_tensor = param._local_tensor.clone() + 1.0


def _new_local_of_a_state(param: Any, optimizer: Any) -> None:
    state: Any = optimizer.state[param]["exp_avg"]
    state._local_tensor = state._local_tensor.clone() + 1.0


def _new_state(param: Any, optimizer: Any) -> None:
    optimizer.state[param]["exp_avg_sq"] = optimizer.state[param]["exp_avg_sq"] + 1.0


def _new_local_of_the_gradient(param: Any, optimizer: Any) -> None:
    param.grad._local_tensor = param.grad._local_tensor.clone() + 1.0


def _same_gradient_elsewhere(param: Any, optimizer: Any) -> None:
    param.grad = param.grad + 1.0


def _gradient_in_another_order(param: Any, optimizer: Any) -> None:
    part = local(param.grad).t().contiguous().t() * 2.0
    param.grad = DTensor.from_local(
        part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _no_gradient(param: Any, optimizer: Any) -> None:
    param.grad = None


def _new_counter(param: Any, optimizer: Any) -> None:
    optimizer.state[param]["step"] = torch.tensor(40.0)


@on_ranks(2)
def test_changed_between_steps(rank: int, world: int) -> None:
    """A step that is like the one before is recognized; any difference is seen."""
    mesh = init_device_mesh("cpu", (world,))
    changes = (
        *(_new_local, _new_local_of_a_state, _new_state, _new_local_of_the_gradient),
        *(_same_gradient_elsewhere, _gradient_in_another_order, _no_gradient, _new_counter),
    )
    for change in changes:
        params: list[Any] = [_param(mesh, [Shard(0)]), _param(mesh, [Replicate()])]
        optimizer = faststep.optim.AdamW(params, lr=0.1)
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        for _ in range(3):
            optimizer.step()
        change(params[0], optimizer)
        twins = Twins(params, faststep.optim.AdamW, lr=0.1)
        for param, plain in zip(params, twins.plain, strict=True):
            twins.optimizer.state[plain] = {
                key: local(value).clone() for key, value in optimizer.state[param].items()
            }
        for _ in range(2):
            before = [(param._version, local(param)._version) for param in params]
            twins.step()
            optimizer.step()
            twins.check(optimizer)
            for param, (whole_one, part) in zip(params, before, strict=True):
                if param.grad is not None:
                    assert param._version > whole_one
                    assert local(param)._version > part


class Acting(TorchFunctionMode):
    """Does something when a second gradient has been read."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.action, self.calls = action, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func == Tensor.grad.__get__:
            self.calls += 1
            if self.calls == 2:
                with torch._C.DisableTorchFunction():
                    self.action()
        return result


def _stepped(mesh: Any) -> tuple[list[Any], Any]:
    """Parameters and an optimizer whose next step is like the ones before."""
    params: list[Any] = [_param(mesh, [Shard(0)]) for _ in range(3)]
    optimizer = faststep.optim.SGD(params, lr=1.0, momentum=0.5)
    for step in range(4):
        for param in params:
            param.grad = torch.ones_like(param)
        if step < 3:
            optimizer.step()
    return params, optimizer


@on_ranks(2)
def test_gradients_that_go_in_a_step(rank: int, world: int) -> None:
    params, optimizer = _stepped(init_device_mesh("cpu", (world,)))
    before = locals_of(params)

    def drop() -> None:
        for param in params[1:]:
            param.grad = None

    with Acting(drop) as mode:
        optimizer.step()
    assert mode.calls >= 2
    for param, value in zip(params, before, strict=True):
        assert torch.equal(local(param), value) is (param.grad is None)


@on_ranks(2)
def test_parameters_that_go_in_a_step(rank: int, world: int) -> None:
    params, optimizer = _stepped(init_device_mesh("cpu", (world,)))

    def drop() -> None:
        optimizer.param_groups[0]["params"].clear()
        optimizer.state.clear()
        params.clear()

    with Acting(drop), pytest.raises(RuntimeError, match="group 0 were changed"):
        optimizer.step()


@on_ranks(2)
def test_torchs_scale_protocol(rank: int, world: int) -> None:
    """`grad_scale` divides, and the quotient is in `.grad` afterwards."""
    mesh = init_device_mesh("cpu", (world,))
    param: Any = _param(mesh, [Shard(0)])
    optimizer = faststep.optim.SGD([param], lr=1.0, fused=True)
    before = locals_of([param])[0]
    param.grad = distribute_tensor(torch.full((5, 3), 8.0), mesh, [Shard(0)])
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert torch.equal(locals_of([param])[0], before - 2.0)
    assert torch.equal(whole(param.grad), torch.full((5, 3), 2.0))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(locals_of([param])[0], before - 2.0)


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    """What cannot be stepped is named, and nothing has changed."""
    mesh, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    fine, param = _param(mesh, [Shard(0)]), _param(mesh, [Shard(0)])
    named = [("fine", fine), ("bad", param)]
    optimizer = faststep.optim.AdamW(named, lr=0.1)
    for one in (fine, param):
        one.grad = torch.ones_like(one)
    optimizer.step()

    def must_fail(error: type[Exception], text: str, step: Callable[[], Any]) -> None:
        before = locals_of([fine, param, *optimizer.state[param].values()])
        with pytest.raises(error, match=re.escape(text)):
            step()
        after = locals_of([fine, param, *optimizer.state[param].values()])
        assert all(map(torch.equal, before, after))

    param.grad = distribute_tensor(torch.ones(5, 3), square, [Shard(0), Replicate()])
    must_fail(RuntimeError, "'bad'", optimizer.step)
    param.grad = torch.ones_like(param)
    moment: Any = optimizer.state[param]["exp_avg"]
    for shape in ((9, 9), local(moment).shape, (5, 3)):  # of one rank a plain state may fit
        optimizer.state[param]["exp_avg"] = local(moment).new_zeros(shape)
        must_fail(TypeError, "state 'exp_avg' of parameter 1 in group 0 ('bad'", optimizer.step)
    elsewhere = distribute_tensor(torch.ones(5, 3), square, [Shard(0), Replicate()])
    optimizer.state[param]["exp_avg"] = elsewhere
    must_fail(RuntimeError, "state 'exp_avg' of parameter 1 in group 0 ('bad'", optimizer.step)
    optimizer.state[param]["exp_avg"] = moment
    sums = nn.Parameter(DTensor.from_local(torch.ones(5, 3), mesh, [Partial()]))
    sums.grad = torch.ones_like(sums)
    other = faststep.optim.AdamW([("sums", sums)], lr=0.1)
    must_fail(RuntimeError, "'sums'", other.step)
    plain = nn.Parameter(torch.ones(5, 3))
    other = faststep.optim.SGD([("plain", plain)], lr=0.1, momentum=0.9)
    plain.grad = DTensor.from_local(torch.ones(5, 3), mesh, [Partial()])
    must_fail(TypeError, "gradient of parameter 0 in group 0 ('plain'", other.step)
    plain.grad = torch.ones(5, 3)
    other.step()
    other.state[plain]["momentum_buffer"] = distribute_tensor(torch.ones(5, 3), mesh, [Replicate()])
    must_fail(TypeError, "state 'momentum_buffer' of parameter 0 in group 0 ('plain'", other.step)
    before = locals_of([fine])[0]
    optimizer.step()
    assert not torch.equal(before, locals_of([fine])[0])


def test_the_net_has_uneven_and_empty_shards() -> None:
    rows = {param.shape[0] for param in net().parameters()}
    assert rows == {1, 3, 5}
