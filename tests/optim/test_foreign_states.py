"""State dicts of bitsandbytes and FlashOptim, built here by the formulas of their formats."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.optim.masters import MASTER

pytestmark = pytest.mark.filterwarnings("ignore:.*and so not at all")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPE = (70, 80)
GROUP: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1}


def numbers(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bnb_state(value: Tensor, number: int, block: int) -> tuple[dict[str, Tensor], Tensor]:
    """The entries of a state, and the values that they stand for."""
    low = -1.0 if value.min() < 0 else 0.0
    qmap = torch.linspace(low, 1, 256).pow(3 if low else 2)
    flat = value.reshape(-1)
    blocks = [part.abs().max() for part in flat.split(block)]
    absmax = torch.stack(blocks)
    scale = absmax.repeat_interleave(block)[: flat.numel()]
    codes = (flat / scale).unsqueeze(1).sub(qmap).abs().argmin(1).to(torch.uint8)
    entries = {"state": codes.view(value.shape), "qmap": qmap, "absmax": absmax}
    known = qmap[codes.long()] * scale
    return {f"{key}{number}": part for key, part in entries.items()}, known.view(value.shape)


def flash_state(value: Tensor, name: str, bits: bool) -> tuple[dict[str, Tensor], Tensor]:
    flat = value.reshape(-1)
    is_root = bool(value.min() >= 0)
    taken = flat.sqrt() if is_root else flat
    absmax = torch.stack([part.abs().max() for part in taken.split(32)]).half()
    scale = absmax.float().repeat_interleave(32)[: flat.numel()]
    part = (taken / scale).clamp(-1, 1)
    if is_root:
        codes = (part * 255).round().to(torch.uint8)
        known = (codes.float() / 255 * scale).square()
    else:
        codes = (2 * part / (1 + part.abs()) * 127).round().to(torch.int8)
        back = codes.float() / 127
        known = back / (2 - back.abs()) * scale
    scales = absmax.view(BF16) if bits else absmax
    entries = {f"{name}::quantized": codes.view(value.shape), f"{name}::scales": scales}
    return entries, known.view(value.shape)


def state_dict(states: dict[int, Any], **group: Any) -> dict[str, Any]:
    return {"state": states, "param_groups": [{**GROUP, **group, "params": [*states]}]}


def adam(params: list[nn.Parameter], **options: Any) -> Any:
    return faststep.optim.AdamW(params, **options)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("option", [None, "fp32", "bf16", "int8"])
def test_bitsandbytes(option: Any, block: int, nested: bool) -> None:
    params = [nn.Parameter(numbers(1)), nn.Parameter(numbers(2, (5,)))]
    first, exp_avg = bnb_state(numbers(3), 1, block)
    second, exp_avg_sq = bnb_state(numbers(4).square(), 2, block)
    quantized: dict[str, Any] = {**first, **second}
    if nested:
        quantized = {"__bnb_optimizer_quant_state__": quantized}
    small = {"state1": numbers(5, (5,)), "state2": numbers(6, (5,)).square()}
    saved = state_dict({0: {"step": 7, **quantized}, 1: {"step": 7, **small}}, t_alpha=None)
    optimizer = adam(params, state_dtype=option)
    twin = adam(copy.deepcopy(params), state_dtype=option)
    twin.load_state_dict(
        state_dict(
            {
                0: {"step": torch.tensor(7.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
                1: {
                    "step": torch.tensor(7.0),
                    "exp_avg": small["state1"],
                    "exp_avg_sq": small["state2"],
                },
            },
            **{k: v for k, v in optimizer.param_groups[0].items() if k not in (*GROUP, "params")},
        )
    )
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert str(before) == str(saved)
    assert optimizer.param_groups[0]["lr"] == GROUP["lr"]
    for mine, its in zip(params, twin.param_groups[0]["params"], strict=True):
        assert list(optimizer.state[mine]) == list(twin.state[its])
        for key, value in twin.state[its].items():
            assert torch.equal(optimizer.state[mine][key], value), key
        mine.grad = its.grad = torch.ones_like(mine)
    optimizer.step()
    twin.step()
    assert all(map(torch.equal, params, twin.param_groups[0]["params"]))


def test_bitsandbytes_of_one_scale_and_other_classes() -> None:
    param = nn.Parameter(numbers(1))
    entries, _ = bnb_state(numbers(3), 1, numbers(3).numel())
    entries["max1"] = entries.pop("absmax1")
    for kind, name in (("SGD", "momentum_buffer"), ("Lion", "exp_avg"), ("RMSprop", "square_avg")):
        options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(faststep.optim, kind)([param], lr=0.1, **options)
        saved = {"state": {0: {"step": 3, **entries, "new_max1": entries["max1"]}}}
        group = {"lr": 0.2, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0]}
        optimizer.load_state_dict({**saved, "param_groups": [group]})
        wanted = entries["qmap1"][entries["state1"].long()] * entries["max1"]
        assert torch.equal(optimizer.state[param][name], wanted)
        assert set(optimizer.state[param]) == {name} | ({"step"} if kind == "RMSprop" else set())
        param.grad = torch.ones_like(param)
        optimizer.step()


@pytest.mark.parametrize("masters", [False, True, "remainder16"])
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_flashoptim(dtype: torch.dtype, width: int, masters: Any) -> None:
    if dtype is F16 and masters == "remainder16":
        pytest.skip("remainders are for bfloat16")
    wide = numbers(1)
    wide.view(-1)[:3] = torch.tensor([0.0, 1e-41, -2.0])
    param = nn.Parameter(wide.to(dtype))
    first, exp_avg = flash_state(numbers(3), "exp_avg", dtype is BF16)
    second, exp_avg_sq = flash_state(numbers(4).square(), "exp_avg_sq", dtype is BF16)
    state: dict[str, Any] = {"step": torch.tensor(7), **first, **second}
    if dtype is not F32:
        mantissa, least = (7, -126) if dtype is BF16 else (10, -14)
        place = wide.to(dtype).double().abs().log2().floor().clamp(min=least) - mantissa - 1
        most = 127 if width == 3 else 32767
        error = (wide.double() - wide.to(dtype).double()) / 2.0**place
        errors = (error.clamp(-1, 1) * most).round()
        state["error_bits"] = errors.to(dtype) if width == 3 else errors.to(torch.int16).view(dtype)
    optimizer = adam([param], master_weights=masters, betas=(0.9, 0.99))
    optimizer.load_state_dict(state_dict({0: state}, master_bytewidth=width, quantize=True))
    assert not {"master_bytewidth", "quantize"} & optimizer.param_groups[0].keys()
    keeps = masters and dtype is not F32
    found = optimizer.state_dict()["state"][0]
    kind = F32 if keeps else dtype
    assert torch.equal(found["exp_avg"], exp_avg.to(kind))
    assert torch.equal(found["exp_avg_sq"], exp_avg_sq.to(kind))
    assert (MASTER in found) == bool(keeps)
    if keeps:
        near = 2.0 ** (place + (-7 if width == 3 else -14))
        assert bool(((found[MASTER].double() - wide.double()).abs() <= near).all())
    param.grad = torch.ones_like(param)
    optimizer.step()


def test_what_does_not_fit() -> None:
    param = nn.Parameter(numbers(1))
    first, _ = bnb_state(numbers(3), 1, 256)
    second, _ = bnb_state(numbers(4).square(), 2, 256)
    flash, _ = flash_state(numbers(3), "exp_avg", False)
    whole: dict[str, Any] = {"step": 1, **first, **second}
    bad: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in whole.items() if k != "qmap1"}, "'qmap1' is missing beside 'state1'"),
        ({k: v for k, v in whole.items() if k != "absmax2"}, "'absmax2' is missing beside 'sta"),
        ({k: v for k, v in whole.items() if k != "step"}, "'step' is missing beside the states"),
        ({**whole, "absmax1": first["absmax1"][:5]}, "'absmax1' has 5 scales for 5600 elements"),
        ({**whole, "state1": first["state1"][:3]}, r"'state1' has the shape \(3, 80\), and the p"),
        ({"step": 1, "exp_avg::quantized": flash["exp_avg::quantized"]}, "'exp_avg::scales' is m"),
        ({"step": 1, "exp_avg::scales": flash["exp_avg::scales"]}, "'exp_avg::quantized' is mis"),
        ({"step": 1, **flash, "exp_avg::scales": flash["exp_avg::scales"][:5]}, "has 5 scales"),
        ({"step": 1, **flash, "error_bits": torch.zeros(SHAPE)}, "'error_bits' are of a param"),
    ]
    for state, text in bad:
        optimizer = adam([param])
        with pytest.raises(ValueError, match=f"the state of parameter 0: .*{text}"):
            optimizer.load_state_dict(state_dict({0: state}))
        assert not optimizer.state
    optimizer = adam([param])
    optimizer.load_state_dict(state_dict({0: {"step": 1, **first}}))
    param.grad = torch.ones_like(param)
    with pytest.raises(KeyError, match="has no 'exp_avg_sq', only 'step', 'exp_avg'"):
        optimizer.step()


def test_in_the_order_of_memory() -> None:
    """Kernels count elements so, whatever the shape."""
    param = nn.Parameter(numbers(1, (2, 3, 20, 20)).to(memory_format=torch.channels_last))
    flat = numbers(2, (2400,))
    for entries, known in (
        bnb_state(flat, 1, 256),
        flash_state(flat, "exp_avg", False),
    ):
        shaped = {
            key: torch.empty_like(param, dtype=value.dtype).permute(0, 2, 3, 1).copy_(
                value.view(2, 20, 20, 3)
            ).permute(0, 3, 1, 2)
            if value.numel() == 2400
            else value
            for key, value in entries.items()
        }  # fmt: skip
        optimizer = faststep.optim.Lion([param])
        optimizer.load_state_dict(state_dict({0: shaped}))
        found = optimizer.state[param]["exp_avg"]
        assert torch.equal(found.permute(0, 2, 3, 1).reshape(-1), known)
