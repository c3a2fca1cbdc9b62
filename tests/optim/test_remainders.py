"""master_weights="remainder16": a bf16 parameter with the other half of its master."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.optim.masters import MASTER, _remainder, joined

from .test_masters import CLASSES, Net, loss_of, wide_copies

pytestmark = pytest.mark.filterwarnings("ignore:.*and so not at all")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(30, 7), (33000,), (), (0, 4), (5, 4, 3, 3), (3,), (9,)]
DTYPES = [BF16, BF16, BF16, BF16, BF16, F32, F64]
OPTION: dict[str, Any] = {"master_weights": "remainder16"}


def _params() -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(7)
    values = [torch.randn(s, generator=made).to(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
    values[4] = values[4].to(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def _give(params: list[nn.Parameter], wide: list[nn.Parameter], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for param, copied in zip(params, wide, strict=True):
        param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
        copied.grad = param.grad.to(copied.dtype, copy=True)


def _made(name: str, params: list[nn.Parameter], **options: Any) -> Any:
    kind, own = CLASSES[name]
    return getattr(faststep.optim, kind)(params, **{**own, **options})


def _rounded(value: Tensor) -> Tensor:
    """To bf16, a tie away from zero."""
    bits = value.view(torch.int32)
    upper = ((bits >> 16) + (bits >> 15 & 1)).to(torch.int16).view(BF16)
    return torch.where(value.isnan(), value.to(BF16), upper)


def _unlike(params: Any, optimizer: Any, wide: Any, reference: Any) -> list[str]:
    """What is not as of a process that keeps fp32 parameters, and rounds them."""
    wrong = []
    for number, (param, copied) in enumerate(zip(params, wide, strict=True)):
        halves = param.dtype == BF16
        if not torch.equal(param, _rounded(copied.detach()) if halves else copied):
            wrong.append(f"{number}")
        expected = dict(reference.state.get(copied, {}))
        mine = dict(optimizer.state.get(param, {}))
        if halves:
            rest = mine.pop(MASTER)
            if rest.dtype != torch.int16 or rest.stride() != param.stride():
                wrong.append(f"{number} is no remainder")
            if not torch.equal(joined(param, rest), copied):
                wrong.append(f"{number} master")
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


def _both(name: str, **options: Any) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    params = _params()
    wide = wide_copies(params)
    return params, _made(name, params, **options, **OPTION), wide, _made(name, wide, **options)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", CLASSES)
def test_bits_of_fp32_copies(name: str, clip: float | None) -> None:
    both = _both(name, max_grad_norm=clip)
    for seed in range(5):
        assert _step(both, seed) == []
    if clip is not None:
        assert torch.equal(both[1].last_grad_norm, both[3].last_grad_norm)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_thousand_steps(dtype: torch.dtype) -> None:
    """The masters are those of fp32 training with the same gradients, of either type."""
    wide = nn.Parameter(torch.randn(3000, generator=torch.Generator().manual_seed(1)))
    param = nn.Parameter(wide.detach().bfloat16())
    wide.data.copy_(param)
    param.grad_dtype = dtype
    optimizer = faststep.optim.AdamW([param], lr=1e-3, **OPTION)
    reference = faststep.optim.AdamW([wide], lr=1e-3)
    made = torch.Generator().manual_seed(2)
    for _ in range(1000):
        wide.grad = (torch.randn(3000, generator=made) + wide.detach()).to(dtype).float()
        param.grad = wide.grad.to(dtype)
        optimizer.step()
        reference.step()
    assert torch.equal(joined(param, optimizer.state[param][MASTER]), wide)
    assert torch.equal(optimizer.state_dict()["state"][0][MASTER], wide)


@pytest.mark.parametrize("name", ["AdamW", "momentum", "SGD", "ASGD"])
def test_beside_bf16_states(name: str) -> None:
    """Against fp32 masters, whose parameters differ by ties alone."""
    params, others = _params(), _params()
    optimizer = _made(name, params, state_dtype="bf16", **OPTION)
    twin = _made(name, others, state_dtype="bf16", master_weights="fp32")
    for seed in range(4):
        _give(params, others, seed)
        optimizer.step()
        twin.step()
    for param, other in zip(params, others, strict=True):
        if param.dtype == BF16:
            state, its = optimizer.state[param], twin.state[other]
            assert torch.equal(joined(param, state[MASTER]), its[MASTER])
            assert list(state) == list(its)
            assert all(torch.equal(state[key], its[key]) for key in state if key != MASTER)


# ---- the two halves


@pytest.mark.parametrize("lower", [0, 1, 0x5A5A, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_no_value_is_lost(lower: int) -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    values = (upper << 16 | lower).view(F32)
    param = _rounded(values)
    back = joined(param, _remainder(values, param))
    known = ~values.isnan()
    assert torch.equal(back.view(torch.int32)[known], values.view(torch.int32)[known])
    assert back[~known].isnan().all()


def test_a_written_parameter_counts() -> None:
    """The step begins with a number that rounds to what was written."""
    written = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, -3.0, 1e-40, 3e38]).bfloat16()
    for seed in range(20):
        param = nn.Parameter(
            torch.randn(8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        )
        optimizer = faststep.optim.SGD([param], lr=0.1, **OPTION)
        param.grad = torch.randn(8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()
        param.data.copy_(written)
        param.grad = torch.zeros(8, dtype=BF16)
        optimizer.step()
        assert torch.equal(param, written)
        assert torch.equal(_rounded(joined(param, optimizer.state[param][MASTER])), written)


def test_nan_stays_and_harms_no_other() -> None:
    param = nn.Parameter(torch.ones(40, dtype=BF16))
    optimizer = faststep.optim.AdamW([param], **OPTION)
    for _ in range(2):
        param.grad = torch.full((40,), 0.5, dtype=BF16)
        param.grad[7] = torch.nan
        optimizer.step()
    assert param.isnan().nonzero().tolist() == [[7]]
    assert optimizer.state[param][MASTER][7] == 0


# ---- saved, loaded and copied


def _fresh(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_state_dict_goes_on(name: str, native: bool) -> None:
    both = _both(name)
    _step(both, 0, 1, 2)
    params, optimizer, wide, reference = both
    file = io.BytesIO()
    torch.save(optimizer.state_dict(native), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    masters = [state.get(MASTER) for state in saved["state"].values()]
    its = torch.int16 if native else F32
    assert [m.dtype for m in masters if m is not None] == [its] * DTYPES.count(BF16)
    fresh = _fresh(params)
    new = _made(name, fresh, **OPTION)
    new.load_state_dict(saved)
    reference.load_state_dict(reference.state_dict())  # torch casts the numbers of float64
    assert _unlike(fresh, new, wide, reference) == []
    assert _step((fresh, new, wide, reference), 3, 4) == []


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_from_fp32_masters_and_back(name: str) -> None:
    """And from torch's class, whose states have none, and to it."""
    params, _, wide, reference = _both(name)
    plain = _made(name, params, master_weights="fp32")
    _step((params, plain, wide, reference), 0, 1)
    halves = _fresh(params)
    optimizer = _made(name, halves, **OPTION)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    for param, rounded in zip(halves, params, strict=True):
        if param.dtype == BF16:
            master = joined(param, optimizer.state[param][MASTER])
            near = (plain.state[rounded][MASTER].view(torch.int32) - master.view(torch.int32)).abs()
            assert near.max().item() <= 1 if near.numel() else True  # 1: a tie
    _give(halves, wide, 2)
    optimizer.step()
    for native in (False, True):
        back = _made(name, _fresh(halves), master_weights="fp32")
        back.load_state_dict(copy.deepcopy(optimizer.state_dict(native)))
        for param, value in zip(halves, back.param_groups[0]["params"], strict=True):
            if param.dtype == BF16:
                assert torch.equal(
                    joined(param, optimizer.state[param][MASTER]), back.state[value][MASTER]
                )
    kind, own = CLASSES[name]
    theirs = getattr(torch.optim, kind)(_fresh(halves), **own)
    theirs.load_state_dict(optimizer.state_dict())
    again = _made(name, _fresh(halves), **OPTION)
    again.load_state_dict(theirs.state_dict())
    _give(again.param_groups[0]["params"], wide, 3)
    again.step()
    without = _made(name, _fresh(halves))
    without.load_state_dict(optimizer.state_dict())
    assert all(MASTER not in state for state in without.state.values())


def test_a_tie_of_fp32_masters() -> None:
    """They round it to even, and remainders away from zero: it is 2^-16 less than half a step."""
    master = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(F32)
    param = master.bfloat16()
    back = joined(param, _remainder(master, param))
    assert (back.view(torch.int32) - master.view(torch.int32)).tolist() == [-1, 0, -1]
    assert torch.equal(joined(_rounded(master), _remainder(master, _rounded(master))), master)


# ---- with the other parts


def test_accumulated_in_fp32() -> None:
    model, other = Net(), Net()
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.01, **OPTION)
    twin = faststep.optim.AdamW(other.parameters(), lr=0.01, master_weights=True)
    for one, stepped in ((model, optimizer), (other, twin)):
        accumulation = faststep.accumulate(stepped, 4, model=one, dtype=torch.float32)
        for seed in range(4):
            with accumulation:
                accumulation.backward(loss_of(one, seed))
        assert accumulation.ready
        stepped.step()
    for param, copied in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(
            joined(param, optimizer.state[param][MASTER]), twin.state[copied][MASTER]
        )


# ---- what is refused


def test_fp16_parameters_are_named() -> None:
    text = r"AdamW: parameter 1 in group {} \(.*float16.*\) is float16, and .*: use \"fp32\""
    params = [nn.Parameter(torch.ones(3, dtype=BF16)), nn.Parameter(torch.ones(3, dtype=F16))]
    with pytest.raises(ValueError, match=text.format(0)):
        faststep.optim.AdamW(params, **OPTION)
    optimizer = faststep.optim.AdamW(params[:1], **OPTION)
    with pytest.raises(ValueError, match=text.format(1)):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2)), params[1]]})
    assert len(optimizer.param_groups) == 1
    params[0].data = params[0].data.half()
    params[0].grad = torch.ones(3, dtype=F16)
    with pytest.raises(RuntimeError, match=r"parameter 0 .* is float16, .*nothing was updated"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(3, dtype=F16))


def test_other_states_are_named_and_nothing_has_changed() -> None:
    both = _both("AdamW")
    _step(both, 0)
    params, optimizer, wide, _ = both
    before = [param.detach().clone() for param in params]
    _give(params, wide, 1)
    for bad, text in (
        (torch.zeros(9, 4), "shape|int16"),
        (torch.zeros(5, 4, 3, 3), "is not of type int16"),
        (torch.zeros(5, 4, 3, 3, dtype=torch.int32), "is not of type int16"),
        (torch.zeros(5, 4, 3, 3, dtype=torch.complex64), "is complex"),
        (torch.zeros(5, 4, 3, 2, dtype=torch.int16), "is not of the parameter's shape"),
    ):
        optimizer.state[params[4]][MASTER] = bad
        text = rf"state 'master_weights' of parameter 4.*({text}).*nothing was updated"
        with pytest.raises(RuntimeError, match=text):
            optimizer.step()
        assert all(map(torch.equal, params, before))
    plain = faststep.optim.AdamW(params, master_weights=True)
    plain.step()
    plain.state[params[4]][MASTER] = torch.zeros(5, 4, 3, 3, dtype=torch.int16)
    with pytest.raises(RuntimeError, match=r"state 'master_weights' of parameter 4 .*float32"):
        plain.step()


@pytest.mark.parametrize("master_weights", ["fp32", "remainder16"])
def test_remainders_of_another_shape_are_not_loaded(master_weights: str) -> None:
    both = _both("AdamW")
    _step(both, 0)
    saved = copy.deepcopy(both[1].state_dict(native=True))
    saved["state"][4][MASTER] = saved["state"][4][MASTER][1:]
    other = _made("AdamW", _params(), master_weights=master_weights)
    with pytest.raises(ValueError, match=f"parameter 4: '{MASTER}' has the shape .4, 4, 3, 3"):
        other.load_state_dict(saved)
    assert not other.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_that_is_cast_in_mid_training_is_saved(dtype: torch.dtype) -> None:
    """Its parameters have no masters then, and what is saved has no remainders."""
    model = torch.nn.Linear(7, 5).bfloat16()
    optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1, master_weights="remainder16")
    for number in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        if number == 0:
            model.to(dtype)
    for native in (False, True):
        saved = optimizer.state_dict(native)
        assert not any(MASTER in state for state in saved["state"].values())
        optimizer.load_state_dict(saved)
    assert not any(MASTER in state for state in optimizer.state.values())


@pytest.mark.parametrize("master_weights", ["fp32", "remainder16"])
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_remainders_go_beside_bf16_parameters_alone(
    dtype: torch.dtype, master_weights: str
) -> None:
    """A loaded run goes on with the same masters, or an error names the parameter."""
    both = _both("AdamW")
    _step(both, 0)
    params = _fresh(both[0])
    other = _made("AdamW", params, master_weights=master_weights)
    params[4].data = params[4].data.to(dtype)
    saved = copy.deepcopy(both[1].state_dict(native=True))
    with pytest.raises(ValueError, match=f"parameter 4: '{MASTER}' .* bfloat16 .*, not {dtype}: "):
        other.load_state_dict(saved)
    assert not other.state


def test_remainders_of_any_strides() -> None:
    both = _both("AdamW")
    _step(both, 0)
    params, optimizer, *_ = both
    for number in (0, 4):
        state = optimizer.state[params[number]]
        spread = torch.stack([state[MASTER], state[MASTER]], -1)[..., 0]
        state[MASTER] = spread if number == 0 else state[MASTER].contiguous()
    wrong = _step(both, 1, 2)
    assert wrong == ["0 is no remainder", "4 is no remainder"]  # for their strides


def test_a_master_that_is_no_tensor_is_kept_for_the_step_to_name() -> None:
    params = [nn.Parameter(torch.zeros(4, dtype=BF16))]
    optimizer = faststep.optim.AdamW(params, master_weights="fp32")
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0][MASTER] = 1.0
    optimizer.load_state_dict(saved)
    with pytest.raises(TypeError, match=MASTER):
        optimizer.step()
    assert optimizer.state[params[0]][MASTER] == 1.0
