"""What the doctor turns on and off between steps, what it measures of a machine, what it says."""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from faststep import memory
from faststep._torch.data_loader import BaseDataLoaderIter
from faststep.doctor import rates, system
from faststep.doctor.alternation import Alternation, Switch
from faststep.doctor.recorder import Recorder
from faststep.doctor.remedies import general, is_chosen
from faststep.doctor.second_loader import ScriptLoaders
from faststep.doctor.switches import CLIPS, NO_OPTIMIZER, SAME_BATCH, SCALES, switches

FOUND: dict[str, Any] = {
    "others": 0.0, "cores": 4, "swapped": 0, "peak": 1 << 20, "switched": {}, "loaders": [],
    "gpu": None,
}  # fmt: skip

TORCHS = [clip_grad_norm_]  # where no switch looks for it


def chosen(
    shares: dict[str, float],
    optimizers: Any = (),
    loop: ScriptLoaders | None = None,
    left: Any = lambda optimizer: None,
    only: Any = (),
    **found: Any,
) -> dict[str, Switch]:
    """By name, for a script whose steps take 10 ms."""
    found = {
        "steps": [0.01] * 10, "phases": {name: 0.1 * share for name, share in shares.items()},
        "faults": 0.0, "cores": 8, "zeroes": False, "collecting": 0.0, "cuda": False, **found,
    }  # fmt: skip
    return {
        one.name: one for one in switches(found, optimizers, loop or ScriptLoaders(), left, only)
    }


def test_blocks_of_steps_show_what_a_switch_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    turned: list[bool] = []
    switch = Switch("half as long", turned.append)
    alternation_ = Alternation([switch, Switch("nothing", lambda is_on: None)], 0.02)
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
    switch = chosen({"optimizer": 0.5}, [made[1]])["faststep's optimizer"]
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
    switch = chosen({"optimizer": 0.5}, [optimizer], left=left.append)[NO_OPTIMIZER]
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
    assert chosen({}, cores=2).keys() == {
        "nothing",
        "all of `run`",
        "1 thread",
        "denormals are zero",
    }
    shares = {"data": 0.5, "clipping": 0.3, "scaler": 0.2}
    found = chosen(shares, faults=1e6, zeroes=True, cuda=True)
    assert {SAME_BATCH, CLIPS, SCALES, "memory is kept"} <= found.keys()
    assert {"gradients set to None", "cudnn.benchmark", "products in TF32"} <= found.keys()
    assert "all of `run` but its loader" in found


def test_what_a_script_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    for frozen in (1, 0):
        monkeypatch.setattr(gc, "get_freeze_count", lambda frozen=frozen: frozen)
        assert ("objects are frozen" in chosen({}, collecting=0.5)) == (not frozen)


def test_switches_of_other_kinds_than_asked_for_are_left_out() -> None:
    shares = {"data": 0.5, "clipping": 0.3, "scaler": 0.2}
    found = {"faults": 1e6, "zeroes": True, "cuda": True}
    assert chosen(shares, only=["loader"], **found).keys() == {"nothing", SAME_BATCH}
    assert chosen(shares, only=["tf32"], **found).keys() == {"nothing", "products in TF32"}
    assert chosen(shares, only=["clip"], **found).keys() == {"nothing", CLIPS}
    assert chosen(shares, only=["compile"], **found) == {}


def test_switches_for_which_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their stretches take longer than 10 s, or all of them longer than 15 s."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    names = ["first", "long", "second", "third"]
    made = [Switch(name, lambda is_on: None, skipped=99 if name == "long" else 1) for name in names]
    alternation = Alternation(made, 0.5)
    while not alternation.is_over():
        now += 0.5
    assert [*alternation.gains] == ["first", "second"]
    assert now < 16.0
    assert Alternation(made, 1.0).is_over()


def test_everything_is_exchanged_and_put_back() -> None:
    """Scaler, clipping and loss of faststep between those of torch, with one course of training."""
    courses = []
    for turns in ({}, {3: True, 6: False, 9: True}):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        switch = chosen({"clipping": 0.3}, [optimizer])["all of `run`"]
        losses = []
        for step in range(12):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            if step == 4:
                x[0, 0] = float("inf")
            loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            if step in turns:  # as by the hook of a step
                switch.turn(turns[step])
                assert type(scaler).__module__.startswith("faststep.") is turns[step]
                assert (clip_grad_norm_ is TORCHS[0]) is not turns[step]
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        if turns:
            switch.turn(False)
        courses.append([*losses[:4], *losses[5:], scaler.get_scale()])
    assert clip_grad_norm_ is TORCHS[0]
    assert not memory.stats().retains
    assert courses[1] == pytest.approx(courses[0], rel=1e-4)


def test_gradients_are_set_to_none_and_to_zero_again() -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=0.1)
    switch = chosen({}, [optimizer], zeroes=True)["gradients set to None"]
    for is_on in (True, False):
        switch.turn(is_on)
        param.grad = torch.ones(2)
        optimizer.zero_grad(set_to_none=False)
        assert (param.grad is None) is is_on


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return index, torch.rand(())


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptLoaders]:
    for kind in (torch.utils.data.DataLoader, BaseDataLoaderIter):
        for name in {"__iter__", "__next__"} & vars(kind).keys():
            monkeypatch.setattr(kind, name, vars(kind)[name])
    made = ScriptLoaders()
    made.watch()
    yield made
    for use in made.uses.values():  # a loader in a cycle ends its workers after 5 s
        use.loader._iterator = None


@pytest.mark.parametrize("workers", [0, 1])
def test_other_loaders_give_batches_of_the_same_order(loop: ScriptLoaders, workers: int) -> None:
    """And draw nothing from the generators; then the script's own goes on."""
    loader = torch.utils.data.DataLoader(Numbers(), 4, shuffle=True, num_workers=workers)
    torch.manual_seed(0)
    plain = [numbers.tolist() for _ in range(2) for numbers, _ in loader]
    made = loop.switches(cores=2)
    names = {"num_workers=2", "faststep's DataLoader"} | (
        {"prefetch_factor=8"} if workers else set()
    )
    assert {one.name for one in made} == names
    for switch in made:
        assert switch.skipped == 1 + {"num_workers=2": 4, "prefetch_factor=8": 8}.get(
            switch.name, 2 * workers
        )
        torch.manual_seed(0)
        seen, others = [], []
        for _ in range(2):
            for at, (numbers, _) in enumerate(loader):
                seen.append(numbers.tolist())
                if at == 2 and len(seen) == 3:
                    switch.turn(True)
                    others = [next_of(loader, loop) for _ in range(7)]
                    switch.turn(False)
        if workers:  # else reading samples has drawn random numbers
            assert seen == plain
        assert sorted(itertools.chain(*others[:5])) == [
            *range(20)
        ]  # an epoch, then the next one begins
        assert len(others[6]) == 4


def next_of(loader: Any, loop: ScriptLoaders) -> list[int]:
    """What an iterator of the loader gives at present."""
    use = loop.uses[id(loader)]
    assert loop._instead is not None
    numbers: list[int] = loop._instead(use)[0].tolist()
    return numbers


def test_a_loader_that_cannot_be_read_beside(loop: ScriptLoaders) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(range(8))

    class Mine(torch.utils.data.Sampler):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(range(8))

    for loader in (
        torch.utils.data.DataLoader(Stream(), 4),
        torch.utils.data.DataLoader(Numbers(), 4, sampler=Mine()),
    ):
        loop.uses.clear()
        next(iter(loader))
        assert loop.switches(cores=2) == []


def test_operations_of_an_lstm_are_counted() -> None:
    lstm = torch.nn.LSTM(8, 16, batch_first=True)
    products = rates.Products()
    with products:  # type: ignore[no-untyped-call]
        lstm(torch.randn(4, 5, 8, requires_grad=True))[0].sum().backward()
    # Forward multiplies once, and backward by weights and by inputs; all as one shape.
    assert products.operations == {(20, 8, 64): 3 * 2 * 20 * (8 + 16) * 64}


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
        "loaders": [{"batch": 8}], "cuda": False, "is_ddp": False,
        "machine": {"operations": 10, "convolutions": 8, "fp32": 1.0, "bf16": 2.0},
    }  # fmt: skip
    names = [name for name, change in general(found) if is_chosen(change, [])]
    assert names == ["all of `run`", "channels last", "autocast to bf16", "batches twice as large"]
    found["machine"] = {"operations": 10, "convolutions": 0, "fp32": 1.0, "bf16": 1.1}
    names = [name for name, change in general(found) if is_chosen(change, [])]
    assert names == ["all of `run`", "batches twice as large"]
    found["phases"] = {"data": 0.9}
    assert [name for name, change in general(found) if is_chosen(change, [])] == ["all of `run`"]
    names = [name for name, _ in general({**found, "cuda": True})]
    assert {"cudnn.benchmark", "products in TF32"} <= {*names}


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
    recorder: Any = Recorder(1e9, 0, 1e9, 1e9, False, lambda found: None)

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
