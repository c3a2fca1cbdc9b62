"""States in codes of 8 bits on the device: the bits of the CPU."""

from typing import Any

import pytest
import torch

import faststep
from optim.common import dtype_name

from .common import (
    CUDA,
    REHEARSAL,
    SPECIAL,
    Twins,
    assert_same_scales,
    place,
    same_bits,
    scalers,
    values,
)
from .test_graphs import refill, warm_up

# Whole tiles; rows that end within blocks, and some that do not; the last has fp32 states.
SHAPES = ((20_000,), (130, 129), (40, 200), (64, 64, 3), (0,), (5, 3))
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AMSGrad": ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Lion": ("Lion", {}),
}
MASTERS = {
    torch.float32: (False,),
    torch.float64: (False,),
    torch.bfloat16: (False, True, "remainder16"),
    torch.float16: (False, True),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*so not at all", "ignore:.*never shrink")


def pair_of(twins: Twins, name: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    """The CPU's optimizer and the device's."""
    kind, own = CLASSES[name]
    options = {"lr": 0.01, "state_dtype": "int8", **own, **options}
    return twins.optimizers(getattr(faststep.optim, kind), **options)


@pytest.mark.parametrize(
    ("dtype", "masters"), [(d, m) for d, some in MASTERS.items() for m in some], ids=str
)
@pytest.mark.parametrize("name", CLASSES)
def test_every_dtype(name: str, dtype: torch.dtype, masters: object) -> None:
    twins = Twins([values(shape, i, dtype) for i, shape in enumerate(SHAPES)])
    both = pair_of(twins, name, max_grad_norm=0.7, master_weights=masters)
    twins.train(both, 3)
    assert both[1].state[twins.cuda[0]]["state_scales"].is_cuda
    for optimizer in both:
        optimizer.load_state_dict(optimizer.state_dict(native=True))
    twins.train(both, 1)
    for a, b in zip(*(o.state_dict()["state"].values() for o in both), strict=True):
        assert all(same_bits(value, b[key].cpu()) for key, value in a.items() if key != "step")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", CLASSES)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    """Each spoils its block, and no other."""
    twins = Twins([values((4200,), i, dtype) for i in range(len(SPECIAL))])
    both = pair_of(twins, name)
    for step in range(3):
        grads = [values((4200,), 10 * step + i, dtype) for i in range(len(SPECIAL))]
        for i, (grad, special) in enumerate(zip(grads, SPECIAL, strict=True)):
            grad[[5, 64 * 7, 4199][i % 3]] = special
            grad[64 * 20 : 64 * 30] = 0.0
        twins.set_grads(grads)
        for optimizer in both:
            optimizer.step()
        twins.assert_same(*both)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e18])
def test_sizes_of_gradients(size: float) -> None:
    """Quotients that quick ways are not sure of."""
    twins = Twins([values((5000,), 0, scale=size), torch.zeros(5000)])
    both = pair_of(twins)
    for step in range(3):
        twins.set_grads([values((5000,), step, scale=size)] * 2)
        for optimizer in both:
            optimizer.step()
        twins.assert_same(*both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_layouts(dtype: torch.dtype) -> None:
    """Parameters that are transposed, or begin anywhere, and gradients that do."""
    whole = values((5001,), 1, dtype)
    twins = Twins([values((72, 100), 0, dtype).t(), whole[1:], whole[:5000], whole[8:4500]])
    both = pair_of(twins)
    for step in range(2):
        grads = [values((100, 72), step, dtype), *(values((5003,), step, dtype) for _ in range(3))]
        cuts = [grads[0], grads[1][:5000], grads[2][3:], grads[3][1:4493]]
        twins.set_grads(
            [
                grad.as_strided(p.shape, p.stride(), grad.storage_offset()) if i else grad
                for i, (grad, p) in enumerate(zip(cuts, twins.cpu, strict=True))
            ]
        )
        for optimizer in both:
            optimizer.step()
        twins.assert_same(*both)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
def test_a_scaler(dtype: torch.dtype, clipped: bool) -> None:
    """It unscales gradients in place, and skips a step with an infinity."""
    twins = Twins([values((70, 100), 0, dtype), values((16_384 + 700,), 1, dtype)])
    both = pair_of(twins, max_grad_norm=0.7 if clipped else None)
    for optimizer in both:
        optimizer._step_supports_amp_scaling = True  # else fp16 is refused
    pair = scalers(init_scale=16.0, growth_interval=2)
    for step in range(4):
        twins.draw_grads(step, 16.0)
        if step == 1:
            for param in (twins.cpu[1], twins.cuda[1]):
                param.grad[9] = float("inf")
        for optimizer, scaler in zip(both, pair, strict=True):
            scaler.step(optimizer)
            scaler.update()
        twins.assert_same(*both, grads=True)
        assert_same_scales(*pair)


def test_states_of_several_types() -> None:
    """Groups of their own kinds, and an int8 moment beside one in bf16, rounded by noise."""
    twins = Twins([values((130, 70), i, torch.bfloat16) for i in range(4)])
    kinds: list[dict[str, Any]] = [
        {"state_dtype": {"exp_avg": "int8", "exp_avg_sq": "bf16"}, "rounding": "stochastic"},
        {"state_dtype": {"exp_avg": "fp32", "exp_avg_sq": "int8"}},
        {"state_dtype": "int8", "lr": 0.1},
        {"state_dtype": "fp32"},
    ]
    both = tuple(
        faststep.optim.AdamW([{"params": [p], **kind} for p, kind in zip(ps, kinds, strict=True)])
        for ps in (twins.cpu, twins.cuda)
    )
    twins.train(both, 3)


@pytest.mark.parametrize("name", CLASSES)
def test_replays(name: str) -> None:
    twins = Twins([values((100, 130), 0), values((20_000,), 1)])
    a, b = pair_of(twins, name, max_grad_norm=0.5)
    if "capturable" in b.param_groups[0]:
        b.param_groups[0]["capturable"] = True
    twins.set_grads([torch.zeros(p.shape) for p in twins.cpu])
    a.step()
    warm_up(b.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b.step()
    for step in range(2):
        refill(twins, step)
        a.step()
        graph.replay()
        twins.assert_same(a, b)


@pytest.mark.skipif(REHEARSAL, reason="gradients of autograd lie on real devices only")
def test_release() -> None:
    twins = Twins([values((80, 70), i) for i in range(3)])
    both = pair_of(twins)
    models = [torch.nn.ParameterList(params) for params in (twins.cpu, twins.cuda)]
    releases = [faststep.release_gradients(model, o) for model, o in zip(models, both, strict=True)]
    for step in range(2):
        for model, device in zip(models, ("cpu", CUDA), strict=True):
            factors = [place(values((80, 70), 10 * step + i), device) for i in range(3)]
            sum((p * x).sum() for p, x in zip(model, factors, strict=True)).backward()
        twins.assert_same(*both)
    for release in releases:
        release.remove()
