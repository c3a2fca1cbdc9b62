"""How many calls of the driver a hook, a release and a list take once they are warm, and which.

Each costs the host 0.05 to 3 µs. What is short goes with the launches, so that no copy stands
between two kernels of backward.
"""

import gc
from collections.abc import Callable

import pytest
import torch

import faststep
from faststep import _C
from gpu.common import Twins, same_bits, values
from leaks.test_leaks import assert_no_growth

from . import fake

LARGE = 3 * 16384 + 5  # some chunks
LAUNCH = {"cuCtxPushCurrent_v2": 1, "cuLaunchKernel": 1, "cuCtxPopCurrent_v2": 1}
STEP = {**LAUNCH, "cuLaunchKernel": 2}
# What a stream takes as well: torch's own may be captured; behind a step on one that may be
# destroyed an event is recorded, and another one may get its handle.
TWICE = {"cuCtxPushCurrent_v2": 2, "cuCtxPopCurrent_v2": 2, "cuStreamGetCaptureInfo_v2": 1}
AS_WELL: dict[str, dict[str, int]] = {
    "default": {},
    "torch's own": TWICE,
    "external": {**TWICE, "cuStreamGetId": 1, "cuEventRecord": 1},
}


def calls_of(machine: fake.Machine, work: Callable[[], object]) -> dict[str, int]:
    """The calls of one run of something that is warm."""
    for _ in range(3):
        work()
    gc.collect()  # plans of other tests free their memory and events when they go
    before = {name: machine.calls(name) for name in machine.entry_points()}
    work()
    found = {name: machine.calls(name) - count for name, count in before.items()}
    return {name: count for name, count in found.items() if count}


@pytest.fixture(params=AS_WELL)
def as_well(request: pytest.FixtureRequest, machine: fake.Machine) -> dict[str, int]:
    """What a step takes as well on the stream that is current."""
    name = str(request.param)
    machine.use(None if name == "default" else machine.stream(lasts=name == "torch's own"))
    return AS_WELL[name]


@pytest.mark.usefixtures("as_well")
def test_a_hook_that_accumulates(machine: fake.Machine) -> None:
    sums = [fake.claim(torch.zeros(LARGE))]

    def hook() -> None:  # another gradient each time
        grad = fake.claim(torch.ones(LARGE, dtype=torch.bfloat16))
        _C.device_accumulate(sums, [grad], 1.0, False)
        machine.synchronize()

    before = _C.device_counts()[1]
    assert calls_of(machine, hook) == LAUNCH
    assert _C.device_counts()[1] == before
    assert torch.equal(fake.plain(sums[0]), torch.full((LARGE,), 4.0))


def test_a_released_update(machine: fake.Machine, as_well: dict[str, int]) -> None:
    pair = Twins([values((LARGE,), 0, torch.float32)])
    a, b = pair.optimizers(faststep.optim.AdamW, lr=1e-2)
    number = 0

    def update() -> None:  # another gradient, and another learning rate
        nonlocal number
        number += 1
        pair.set_grads([values((LARGE,), number, torch.float32)])
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 1e-2 / number
            optimizer.step()
        machine.synchronize()

    assert calls_of(machine, update) == {**STEP, **as_well}
    assert _C.device_counts()[1] > 0
    pair.assert_same(a, b)


def test_lists(machine: fake.Machine, as_well: dict[str, int]) -> None:
    pair = Twins([values((n,), n, torch.float32) for n in (7, LARGE, 300)])
    pair.set_grads([values((n,), n, torch.float32) for n in (7, LARGE, 300)])
    out = fake.claim(torch.zeros((), dtype=torch.float64))
    grads = [p.grad for p in pair.cuda]
    found = calls_of(machine, lambda: _C.device_norm(grads, 2.0, out))
    assert found == {**LAUNCH, **as_well}
    assert calls_of(machine, lambda: _C.device_clip(grads, 0.5, out)) == LAUNCH
    assert calls_of(machine, lambda: _C.device_clamp(grads, 0.5)) == LAUNCH


def test_a_long_list_is_uploaded(machine: fake.Machine) -> None:
    sums = [fake.claim(torch.zeros(2)) for _ in range(200)]
    grads = [fake.claim(torch.ones(2)) for _ in range(200)]
    before = _C.device_counts()[1]
    _C.device_accumulate(sums, grads, 1.0, False)
    assert _C.device_counts()[1] == before + 1
    machine.synchronize()
    assert all(torch.equal(fake.plain(s), torch.ones(2)) for s in sums)


@pytest.mark.parametrize("count", [1, 3, 40, 60])
@pytest.mark.parametrize("strided", [False, True])
def test_sums_of_short_lists_have_the_bits_of_the_cpu(
    machine: fake.Machine, count: int, strided: bool
) -> None:
    """Chunks are found from the tensors' sizes; layouts go with the launch too."""
    sizes = [(1 + 37 * i % 50, 1 + (i * i) % 700) for i in range(count - 1)] + [(7, 8000)]
    sums = [values(size, 1, torch.float32) for size in sizes]
    terms = [values(size, 2, torch.bfloat16) for size in sizes]
    if strided:
        sums = [s.t().contiguous().t() if i % 2 else s for i, s in enumerate(sums)]
    ours = [fake.claim(s.clone()) for s in sums]
    _C.accumulate(sums, terms, 0.3, False)
    _C.device_accumulate(ours, [fake.claim(t.clone()) for t in terms], 0.3, False)
    machine.synchronize()
    for s, mine in zip(sums, ours, strict=True):
        assert same_bits(s, fake.plain(mine))
    _C.device_clamp(ours, 0.25)
    machine.synchronize()
    for s, mine in zip(sums, ours, strict=True):
        assert same_bits(s.clamp(-0.25, 0.25), fake.plain(mine))


def test_sums_in_a_graph_need_nothing_but_the_graph(machine: fake.Machine) -> None:
    """Later sums, over other tensors, do not disturb it."""
    stream = machine.stream()
    sums = [fake.claim(torch.zeros(LARGE))]
    grad = fake.claim(torch.ones(LARGE))
    machine.use(stream)
    machine.capture(stream)
    _C.device_accumulate(sums, [grad], 1.0, False)
    graph = machine.captured(stream)
    others = [fake.claim(torch.zeros(9))]
    _C.device_accumulate(others, [fake.claim(torch.ones(9))], 1.0, False)
    for _ in range(3):
        machine.replay(graph, stream)
    machine.synchronize()
    assert torch.equal(fake.plain(sums[0]), torch.full((LARGE,), 3.0))
    assert torch.equal(fake.plain(others[0]), torch.ones(9))
    machine.library.fake_cuda_free_graph(graph)


def test_updates_on_changing_streams_keep_their_order(machine: fake.Machine) -> None:
    """From streams whose end is marked only now to others, and back."""
    machine.lag(20)
    pair = Twins([values((100,), 0, torch.float32)])
    a, b = pair.optimizers(faststep.optim.AdamW, lr=1e-2, max_grad_norm=0.5)
    own, external = machine.stream(), machine.stream(lasts=False)
    streams = [None, own, None, external, own]
    grads = []  # which the late device reads
    for number in range(20):
        machine.use(streams[number % 5])
        pair.set_grads([values((100,), number, torch.float32)])
        grads.append(pair.cuda[0].grad)
        a.step()
        b.step()
    machine.lag(0)
    machine.synchronize()
    pair.assert_same(a, b)


def test_python_is_asked_about_a_stream_once(
    machine: fake.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says may come with another gradient, which the step then takes."""
    pair = Twins([values((100,), 0, torch.float32)])
    a, b = pair.optimizers(faststep.optim.AdamW, lr=1e-2)
    asked = []

    def lasts(device: int, handle: int) -> bool:
        asked.append((device, handle))
        pair.cuda[0].grad = fake.claim(pair.cpu[0].grad.clone())
        return True

    _C.use_streams(lasts)
    streams = [machine.stream(), machine.stream()]
    for number in range(6):
        machine.use(streams[number % 2])
        pair.set_grads([values((100,), number, torch.float32)])
        if number < 2:
            pair.cuda[0].grad = fake.claim(torch.full((100,), torch.nan))
        for optimizer in (a, b):
            optimizer.step()
        machine.synchronize()
    assert asked == [(0, stream) for stream in streams]
    pair.assert_same(a, b)


def test_an_answer_that_fails_names_the_parameter(machine: fake.Machine) -> None:
    def lasts(device: int, handle: int) -> bool:
        raise ValueError("no idea")

    pair = Twins([torch.ones(3)])
    _, optimizer = pair.optimizers(faststep.optim.SGD)
    pair.set_grads([torch.ones(3)])
    machine.use(machine.stream())
    _C.use_streams(lasts)
    with pytest.raises(RuntimeError, match=r"parameter 0 in group 0 .*no idea"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"tensor 0 .*no idea"):
        _C.device_clamp([pair.cuda[0].grad], 1.0)
    _C.use_streams(None)
    optimizer.step()


def test_nothing_grows(machine: fake.Machine) -> None:
    sums = [fake.claim(torch.zeros(300))]
    grads = [fake.claim(torch.ones(300))]
    pair = Twins([torch.ones(300)])
    pair.set_grads([torch.ones(300)])
    _, optimizer = pair.optimizers(faststep.optim.AdamW)

    def once() -> None:
        _C.device_accumulate(sums, grads, 1.0, False)
        _C.device_clamp(grads, 1.0)
        optimizer.step()
        machine.synchronize()

    once()
    gc.collect()
    assert_no_growth(once)
