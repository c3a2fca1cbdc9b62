"""rounding="stochastic": states against a twin rounded by a Philox of its own, and their means."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.optim.masters import MASTER

from .test_state_dtype import KEPT, assert_same, make, params_of, shaped

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COUNTED = [name for name in KEPT if name not in ("momentum", "Lion")]
NOISY: dict[str, Any] = {"state_dtype": "bf16", "rounding": "stochastic"}


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of rows of four words."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for number in range(10):
        keys = [np.uint64((k + number * w) % 2**32) for k, w in zip(key, WEYL, strict=True)]
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> half ^ c[1] ^ keys[0], b & low, a >> half ^ c[3] ^ keys[1], a & low]
    return np.stack(c, 1).astype(np.uint32)


WEYL = (0x9E3779B9, 0xBB67AE85)


def noise_of(count: int, state: int, step: int, param: int, seed: int) -> Tensor:
    """The 16 bits of each element, in order."""
    eights = -(-count // 8)
    counter = np.zeros((eights, 4), np.uint32)
    counter[:, 0] = np.arange(eights)
    counter[:, 1] = state << 30
    counter[:, 2:] = step, param
    words = philox(counter, (seed % 2**32, seed >> 32))
    return torch.from_numpy(words.view("<u2").reshape(-1)[:count].astype(np.int32))


def rounded(value: Tensor, noise: Tensor) -> Tensor:
    """In the order of memory."""
    flat = value.permute(sorted(range(value.dim()), key=lambda d: -value.stride(d)))
    bits = flat.contiguous().view(torch.int32) + noise.reshape(flat.shape)
    made = (bits & -65536).view(F32)
    back = torch.empty_like(value)
    back.permute(sorted(range(value.dim()), key=lambda d: -value.stride(d))).copy_(made)
    return back


@pytest.mark.parametrize(
    ("counter", "key", "known"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_known_answers(counter: list[int], key: tuple[int, int], known: list[int]) -> None:
    assert philox(np.array([counter], np.uint32), key)[0].tolist() == known


def step(optimizer: Any, number: int) -> None:
    made = torch.Generator().manual_seed(number)
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = torch.randn(param.shape, generator=made).to(param.dtype)
        if index == 1 and number == 1:  # its count falls behind
            param.grad = None
    optimizer.step()


def without_masters(optimizer: Any, param: Tensor) -> list[Tensor]:
    return [value for key, value in shaped(optimizer, param) if key != MASTER]


@pytest.mark.parametrize("options", [{}, {"rounding_seed": 2**63 + 12345}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", COUNTED)
def test_the_step_is_that_of_states_rounded_by_noise(
    name: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    seed = options.get("rounding_seed", 0)
    halves = {"master_weights": "remainder16"} if seed and dtype == BF16 else {}
    optimizer = make(name, params_of(dtype), **NOISY, **options, **halves)
    twin = make(name, params_of(dtype), state_dtype="fp32", **halves)
    for number in range(3):
        step(optimizer, number)
        step(twin, number)
        for index, param in enumerate(twin.param_groups[0]["params"]):
            if param.grad is None or not param.numel():
                continue
            count = int(twin.state[param]["step"].item())
            for k, value in enumerate(without_masters(twin, param)):
                value.copy_(rounded(value, noise_of(value.numel(), k, count, index, seed)))
        assert_same(optimizer, twin)
    for param in optimizer.param_groups[0]["params"]:
        assert {value.dtype for value in without_masters(optimizer, param)} <= {BF16}


def test_the_mean_is_that_of_fp32() -> None:
    """Over many seeds the mean of a state is the fp32 one, and the nearest is up to 2^-9 away."""
    grad = torch.linspace(0.5, 1.5, 64)
    total = torch.zeros(64, dtype=F64)
    seeds = 4000
    for seed in range(seeds):
        param = nn.Parameter(torch.zeros(64))
        optimizer = faststep.optim.AdamW([param], betas=(0.9, 0.99), rounding_seed=seed, **NOISY)
        param.grad = grad.clone()
        optimizer.step()
        total += optimizer.state[param]["exp_avg"].double()
    exact = (grad * torch.tensor(0.1)).double()
    spread = exact.abs() * 2**-8 / 2 / seeds**0.5  # a standard deviation, at most
    assert ((total / seeds - exact).abs() < 5 * spread).all()
    nearest = (exact.bfloat16().double() - exact).abs()
    assert nearest.max() > 20 * spread.max()


def test_the_second_moment_decays_as_in_fp32() -> None:
    """With torch's betas, where rounding to the nearest undoes the decay, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param = nn.Parameter(torch.ones(20_000))
        optimizer = faststep.optim.AdamW([param], **NOISY)
    param.grad = torch.ones(20_000)
    optimizer.step()
    first = optimizer.state[param]["exp_avg_sq"].double().mean()
    param.grad = torch.zeros(20_000)
    for _ in range(1000):
        optimizer.step()
    last = optimizer.state[param]["exp_avg_sq"].double().mean()
    assert last / first == pytest.approx(0.999**1000, rel=0.01)


def test_nan_and_infinity_stay() -> None:
    param = nn.Parameter(torch.ones(40))
    optimizer = faststep.optim.AdamW([param], betas=(0.9, 0.99), **NOISY)
    param.grad = torch.full((40,), 0.5)
    param.grad[3], param.grad[5] = torch.nan, torch.inf
    optimizer.step()
    first = optimizer.state[param]["exp_avg"]
    assert first.isnan().nonzero().tolist() == [[3]]
    assert first.isinf().nonzero().tolist() == [[5]]


def test_parameters_steps_and_seeds_differ() -> None:
    def after(seed: int, steps: int) -> list[Tensor]:
        params = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
        optimizer = faststep.optim.AdamW(params, betas=(0.0, 0.99), rounding_seed=seed, **NOISY)
        for _ in range(steps):
            for param in params:
                param.grad = torch.full((1000,), 1 / 3)
            optimizer.step()
        return [optimizer.state[param]["exp_avg"] for param in params]

    found = [*after(0, 1), *after(0, 2), *after(1, 1), *after(2**32, 1)]
    for index, one in enumerate(found):
        assert 0.2 < (one.float() > 1 / 3).float().mean() < 0.8
        for other in found[:index]:
            assert 0.3 < (one == other).float().mean() < 0.7


# ---- what is refused


def test_options_out_of_range() -> None:
    param = [nn.Parameter(torch.ones(3))]
    for options, text in (
        ({"rounding": "up"}, 'rounding must be "nearest" or "stochastic", not'),
        ({"rounding": True}, 'rounding must be "nearest" or "stochastic", not'),
        ({"rounding": "stochastic"}, 'is for states in bf16: pass state_dtype="bf16" too'),
        ({"rounding": "stochastic", "state_dtype": "fp32"}, "is for states in bf16"),
        ({**NOISY, "rounding_seed": -1}, "rounding_seed must be an integer from 0 to"),
        ({**NOISY, "rounding_seed": 2**64}, "rounding_seed must be an integer from 0 to"),
        ({**NOISY, "rounding_seed": 1.0}, "rounding_seed must be an integer from 0 to"),
        ({**NOISY, "rounding_seed": True}, "rounding_seed must be an integer from 0 to"),
    ):
        with pytest.raises(ValueError, match=text):
            faststep.optim.AdamW(param, **options)


@pytest.mark.parametrize("name", ["SGD", "Lion"])
def test_classes_without_a_count(name: str) -> None:
    with pytest.raises(ValueError, match=f'{name}: rounding="stochastic" needs a count'):
        getattr(faststep.optim, name)([nn.Parameter(torch.ones(3))], lr=0.1, **NOISY)
