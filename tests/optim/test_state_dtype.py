"""state_dtype: against a twin whose states are rounded by hand after each step."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.optim.masters import MASTER

from .test_masters import CLASSES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*and so not at all"),
    pytest.mark.filterwarnings("ignore:.* are lost in most elements"),
    pytest.mark.filterwarnings("ignore:.*gives states in bfloat16 their parameter"),
]

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = {"fp32": F32, "bf16": BF16}
NARROW = {"bf16": BF16}  # to which a step rounds each element by itself
SHAPES = ((33000,), (4, 3), (0,), (), (5, 4, 3, 3))
EXACT = {"Adagrad": {"initial_accumulator_value": 0.125}, "Rprop": {"lr": 0.0078125}}
KEPT = {  # SGD has no state; those of others begin with a number of 16 bits
    name: (kind, {**arguments, **EXACT.get(name, {})})
    for name, (kind, arguments) in CLASSES.items()
    if name != "SGD"
}
NUMBERS = ("step", "eta", "mu", "mu_product")


def params_of(dtype: torch.dtype) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=made).to(dtype) for shape in SHAPES]
    values[-1] = values[-1].to(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def make(name: str, params: list[nn.Parameter], **options: Any) -> Any:
    kind, arguments = KEPT[name]
    return getattr(faststep.optim, kind)(params, **{**arguments, **options})


def step(optimizer: Any, number: int) -> None:
    made = torch.Generator().manual_seed(number)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
    optimizer.step()


def shaped(optimizer: Any, *params: Tensor) -> list[tuple[str, Tensor]]:
    """The states of a parameter's shape, in order; of all parameters if none is given."""
    return [
        (key, value)
        for param in params or optimizer.param_groups[0]["params"]
        for key, value in optimizer.state[param].items()
        if isinstance(value, Tensor) and key not in NUMBERS
    ]


def round_states(optimizer: Any, dtype: torch.dtype) -> None:
    for key, value in shaped(optimizer):
        if key != MASTER:
            value.copy_(value.to(dtype))


def assert_same(one: Any, other: Any) -> None:
    """The same bits in parameters, and states of the same values."""
    groups = one.param_groups[0]["params"], other.param_groups[0]["params"]
    for mine, its in zip(*groups, strict=True):
        assert torch.equal(mine, its)
        assert one.state[mine].keys() == other.state[its].keys()
        for key, value in one.state[mine].items():
            other_value = other.state[its][key]
            if value is None:
                assert other_value is None
            else:
                assert torch.equal(value.double(), other_value.double()), key


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("state_dtype", NARROW)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
def test_the_step_is_that_of_rounded_states(
    name: str, state_dtype: str, dtype: torch.dtype
) -> None:
    """Computed as ever, from what was stored; states of 16 bits beside the same parameters."""
    narrow = NARROW[state_dtype]
    optimizer = make(name, params_of(dtype), state_dtype=state_dtype)
    twin = make(name, params_of(dtype), state_dtype=None if dtype in (F32, F64) else "fp32")
    for number in range(4):
        step(optimizer, number)
        step(twin, number)
        round_states(twin, narrow)
        assert_same(optimizer, twin)
    assert {value.dtype for _, value in shaped(optimizer)} == {narrow}
    wide = {value.dtype for _, value in shaped(twin)}
    assert wide == {dtype if dtype in (F32, F64) else F32}
    for param in optimizer.param_groups[0]["params"]:
        for key, value in optimizer.state[param].items():
            if key not in NUMBERS and value is not None:
                assert value.stride() == param.stride()


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("state_dtype", NARROW)
def test_beside_masters(name: str, state_dtype: str) -> None:
    """Masters stay fp32."""
    narrow = NARROW[state_dtype]
    optimizer = make(name, params_of(BF16), master_weights=True, state_dtype=state_dtype)
    twin = make(name, params_of(BF16), master_weights=True)
    for number in range(3):
        step(optimizer, number)
        step(twin, number)
        round_states(twin, narrow)
        assert_same(optimizer, twin)
    found = {(key == MASTER, value.dtype) for key, value in shaped(optimizer)}
    assert found == {(True, F32), (False, narrow)}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("state_dtype", NAMES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_saved_and_loaded(name: str, state_dtype: str, dtype: torch.dtype) -> None:
    """A copy, a pickle and a state dict go on with the same bits, and torch's class loads it."""
    options: dict[str, Any] = {"state_dtype": state_dtype}
    optimizer = make(name, params_of(dtype), **options)
    for number in range(2):
        step(optimizer, number)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = make(name, copy.deepcopy(optimizer.param_groups[0]["params"]), **options)
    loaded.load_state_dict(torch.load(file))
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    if dtype is F32 or not optimizer._numbers:  # torch rounds those as the parameter when it loads
        others.append(loaded)
    for number in range(2, 4):
        step(optimizer, number)
        for other in others:
            step(other, number)
            assert_same(optimizer, other)
            assert {value.dtype for _, value in shaped(other)} == {NAMES[state_dtype]}
    kind, arguments = KEPT[name]
    if theirs := getattr(torch.optim, kind, None):
        plain = theirs(params_of(dtype), **arguments)
        plain.load_state_dict(optimizer.state_dict())
        assert {value.dtype for _, value in shaped(plain)} == {dtype}


@pytest.mark.parametrize(("beta", "warns"), [(0.999, True), (0.997, True), (0.996, False)])
def test_a_second_moment_that_could_not_shrink(beta: float, warns: bool) -> None:
    """The warning, and that it is so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        param = nn.Parameter(torch.ones(300))
        optimizer = faststep.optim.AdamW([param], betas=(0.9, beta), state_dtype="bf16")
        faststep.optim.AdamW([nn.Parameter(torch.ones(3))], betas=(0.9, beta))
    assert ["and so not at all" in str(one.message) for one in caught] == [True] * warns
    param.grad = torch.linspace(0.1, 10, 300)
    optimizer.step()
    first = optimizer.state[param]["exp_avg_sq"].clone()
    param.grad = torch.zeros(300)
    optimizer.step()
    shrunk = (optimizer.state[param]["exp_avg_sq"] < first).float().mean()
    assert shrunk == 1 if not warns else shrunk < 1


def test_new_parameters_and_sgd_without_momentum() -> None:
    optimizer = make("AdamW", params_of(F32), state_dtype="bf16")
    step(optimizer, 0)
    more = nn.Parameter(torch.ones(5))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    more.grad = torch.ones(5)
    optimizer.step()
    assert optimizer.state[more]["exp_avg"].dtype is BF16
    plain = faststep.optim.SGD(params_of(F32), lr=0.1, state_dtype="bf16")
    step(plain, 0)
    assert not shaped(plain)


def test_types_of_groups() -> None:
    """Each group has its own; `param_groups` of a state dict are torch's, and leave them alone."""
    options: dict[str, Any] = {"state_dtype": "bf16", "betas": (0.9, 0.99), "lr": 0.01}
    made = [params_of(F32)[0] for _ in range(4)]
    others: list[dict[str, Any]] = [
        {},
        {"state_dtype": "fp32"},
        {"rounding": "stochastic"},
        {"state_dtype": "int8", "min_8bit_size": 100},
    ]
    groups = [{"params": [p], **own} for p, own in zip(made, others, strict=True)]
    optimizer = faststep.optim.AdamW(groups, **options)
    alone = [copy.deepcopy(param) for param in made]
    singles = [
        faststep.optim.AdamW([p], **{**options, **own})
        for p, own in zip(alone, others, strict=True)
    ]
    singles[2] = faststep.optim.AdamW(
        [params_of(F32)[1], *[params_of(F32)[1]], alone[2]], **options, rounding="stochastic"
    )
    for number in range(4):
        grad = torch.randn(made[0].shape, generator=torch.Generator().manual_seed(number))
        for param in (*made, *alone):
            param.grad = grad.clone()
        optimizer.step()
        for single in singles:
            single.step()
        for mine, its, single in zip(made, alone, singles, strict=True):
            assert torch.equal(mine, its)
            for key, value in single.state[its].items():
                assert torch.equal(optimizer.state[mine][key], value)
        if number == 1:
            saved = optimizer.state_dict(native=True)
            assert (
                not {"state_dtype", "rounding", "min_8bit_size"} & saved["param_groups"][3].keys()
            )
            optimizer.load_state_dict(copy.deepcopy(saved))
            assert [group.get("state_dtype") for group in optimizer.param_groups] == [
                None, "fp32", None, "int8"
            ]  # fmt: skip
        if number == 2:
            optimizer = copy.deepcopy(optimizer)
            made = [group["params"][0] for group in optimizer.param_groups]
    torch.optim.AdamW(made[:1], lr=0.1).load_state_dict(singles[0].state_dict())
    for bad, text in (
        ({"state_dtype": "fp16"}, "state_dtype must be None,"),
        ({"state_dtype": "fp32", "rounding": "stochastic"}, "is for states in bf16"),
        ({"rounding": "up"}, "rounding must be"),
        ({"state_dtype": "int8", "min_8bit_size": -1}, "min_8bit_size must be"),
        ({"rounding_seed": 1}, "rounding_seed is an option of faststep's optimizers, for all"),
    ):
        before = len(optimizer.param_groups)
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": params_of(F32), **bad})
        assert len(optimizer.param_groups) == before


@pytest.mark.parametrize("name", KEPT)
def test_each_state_and_each_group_of_every_class(name: str) -> None:
    """One state in bf16 after another, in a group beside one whose states stay as they are."""
    plain = make(name, params_of(F32))
    step(plain, 0)
    for key in {key for key, _ in shaped(plain)}:
        own: Any = [{"params": params_of(F32), "state_dtype": {key: "bf16"}}]
        optimizer, twin = make(name, own), make(name, params_of(F32))
        kept, plain_kept = (nn.Parameter(torch.ones(7)) for _ in range(2))
        optimizer.add_param_group({"params": [kept]})
        twin.add_param_group({"params": [plain_kept]})
        for number in range(3):
            for one, other in ((optimizer, kept), (twin, plain_kept)):
                other.grad = torch.full((7,), 0.3)
                step(one, number)
            for its, value in shaped(twin):
                if its == key:
                    value.copy_(value.bfloat16())
            assert_same(optimizer, twin)
        assert {(k == key, v.dtype) for k, v in shaped(optimizer)} <= {(True, BF16), (False, F32)}
        assert_same_states(optimizer.state[kept], twin.state[plain_kept])


def assert_same_states(mine: dict[str, Any], its: dict[str, Any]) -> None:
    assert {key: value.dtype for key, value in mine.items()} == {k: v.dtype for k, v in its.items()}
    assert all(torch.equal(value, its[key]) for key, value in mine.items())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_types_of_single_states(dtype: torch.dtype) -> None:
    """Each state is that of an optimizer which has all of that type, after a step from the same."""
    own: dict[str, Any] = {"exp_avg": "int8", "exp_avg_sq": "fp32"}
    mixes: list[dict[str, Any]] = [own, {"exp_avg_sq": "int8"}, {"exp_avg": "bf16"}]
    for mixed in mixes:
        params = params_of(dtype)
        optimizer = faststep.optim.AdamW(params, betas=(0.9, 0.99), state_dtype=mixed)
        step(optimizer, 0)
        param = params[0]
        state = optimizer.state[param]
        again = faststep.optim.AdamW(params, betas=(0.9, 0.99), state_dtype=mixed)
        again.load_state_dict(optimizer.state_dict(native=True))
        for key, value in state.items():
            assert torch.equal(again.state[param][key], value)
        for key in ("exp_avg", "exp_avg_sq"):
            name = mixed.get(key)
            alike = copy.deepcopy(params)
            single = faststep.optim.AdamW(alike, betas=(0.9, 0.99), state_dtype=name)
            for one, other in zip(alike, params, strict=True):
                one.grad = other.grad
            single.load_state_dict(faststep.optim.AdamW(alike, betas=(0.9, 0.99)).state_dict())
            single.step()
            assert single.state[alike[0]][key].dtype == state[key].dtype
            assert torch.equal(single.state[alike[0]][key], state[key])
        changed = faststep.optim.AdamW(params, betas=(0.9, 0.99), state_dtype="int8")
        changed.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(changed.state_dict(native=True))
        assert {k: v.dtype for k, v in optimizer.state[param].items()} == {
            k: v.dtype for k, v in state.items()
        }
        step(optimizer, 1)
        step(changed, 2)
    with pytest.raises(ValueError, match="AdamW does not take state_dtype=\"int8\" of 'sum': Adam"):
        faststep.optim.AdamW(params_of(F32), state_dtype={"sum": "int8"})
    with pytest.raises(ValueError, match="state_dtype must be None,"):
        faststep.optim.AdamW(params_of(F32), state_dtype={"exp_avg": "int4"})  # type: ignore


def test_steps_of_torch_are_refused() -> None:
    """Its operators do not mix types; and nothing has changed."""
    optimizer = faststep.optim.AdamW(params_of(F32), state_dtype="bf16", differentiable=True)
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    with pytest.raises(RuntimeError, match=r"keeps states of a type of their own \(state_dtype\)"):
        step(optimizer, 0)
    for param, value in zip(optimizer.param_groups[0]["params"], before, strict=True):
        assert torch.equal(param, value)
