"""Our scaler with torch's optimizers does what torch's scaler does with them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

import faststep.optim
from compare import assert_same_tensors
from faststep.amp import GradScaler
from faststep.clip import clip_grad_norm_
from scalers import (
    TORCHS_OPTIMIZERS,
    Make,
    Training,
    make_param,
    make_scaler,
    plain_step,
)

INF = math.inf
TORCHS = torch.amp.GradScaler
CPU = torch.device("cpu")
OF_EACH_KIND = pytest.mark.parametrize("make", TORCHS_OPTIMIZERS.values(), ids=TORCHS_OPTIMIZERS)


def unscale_and_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.5)
    scaler.step(optimizer)


@OF_EACH_KIND
@pytest.mark.parametrize("body", [plain_step, unscale_and_step])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_bit_for_bit_that_of_torchs_scaler(
    make: Make, body: Callable[..., Any], dtype: torch.dtype
) -> None:
    ours = Training(GradScaler, make, dtype).run(body)
    theirs = Training(TORCHS, make, dtype).run(body)
    assert_same_tensors(ours, theirs)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
@pytest.mark.parametrize("cls", [torch.optim.SGD, faststep.optim.SGD])
def test_max_norm_out_of_range(cls: type[torch.optim.Optimizer], max_norm: float) -> None:
    """The step can be repeated with another limit: nothing has happened."""
    param = make_param(1.0, grad=[8.0])
    scaler, optimizer = make_scaler(), cls([param], lr=0.5)
    with pytest.raises(ValueError, match="Invalid max_norm value"):
        scaler.step(optimizer, max_norm=max_norm)
    assert (param.item(), param.grad.item()) == (1.0, 8.0)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert param.item() == pytest.approx(0.5)


def test_fp16_gradients_go_through_fused_optimizers() -> None:
    make = TORCHS_OPTIMIZERS["AdamW fused"]
    ours = Training(GradScaler, make, torch.float16).run(plain_step)
    assert_same_tensors(ours, Training(TORCHS, make, torch.float16).run(plain_step))


@OF_EACH_KIND
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_max_norm_is_unscale_clip_step(make: Make, unscale_first: bool, max_norm: float) -> None:
    def in_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer, max_norm=max_norm)

    def by_hand(clip: Callable[..., Any]) -> Callable[..., None]:
        def body(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
            scaler.unscale_(optimizer)
            clip([p for g in optimizer.param_groups for p in g["params"]], max_norm)
            scaler.step(optimizer)

        return body

    ours = Training(GradScaler, make).run(in_step)
    assert_same_tensors(ours, Training(GradScaler, make).run(by_hand(clip_grad_norm_)))
    theirs = Training(TORCHS, make).run(by_hand(torch_clip_grad_norm_))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@OF_EACH_KIND
@pytest.mark.parametrize("enabled", [True, False])
def test_max_norm_with_a_closure_is_an_error(make: Make, enabled: bool) -> None:
    param = make_param(1.0, grad=[1.0])
    scaler = make_scaler(enabled=enabled)
    with pytest.raises(RuntimeError, match="max_norm cannot be combined with a closure"):
        scaler.step(make([param]), lambda: 1.0, max_norm=1.0)
    assert param == 1.0
    # A closure of None, as frameworks pass it on, is no closure.
    param.grad = torch.ones(1)
    assert make_scaler(enabled=enabled).step(make([param]), None, max_norm=1.0) is None
    assert param != 1.0


@OF_EACH_KIND
def test_the_value_of_step_comes_back(make: Make) -> None:
    for bad, expected in ((1.0, 7.0), (INF, None)):
        results = []
        for cls in (GradScaler, TORCHS):
            optimizer = make([make_param(1.0, grad=[bad])])
            results.append(make_scaler(cls).step(optimizer, lambda: 7.0))
        assert results[0] == results[1]
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            assert results[0] == expected


def test_an_overflow_on_two_devices_is_skipped() -> None:
    # torch's kernels skip for found_inf == 1 only, and its scaler hands them the sum.
    param = make_param(1.0, grad=[1.0])
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    scaler = make_scaler()
    scaler.unscale_(optimizer)
    scaler._found_inf_per_device(optimizer).update(
        {CPU: torch.tensor(1.0), torch.device("cpu", 0): torch.tensor(1.0)}
    )
    scaler.step(optimizer)
    scaler.update()
    assert param == 1.0
    assert optimizer.state[param]["step"] == 0
    assert scaler.get_scale() == 4.0


class Watched(torch.optim.SGD):
    """Notes what a scaler set for the step; raises if told to."""

    _step_supports_amp_scaling = True
    error: Exception | None = None

    def step(self, closure: Any = None) -> Any:
        names = ("grad_scale", "found_inf", "_asked")
        self.seen = {name: getattr(self, name) for name in names if hasattr(self, name)}
        if self.error is not None:
            raise self.error
        return 5.0


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("given", [None, 3.0])
def test_what_an_optimizer_that_unscales_itself_is_given(
    unscale_first: bool, given: float | None
) -> None:
    seen = []
    for cls in (GradScaler, TORCHS):
        optimizer = Watched([make_param(1.0, grad=[INF])])
        if given is not None:
            optimizer.grad_scale = torch.tensor(given)
        scaler = make_scaler(cls)
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) == 5.0
        assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        seen.append(optimizer.seen)
    assert seen[0] == seen[1]
    assert set(seen[0]) == {"grad_scale", "found_inf"}
    assert seen[0]["found_inf"].dtype == torch.float32


@pytest.mark.parametrize("given", [None, 3.0])
def test_an_error_in_step_leaves_nothing_behind_and_the_step_can_be_repeated(
    given: float | None,
) -> None:
    optimizer = Watched([make_param(1.0, grad=[1.0])])
    if given is not None:
        optimizer.grad_scale = torch.tensor(given)
    scaler = make_scaler()
    before = set(vars(optimizer)) | {"seen"}
    optimizer.error = KeyError("in step")
    with pytest.raises(KeyError, match="in step"):
        scaler.step(optimizer)
    assert set(vars(optimizer)) == before | {"error"}
    optimizer.error = None
    scaler.step(optimizer)
    assert optimizer.seen["grad_scale"] == 8.0 * (given or 1.0)


def test_an_optimizer_of_the_older_protocol_gets_the_scaler() -> None:
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            return grad_scaler

    for cls in (GradScaler, TORCHS):
        scaler = make_scaler(cls)
        optimizer = Older([make_param(1.0, grad=[1.0])])
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            assert scaler.step(optimizer) is scaler


def test_several_optimizers_share_one_scale() -> None:
    results = []
    for cls in (GradScaler, TORCHS):
        scaler = make_scaler(cls)
        params = [make_param(1.0, grad=[g]) for g in (8.0, INF, 4.0)]
        optimizers = [
            make([p]) for make, p in zip(TORCHS_OPTIMIZERS.values(), params, strict=False)
        ]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        results.append(([p.item() for p in params], scaler.state_dict()))
    assert results[0] == results[1]
    assert results[0][0][1] == 1.0
    assert results[0][1]["scale"] == 4.0
