"""state_dtype="int8": against a twin whose fp32 states are converted after each step.

The conversion is written here without that of the package, a row of a matrix for each block.
"""

import copy
import functools
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import faststep
from faststep.optim.masters import MASTER
from faststep.optim.param_shards import Shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*and so not at all"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIGNED, ROOT = torch.int8, torch.uint8
SCALES = "state_scales"
CLASSES: dict[str, tuple[str, dict[str, Any], dict[str, torch.dtype]]] = {
    "AdamW": ("AdamW", {"lr": 0.01}, {"exp_avg": SIGNED, "exp_avg_sq": ROOT}),
    "Adam": (
        "Adam",
        {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"exp_avg": SIGNED, "exp_avg_sq": ROOT, "max_exp_avg_sq": ROOT},
    ),
    "momentum": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        {"momentum_buffer": SIGNED},
    ),
    "Lion": ("Lion", {"lr": 0.01, "weight_decay": 0.1}, {"exp_avg": SIGNED}),
}
OTHERS = sorted(set(faststep.optim.__all__) - {kind for kind, *_ in CLASSES.values()})
SHAPES = ((16500,), (130, 129), (2, 8300), (70, 100), (3000, 2), (4095,), (0, 70), (8, 9, 8, 8))


def row_of(value: Tensor) -> int:
    """Elements of a row at whose end a block ends; 0: there is none."""
    if value.dim() < 2 or value.shape[0] < 2:
        return 0
    row = value.numel() // value.shape[0]
    return row if row > 64 and value.stride(0) == max(value.stride()) else 0


def blocks_of(count: int, row: int) -> tuple[list[tuple[int, int, int]], int]:
    """(begin, end, place of the scale) of each block, and the number of places."""
    counts = row % 64 != 0
    room = 256 + (16384 // row + 2 if counts else 0)
    edges = {*range(0, count, 16384), *(range(0, count, row) if counts else ()), count}
    ends = sorted(edges)
    blocks, places = [], {}
    for first, last in itertools.pairwise(ends):
        for begin in range(first, last, 64):
            chunk = begin // 16384
            place = places[chunk] = places.get(chunk, -1) + 1
            blocks.append((begin, min(begin + 64, last), chunk * room + place))
    return blocks, -(-count // 16384) * room if counts else len(blocks)


def in_memory(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


def scales_of(blocks: Tensor) -> Tensor:
    """The largest magnitudes in bf16, rounded up but for 16 units in the last place; NaN where
    there is one, or one that is too large."""
    largest = blocks.abs().amax(1, keepdim=True)
    up = ((largest.view(torch.int32) + 0xFFEF) // 65536 * 65536).view(F32)
    up = torch.where(up < 2.0**-126, 0.0, up)
    return torch.where(largest <= 2.0**126, up, torch.nan)


def convert(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A state's codes and scales; its values become those that the codes stand for."""
    numbers, codes = in_memory(value), torch.empty_like(value, dtype=dtype)
    blocks, places = blocks_of(value.numel(), row_of(value))
    begins, ends, of_scales = torch.tensor(blocks).view(-1, 3).t()
    at = begins[:, None] + torch.arange(64)
    within = at < ends[:, None]
    x = torch.where(within, numbers[at.clamp(max=value.numel() - 1)], 0.0)
    scale = scales_of(x)
    if dtype is SIGNED:
        q = (x / (torch.where(scale > 0, scale, torch.inf) + x.abs()) * 254).round()
        back = scale * (q / (254 - q.abs()))
    else:
        scale = torch.where(scale.isnan(), scale, scales_of(x.sqrt()))
        divisor = torch.where(scale > 0, torch.tensor(255.0) / scale, 0.0)
        q = (x.sqrt() * divisor).round()
        q = torch.where((x > 0) & (q < 1), 1.0, q)
        back = (q * (scale * torch.tensor(1 / 255))).square()
    in_memory(codes)[at[within]] = torch.where(scale.isnan(), 0.0, q)[within].to(dtype)
    numbers[at[within]] = torch.where(scale.isnan(), torch.nan, back)[within]
    scales = torch.zeros(places, dtype=BF16)
    scales[of_scales] = scale[:, 0].to(BF16)
    return codes, scales


def params_of(dtype: torch.dtype, shapes: Any = SHAPES) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=made).to(dtype) for shape in shapes]
    if len(shapes[-1]) == 4:
        values[-1] = values[-1].to(memory_format=torch.channels_last)
        values[3] = values[3].t()
    return [nn.Parameter(value) for value in values]


def make(name: str, params: list[nn.Parameter], **options: Any) -> Any:
    kind, arguments, _ = CLASSES[name]
    return getattr(faststep.optim, kind)(params, **{**arguments, **options})


def step(optimizer: Any, number: int) -> None:
    made = torch.Generator().manual_seed(number)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
    optimizer.step()


def is_coded(param: Tensor, smallest: int = 4096) -> bool:
    return param.numel() >= smallest


def convert_all(twin: Any, name: str, smallest: int = 4096) -> dict[Tensor, dict[str, Any]]:
    found: dict[Tensor, dict[str, Any]] = {}
    for param in twin.param_groups[0]["params"]:
        if is_coded(param, smallest):
            codes = {k: convert(twin.state[param][k], d) for k, d in CLASSES[name][2].items()}
            found[param] = codes
    return found


def assert_same(one: Any, other: Any) -> None:
    """The same bits in parameters and states."""
    groups = one.param_groups[0]["params"], other.param_groups[0]["params"]
    for mine, its in zip(*groups, strict=True):
        assert torch.equal(mine, its)
        assert list(one.state[mine]) == list(other.state[its])
        for key, value in one.state[mine].items():
            assert value.dtype == other.state[its][key].dtype
            assert torch.equal(value, other.state[its][key]), key


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
def test_the_step_is_that_of_converted_states(name: str, dtype: torch.dtype) -> None:
    optimizer = make(name, params_of(dtype), state_dtype="int8")
    twin = make(name, params_of(dtype), state_dtype="fp32")
    for number in range(2):
        step(optimizer, number)
        step(twin, number)
        found = convert_all(twin, name)
        groups = optimizer.param_groups[0]["params"], twin.param_groups[0]["params"]
        for param, its in zip(*groups, strict=True):
            state = optimizer.state[param]
            assert torch.equal(param, its)
            assert (SCALES in state) == is_coded(param)
            for row, (key, code) in enumerate(CLASSES[name][2].items()):
                if not is_coded(param):
                    assert state[key].dtype is F32
                    continue
                codes, scales = found[its][key]
                assert state[key].dtype is code
                assert state[key].stride() == param.stride()
                assert torch.equal(state[key], codes), (param.shape, key)
                assert torch.equal(state[SCALES][row], scales)
        saved = optimizer.state_dict()["state"]
        for index, its in enumerate(groups[1]):
            assert saved[index].keys() == twin.state[its].keys()
            for key, value in twin.state[its].items():
                assert torch.equal(saved[index][key], value)
                assert saved[index][key].dtype is F32


@pytest.mark.parametrize("masters", ["fp32", "remainder16"])
@pytest.mark.parametrize("name", CLASSES)
def test_beside_masters(name: str, masters: str) -> None:
    """Codes are of what the master's states are, and come before it."""
    optimizer = make(name, params_of(BF16), master_weights=masters, state_dtype="int8")
    twin = make(name, params_of(BF16), master_weights=masters)
    for number in range(2):
        step(optimizer, number)
        step(twin, number)
        convert_all(twin, name)
    for mine, its in zip(*(o.param_groups[0]["params"] for o in (optimizer, twin)), strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(optimizer.state[mine][MASTER], twin.state[its][MASTER])
        assert list(optimizer.state[mine])[-1] == MASTER


@pytest.mark.parametrize("smallest", [0, 1, 64, 100])
def test_small_parameters(smallest: int) -> None:
    shapes = ((1,), (63,), (64,), (3, 70), (0,), (), (5, 1, 90))
    options = {"state_dtype": "int8", "min_8bit_size": smallest}
    optimizer = make("AdamW", params_of(F32, shapes), **options)
    twin = make("AdamW", params_of(F32, shapes))
    for number in range(3):
        step(optimizer, number)
        step(twin, number)
        convert_all(twin, "AdamW", max(2, smallest))
    for mine, its in zip(*(o.param_groups[0]["params"] for o in (optimizer, twin)), strict=True):
        assert torch.equal(mine, its)
        assert (SCALES in optimizer.state[mine]) == (mine.numel() >= max(2, smallest))
    for native in (True, False):
        saved = optimizer.state_dict(native=native)
        assert saved["state"][5]["exp_avg"].dtype == torch.float32  # of a number
        other = make("AdamW", params_of(F32, shapes), **options)
        other.load_state_dict(saved)
        step(other, 3)


def test_parameters_with_gaps_and_tied_ones() -> None:
    base = torch.randn(90, 2, 140, generator=torch.Generator().manual_seed(1))
    given = [nn.Parameter(base.clone()[:, 0]), nn.Parameter(base.clone()[:, 1].t())]
    plain = [nn.Parameter(param.detach().clone()) for param in given]
    optimizer = make("AdamW", given, state_dtype="int8")
    twin = make("AdamW", plain, state_dtype="int8")
    for number in range(3):
        step(optimizer, number)
        step(twin, number)
    for mine, its in zip(given, plain, strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(optimizer.state[mine]["exp_avg"], twin.state[its]["exp_avg"])
    both = nn.Parameter(torch.ones(70, 70))
    model = nn.ModuleDict({"a": nn.Linear(70, 70, bias=False), "b": nn.Linear(70, 70, bias=False)})
    model["a"].weight = model["b"].weight = both
    tied = faststep.optim.AdamW(model.parameters(), state_dtype="int8")
    model["b"](model["a"](torch.ones(2, 70))).sum().backward()
    tied.step()
    assert list(tied.state) == [both]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_saved_and_loaded(name: str, dtype: torch.dtype) -> None:
    """A copy, a pickle and state dicts go on with the same bits; torch loads the one of floats."""
    options: dict[str, Any] = {"state_dtype": "int8", "master_weights": dtype is BF16}
    optimizer = make(name, params_of(dtype), **options)
    for number in range(2):
        step(optimizer, number)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(native=True), file)
    file.seek(0)
    loaded = make(name, copy.deepcopy(optimizer.param_groups[0]["params"]), **options)
    loaded.load_state_dict(torch.load(file))
    of_floats = make(name, copy.deepcopy(optimizer.param_groups[0]["params"]), **options)
    of_floats.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [loaded, of_floats, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    kind, arguments, codes = CLASSES[name]
    if theirs := getattr(torch.optim, kind, None):
        plain = theirs(params_of(dtype), **arguments)
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(plain, 7)
    for number in range(2, 4):
        step(optimizer, number)
        for other in others:
            step(other, number)
            assert_same(optimizer, other)
    wide = optimizer.state_dict()["state"][0]
    assert not {key for key in wide if key not in {"step", MASTER, *codes}}
    assert {wide[key].dtype for key in codes} == {F32}


class CountedList(list[nn.Parameter]):
    """Parameters of a group, and how often somebody went through them."""

    passes = 0

    def __iter__(self) -> Iterator[nn.Parameter]:
        self.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("has_group_option", [False, True])
def test_the_parameters_are_gone_through_as_often_whatever_their_number(
    has_group_option: bool,
) -> None:
    passes = []
    for count in (2, 20):
        params = CountedList(nn.Parameter(torch.ones(70, 70)) for _ in range(count))
        options = {"params": params, **({"min_8bit_size": 1} if has_group_option else {})}
        optimizer = make("AdamW", [options], state_dtype="int8")
        step(optimizer, 0)
        optimizer.param_groups[0]["params"] = params
        params.passes = 0
        optimizer.load_state_dict(optimizer.state_dict(native=True))
        optimizer.load_state_dict(optimizer.state_dict())
        passes.append(params.passes)
    assert passes[0] == passes[1] > 0


STORED: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"state_dtype": "int8"}),
    ("Lion", {"state_dtype": "int8"}),
    ("AdamW", {"state_dtype": "bf16", "rounding": "stochastic"}),
]


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(("kind", "options"), STORED, ids=str)
def test_steps_go_through_each_group_as_often_whatever_the_number_of_groups_and_parameters(
    kind: str, options: dict[str, Any], releases: bool
) -> None:
    passes = []
    for count in (2, 12):
        model = nn.ModuleList(nn.Linear(70, 70) for _ in range(count))
        groups: list[Any] = [{"params": layer.parameters()} for layer in model]
        optimizer = getattr(faststep.optim, kind)(groups, **options)
        for group in optimizer.param_groups:
            group["params"] = CountedList(group["params"])
        if releases:
            faststep.release_gradients(model, optimizer)
        for _ in range(2):
            sum(layer(torch.ones(1, 70)).sum() for layer in model).backward()  # type: ignore
            optimizer.step()
        passes.append([group["params"].passes for group in optimizer.param_groups])
    assert len({*passes[0], *passes[1]}) == 1, passes


def decoded_states(optimizer: Any) -> list[Any]:
    return [
        {k: v.float() for k, v in state.items()}
        for state in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [*itertools.permutations((None, "fp32", "bf16", "int8"), 2)],
    ids=str,
)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_another_type_in_mid_training(
    name: str, native: bool, before: str | None, after: str | None
) -> None:
    """States are converted when they are loaded, without the option to the parameter's type."""
    optimizer = make(name, params_of(F32), state_dtype=before)
    step(optimizer, 0)
    changed = make(name, copy.deepcopy(optimizer.param_groups[0]["params"]), state_dtype=after)
    changed.load_state_dict(optimizer.state_dict(native=native))
    twin = make(name, params_of(F32), state_dtype="fp32")
    twin.load_state_dict(optimizer.state_dict())
    if after == "int8":
        convert_all(twin, name)
    for one, other in zip(decoded_states(changed), decoded_states(twin), strict=True):
        for key, value in other.items():
            wanted = value.to(BF16).float() if after == "bf16" and key != "step" else value
            assert torch.equal(one[key], wanted), key
    step(changed, 1)
    found = {v.dtype for k, v in changed.state[changed.param_groups[0]["params"][0]].items()}
    wanted_dtypes = {"bf16": {BF16}, "int8": {*CLASSES[name][2].values(), BF16}}
    assert found - {F32} == wanted_dtypes.get(after or "", set())


def test_a_native_state_dict_of_another_layout() -> None:
    """Codes of other strides, or under another limit, are converted."""
    optimizer = make("AdamW", params_of(F32), state_dtype="int8")
    step(optimizer, 0)
    params = [nn.Parameter(p.detach().clone().contiguous()) for p in params_of(F32)]
    other = make("AdamW", params, state_dtype="int8", min_8bit_size=7000)
    other.load_state_dict(optimizer.state_dict(native=True))
    step(other, 1)
    sizes = [p.numel() for p in params if SCALES in other.state[p]]
    assert min(sizes) >= 7000
    assert len(sizes) == 4
    for param in params:
        for value in other.state[param].values():
            assert value.dtype not in (SIGNED, ROOT) or value.stride() == param.stride()


def test_by_distributed_checkpoint(tmp_path: Any) -> None:
    def make_both() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3))
        return model, faststep.optim.AdamW(model.parameters(), lr=0.01, state_dtype="int8")

    model, optimizer = make_both()
    model(torch.ones(2, 70)).sum().backward()
    optimizer.step()
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    again, other = make_both()
    state = get_optimizer_state_dict(again, other)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, other, state)
    for one, two in zip(decoded_states(optimizer), decoded_states(other), strict=True):
        for key, value in one.items():
            torch.testing.assert_close(
                two[key], value, rtol=0.02, atol=float(value.abs().max()) / 60
            )


def test_nan_and_inf_stay_in_their_block() -> None:
    for bad in (torch.nan, torch.inf, 1e38):
        param = nn.Parameter(torch.zeros(4, 4100))
        optimizer = faststep.optim.SGD([param], lr=0.1, momentum=0.9, state_dtype="int8")
        for _ in range(2):
            param.grad = torch.ones(4, 4100)
            param.grad[1, 70] = bad
            optimizer.step()
        broken = optimizer.state_dict()["state"][0]["momentum_buffer"].isnan()
        assert broken.nonzero().tolist() == [[1, i] for i in range(64, 128)]
        assert not optimizer.state[param]["momentum_buffer"][1, 64:128].any()
        assert param[broken].isfinite().sum() == 0
        assert param[~broken].isfinite().all()


def test_steps_that_are_like_the_one_before() -> None:
    """Scales are found again; others that a script puts there are taken."""
    param = nn.Parameter(torch.ones(70, 100))
    optimizer = faststep.optim.AdamW([param], state_dtype="int8")
    param.grad = torch.linspace(0.1, 1, 7000).view(70, 100)
    for _ in range(3):
        optimizer.step()
    state = optimizer.state[param]
    other = copy.deepcopy(optimizer)
    state[SCALES] = state[SCALES] * 2
    twin = other.param_groups[0]["params"][0]
    twin.grad = param.grad.clone()
    other.state[twin][SCALES].mul_(2)
    optimizer.step()
    other.step()
    assert_same(optimizer, other)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], Tensor], Any], type[Exception], str]] = {
    "no scales": (lambda s, _: s.pop(SCALES), KeyError, r"has no 'state_scales'"),
    "None": (lambda s, _: s.update({SCALES: None}), RuntimeError, "'state_scales' of .* is None"),
    "short": (
        lambda s, _: s.update({SCALES: s[SCALES][:, 1:].clone()}),
        RuntimeError,
        r"'state_scales' of .* is not a bfloat16 tensor of 2 rows of \d+ scales",
    ),
    "a row": (lambda s, _: s.update({SCALES: s[SCALES][0]}), RuntimeError, "is not a bfloat16"),
    "fp32": (lambda s, _: s.update({SCALES: s[SCALES].float()}), RuntimeError, "is not a bfloat16"),
    "strided": (
        lambda s, _: s.update({SCALES: s[SCALES].t().contiguous().t()}),
        RuntimeError,
        "is not a bfloat16",
    ),
    "transposed": (
        lambda s, _: s.update({"exp_avg": s["exp_avg"].t().contiguous().t()}),
        RuntimeError,
        "'exp_avg' of .* is not laid out in memory as its parameter",
    ),
    "wide": (
        lambda s, _: s.update({"exp_avg": s["exp_avg"].short()}),
        RuntimeError,
        "'exp_avg' of .* is not of type float32, float64, bfloat16, float16, int8 or uint8",
    ),
    "small": (
        lambda s, p: s.update({"exp_avg": s["exp_avg"][1:]}),
        RuntimeError,
        "'exp_avg' of .* is not of the parameter's shape",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_damaged_states_are_refused(how: str) -> None:
    params = params_of(F32, ((130, 257), (70, 100)))
    optimizer = make("AdamW", params, state_dtype="int8")
    step(optimizer, 0)
    change, kind, text = BROKEN[how]
    change(optimizer.state[params[1]], params[1])
    before = copy.deepcopy(optimizer)
    with pytest.raises(kind, match=text):
        step(optimizer, 1)
    for mine, its in zip(params, before.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, its)
        for key, value in before.state[its].items():
            assert value is None or torch.equal(value, optimizer.state[mine][key])


def test_floats_that_a_script_puts_in_the_place_of_codes() -> None:
    """They are stepped as they are, beside scales that are left alone."""
    params = params_of(F32, ((130, 257),))
    optimizer = make("AdamW", params, state_dtype="int8")
    step(optimizer, 0)
    state = optimizer.state[params[0]]
    state["exp_avg"] = torch.zeros(130, 257)
    step(optimizer, 1)
    assert state["exp_avg"].dtype is F32
    assert state["exp_avg"].any()


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state.pop(key)


def _with_scale(scale: float) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state[SCALES].view(-1)[3].fill_(scale)


def _changed(key: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state.update({key: change(state[key])})


_NOT_ITS, _NONE = "'state_scales' are not the scales of 'exp_avg", "'state_scales' are no scales"
DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "short": (_changed(SCALES, lambda s: s[:, 1:].clone()), _NOT_ITS),
    "a row": (_changed(SCALES, lambda s: s[:1].clone()), _NOT_ITS),
    "flat": (_changed(SCALES, lambda s: s.view(-1).clone()), _NOT_ITS),
    "int": (_changed(SCALES, Tensor.int), _NONE),
    "list": (_changed(SCALES, Tensor.tolist), _NONE),
    "inf": (_with_scale(torch.inf), _NONE),
    "negative": (_with_scale(-1.0), _NONE),
    "missing": (_without(SCALES), "'state_scales' are missing beside 'exp_avg'"),
    "None": (_changed(SCALES, lambda _: None), "'state_scales' are missing beside 'exp_avg'"),
    "few codes": (_changed("exp_avg", lambda s: s.view(-1)[:50].clone()), _NOT_ITS),
    "unsigned": (_changed("exp_avg", lambda s: s.view(ROOT)), "codes of torch.uint8, and not of"),
    "signed": (_changed("exp_avg_sq", lambda s: s.view(SIGNED)), "codes of torch.int8, and not"),
    "no step": (_without("step"), "step"),  # torch's error
}


@pytest.mark.parametrize("kept", [None, "bf16", "int8"])
@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_codes_are_not_loaded(how: str, kept: str | None) -> None:
    """The error names the parameter, and the states that were there are there still."""
    shapes = ((70, 100), (70, 100))
    optimizer = make("AdamW", params_of(F32, shapes), state_dtype="int8")
    other = make("AdamW", params_of(F32, shapes), state_dtype=kept)
    for seed, one in enumerate((optimizer, other)):
        step(one, seed)
    change, text = DAMAGED[how]
    saved = copy.deepcopy(optimizer.state_dict(native=True))
    saved["param_groups"][0]["lr"] = 7.0
    change(saved["state"][1])
    twin = copy.deepcopy(other)
    error, named = (KeyError, "") if how == "no step" else (ValueError, "state of parameter 1: .*")
    with pytest.raises(error, match=named + text):
        other.load_state_dict(saved)
    for one in (other, twin):
        step(one, 3)
    assert_same(other, twin)


def test_a_nan_scale_is_loaded() -> None:
    optimizer = make("AdamW", params_of(F32, ((70, 100),)), state_dtype="int8")
    step(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict(native=True))
    _with_scale(torch.nan)(saved["state"][0])
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][0]["exp_avg"].isnan().sum() == 36  # the end of row 1


@pytest.mark.parametrize("at", [1e-5, 0.3, 1.0])
def test_what_was_saved_is_loaded_as_it_is(at: float) -> None:
    """Whatever the scale, and wherever the largest number of a block lies below it."""
    made = torch.Generator().manual_seed(2)

    def spread(exponents: range) -> Tensor:
        up = 2.0 ** torch.tensor(exponents, dtype=F64).view(-1, 1)
        largest = ((torch.arange(128, 256) - 1 + at) / 128 * up).view(-1, 1)
        parts = torch.rand(len(largest), 64, generator=made).square()
        parts[::2, 9], parts[:, 5] = 0.0, 1.0
        return torch.cat([(largest * parts).view(-1), torch.zeros(128, dtype=F64)])

    first = spread(range(-133, 126))
    first[::3] *= -1
    second = spread(range(-62, 62)).square()
    second = torch.cat([second, torch.zeros(len(first) - len(second))]).float()
    second[-1] = torch.nan
    param = nn.Parameter(torch.zeros(len(first)))
    optimizer = make("AdamW", [param], state_dtype="int8")
    step(optimizer, 0)
    saved = optimizer.state_dict()
    saved["state"][0].update(exp_avg=first.float(), exp_avg_sq=second)
    dicts = []
    for _ in range(2):
        optimizer.load_state_dict(saved)
        saved = copy.deepcopy(optimizer.state_dict())
        dicts.append(saved["state"][0])
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(*(one[key].view(torch.int32) for one in dicts))


@pytest.mark.parametrize("name", OTHERS)
def test_classes_without_codes(name: str) -> None:
    kind = getattr(faststep.optim, name)
    error = TypeError if name == "Adafactor" else ValueError
    with pytest.raises(error, match="state_dtype" if name == "Adafactor" else f"^{name} does not"):
        kind(params_of(F32), lr=0.1, state_dtype="int8")


def test_what_does_not_take_codes() -> None:
    by_torch = faststep.optim.AdamW(params_of(F32), state_dtype="int8", differentiable=True)
    with pytest.raises(RuntimeError, match=r"keeps states of a type of their own \(state_dtype\)"):
        step(by_torch, 0)


def test_sgd_without_momentum_has_no_scales() -> None:
    plain = faststep.optim.SGD(params_of(F32), lr=0.1, state_dtype="int8")
    step(plain, 0)
    assert not any(plain.state.values())


# Shards of a parameter, of which faststep.zero and DTensors make some.


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        ((300, 70), (70 * 3, 70 * 240, 16384)),
        ((40000,), (64, 16384 + 128, 16384)),
        ((500, 65), (65 * 253, 65 * 400)),
        ((90, 128), (128 * 30,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CLASSES)
def test_shards_have_the_bits_of_the_whole(
    name: str, shape: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    whole = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    edges = [0, *sorted(ends), whole.numel()]
    cuts = list(itertools.pairwise(edges))
    flat = whole.detach().view(-1)
    pieces = [nn.Parameter(flat[begin:end].clone()) for begin, end in cuts]
    one = make(name, [whole], state_dtype="int8")
    other = make(name, pieces, state_dtype="int8", min_8bit_size=10**6)
    other._shards = {
        id(piece): Shard(0, begin, row_of(whole) if row_of(whole) % 64 else 0, coded=True)
        for piece, (begin, _) in zip(pieces, cuts, strict=True)
    }
    for number in range(3):
        if number == 2:  # their codes as float32, and back
            other.load_state_dict(other.state_dict())
            one.load_state_dict(one.state_dict())
        whole.grad = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        for piece, (begin, end) in zip(pieces, cuts, strict=True):
            piece.grad = whole.grad.view(-1)[begin:end].clone()
        one.step()
        other.step()
        assert torch.equal(whole.detach().view(-1), torch.cat([p.detach() for p in pieces]))
    for key in CLASSES[name][2]:
        parts = [other.state[piece][key] for piece in pieces]
        assert torch.equal(one.state[whole][key].view(-1), torch.cat(parts))


def test_shards_that_are_none() -> None:
    param = nn.Parameter(torch.ones(5000))
    param.grad = torch.ones(5000)
    optimizer = make("AdamW", [param], state_dtype="int8")
    bad: list[Any] = [(-1, 0, 0, 1), (0, 32, 0, 1), (0, -64, 0, 1), (0, 0, 64, 1), (0, 2**62, 0, 1)]
    for shard in (*bad, (0, 0, 0), [0, 0, 0, 1]):
        optimizer._shards = {id(param): shard}
        with pytest.raises((TypeError, ValueError)):
            optimizer.step()
        assert bool((param == 1).all())
        optimizer.state.clear()
    optimizer._shards = [1]
    with pytest.raises((TypeError, AttributeError)):
        optimizer.step()
    plain = make("AdamW", [param], state_dtype="bf16", rounding="stochastic")
    plain._shards = {id(param): Shard(0, 0, 0, coded=True)}  # its group has no codes
    with pytest.raises(ValueError, match="not a shard"):
        plain.step()
    odd = torch.ones(5000, 2)[:, 0]
    plain._shards = {id(param): Shard(0, 64, 0, coded=False)}
    plain.step()
    param.grad = odd
    with pytest.raises(RuntimeError, match=r"gradient of .* is not contiguous, and begins inside"):
        plain.step()


# What codes cost, beside two other formats.


def flash(value: Tensor, is_signed: bool, block: int = 32) -> Tensor:
    """Blocks of 32, a scale in fp16 (FlashOptim, arXiv:2602.23349)."""
    blocks = value.view(-1, block)
    if is_signed:
        s = blocks.abs().amax(1, keepdim=True).to(F16).float()
        x = torch.where(s > 0, blocks / s, 0.0).clamp(-1, 1)
        q = (127 * 2 * x / (1 + x.abs())).round() / 127
        return (s * q / (2 - q.abs())).view(-1)
    root = blocks.sqrt()
    s = root.amax(1, keepdim=True).to(F16).float()
    q = (255 * torch.where(s > 0, root / s, 0.0).clamp(0, 1)).round()
    return (q * s / 255).square().view(-1)


def dynamic_map(is_signed: bool) -> Tensor:
    """bitsandbytes' create_dynamic_map()."""
    data = [0.0, 1.0]
    for i in range(7):
        items = 2**i + 1 if is_signed else 2 ** (i + 1) + 1
        bounds = torch.linspace(0.1, 1, items)
        means = (10.0 ** (i - 6) * (bounds[:-1] + bounds[1:]) / 2).tolist()
        data += [*means, *(-x for x in means)] if is_signed else means
    return torch.tensor(sorted(data))


MAPS = {is_signed: dynamic_map(is_signed) for is_signed in (True, False)}


def dynamic(value: Tensor, is_signed: bool) -> Tensor:
    """Blocks of 256, the nearest of a map (bitsandbytes' AdamW8bit)."""
    blocks, codes = value.view(-1, 256), MAPS[is_signed]
    s = blocks.abs().amax(1, keepdim=True)
    x = torch.where(s > 0, blocks / s, 0.0)
    return (codes[torch.bucketize(x, (codes[:-1] + codes[1:]) / 2)] * s).view(-1)


def ours(value: Tensor, is_signed: bool) -> Tensor:
    """By the optimizer's own state dict."""
    param = nn.Parameter(torch.zeros_like(value))
    optimizer = faststep.optim.AdamW([param], state_dtype="int8")
    empty = {"step": torch.tensor(1.0), "exp_avg": value * is_signed, "exp_avg_sq": value * value}
    empty["exp_avg_sq"] = empty["exp_avg_sq"] * 0 if is_signed else value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: empty}, "param_groups": groups})
    return optimizer.state_dict()["state"][0]["exp_avg" if is_signed else "exp_avg_sq"]


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("exponent", range(-8, 5))
def test_the_error_of_one_round_trip(exponent: int) -> None:
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 10.0**exponent
    v = 0.01 * (x.square() + torch.randn(x.shape).square() * 100.0**exponent)
    assert error(ours(x, True), x) < 0.01
    assert error(ours(v, False).sqrt(), v.sqrt()) < 0.01
    if exponent <= -6:
        assert max(error(flash(x, True), x), error(flash(v, False).sqrt(), v.sqrt())) > 0.01


def updates(scale: float, sigma: float | None) -> dict[str, tuple[float, float]]:
    """Of each format the error of the update after 100 steps, and its largest in fp32's."""
    count, betas, eps = 2**15, (0.9, 0.999), 1e-20
    param = nn.Parameter(torch.zeros(count))
    mine = faststep.optim.AdamW(
        [param], lr=1.0, betas=betas, eps=eps, weight_decay=0.0, state_dtype="int8"
    )
    made = torch.Generator().manual_seed(5)
    formats: dict[str, Any] = {
        "fp32": lambda x, _: x,
        "flash": flash,
        "flash, 64": functools.partial(flash, block=64),
        "dynamic": dynamic,
    }
    states = {name: (torch.zeros(count), torch.zeros(count)) for name in formats}
    update = {}
    for number in range(1, 101):
        grad = torch.randn(count, generator=made) * scale
        if sigma is not None:
            grad *= (torch.randn(count, generator=made) * sigma).exp()
        for name, form in formats.items():
            m, v = states[name]
            m = betas[0] * m + (1 - betas[0]) * grad
            v = betas[1] * v + (1 - betas[1]) * grad * grad
            m_hat, v_hat = m / (1 - betas[0] ** number), v / (1 - betas[1] ** number)
            update[name] = m_hat / (v_hat.sqrt() + eps)
            states[name] = form(m, True), form(v, False)
        with torch.no_grad():
            param.zero_()
        param.grad = grad
        mine.step()
    update["ours"] = -param.detach()
    wanted = update["fp32"]
    largest = float(wanted.abs().max())
    return {
        name: (error(value, wanted), float(value.abs().max()) / largest)
        for name, value in update.items()
    }


@pytest.mark.parametrize("scale", [1e-8, 3e-7, 3e-5, 1.0, 1e4])
@pytest.mark.parametrize("sigma", [None, 1.0], ids=["normal", "lognormal"])
def test_the_error_of_an_update(scale: float, sigma: float | None) -> None:
    """Half of that of a dynamic map at each scale, and that of FlashOptim's with blocks of as many
    elements where its scales hold, which they do not for small gradients."""
    found = {name: list(values) for name, values in updates(scale, sigma).items()}
    assert found["ours"][0] < 0.6 * found["dynamic"][0]
    assert found["ours"][1] < 1.1
    if 3e-5 <= scale <= 1:
        assert found["ours"][0] < 1.05 * found["flash, 64"][0]
        assert found["ours"][0] < 1.25 * found["flash"][0]
    if scale < 1e-6:
        assert found["flash"][0] > 1.5 * found["ours"][0]


def test_a_model_learns_as_with_fp32_states() -> None:
    def train(**options: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        model.append(nn.Linear(256, 1))
        optimizer = faststep.optim.AdamW(model.parameters(), lr=3e-3, **options)
        loss = torch.zeros(())
        for number in range(300):
            made = torch.Generator().manual_seed(number)
            x = torch.randn(64, 32, generator=made)
            y = (x[:, :8].sin().sum(1, keepdim=True) * x[:, 8:9]).tanh()
            loss = 0.98 * loss + 0.02 * (batch := (model(x) - y).square().mean()).detach()
            batch.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    plain, narrow = train(), train(state_dtype="int8")
    assert abs(narrow - plain) < 0.05 * plain
