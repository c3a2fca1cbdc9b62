"""What the doctor turns on and off between steps, what it measures of a machine, what it says."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from faststep.doctor import alternation, rates, system
from faststep.doctor.alternation import Alternation, Switch, switches
from faststep.doctor.recorder import Recorder
from faststep.doctor.remedies import general, is_chosen
from faststep.doctor.trials import Trial, Trials

FOUND: dict[str, Any] = {
    "others": 0.0, "cores": 4, "swapped": 0, "peak": 1 << 20, "switched": {}, "loaders": [],
    "gpu": None,
}  # fmt: skip


def test_blocks_of_steps_show_what_a_switch_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    turned: list[bool] = []
    switch = Switch("half as long", turned.append)
    alternation_ = Alternation([switch, Switch("nothing", lambda is_on: None)])
    for step in range(10000):
        is_on = bool(turned) and turned[-1]
        now += (0.01 if is_on else 0.02) * (1.0 + 0.1 * (step % 3))
        if alternation_.is_over():
            break
    assert alternation_.gains["half as long"].gain == pytest.approx(2.0, rel=0.1)
    assert alternation_.gains["half as long"].low > 1.8
    assert alternation_.gains["nothing"].low <= 1.0 <= alternation_.gains["nothing"].high
    assert turned[0] is True
    assert turned[-1] is False
    assert turned == [True, False] * (len(turned) // 2)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_are_exchanged_and_put_back(kind: type) -> None:
    """Steps of faststep's class go on with torch's states, below a scheduler and hooks."""
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    made = [kind(model.parameters(), lr=0.1, momentum=0.9) if kind is torch.optim.SGD
            else kind(model.parameters(), lr=0.1) for model in models]  # fmt: skip
    schedules = [torch.optim.lr_scheduler.StepLR(one, 3) for one in made]
    stepped: list[Any] = []
    made[1].register_step_post_hook(lambda optimizer, *_: stepped.append(type(optimizer)))
    own = made[1].step
    chosen = switches(
        0.01, {"optimizer": 0.5}, 0.0, 8, [made[1]], lambda on: None, lambda one: None
    )
    [switch] = [one for one in chosen if one.name == "faststep's optimizer"]
    x = torch.randn(8, 4)
    for step in range(8):
        if step in (2, 5):
            switch.turn(step == 2)
        for model, optimizer, schedule in zip(models, made, schedules, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert [one is kind for one in stepped] == [True] * 2 + [False] * 3 + [True] * 3
    assert {one.__module__ for one in stepped[2:5]} == {"faststep.run.optimizers"}
    assert type(made[1]) is kind
    assert made[1].step == own
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_steps_are_left_out() -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=0.1)
    left: list[Any] = []
    chosen = switches(0.01, {"optimizer": 0.5}, 0.0, 8, [optimizer], lambda on: None, left.append)
    [switch] = [one for one in chosen if one.name == alternation.NO_OPTIMIZER]
    param.grad = torch.ones(2)
    switch.turn(True)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert left == [optimizer]
    assert param.tolist() == [1.0, 1.0]
    switch.turn(False)
    optimizer.step()
    assert param.tolist() == pytest.approx([0.9, 0.9])


def test_switches_are_those_that_can_gain() -> None:
    torch.set_num_threads(2)
    names = {one.name for one in switches(0.01, {}, 0.0, 2, [], lambda on: None, lambda one: None)}
    assert names == {"nothing", "1 thread", "denormals are zero"}
    shares = {"data": 0.5}
    names = {
        one.name for one in switches(0.01, shares, 0.3, 2, [], lambda on: None, lambda one: None)
    }
    assert {alternation.SAME_BATCH, "memory is kept"} <= names
    assert switches(1.0, shares, 0.3, 2, [], lambda on: None, lambda one: None) == []


def test_operations_of_products_are_counted() -> None:
    layer, conv = torch.nn.Linear(8, 16), torch.nn.Conv2d(3, 5, 3)
    products = rates.Products()
    with products:  # type: ignore[no-untyped-call]
        layer(torch.ones(4, 8)).sum().backward()
        conv(torch.ones(2, 3, 6, 6)).sum().backward()
    product, convolution = 2 * 4 * 8 * 16, 2 * (2 * 4 * 4) * (3 * 3 * 3) * 5
    assert products.operations[4, 8, 16] == product
    assert products.convolutions == 2 * convolution  # backward needs the weight's gradient alone
    assert products.operations[32, 27, 5] == 2 * convolution
    measured = rates.measured(products)
    assert measured["operations"] == products.operations.total()
    assert min(measured["copy"], measured["fp32"], measured["bf16"]) > 0
    assert rates.measured(rates.Products())["fp32"] == 0.0


def test_remedies_for_scripts_that_compute() -> None:
    found: dict[str, Any] = {
        "steps": [1.0], "phases": {"forward": 0.4, "backward": 0.4}, "autocast": {},
        "loaders": [{"batch": 8}],
        "machine": {"operations": 10, "convolutions": 8, "fp32": 1.0, "bf16": 2.0},
    }  # fmt: skip
    names = [name for name, _ in general(found)]
    assert names == ["all of `run`", "channels last", "autocast to bf16", "batches twice as large",
                     "compiled models"]  # fmt: skip
    found["machine"] = {"operations": 10, "convolutions": 0, "fp32": 1.0, "bf16": 1.1}
    assert [name for name, _ in general(found)][1:] == ["batches twice as large", "compiled models"]
    assert len(list(general({**found, "phases": {"data": 0.9}}))) == 1


def test_kinds_of_remedies_are_chosen_by_name() -> None:
    assert is_chosen({"parts": ["optim", "amp"]}, [])
    assert is_chosen({"parts": ["optim", "amp"]}, ["optim", "amp"])
    assert not is_chosen({"parts": ["optim", "amp"]}, ["optim"])
    assert is_chosen({"flush": True}, ["denormals"])
    assert not is_chosen({"compile": True}, [])
    assert is_chosen({"compile": True}, ["compile"])


@pytest.mark.parametrize(
    ("files", "found", "said"),
    [
        ({}, {}, ""),
        ({}, {"others": 3.0}, "other programs used 3.0 of 4 cores"),
        ({"proc/sys/vm/swappiness": "60"}, {"swapped": 1 << 30}, "vm.swappiness is 60"),
        (
            {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
            {"switched": {"memory is kept": [1.5, 1.4, 1.6]}},
            "huge pages are off",
        ),
        ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, {}, "cpupower"),
        (
            {
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
            },
            {},
            "",
        ),
        (
            {
                "sys/devices/system/node/node0/cpulist": "0-1",
                "sys/devices/system/node/node1/cpulist": "2-3",
            },
            {},
            "2 NUMA nodes: try numactl --cpunodebind=0",
        ),
        ({}, {"loaders": [{"workers": 10**9}]}, "--shm-size"),
    ],
)
def test_settings_that_matter_are_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    found: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2})
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    made = system.notes({**FOUND, **found}, {}, tmp_path / "proc", tmp_path / "sys")
    assert (said in "\n".join(made)) if said else made == []


def test_variables_that_matter_are_said(tmp_path: Path) -> None:
    made = system.notes(FOUND, {"OMP_NUM_THREADS": "64"}, tmp_path, tmp_path)
    assert made == ["OMP_NUM_THREADS is 64, and the process may use 4 cores: unset it"]
    assert system.notes(FOUND, {"OMP_NUM_THREADS": "4"}, tmp_path, tmp_path) == []


def test_a_long_look_at_the_counters_is_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library of a script that has freed much adds up its blocks for tens of ms."""
    now = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: now)
    recorder: Any = Recorder(1e9, 0, 1e9, False, lambda found: None)

    def count() -> int:
        nonlocal now
        now += 0.005
        return 0

    recorder._allocated = count
    for step in range(1000):
        now += 0.1
        recorder._stepped(None, [now] * (step + 1))
    assert 0.004 < 0.005 * len(recorder._counts) / now < 0.006


def test_the_seconds_of_all_cores_and_of_this_process() -> None:
    before = system.busy_seconds()
    begun = time.process_time()
    while time.process_time() - begun < 0.3:
        Counter(range(1000))
    after = system.busy_seconds()
    assert after[0] - before[0] > 0.2
    assert after[1] - before[1] > 0.2


def test_a_remedy_that_has_all_others_is_not_tried_again() -> None:
    runs: Any = None  # no run is made
    trials = Trials(runs, {"switched": {}}, [], lambda text: None)
    for name, gain, parts in (
        ("some", 1.2, ["amp", "clip"]),
        ("all", 1.5, ["clip", "amp", "data"]),
    ):
        change = {"parts": parts}
        trials.made.append(Trial(name, gain, 1.1, 1.6, "same bits", 0, change, []))
    assert trials.together() == trials.made[1]
