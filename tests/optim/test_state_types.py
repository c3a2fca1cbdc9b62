"""States of other types than torch makes: a step goes on with them, with torch's numbers."""

import copy
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import faststep

from .common import (
    DTYPES,
    ONE_STEP,
    TOLERANCE,
    Snapshot,
    assert_near,
    assert_same_bits,
    dtype_name,
    outcome,
    parameters,
    set_gradients,
    state_tensors,
    train,
)
from .declarations import ADAM, ADAMW, ALL, ASGD, NADAM, OTHERS, SGD, Declaration

EVERY = ALL + OTHERS
COUNTED = tuple(d for d in EVERY if "step" in d.state)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPES = ((33,), (4, 3), (0,), ())
TAKEN = (
    "is not a one-element tensor of type float32, float64, bfloat16, float16, int64, int32, int16, "
    "int8 or uint8; nothing was updated"
)


def name_of(value: Any) -> str:
    return getattr(value, "name", None) or dtype_name(value)


def pair_of(declaration: Declaration, **kwargs: Any) -> list[tuple[Any, list[Tensor]]]:
    """torch's class and ours in the middle of the same training."""
    made = []
    for cls in (declaration.torchs, declaration.ours):
        params = parameters(*SHAPES)
        optimizer = cls(params, **{**declaration.kwargs, **kwargs})
        train(optimizer, params, steps=2)
        made.append((optimizer, params))
    return made


def assert_alike(pair: list[tuple[Any, list[Tensor]]], declaration: Declaration) -> None:
    (theirs, their_params), (ours, params) = pair
    for mine, other in zip(params, their_params, strict=True):
        assert_near(mine, other, declaration.tolerance, "parameter")
        assert_same_bits([ours.state[mine]["step"]], [theirs.state[other]["step"]], "step")
        for key in declaration.moments(ours.param_groups[0]):
            theirs_now = theirs.state[other][key]
            assert_near(ours.state[mine][key], theirs_now, declaration.tolerance, key)


COUNTS = {dtype_name(d): d for d in (*INTEGERS, *DTYPES)}


@pytest.mark.parametrize("dtype", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("start", [0, 2, 100, 300, 2048])
@pytest.mark.parametrize("declaration", COUNTED, ids=name_of)
def test_a_counter_of_any_type_counts_as_torchs(
    declaration: Declaration, start: int, dtype: torch.dtype
) -> None:
    """bf16 stays at 256, and fp16 at 2048, as there."""
    if dtype.is_floating_point or start <= torch.iinfo(dtype).max:
        pair = pair_of(declaration)
        counters = []
        for (optimizer, params), shape in itertools.product(pair, [(), (1,)]):
            counters.append(torch.full(shape, start, dtype=dtype))
            optimizer.state[params[len(shape)]]["step"] = counters[-1]
        for optimizer, params in pair:
            train(optimizer, params, steps=3, seed=7)
        assert_alike(pair, declaration)
        optimizer, params = pair[1]
        assert optimizer.state[params[0]]["step"] is counters[2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64], ids=dtype_name)
def test_a_counter_whose_sign_is_flipped(dtype: torch.dtype) -> None:
    (params,) = [parameters((3,))]
    optimizer = faststep.optim.RMSprop(params)
    train(optimizer, params)
    memory = torch.tensor(-4, dtype=dtype)
    optimizer.state[params[0]]["step"] = torch._neg_view(memory)
    train(optimizer, params, steps=2)
    assert memory.item() == -6


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("declaration", COUNTED, ids=name_of)
def test_a_state_dict_with_such_counters(declaration: Declaration, dtype: torch.dtype) -> None:
    """From torch to ours and back, as in a checkpoint that was cast as a whole."""
    assert declaration.torchs is not None
    results = []
    for classes in ((declaration.torchs,) * 3, (declaration.torchs, declaration.ours) * 2):
        params = parameters(*SHAPES)
        optimizer = classes[0](params, **declaration.kwargs)
        train(optimizer, params, steps=2)
        for cls in classes[1:3]:
            state_dict = copy.deepcopy(optimizer.state_dict())
            for state in state_dict["state"].values():
                state["step"] = state["step"].to(dtype)
            optimizer = cls(params, **declaration.kwargs)
            optimizer.load_state_dict(state_dict)
            train(optimizer, params, steps=2, seed=5)
        results.append((optimizer, params))
    assert_alike(results, declaration)


def reference(
    declaration: Declaration, optimizer: torch.optim.Optimizer, param: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """What fp64 makes of a parameter and its state."""
    assert param.grad is not None
    state = {
        key: value.double().clone() if value.dim() else float(value)
        for key, value in optimizer.state[param].items()
    }
    value, new = declaration.reference(
        param.detach().double(), param.grad.double(), state, optimizer.param_groups[0]
    )
    return value, new


def cast_states(optimizer: torch.optim.Optimizer, *dtypes: torch.dtype) -> None:
    """Give the states of each parameter's shape these types in turn."""
    for param, state in optimizer.state.items():
        for (key, value), dtype in zip(list(state.items()), itertools.cycle(dtypes)):
            if value.shape == param.shape and key != "step" and value.dim():
                state[key] = value.to(dtype)


MIXTURES = [(p, (s,)) for p in DTYPES for s in DTYPES if p != s]
MIXTURES += [(torch.float32, (torch.bfloat16, torch.float64, torch.float32))]
MIXTURES += [(torch.bfloat16, (torch.float16, torch.float32, torch.float64))]


@pytest.mark.parametrize(
    ("dtype", "states"), MIXTURES, ids=lambda v: v if isinstance(v, str) else str(v)
)
@pytest.mark.parametrize("declaration", EVERY, ids=name_of)
def test_states_of_other_types_than_their_parameters(
    declaration: Declaration, dtype: torch.dtype, states: tuple[torch.dtype, ...]
) -> None:
    """Computed in the widest of the types, and rounded once; the states keep their types."""
    params = parameters((33,), (40, 50), dtype=dtype)
    optimizer = declaration.ours(params, **declaration.kwargs)
    train(optimizer, params, steps=3)
    cast_states(optimizer, *states)
    types = [[value.dtype for value in state.values()] for state in optimizer.state.values()]
    set_gradients(params, 9)
    for param in params:
        optimizer.state[param]  # in the order of the parameters
    expected = [reference(declaration, optimizer, param) for param in params]
    optimizer.step()
    for param, (value, state) in zip(params, expected, strict=True):
        assert_near(param, value, ONE_STEP, "parameter")
        for key in declaration.moments(optimizer.param_groups[0]):
            assert_near(optimizer.state[param][key], state[key], ONE_STEP, key, declaration.terms)
    assert types == [[v.dtype for v in state.values()] for state in optimizer.state.values()]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("cast", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("declaration", [d for d in EVERY if d.torchs is not None], ids=name_of)
def test_a_model_that_is_cast_in_mid_training(
    declaration: Declaration, cast: torch.dtype, dtype: torch.dtype
) -> None:
    """module.bfloat16(): where torch's class goes on, ours does with its numbers."""
    ends = []
    for cls in (declaration.torchs, declaration.ours):
        assert cls is not None
        model = torch.nn.Linear(5, 3).to(dtype)
        source = parameters((3, 5), (3,), dtype=dtype)
        model.load_state_dict({"weight": source[0], "bias": source[1]})
        params = list(model.parameters())
        optimizer = cls(params, **declaration.kwargs)
        train(optimizer, params, steps=2)
        optimizer.zero_grad()
        model.to(cast)
        error = outcome(lambda o=optimizer, p=params: train(o, p, steps=3, seed=4))[0]
        ends.append((error, optimizer, params))
    (their_error, theirs, their_params), (error, ours, params) = ends
    assert error is None
    if their_error is not None:
        return  # torch's lerp_ takes one type
    coarse = max((cast, dtype), key=lambda d: torch.finfo(d).eps)
    near = {"rtol": 4 * TOLERANCE[coarse]["rtol"], "atol": 4 * TOLERANCE[coarse]["atol"]}
    for mine, other in zip(params, their_params, strict=True):
        torch.testing.assert_close(mine, other, **near)
        torch.testing.assert_close(ours.state[mine], theirs.state[other], **near)


@pytest.mark.parametrize("declaration", [ADAM, ADAMW], ids=name_of)
def test_bf16_moments_that_a_hook_makes(declaration: Declaration) -> None:
    """As torchtitan's hook does, for torch's fused kernel on CUDA."""

    def begin(optimizer: torch.optim.Optimizer, *unused: object) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if not optimizer.state[param]:
                moments = {k: torch.zeros_like(param, dtype=torch.bfloat16) for k in keys}
                optimizer.state[param] = {"step": torch.zeros(()), **moments}

    keys = ("exp_avg", "exp_avg_sq")
    params = parameters(*SHAPES)
    optimizer = declaration.ours(params, lr=1e-2)
    optimizer.register_step_pre_hook(begin)
    train(optimizer, params)
    for step in range(1, 4):
        set_gradients(params, step)
        expected = [reference(declaration, optimizer, param) for param in params]
        optimizer.step()
        for param, (value, _) in zip(params, expected, strict=True):
            assert_near(param, value, ONE_STEP, "parameter")
            state = optimizer.state[param]
            assert {state[key].dtype for key in keys} == {torch.bfloat16}
            assert state["step"].item() == step + 1


@pytest.mark.parametrize("option", [None, "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_states_of_a_type_that_others_chose(dtype: torch.dtype, option: Any) -> None:
    """Copies have them as they are. Loading gives the parameter's type as torch does, or that of
    `state_dtype`, and never numbers that bf16 has not."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 50).to(dtype))
    optimizer = faststep.optim.AdamW([param], betas=(0.9, 0.99))
    moments = {key: torch.zeros(50, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param] = {"step": torch.zeros(()), **moments}
    param.grad = torch.linspace(-2, 1, 50).to(dtype)
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (state,) = copied.state.values()
        assert all(torch.equal(state[key], optimizer.state[param][key]) for key in state)
        assert {state[key].dtype for key in moments} == {torch.bfloat16}
    saved = optimizer.state_dict()
    assert {saved["state"][0][key].dtype for key in moments} == {torch.bfloat16}
    theirs = torch.optim.AdamW([param], betas=(0.9, 0.99))
    theirs.load_state_dict(copy.deepcopy(saved))
    ours = faststep.optim.AdamW([param], betas=(0.9, 0.99), state_dtype=option)
    found = outcome(lambda: ours.load_state_dict(copy.deepcopy(saved)))
    warns = dtype is torch.float32 and option is None
    assert ["state_dtype=\"bf16\" keeps 'exp_avg'" in text for _, text in found[2]] == [
        True
    ] * warns
    wanted = {None: dtype, "bf16": torch.bfloat16, "fp32": torch.float32}[option]
    for key in moments:
        assert theirs.state[param][key].dtype == dtype
        assert ours.state[param][key].dtype == wanted
        assert torch.equal(ours.state[param][key].float(), saved["state"][0][key].float())


@pytest.mark.parametrize("how", ["state dict", "checkpoint", "accelerate", "low precision"])
@pytest.mark.parametrize("masters", [False, True])
def test_bf16_states_stay_where_the_optimizer_has_them(how: str, masters: bool) -> None:
    """As of a hook: loading a state dict with such states gives them no other type."""
    keys = ("exp_avg", "exp_avg_sq")
    model = torch.nn.Linear(9, 7).to(torch.bfloat16 if masters else torch.float32)
    params = list(model.parameters())
    optimizer = faststep.optim.AdamW(params, betas=(0.9, 0.99), master_weights=masters)
    train(optimizer, params)
    for state in optimizer.state.values():
        state.update({key: state[key].to(torch.bfloat16) for key in keys})
    train(optimizer, params)
    optimizer.zero_grad()
    before = state_tensors(optimizer)
    if how == "state dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "checkpoint":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is one process
            saved = get_optimizer_state_dict(model, optimizer)
            set_optimizer_state_dict(model, optimizer, saved)
    elif how == "accelerate":
        pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)
    elif not masters:
        faststep.amp.low_precision_weights(model, optimizer)
        assert all(
            state["master_weights"].dtype is torch.float32 for state in optimizer.state.values()
        )
        before = [v for v in before if v.dim()]
        assert_same_bits([s[k] for s in optimizer.state.values() for k in keys], before)
        return
    assert_same_bits(state_tensors(optimizer), before)
    train(optimizer, params)
    assert {state[key].dtype for state in optimizer.state.values() for key in keys} == {
        torch.bfloat16
    }


def test_one_norm_and_one_scale_for_all() -> None:
    """Beside parameters whose states are as torch makes them."""
    ends = []
    for mixed in (False, True):
        params = parameters(*SHAPES)
        optimizer = faststep.optim.AdamW(params, lr=1e-2, max_grad_norm=0.5)
        scaler = faststep.amp.GradScaler("cpu", init_scale=1024.0)
        train(optimizer, params, steps=2, scaler=scaler)
        if mixed:
            state = optimizer.state[params[0]]
            state["step"] = state["step"].to(torch.int64)
            state["exp_avg"] = state["exp_avg"].double()
        train(optimizer, params, steps=2, scaler=scaler, seed=3)
        params[1].grad = torch.full_like(params[1], torch.inf)
        before = Snapshot(optimizer)
        scaler.step(optimizer)
        assert optimizer.step_was_skipped
        before.assert_unchanged()
        ends.append((optimizer, params))
    for mine, other in zip(ends[0][1], ends[1][1], strict=True):
        assert_near(mine, other, TOLERANCE, "parameter")
        assert ends[0][0].state[mine]["step"].item() == 4.0


def test_a_state_that_is_cast_in_place() -> None:
    """A step that is like the one before is not taken for the same."""
    params = parameters((64,), (64,))
    optimizer = faststep.optim.AdamW(params, lr=1e-2)
    train(optimizer, params, steps=4)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        for state in optimizer.state.values():
            for value in state.values():
                value.data = value.data.to(dtype)
        set_gradients(params, 5)
        expected = [reference(ADAMW, optimizer, param) for param in params]
        optimizer.step()
        for param, (value, new) in zip(params, expected, strict=True):
            assert_near(param, value, ONE_STEP, "parameter")
            assert optimizer.state[param]["step"].item() == new["step"]


def test_released_gradients() -> None:
    results = []
    for release in (False, True):
        model = torch.nn.Linear(3, 2)
        model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1)
        handle = faststep.release_gradients(model, optimizer) if release else None
        for step in range(4):
            if step == 1:
                for state in optimizer.state.values():
                    state["step"] = state["step"].to(torch.int32)
                cast_states(optimizer, torch.bfloat16)
            model(torch.full((1, 3), 1.0 + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        results.append([*model.parameters(), *optimizer.state[model.weight].values()])
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=dtype_name)
def test_masters(dtype: torch.dtype) -> None:
    """The moments beside a master may be of any type; the master is fp32."""
    params = parameters((33,), (4, 3), dtype=torch.bfloat16)
    optimizer = faststep.optim.AdamW(params, lr=1e-2)
    optimizer._keeps_masters = True
    train(optimizer, params, steps=2)
    for state in optimizer.state.values():
        state["step"] = state["step"].to(torch.int64)
        state["exp_avg"] = state["exp_avg"].to(dtype)
    set_gradients(params, 5)
    before = [{**optimizer.state[param]} for param in params]
    masters = [state["master_weights"].clone() for state in before]
    expected = [
        ADAMW.reference(
            master.double(),
            param.grad.double(),
            {k: v.double() if v.dim() else float(v) for k, v in state.items()},
            optimizer.param_groups[0],
        )
        for param, master, state in zip(params, masters, before, strict=True)
    ]
    optimizer.step()
    for param, (value, state) in zip(params, expected, strict=True):
        master = optimizer.state[param]["master_weights"]
        assert_near(master, value, ONE_STEP, "master")
        assert_same_bits([param], [master.to(torch.bfloat16)])
        assert_near(optimizer.state[param]["exp_avg"], state["exp_avg"], ONE_STEP, "exp_avg")
    optimizer.state[params[0]]["master_weights"] = masters[0].to(dtype)
    snapshot = Snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"'master_weights' of .* is not of type float32"):
        optimizer.step()
    snapshot.assert_unchanged()


@pytest.mark.parametrize(
    "bad",
    [
        True,
        3,
        3.0,
        "3",
        torch.tensor(True),
        torch.tensor(3j),
        torch.ones(2),
        torch.ones(2, dtype=torch.int64),
        torch.ones((0,)),
        torch.tensor(3, dtype=torch.uint16),
        torch.tensor(3.0).to(torch.float8_e5m2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("declaration", [ADAM, NADAM], ids=name_of)
def test_one_text_for_counters_that_nobody_takes(declaration: Declaration, bad: Any) -> None:
    for (optimizer, params), ours in zip(pair_of(declaration), (False, True), strict=True):
        optimizer.state[params[1]]["step"] = bad
        set_gradients(params, 3)
        snapshot = Snapshot(optimizer)
        error, text, _ = outcome(optimizer.step)
        assert error is not None
        if ours:
            assert error is RuntimeError
            assert text.endswith(TAKEN)
            assert "state 'step' of parameter 1 in group 0" in text
            snapshot.assert_unchanged()


def test_one_text_for_moments_that_nobody_takes() -> None:
    for cls in (torch.optim.SGD, faststep.optim.SGD):
        params = parameters(*SHAPES)
        optimizer = cls(params, lr=0.1, momentum=0.9)
        train(optimizer, params)
        for bad in (torch.int64, torch.complex64, torch.bool):
            optimizer.state[params[1]]["momentum_buffer"] = torch.zeros((4, 3), dtype=bad)
            error, text, _ = outcome(optimizer.step)
            assert error is RuntimeError
            if cls is faststep.optim.SGD:
                assert "'momentum_buffer' of parameter 1 in group 0" in text
                assert "float32, float64, bfloat16 or float16; nothing was updated" in text


@pytest.mark.parametrize("declaration", [ASGD, SGD], ids=name_of)
def test_nothing_was_updated_where_one_is_refused(declaration: Declaration) -> None:
    params = parameters(*SHAPES)
    optimizer = declaration.ours(params, **declaration.kwargs)
    train(optimizer, params)
    cast_states(optimizer, torch.bfloat16)
    key = declaration.moments(optimizer.param_groups[0])[0]
    optimizer.state[params[3]][key] = torch.zeros((), dtype=torch.int32)
    set_gradients(params, 4)
    snapshot = Snapshot(optimizer)
    with pytest.raises(RuntimeError, match=f"'{key}' of parameter 3"):
        optimizer.step()
    snapshot.assert_unchanged()
