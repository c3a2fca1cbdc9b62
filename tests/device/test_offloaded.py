"""offload() of CUDA parameters, on a device whose streams run as late as they may."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import faststep
from faststep import zero
from faststep.offloading import places
from offload.common import assert_same, bits

from . import fake, late
from .common import scaler_on

SHAPES = ((300, 130), (130,), (), (40, 77))
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "few bits": (torch.bfloat16, {"master_weights": "remainder16", "state_dtype": "int8"}),
}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * 0.1).to(dtype)


SOURCES: list[Tensor] = []  # that the device may still read


class Twins:
    """Parameters on the late device that are offloaded, and the same in CPU memory."""

    def __init__(
        self,
        device: late.Late,
        dtype: torch.dtype = torch.float32,
        how: dict[str, Any] | None = None,
        kind: Callable[..., Any] = faststep.optim.AdamW,
        **options: Any,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.sources = SOURCES
        self.cpu = [nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
        self.cuda = [nn.Parameter(self.new(p.detach(), late=False)) for p in self.cpu]
        self.a, self.b = (kind(ps, lr=0.01, **options) for ps in (self.cpu, self.cuda))
        self.handle: Any = faststep.offload(self.b, threads=2, **(how or {}))

    def write(self, tensor: Tensor, elements: Tensor) -> None:
        """As an operation in place writes them, when the current stream comes to it."""
        source = torch.empty_like(elements, pin_memory=True).copy_(elements)
        self.sources.append(source)
        self.device.upload(tensor, source)
        torch.autograd.graph.increment_version(tensor)

    def new(self, elements: Tensor, late: bool = True) -> Tensor:
        made = torch.empty_like(elements, device="cuda")
        if late:
            self.write(made, elements)
        else:
            fake.plain(made).copy_(elements)
        return made

    def grads(self, seed: int, scale: float = 1.0) -> list[Tensor]:
        return [values(p.shape, 100 * seed + i, self.dtype) * scale for i, p in enumerate(self.cpu)]

    def arrive(self, index: int, grad: Tensor | None = None) -> None:
        """A gradient as backward leaves it; None: `.grad` was accumulated in place."""
        param = self.cuda[index]
        if grad is not None:
            param.grad = self.new(grad)
        for hook in [*(param._post_accumulate_grad_hooks or {}).values()]:  # type: ignore[attr-defined]
            hook(param)

    def backward(self, seed: int, scale: float = 1.0) -> None:
        """New gradients, the last parameter's first."""
        for index, grad in reversed([*enumerate(self.grads(seed, scale))]):
            self.cpu[index].grad = grad.clone()
            self.arrive(index, grad)

    def found(self) -> list[Tensor]:
        """The parameters as the current stream finds them."""
        read = [self.device.read(param) for param in self.cuda]
        self.device.current.synchronize()
        return read

    def assert_same(self) -> None:
        assert_same(bits(self.found()), bits([p.detach() for p in self.cpu]))
        states = [one.state_dict(native=True) for one in (self.b, self.a)]
        assert_same(*map(bits, tree_map_only(fake.OnCuda, fake.plain, states)))
        assert_same(bits(self.b.last_grad_norm), bits(self.a.last_grad_norm))
        for param, state in self.b.state.items():
            tensors = [one for one in state.values() if isinstance(one, Tensor) and one.dim()]
            assert all(one.is_cpu != (param in self.handle._copies._kept) for one in tensors)


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "KINDS", (*places.KINDS, fake.OnCuda))


@pytest.fixture
def world(device: late.Late) -> Iterator[late.Late]:
    """The device; nothing of the offload may be left."""
    yield device
    device.machine.synchronize()
    SOURCES.clear()
    gc.collect()


@pytest.fixture(params=[1.0, 0.9, 0.0])
def how(
    request: pytest.FixtureRequest, world: late.Late, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Options: the fraction of the states that lies in host memory.

    The others lie in memory of torch's operators here, which the driver does not know, so that
    kernels and copies run at once.
    """

    def copy(device: late.Late, source: Tensor, target: Tensor) -> None:
        fake.plain(target).copy_(fake.plain(source))

    if request.param < 1.0:
        world.machine.lag(0)
        monkeypatch.setattr(late.Late, "copy_from", copy)
    return {"fraction": request.param}


def test_a_learning_rate_on_the_device(world: late.Late) -> None:
    twins = Twins(world)
    rate = torch.tensor(0.03)
    twins.a.param_groups[0]["lr"] = rate
    twins.b.param_groups[0]["lr"] = twins.new(rate, late=False)
    for step in range(2):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        assert_same(bits(twins.found()), bits([p.detach() for p in twins.cpu]))
        twins.b.zero_grad()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_bits(world: late.Late, how: dict[str, Any], stored: str, max_norm: float | None) -> None:
    dtype, options = FORMATS[stored]
    twins = Twins(world, dtype, how, max_grad_norm=max_norm, **options)
    for step in range(4):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        twins.assert_same()
        twins.b.zero_grad()


def test_the_host_does_not_wait_in_hooks(world: late.Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the device in a step: parameters are read behind steps in the order of streams."""
    twins = Twins(world, max_grad_norm=0.5)
    found, expected = [], []
    for step in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(fake, "waiting_is_an_error", True)
            twins.backward(step)
            old = [world.read(param) for param in twins.cuda]
            twins.b.step()
        found += old + [world.read(param) for param in twins.cuda]
        expected += [p.detach().clone() for p in twins.cpu]
        twins.a.step()
        expected += [p.detach().clone() for p in twins.cpu]
        twins.b.zero_grad()
    world.default.synchronize()
    assert_same(bits(found), bits(expected))


@pytest.mark.parametrize("lag", [0, 3, 10_000])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_updates_in_backward(world: late.Late, lag: int, max_norm: float | None) -> None:
    """The memory of a gradient is used again at once."""
    world.machine.lag(lag)
    twins = Twins(world, how={"in_backward": True}, max_grad_norm=max_norm)
    for step in range(3):
        twins.backward(step)
        assert max_norm is not None or all(param.grad is None for param in twins.cuda)
        if max_norm is None:
            others = [twins.new(torch.full_like(p.detach(), 1e30)) for p in twins.cpu]
        twins.a.step()
        twins.b.step()
        twins.assert_same()
        twins.b.zero_grad()
    assert max_norm is not None or len(others) == len(SHAPES)


class Layers(nn.Module):
    """A module for each parameter."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in params)
        for layer, param in zip(self.layers, params, strict=True):
            layer.weight = param


def test_modules_wait_for_their_own(world: late.Late) -> None:
    twins = Twins(world, max_grad_norm=0.5)
    twins.handle.remove()
    model = Layers(twins.cuda)
    twins.handle = faststep.offload(twins.b, model=model, threads=1)
    for step in range(3):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        for param, grad in zip(twins.cuda, twins.grads(99), strict=True):
            twins.write(param.grad, grad)  # behind the copies
        found = []
        for layer in model.layers:
            layer(torch.ones(1))
            found.append(world.read(layer.weight))
        world.default.synchronize()
        assert_same(bits(found), bits([p.detach() for p in twins.cpu]))
        twins.assert_same()


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_shard_in_one_process(world: late.Late, gather: Any, tmp_path: Any) -> None:
    twins = Twins(world, max_grad_norm=0.5)
    twins.handle.remove()
    model = Layers(twins.cuda)
    twins.b = zero.shard(model, twins.b, offload="optimizer", gather=gather)
    for step in range(4):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        for layer in model.layers:
            layer(torch.ones(1))
        twins.assert_same()
        twins.b.zero_grad()
        if step == 1:
            torch.save(twins.a.state_dict(), tmp_path / "states")
            for optimizer in (twins.a, twins.b):
                optimizer.load_state_dict(torch.load(tmp_path / "states"))


def test_parameters_that_come_again_while_they_go_back(world: late.Late) -> None:
    """As those that a script's collectives may have written, when no module has waited for them."""
    twins = Twins(world)
    twins.handle.remove()
    twins.handle = faststep.offload(twins.b, model=Layers(twins.cuda), threads=1)
    for step in range(3):
        twins.backward(step)
        for place in twins.handle._copies.places.entries():
            place.written = (-1, 0)
        twins.a.step()
        twins.b.step()
    twins.handle.wait()
    twins.assert_same()


def replaced(twins: Twins) -> None:
    twins.cuda[0].grad = twins.new(twins.grads(7)[0])


def dropped(twins: Twins) -> None:
    twins.cuda[0].grad = None
    twins.new(twins.grads(7)[0])


def written(twins: Twins) -> None:
    twins.write(twins.cuda[0].grad, twins.grads(7)[0])


def accumulated(twins: Twins) -> None:
    written(twins)
    twins.arrive(0)


def turned(twins: Twins) -> None:
    """Another order of elements."""
    grad = twins.new(twins.grads(7)[0].t().contiguous(), late=False)
    twins.cuda[0].grad = grad.t()


def exchanged(twins: Twins) -> None:
    twins.cuda[0].data = twins.new(twins.cpu[0].detach() * 2)
    twins.cpu[0].data = twins.cpu[0].data * 2
    twins.cpu[0].grad = twins.grads(0)[0]
    twins.arrive(0, twins.grads(0)[0])


def param_written(twins: Twins) -> None:
    with torch.no_grad():
        twins.write(twins.cuda[0], twins.cpu[0].detach() * 2)
        twins.cpu[0].mul_(2)


@pytest.mark.parametrize(
    "act", [replaced, dropped, written, accumulated, turned, exchanged, param_written]
)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_scripts_that_change_what_is_copied(
    world: late.Late, act: Callable[[Twins], None], max_norm: float | None
) -> None:
    twins = Twins(world, max_grad_norm=max_norm)
    for step in range(3):
        twins.backward(step)
        if step == 1:
            act(twins)
            if act is dropped:
                twins.cpu[0].grad = None
            elif act not in (exchanged, param_written):
                twins.cpu[0].grad = twins.grads(7)[0]
        twins.a.step()
        twins.b.step()
        twins.assert_same()
        twins.b.zero_grad()


def test_a_backward_that_raised(world: late.Late) -> None:
    """Some of its gradients have arrived, and the next ones add to them or replace them."""
    twins = Twins(world, max_grad_norm=0.5)
    for index, grad in enumerate(twins.grads(5)[:2]):
        twins.arrive(index, grad)
    twins.b.zero_grad()
    for step in range(2):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        twins.assert_same()


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("stored", ["fp32", "few bits"])
def test_the_scaler(
    world: late.Late, how: dict[str, Any], limit: float | None, stored: str
) -> None:
    """An infinity is found in the host's copies, or on the device, and the scale shrinks."""
    dtype, options = FORMATS[stored]
    twins = Twins(world, dtype, how, max_grad_norm=limit, **options)
    scalers = scaler_on(None, init_scale=512.0), scaler_on(0, init_scale=512.0)
    for step in range(4):
        twins.backward(step, 512.0)
        if step == 1:
            grad = twins.grads(step, 512.0)[3]
            grad[2, 5] = float("inf")
            twins.cpu[3].grad = grad.clone()
            twins.arrive(3, grad)
        for scaler, optimizer in zip(scalers, (twins.a, twins.b), strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (256.0 if step else 512.0)
        twins.assert_same()


@pytest.mark.parametrize("scale", [512.0, 1000.0])
@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_scaler(world: late.Late, how: dict[str, Any], scale: float, unscales: bool) -> None:
    world.machine.lag(0)  # torch's operators run at once
    twins = Twins(world, torch.bfloat16, how, max_grad_norm=0.5)
    scalers = [torch.amp.GradScaler("cpu", scale) for _ in range(2)]
    scalers[0].scale(torch.ones(()))
    scalers[1]._lazy_init_scale_growth_tracker(torch.device("cuda", 0))
    for step in range(3):
        twins.backward(step, scale)
        if step == 1:
            for one in (twins.cpu[0], twins.cuda[0]):
                grad = torch.full_like(fake.plain(one), float("nan"))
                one.grad = twins.new(grad) if one.is_cuda else grad
        for scaler, optimizer in zip(scalers, (twins.a, twins.b), strict=True):
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(bits(twins.found()), bits([p.detach() for p in twins.cpu]))


def test_gradients_go_back_when_all_are_unscaled(world: late.Late) -> None:
    """A slow copy to the host holds their updates up."""
    world.machine.lag(0)
    twins = Twins(world)
    twins.handle._copies.pipe.pace(2e6, 0.0)
    twins.backward(0, 512.0)
    for optimizer, device in ((twins.a, "cpu"), (twins.b, "cuda")):
        scaler = torch.amp.GradScaler("cpu", 512.0)
        scaler._lazy_init_scale_growth_tracker(torch.device(device))
        scaler.step(optimizer)
    read = [world.read(param.grad) for param in twins.cuda]
    twins.assert_same()
    assert_same(bits(read), bits([param.grad for param in twins.cpu]))


def test_gradients_are_written_back(world: late.Late, how: dict[str, Any]) -> None:
    twins = Twins(world, how=how, max_grad_norm=0.1, keep_grads=True)
    for step in range(2):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        read = [world.read(param.grad) for param in twins.cuda]
        twins.assert_same()
        assert_same(bits(read), bits([param.grad for param in twins.cpu]))


@pytest.mark.parametrize("stored", FORMATS)
def test_checkpoints(world: late.Late, stored: str, tmp_path: Any) -> None:
    """Of a run without offload, and for one."""
    dtype, options = FORMATS[stored]
    twins = Twins(world, dtype, **options)
    for grad, param in zip(twins.grads(0), twins.cpu, strict=True):
        param.grad = grad
    twins.a.step()
    for param, other in zip(twins.cuda, twins.cpu, strict=True):
        param.data = twins.new(other.detach(), late=False)
    torch.save(twins.a.state_dict(), tmp_path / "states")
    for optimizer in (twins.a, twins.b):
        optimizer.load_state_dict(torch.load(tmp_path / "states"))
    assert [*map(id, twins.b.param_groups[0]["params"])] == [*map(id, twins.cuda)]
    for step in (1, 2):
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        twins.assert_same()
        assert_same(bits(twins.b.state_dict()), bits(twins.a.state_dict()))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        twins.b.load_state_dict({"state": {}, "param_groups": []})
    torch.save(twins.b.state_dict(), tmp_path / "states")
    twins.handle.remove()
    assert all(
        value.is_cuda
        for state in twins.b.state.values()
        for key, value in state.items()
        if key != "step"
    )
    twins.backward(3)
    twins.a.step()
    world.machine.lag(0)
    twins.b.step()
    assert_same(bits(twins.found()), bits([p.detach() for p in twins.cpu]))


def test_later_parameters(world: late.Late) -> None:
    """A group that is added, and gradients that become float32."""
    twins = Twins(world, torch.bfloat16)
    twins.backward(0)
    twins.a.step()
    twins.b.step()
    twins.cpu.append(nn.Parameter(values((50, 50), 77, torch.bfloat16)))
    twins.cuda.append(nn.Parameter(twins.new(twins.cpu[-1].detach(), late=False)))
    for optimizer, params in ((twins.a, twins.cpu), (twins.b, twins.cuda)):
        optimizer.add_param_group({"params": params[-1:], "lr": 0.1})
    for param in (twins.cpu[0], twins.cuda[0]):
        param.grad = None
        param.grad_dtype = torch.float32
    for step in (1, 2):
        for index, grad in enumerate(twins.grads(step)):
            grad = grad.float() if index == 0 else grad
            twins.cpu[index].grad = grad.clone()
            twins.arrive(index, grad)
        twins.a.step()
        twins.b.step()
        twins.assert_same()


def test_a_copy_that_fails(world: late.Late) -> None:
    for entry, text in (
        ("cuEventSynchronize", "nothing was updated"),
        ("cuMemcpyHtoDAsync_v2", "some parameters were updated"),
    ):
        twins = Twins(world, max_grad_norm=0.5)
        grads = [twins.new(grad) for grad in twins.grads(0)]
        world.machine.fail(entry, 1, 719)
        for index, (param, grad) in enumerate(zip(twins.cuda, grads, strict=True)):
            param.grad = grad
            twins.arrive(index)
        with pytest.raises(RuntimeError, match=f"{text}|did not reach the host"):
            twins.b.step()


def test_memory_that_cannot_be_locked(world: late.Late) -> None:
    world.machine.fail("cuMemHostRegister_v2", 1, 2)
    with pytest.raises(RuntimeError, match="cannot page-lock"):
        Twins(world)


def test_a_captured_graph_is_refused(world: late.Late, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(world, capturable=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        twins.backward(0)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        twins.b.step()


def test_parameters_that_are_refused(world: late.Late) -> None:
    def refused(params: list[Tensor], text: str, **options: Any) -> None:
        optimizer = faststep.optim.AdamW(params)
        with pytest.raises(NotImplementedError, match=text):
            faststep.offload(optimizer, **options)
        assert optimizer._stepper is None

    def made(*shape: int) -> Tensor:
        return torch.empty(*shape, device="cuda")

    refused([nn.Parameter(made(3)), nn.Parameter(torch.ones(3))], "one device")
    refused([nn.Parameter(made(6, 4)[:, ::2])], r"without gaps, not one of shape \(6, 2\)")
    refused([nn.Parameter(made(0, 3))], "with elements")


def test_gradients_that_are_refused(world: late.Late) -> None:
    twins = Twins(world)
    twins.backward(0)
    frozen = nn.Parameter(twins.new(torch.ones(3)), requires_grad=False)
    frozen.grad = twins.new(torch.ones(3))
    twins.b.add_param_group({"params": [frozen]})
    with pytest.raises(NotImplementedError, match="cannot copy a gradient of torch"):
        twins.b.step()
    frozen.grad = None
    twins.backward(0)
    twins.a.step()
    twins.b.step()
    assert_same(bits(twins.found()[:4]), bits([p.detach() for p in twins.cpu]))


def test_torchs_operators_are_refused(world: late.Late) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    twins = Twins(world)
    twins.backward(0)
    with Watch(), pytest.raises(NotImplementedError, match="torch's operators cannot"):
        twins.b.step()


def test_a_copied_optimizer_is_not_offloaded(world: late.Late) -> None:
    """Its states stay on the host; those of a state dict do not."""
    twins = Twins(world)
    twins.backward(0)
    twins.a.step()
    twins.b.step()
    twins.found()
    copied, state = object.__new__(type(twins.b)), twins.b.__getstate__()
    own = {param: {**states} for param, states in twins.b.state.items()}
    copied.__setstate__({**state, "state": own})
    again = faststep.optim.AdamW(twins.cuda, lr=0.01)
    again.load_state_dict(twins.b.state_dict())
    twins.handle.remove()
    world.machine.lag(0)
    twins.backward(1)
    with pytest.raises(RuntimeError, match="is on cpu, not on cuda:0"):
        copied.step()
    twins.a.step()
    again.step()
    assert_same(bits(twins.found()), bits([p.detach() for p in twins.cpu]))


def test_gradients_that_are_written_behind_a_step(world: late.Late) -> None:
    """Their copies are under way: a thread has not come to them."""
    twins = Twins(world)
    twins.handle.remove()
    twins.handle = faststep.offload(twins.b, model=Layers(twins.cuda), threads=1)
    for step in range(2):
        twins.handle._copies.pipe.pace(5e5, 0.0)
        twins.backward(step)
        twins.a.step()
        twins.b.step()
        for param, grad in zip(twins.cuda, twins.grads(99), strict=True):
            twins.write(param.grad, grad)
        world.default.synchronize()
        twins.handle.wait()
        twins.assert_same()


def test_steps_on_several_streams(world: late.Late) -> None:
    """As the script orders them."""
    twins = Twins(world)
    found, expected = [], []
    first, second = late.Stream(world), late.Stream(world)
    for step, stream in enumerate((first, second, first)):
        stream.wait_stream(second if stream is first else first)
        with world.use(stream):
            twins.backward(step)
            twins.a.step()
            twins.b.step()
            found += [world.read(param) for param in twins.cuda]
        expected += [p.detach().clone() for p in twins.cpu]
    first.synchronize()
    assert_same(bits(found), bits(expected))


@pytest.mark.parametrize("has_model", [False, True])
def test_objects_that_go_while_copies_are_under_way(world: late.Late, has_model: bool) -> None:
    """Memory of parameters is used again, and that of the host is freed."""
    twins = Twins(world)
    if has_model:
        twins.handle.remove()
        twins.handle = faststep.offload(twins.b, model=Layers(twins.cuda), threads=1)
        twins.handle._copies.pipe.pace(0.0, 2e6)
    twins.backward(0)
    twins.b.step()
    elements = twins.grads(8)
    kept = [{**state} for state in twins.b.state.values()]
    del twins
    gc.collect()
    made = []
    for one in elements:
        made.append(torch.empty_like(one, device="cuda"))
        SOURCES.append(torch.empty_like(one, pin_memory=True).copy_(one))
        world.upload(made[-1], SOURCES[-1])
    world.default.synchronize()
    world.machine.synchronize()
    assert_same(bits([fake.plain(one) for one in made]), bits(elements))
    assert len(kept) == len(SHAPES)
    kept.clear()
    again = Twins(world)
    again.backward(0)
    again.b.step()
    del again
    gc.collect()
