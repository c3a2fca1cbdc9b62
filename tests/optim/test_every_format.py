"""Each format of states and masters with torch's options, odd tensors, closures and threads."""

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.optim.masters import MASTER

from .common import Snapshot, assert_same_bits, released_and_stepped, state_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*and so not at all"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
]

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HALVES: dict[str, Any] = {"master_weights": "remainder16"}
NOISE: dict[str, Any] = {"state_dtype": "bf16", "rounding": "stochastic"}
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (F32, {"state_dtype": "bf16"}),
    "noise": (F32, NOISE),
    "int8": (F32, {"state_dtype": "int8"}),
    "mixed": (F32, {"state_dtype": {"exp_avg": "int8", "exp_avg_sq": "bf16"}}),
    "masters": (BF16, {"master_weights": "fp32"}),
    "halves": (BF16, HALVES),
    "halves, noise": (BF16, {**HALVES, **NOISE}),
    "halves, int8": (BF16, {**HALVES, "state_dtype": "int8"}),
}
SHAPES = ((70, 100), (5000,), (), (0, 70), (8, 9, 8, 8))
over_formats = pytest.mark.parametrize("form", FORMATS)

Change = Callable[[Tensor], Tensor]


def make(form: str, shapes: Any = SHAPES, **options: Any) -> Any:
    dtype, own = FORMATS[form]
    made = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(s, generator=made).to(dtype)) for s in shapes]
    return faststep.optim.AdamW(params, **{"lr": 0.01, "betas": (0.9, 0.95), **own, **options})


def params_of(optimizer: Any) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]  # type: ignore[no-any-return]


def give(optimizer: Any, seed: int, change: Change = Tensor.clone) -> None:
    made = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        param.grad = change(torch.randn(param.shape, generator=made).to(param.dtype))


def train(optimizer: Any, steps: int, change: Change = Tensor.clone) -> None:
    for seed in range(steps):
        give(optimizer, seed, change)
        optimizer.step()


def assert_same(one: Any, other: Any) -> None:
    assert_same_bits(params_of(one), params_of(other))
    assert_same_bits(state_tensors(one), state_tensors(other))


def continued(optimizer: Any, form: str, native: bool, **options: Any) -> Any:
    """Saved, natively or as torch does, and loaded into a new optimizer of a new model."""
    file = io.BytesIO()
    torch.save([params_of(optimizer), optimizer.state_dict(native)], file)
    file.seek(0)
    params, saved = torch.load(file)
    new = make(form, [p.shape for p in params], **options)
    for mine, its in zip(params_of(new), params, strict=True):
        mine.data = its.data
    new.load_state_dict(saved)
    return new


@over_formats
def test_options_that_change_nothing(form: str) -> None:
    plain = make(form)
    train(plain, 3)
    rate, beta = torch.tensor(0.01, dtype=F64), torch.tensor(0.9, dtype=F64)
    for options in (
        *({"foreach": True}, {"foreach": False}, {"fused": True}, {"lr": rate}),
        {"lr": rate.view(1), "betas": (beta, torch.tensor(0.95, dtype=F64))},
    ):
        optimizer = make(form, **options)
        train(optimizer, 3)
        assert_same(optimizer, plain)
    negated = make(form, maximize=True)
    train(negated, 3, torch.neg)
    assert_same_bits(params_of(negated), params_of(plain))


@over_formats
def test_gradients_of_other_layouts_and_types(form: str) -> None:
    def wide(grad: Tensor) -> Tensor:
        return grad.double()

    layouts: list[Change] = [
        lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
        lambda g: g[:1].expand(g.shape),
        lambda g: torch.stack([g, g], -1)[..., 0],
        lambda g: torch._neg_view(-g),
        lambda g: g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g,
    ]
    shapes = ((100, 100), (64, 128, 3, 3))
    for layout in layouts:
        optimizer, plain = make(form, shapes), make(form, shapes)
        train(optimizer, 2, layout)
        train(plain, 2, lambda g, layout=layout: layout(g).resolve_neg().contiguous())  # type: ignore[misc]
        assert_same(optimizer, plain)
    optimizer, plain = make(form, shapes), make(form, shapes)
    for param in params_of(optimizer):
        param.grad_dtype = None
    train(optimizer, 2, wide)
    train(plain, 2)
    for mine, its in zip(params_of(optimizer), params_of(plain), strict=True):
        torch.testing.assert_close(mine, its, rtol=0.02, atol=1e-5)


@over_formats
def test_calls_of_other_kinds(form: str) -> None:
    """In a compiled function, with a closure, and from two threads at once."""
    plain, compiled, closed = (make(form) for _ in range(3))
    train(plain, 3)
    step = torch.compile(lambda: compiled.step(), backend="eager")
    for seed in range(3):
        give(compiled, seed)
        step()
        closed.step(lambda seed=seed: give(closed, seed))
    for one in (compiled, closed):
        assert_same(one, plain)
    several = [make(form, ((100, 300), (5000,))) for _ in range(4)]
    threads = [threading.Thread(target=train, args=(one, 4)) for one in several[:3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(several[3], 4)
    for one in several[:3]:
        assert_same(one, several[3])


@over_formats
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("module", [torch.amp, faststep.amp])
def test_under_a_scaler(form: str, module: Any, limit: float | None) -> None:
    """The bits without one; a step that overflows changes, counts and draws nothing."""
    scaled, plain = (make(form, max_grad_norm=limit) for _ in range(2))
    scaler = module.GradScaler("cpu", init_scale=4.0)
    for seed in range(4):
        scale = scaler.scale(torch.ones(())).item()
        give(scaled, seed, lambda g, scale=scale: g * scale)  # type: ignore[misc]
        if seed == 1:
            params_of(scaled)[1].grad[7] = torch.inf  # type: ignore[index]
        else:
            give(plain, seed)
            plain.step()
        scaler.step(scaled)
        scaler.update()
    assert_same(scaled, plain)


@over_formats
def test_clipping(form: str) -> None:
    """Inside the step and before it."""
    inside, before = make(form, max_grad_norm=0.1), make(form)
    for seed in range(3):
        give(inside, seed)
        give(before, seed)
        inside.step()
        faststep.clip_grad_norm_(params_of(before), 0.1)
        before.step()
    for one, other in zip(params_of(inside), params_of(before), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@over_formats
def test_released_gradients(form: str) -> None:
    dtype, options = FORMATS[form]
    options = {"betas": (0.9, 0.99), **options}
    releasing, stepping = released_and_stepped((90, 70), 4, dtype, **options)
    assert_same(releasing, stepping)
    for optimizer in (releasing, stepping):
        train(optimizer, 1)  # without release
    assert_same(releasing, stepping)


@over_formats
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_run_that_goes_on_has_the_same_bits(form: str, amsgrad: bool) -> None:
    """Copied, pickled or saved in both ways after a step, on other numbers of threads."""
    shapes = ((101, 200), (40000,), (77,), (8, 9, 8, 8))
    options = {"amsgrad": amsgrad}
    whole = make(form, shapes, **options)
    train(whole, 4)
    ways: list[Callable[[Any], Any]] = [
        lambda one: continued(one, form, True, **options),
        lambda one: continued(one, form, False, **options),
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
    ]
    before = torch.get_num_threads()
    try:
        optimizer = make(form, shapes, **options)
        for seed, (way, threads) in enumerate(zip(ways, (2, 1, 3, 2), strict=True)):
            torch.set_num_threads(threads)
            give(optimizer, seed)
            optimizer.step()
            optimizer = way(optimizer)
    finally:
        torch.set_num_threads(before)
    assert_same(optimizer, whole)


@over_formats
def test_torchs_class_loads_it_and_gives_it_back(form: str) -> None:
    optimizer = make(form)
    train(optimizer, 2)
    params = [nn.Parameter(param.detach().clone()) for param in params_of(optimizer)]
    theirs = torch.optim.AdamW(params, lr=0.5)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in params:
        state = theirs.state[param]
        assert state.keys() - {MASTER} == {"step", "exp_avg", "exp_avg_sq"}
        assert {value.dtype for key, value in state.items() if key != "step"} == {param.dtype}
        param.grad = torch.ones_like(param)
    theirs.step()
    again = make(form)
    again.load_state_dict(theirs.state_dict())
    train(again, 1)


@over_formats
def test_what_it_cannot_step_changes_nothing(form: str) -> None:
    """The second of two parameters, codes and masters of the first included."""
    dtype = FORMATS[form][0]
    shared = torch.ones(1, 100, dtype=dtype).expand(60, 100)
    kinds = [nn.Parameter(torch.ones(70, 100, dtype=torch.complex64)), nn.Parameter(shared)]
    for bad, options in [
        *((param, {}) for param in kinds),
        *((None, {flag: True}) for flag in ("capturable", "differentiable")),
        (nn.Parameter(torch.ones(70, 100, dtype=dtype)), {}),
    ]:
        optimizer = make(form, ((70, 100),), **options)
        if not options:
            train(optimizer, 1)
            optimizer.add_param_group({"params": [bad]})
            assert isinstance(bad, Tensor)
            dense = torch.ones(bad.shape, dtype=bad.dtype)
            bad.grad = dense if bad is kinds[0] or bad is kinds[1] else dense.to_sparse()
        give(optimizer, 1)
        before = Snapshot(optimizer)
        with pytest.raises(RuntimeError, match="nothing was updated"):
            optimizer.step()
        before.assert_unchanged()


NAMED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"state_dtype": bad}, "state_dtype must")
        for bad in ("INT8", torch.int8, ["bf16"], b"bf16", "int4", "", True, 16)
    ),
    ({"state_dtype": {"exp_av": "bf16"}}, "state_dtype has 'exp_av', and the states of AdamW are"),
    ({"state_dtype": {"step": "bf16", 1: None}}, "state_dtype has 'step', 1, and"),
    ({"state_dtype": {MASTER: "bf16"}}, f"state_dtype has '{MASTER}', and"),
    ({"state_dtype": "bf16", "rounding": "Stochastic"}, "rounding must be"),
    ({"state_dtype": "bf16", "rounding": ["nearest"]}, "rounding must be"),
    *(({"min_8bit_size": bad}, "min_8bit_size must be") for bad in (-1, 1.5, "64", True)),
]


@pytest.mark.parametrize(("options", "text"), NAMED, ids=str)
def test_errors_name_the_option(options: dict[str, Any], text: str) -> None:
    """Of the optimizer, of a group, and of a group that a script changes later."""
    params = [nn.Parameter(torch.ones(70, 100))]
    with pytest.raises(ValueError, match=text):
        faststep.optim.AdamW(params, **options)
    with pytest.raises(ValueError, match=text):
        faststep.optim.AdamW([{"params": params, **options}])
    optimizer = make("int8")
    train(optimizer, 1)
    optimizer.param_groups[0].update(options)
    give(optimizer, 1)
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    before.assert_unchanged()


def test_a_least_size_is_needed_of_the_optimizer_alone() -> None:
    """None in a group means that of the optimizer."""
    params = [nn.Parameter(torch.ones(70, 100))]
    with pytest.raises(ValueError, match="min_8bit_size must be"):
        faststep.optim.AdamW(params, state_dtype="int8", min_8bit_size=None)
    faststep.optim.AdamW([{"params": params, "min_8bit_size": None}], state_dtype="int8")


def test_names_of_states_that_a_group_may_have() -> None:
    params = [nn.Parameter(torch.ones(70, 100))]
    faststep.optim.AdamW(params, state_dtype={"max_exp_avg_sq": "bf16"})
    faststep.optim.RMSprop(params, state_dtype={"grad_avg": "bf16", "momentum_buffer": "fp32"})
    with pytest.raises(ValueError, match=r"the states of ASGD are 'ax'$"):
        faststep.optim.ASGD(params, state_dtype={"eta": "bf16"})


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.permutations(("fp32", "bf16", "int8"), 2)]
)
def test_a_groups_option_that_is_changed_in_mid_training(before: str, after: str) -> None:
    """A step takes what is there or names it, and the own state dict converts it."""
    optimizer, twin = make("bf16", state_dtype=before), make("bf16", state_dtype=before)
    train(optimizer, 1)
    train(twin, 1)
    optimizer.param_groups[0]["state_dtype"] = after
    if "int8" in (before, after):
        give(optimizer, 1)
        kept = Snapshot(optimizer)
        with pytest.raises((KeyError, RuntimeError), match=r"state.* of parameter 0"):
            optimizer.step()
        kept.assert_unchanged()
    optimizer.load_state_dict(optimizer.state_dict())
    other = make("bf16", state_dtype=after)
    for mine, its in zip(params_of(other), params_of(twin), strict=True):
        mine.data = its.data
    other.load_state_dict(twin.state_dict())
    for one in (optimizer, other):
        train(one, 1)
    assert_same(optimizer, other)
