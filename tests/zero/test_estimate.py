"""The memory that `estimate` counts, beside what ranks measure."""

import ctypes
import functools
import gc
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from faststep import optim, zero
from faststep._torch.fake import NoMemory
from faststep.cli.scripts.gpt import GPT, GPTConfig
from faststep.sizing.dry_run import dry_run
from faststep.sizing.formats import formats_of
from faststep.zero.estimate import Layout, count
from ranks import Job, results_of

MODEL = GPTConfig(layers=4, heads=4, width=320, context=64, vocabulary=2048)  # 5.6M parameters
OTHER = 1_500_000  # bytes of Python, torch and gloo
BATCH = (16, 65)  # whose activations take as much as parameters


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+)", status)
    assert found
    return 1024 * int(found[1])


def resident() -> int:
    """What is in use: freed blocks go back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory("VmRSS")


class Found(NamedTuple):
    """Bytes of a rank."""

    between: int  # after a step, before zero_grad()
    peak: int  # of a step


def _measured(
    rank: int,
    world: int,
    config: GPTConfig,
    low: bool,
    options: dict[str, Any],
    shape: tuple[int, int] = (1, 3),
) -> Found:
    """Trains with two tokens, so that there are hardly any activations, or with more."""
    big_blocks_go_back = ctypes.CDLL(None).mallopt(-3, 2**15)
    assert big_blocks_go_back
    before, model, optimizer = 0, None, None
    for last in (0, 1):  # the first run imports, connects, and lets kernels take their memory
        del model, optimizer
        before = resident()
        torch.manual_seed(0)
        model = GPT(config).to(torch.bfloat16 if low else torch.float32)
        optimizer = zero.shard(model, optim.AdamW(model.parameters()), **options)
        tokens = torch.randint(config.vocabulary, shape)
        for step in range(last + 1):
            if step == last:
                Path("/proc/self/clear_refs").write_text("5")
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            dist.barrier()
    peak = memory("VmHWM") - before
    return Found(resident() - before, peak)


CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    **{f"stage {s} on {n}": (n, False, {"stage": s}) for s in (1, 2, 3) for n in (2, 4)},
    "one": (1, False, {"stage": 2}),
    "small buckets": (2, False, {"stage": 2, "bucket_mb": 4}),
    "masters": (2, True, {"stage": 2, "master_weights": True}),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Found]]:
    """In processes of their own: those of other tests have memory at hand."""
    own = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params.get("case") for item in own if hasattr(item, "callspec")}
    jobs = [
        Job(name, world, _measured, (MODEL, low, options))
        for name, (world, low, options) in CASES.items()
        if name in chosen
    ]
    return results_of([*jobs, Job("batch", 2, _measured, (MODEL, False, {"stage": 2}, BATCH))])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells resident memory")
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_ranks_measure(case: str, found: dict[str, list[Found]]) -> None:
    world, low, options = CASES[case]
    with torch.device("meta"):
        model = GPT(MODEL).to(torch.bfloat16 if low else torch.float32)
    estimated = zero.estimate(model, optim.AdamW, ranks=world, **options)
    (counted,) = estimated.stages.values()
    between = max(one.between for one in found[case])
    peak = max(one.peak for one in found[case])
    said = f"{between / 1e6:.1f} and {peak / 1e6:.1f} were measured:\n{estimated}"
    assert abs(counted.between - between) < 0.05 * between + OTHER, said
    assert counted.peak > 0.95 * peak - OTHER, said
    assert counted.peak < 1.25 * peak, said  # messages that arrive early take less


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells resident memory")
def test_a_peak_with_activations(found: dict[str, list[Found]]) -> None:
    """benchmarks/planned.py measures larger models at all stages."""
    with NoMemory():
        model, tokens = GPT(MODEL), torch.zeros(BATCH, dtype=torch.int64)
        run = dry_run(model, lambda: model(tokens[:, :-1], tokens[:, 1:]))
    (kept, *_) = formats_of("AdamW", [torch.float32])
    layout = Layout(2, 2, 25 * 2**20, False, False, run.live, run.forward)
    counted = count(model, kept.bytes, layout)
    assert counted.activations > 0.5 * counted.parameters
    peak = max(one.peak for one in found["batch"])
    assert counted.peak == pytest.approx(peak, rel=0.1), f"{peak / 1e6:.1f} MB: {counted}"


def test_the_table() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000))
    model[0].bias.requires_grad_(False)
    found = zero.estimate(model, torch.optim.AdamW, ranks=1)
    one = found.stages[1]
    assert one.parameters == 4 * (1000 * 1000 + 5 * 1000) + 8  # the last: num_batches_tracked
    assert one.gradients == 4 * (1000 * 1000 + 2 * 1000)
    assert one.states == 2 * one.gradients + 3 * 4
    assert one.peak == one.between == one.parameters + one.gradients + one.states
    assert str(found).splitlines() == [
        "stage  parameters  gradients  states  between  messages  peak  (MB of each of 1 ranks)",
        "1             4.0        4.0     8.0     16.0       0.0  16.0",
        "2             4.0        4.0     8.0     16.0       0.0  16.0",
        "3             4.0        4.0     8.0     16.0       0.0  16.0",
    ]
    two = zero.estimate(model, torch.optim.AdamW, ranks=2).stages
    assert two[2].gradients * 2 == pytest.approx(two[1].gradients, rel=0.02)
    assert two[3].parameters < two[1].parameters
    low = zero.estimate(model.bfloat16(), torch.optim.AdamW, ranks=2, master_weights=True)
    assert set(low.stages) == {1, 2}


@pytest.mark.parametrize(
    ("make", "low", "per_element"),
    [
        (optim.SGD, False, 0),
        (functools.partial(torch.optim.SGD, momentum=0.9), False, 4),
        (optim.Lion, True, 2),
        (torch.optim.AdamW, True, 4),
        (functools.partial(torch.optim.Adam, amsgrad=True), False, 12),
    ],
)
def test_states(make: Any, low: bool, per_element: int) -> None:
    model = nn.Linear(1000, 1000, dtype=torch.bfloat16 if low else torch.float32)
    for ranks in (1, 2, 4):
        for memory in zero.estimate(model, make, ranks=ranks).stages.values():
            expected = per_element * 1_001_000 / ranks
            assert memory.states == pytest.approx(expected, rel=0.05, abs=8)
    if low:
        (with_masters,) = zero.estimate(
            model, make, ranks=2, stage=2, master_weights=True
        ).stages.values()
        assert with_masters.states == pytest.approx((2 * per_element + 4) * 500_500, rel=0.05)


def test_nothing_of_the_model_is_changed() -> None:
    model = nn.Linear(300, 300)
    before = [param.data_ptr() for param in model.parameters()]
    zero.estimate(model, optim.AdamW, ranks=4)
    assert [param.data_ptr() for param in model.parameters()] == before
    assert all(type(param) is nn.Parameter and param.grad is None for param in model.parameters())


@pytest.mark.parametrize("model", [nn.ReLU(), nn.LayerNorm(0), nn.Linear(1, 1, bias=False)])
def test_small_models(model: nn.Module) -> None:
    for ranks in (1, 2, 64):
        for stage, memory in zero.estimate(model, optim.AdamW, ranks=ranks).stages.items():
            assert 0 <= memory.between <= memory.peak < 64 * 1024, stage


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ranks": 0}, "ranks .0. and bucket_mb .25. must be positive"),
        ({"ranks": 2, "bucket_mb": 0}, "must be positive"),
        ({"ranks": 2, "stage": 4}, "stage must be one of .1, 2, 3. .* not 4"),
        ({"ranks": 2, "stage": 3, "master_weights": True}, "stage must be one of .1, 2. .* not 3"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        zero.estimate(nn.Linear(2, 2), optim.AdamW, **options)


def test_an_optimizer_that_is_not_sharded() -> None:
    with pytest.raises(TypeError, match="LBFGS"):
        zero.estimate(nn.Linear(2, 2), torch.optim.LBFGS, ranks=2)
