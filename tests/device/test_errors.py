"""What goes wrong between Python and the device: a clear error, and a next step that works."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import faststep
from faststep import _C
from gpu.common import Twins, values
from programs import Programs

from . import fake

SETUP = """
import torch, faststep
from device import fake
import pytest
patch = pytest.MonkeyPatch()
machine = fake.start(patch)
p = fake.parameter(torch.ones(3))
p.grad = fake.claim(torch.ones(3))
optimizer = faststep.optim.AdamW([p])
"""


def forked(programs: Programs, code: str) -> str:
    """What a process prints that has imported torch, but nothing of faststep."""
    there = f"import os\nos.chdir({str(fake.ROOT / 'tests')!r})\n"
    done = programs.run(there + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_states_on_the_wrong_device(machine: fake.Machine) -> None:
    pair = Twins([torch.ones(3)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    pair.set_grads([torch.ones(3)])
    optimizer.step()
    state = optimizer.state[pair.cuda[0]]
    state["exp_avg"] = torch.zeros(3)
    with pytest.raises(
        RuntimeError, match=r"state 'exp_avg' of parameter 0 .* is on cpu, not on cuda:0"
    ):
        optimizer.step()
    assert float(fake.plain(state["step"])) == 1.0
    state["exp_avg"] = fake.claim(torch.zeros(3), 1)
    with pytest.raises(RuntimeError, match=r"is on cuda:1, not on cuda:0"):
        optimizer.step()
    state["exp_avg"] = fake.claim(torch.zeros(3))
    optimizer.step()
    assert float(fake.plain(state["step"])) == 2.0


def test_shared_step_counters(machine: fake.Machine) -> None:
    pair = Twins([torch.ones(3), torch.ones(2), torch.ones(1)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    pair.set_grads([torch.ones(3), torch.ones(2), torch.ones(1)])
    optimizer.step()
    first, _, last = (optimizer.state[p] for p in pair.cuda)
    last["step"] = first["step"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"share the tensor state\['step'\]"):
            optimizer.step()
    last["step"] = fake.claim(torch.tensor(1.0))
    optimizer.step()
    assert [float(fake.plain(optimizer.state[p]["step"])) for p in pair.cuda] == [2.0] * 3


def test_a_step_counter_that_becomes_shared_between_steps(machine: fake.Machine) -> None:
    """Also where the tables of the step before, with fewer gradients, look the same."""
    pair = Twins([torch.ones(3), torch.ones(2)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    first, second = pair.cuda
    for grads in ([torch.ones(3), torch.ones(2)], [None, torch.ones(2)]):
        pair.set_grads(grads)
        optimizer.step()
    optimizer.state[first]["step"] = optimizer.state[second]["step"]
    pair.set_grads([torch.ones(3), torch.ones(2)])
    with pytest.raises(RuntimeError, match=r"share the tensor state\['step'\]"):
        optimizer.step()


def test_more_dimensions_than_a_layout_holds(machine: fake.Machine) -> None:
    shape = (2,) * 9
    pair = Twins([values(shape, 0, torch.float32)])
    optimizer = faststep.optim.SGD(pair.cuda, lr=0.1)
    odd = torch.randn(tuple(2 * n for n in shape))[(slice(None, None, 2),) * 9]
    pair.cuda[0].grad = fake.claim(odd)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0 .* needs 9 strides"):
        optimizer.step()


def test_every_error_of_the_driver(machine: fake.Machine) -> None:
    """Each call of a first and of a second step fails once; the step after it is right."""
    names = machine.entry_points()
    assert "cuLaunchKernel" in names
    failures = 0
    for name in names:
        for nth in (1, 2):
            pair = Twins([values((40,), 0, torch.float32)])
            a, b = pair.optimizers(faststep.optim.AdamW, max_grad_norm=0.5)
            machine.use(machine.stream())
            pair.set_grads([values((40,), 1, torch.float32)])
            machine.fail(name, nth, 1)
            error = None
            try:
                b.step()
            except RuntimeError as raised:
                error = str(raised)
            machine.fail(name, 0, 0)
            if error is None:
                a.step()
                pair.assert_same(a, b)
                continue
            failures += 1
            assert name.removesuffix("_v2") in error
            assert "as the test wished" in error  # the driver's own words
            assert "1 parameters there, of which the first is parameter 0 in group 0" in error
            assert "shape (40,), torch.float32, cuda:0" in error
            if (name, nth) == ("cuLaunchKernel", 2) or b.state[pair.cuda[0]]["step"] == 1:
                continue  # the step was decided, and may have counted
            a.step()
            b.step()
            pair.assert_same(a, b)
    assert failures >= 8


def test_errors_of_a_step_name_a_parameter(machine: fake.Machine) -> None:
    """A launch is for all parameters of a device: the first with a gradient stands for them."""
    pair = Twins([torch.ones(n) for n in (1, 2, 3, 4)], ["cuda:0"] + ["cuda:1"] * 3)
    names = [("a", pair.cuda[0]), ("b", pair.cuda[1])], [("c", pair.cuda[2]), ("d", pair.cuda[3])]
    optimizer = faststep.optim.SGD([{"params": group} for group in names], lr=0.1)
    for first in (True, False):
        pair.set_grads([torch.ones(1), None, None if first else torch.ones(3), torch.ones(4)])
        machine.fail("cuLaunchKernel", 4, 1)  # the update on the second device
        with pytest.raises(RuntimeError, match="cuLaunchKernel of fst_update on CUDA dev") as info:
            optimizer.step()
        who = "1 in group 1 ('d', shape (4,)" if first else "0 in group 1 ('c', shape (3,)"
        assert f"{2 - first} parameters there, of which the first is parameter {who}" in str(
            info.value
        )
        optimizer.step()


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuCtxPushCurrent_v2"])
def test_errors_of_a_list_name_a_tensor(machine: fake.Machine, call: str) -> None:
    pair = Twins([torch.ones(2, 3), torch.ones(5)])
    pair.set_grads([torch.ones(2, 3), torch.ones(5)])
    faststep.clip_grad_norm_(pair.cuda, 0.5)
    grads = [p.grad for p in pair.cuda]
    sums = [fake.claim(torch.zeros(2, 3)), fake.claim(torch.zeros(5))]
    for use in (
        lambda: faststep.clip_grad_norm_(pair.cuda, 0.5),
        lambda: faststep.clip_grad_value_(pair.cuda, 0.5),
        lambda: _C.device_accumulate(sums, grads, 1.0, False),
    ):
        machine.fail(call, 1, 1)
        with pytest.raises(RuntimeError, match=call) as info:
            use()
        assert "for 2 tensors, of which the first has the shape (2, 3)" in str(info.value)
        use()


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_torch_holds_is_given_back(
    machine: fake.Machine, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """torch.OutOfMemoryError only where that does not help; then nothing has changed."""
    out_of_memory = 2
    pair = Twins([torch.ones(3)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    pair.set_grads([torch.ones(3)])
    emptied: list[int] = []

    def empty_cache() -> None:
        emptied.append(1)
        if again:
            machine.fail("cuMemAlloc_v2", 1, out_of_memory)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    machine.fail("cuMemAlloc_v2", 1, out_of_memory)
    if again:
        with pytest.raises(torch.OutOfMemoryError, match=r"cuMemAlloc.*nothing was updated"):
            optimizer.step()
        assert torch.equal(fake.plain(pair.cuda[0]), torch.ones(3))
        machine.fail("cuMemAlloc_v2", 0, 0)
    optimizer.step()
    assert emptied == [1]
    assert not torch.equal(fake.plain(pair.cuda[0]), torch.ones(3))


def test_lists_have_torch_give_its_memory_back(programs: Programs) -> None:
    """As a step does. Programs that look for a batch size look for torch's error and its words. The
    lists are longer and longer, because the module keeps the memory of its tables."""
    out = forked(
        programs,
        SETUP
        + """
from faststep import _C
emptied = []
def empty_cache():
    emptied.append(1)
    machine.fail("cuMemAlloc_v2", int(again), 2)
patch.setattr(torch.cuda, "empty_cache", empty_cache)
one, found = fake.claim(torch.ones(())), fake.claim(torch.zeros(()))
for i, what in enumerate(("clip", "clamp", "unscale", "accumulate", "squares")):
    count = 100 << i
    params = [fake.parameter(torch.ones(3)) for _ in range(count)]
    grads, sums = ([fake.claim(torch.ones(3)) for _ in range(count)] for _ in range(2))
    for param, grad in zip(params, grads):
        param.grad = grad
    squares = fake.claim(torch.zeros(count, dtype=torch.float64))
    use = {
        "clip": lambda: faststep.clip_grad_norm_(params, 0.5),
        "clamp": lambda: faststep.clip_grad_value_(params, 0.5),
        "unscale": lambda: _C.device_unscale(grads, one, found, False),
        "accumulate": lambda: _C.device_accumulate(sums, grads, 1.0, True),
        "squares": lambda: _C.device_chunk_squares(grads, None, squares, found),
    }[what]
    for again in (True, False):
        machine.fail("cuMemAlloc_v2", 1, 2)
        emptied.clear()
        try:
            use()
            error = ""
        except torch.OutOfMemoryError as raised:
            error = str(raised)
        print(what, len(emptied), "CUDA out of memory. cuMemAlloc_v2 on" in error, len(error) > 0)
""",
    )
    whats = ("clip", "clamp", "unscale", "accumulate", "squares")
    each = [f"{what} 1 {failed} {failed}" for what in whats for failed in (True, False)]
    assert out.splitlines() == each


@pytest.mark.parametrize("what", ["step", "clip_grad_norm_"])
@pytest.mark.parametrize("error", [214, 700, 702, 710, 716, 719])
def test_an_error_that_may_be_of_earlier_work_blames_no_parameter(
    machine: fake.Machine, what: str, error: int
) -> None:
    pair = Twins([torch.ones(3)])
    pair.set_grads([torch.ones(3)])
    optimizer = faststep.optim.AdamW(pair.cuda)
    machine.fail("cuLaunchKernel", 1, error)
    with pytest.raises(torch.AcceleratorError, match=r"^CUDA error: ") as info:
        optimizer.step() if what == "step" else faststep.clip_grad_norm_(pair.cuda, 0.5)
    assert info.value.error_code == error
    assert "may be of earlier work" in str(info.value)
    assert "CUDA_LAUNCH_BLOCKING=1" in str(info.value)
    assert "parameter" not in str(info.value)
    assert "tensors" not in str(info.value)


def test_a_forked_child_says_so(programs: Programs) -> None:
    out = forked(
        programs,
        SETUP
        + """
import os
optimizer.step()
pid = os.fork()
if pid == 0:
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error, flush=True)
    q = torch.nn.Parameter(torch.ones(3))
    q.grad = torch.ones(3)
    faststep.optim.AdamW([q]).step()
    print("CPU", q.detach().tolist() != [1.0, 1.0, 1.0], flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
""",
    )
    assert "fork" in out
    assert "CPU True" in out


def test_import_does_not_touch_the_driver(programs: Programs) -> None:
    fake.library()  # builds it
    out = forked(
        programs,
        """
import ctypes
from device import fake
loaded = ctypes.CDLL(str(fake.ROOT / fake.LIBRARY))
import torch, faststep
q = torch.nn.Parameter(torch.ones(3))
q.grad = torch.ones(3)
faststep.optim.AdamW([q], max_grad_norm=1.0).step()
faststep.clip_grad_norm_([q], 1.0)
print(loaded.fake_cuda_calls(None))
""",
    )
    assert out.strip() == "0"


OPENS = """
import torch, faststep
from faststep import _C

def opened():
    return "libcuda" in open("/proc/self/maps").read()

p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
optimizer, scaler = faststep.optim.AdamW([p]), faststep.amp.GradScaler("cpu")
scaler.scale(p.sum()).backward()
scaler.unscale_(optimizer)
faststep.clip_grad_norm_([p], 1.0)
scaler.step(optimizer)
scaler.update()
print(opened())
_C.use_kernels_of("/dev/null")
try:
    _C.device_info(0)
except RuntimeError:
    print(opened())
"""


def test_libcuda_is_opened_by_the_first_use_only() -> None:
    """A driver lies where it would be found: import and CPU use leave it there."""
    fake.build(fake.DRIVER)
    done = subprocess.run(
        [sys.executable, "-c", OPENS],
        env={**os.environ, "LD_LIBRARY_PATH": str((fake.ROOT / fake.DRIVER).parent)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["False", "True"], done.stderr


def has_driver(programs: Programs) -> bool:
    """Asked in a process of its own: in this one the fake driver may be loaded."""
    out = forked(
        programs,
        """
import ctypes
try:
    print(bool(ctypes.CDLL("libcuda.so.1")))
except OSError:
    print(False)
""",
    )
    return out == "True\n"


@pytest.mark.parametrize(
    ("library", "machine", "text"),
    [
        ("", None, "no NVIDIA driver: libcuda.so.1"),
        (fake.OLD_DRIVER, (1, 90, 10020), "for CUDA 10.2) is too old: it has no cuStreamGetCa"),
        (fake.DRIVER, (0, 90, 13000), "cuInit: CUDA_ERROR_NO_DEVICE"),
        (fake.DRIVER, (1, 70, 13000), "newer device than Fake GPU 0 (compute capability 7.0)"),
        (fake.DRIVER, (1, 90, 12040), "a newer driver than one for CUDA 12.4"),
    ],
    ids=["no driver", "old driver", "no device", "old device", "driver older than the kernels"],
)
def test_machines_that_cannot_be_used(
    programs: Programs,
    tmp_path: Path,
    library: str,
    machine: tuple[int, int, int] | None,
    text: str,
) -> None:
    """Each use says why, and the CPU is as ever before and after."""
    if not library and has_driver(programs):
        pytest.skip("this machine has a driver")
    if library:
        fake.build(library)
    fatbin = tmp_path / "kernels.fatbin"
    fatbin.write_bytes(fake.EMPTY_FATBIN)
    out = forked(
        programs,
        f"""
import ctypes, torch, faststep
from faststep import _C

p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
optimizer = faststep.optim.AdamW([p], max_grad_norm=1.0)

def cpu():
    before = p.detach().clone()
    optimizer.step()
    faststep.clip_grad_norm_([p], 1.0)
    assert not torch.equal(before, p.detach())

cpu()
_C.use_kernels_of({str(fatbin)!r})
if {library!r}:  # called libcuda.so.1, so that it is found from here on
    driver = ctypes.CDLL({str(fake.ROOT / library)!r})
    if {machine}:
        driver.fake_cuda_machine(*{machine})
for _ in range(2):
    try:
        _C.device_info(0)
    except RuntimeError as error:
        print(error)
    cpu()
""",
    )
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(text in line for line in lines)


def test_a_first_step_on_a_device_that_is_too_old(programs: Programs) -> None:
    out = forked(
        programs,
        SETUP
        + """
machine.library.fake_cuda_machine(1, 70, 13000)
for _ in range(2):
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error)
    assert not any(fake.plain(value).any() for value in optimizer.state[p].values())
q = torch.nn.Parameter(torch.ones(3))
q.grad = torch.ones(3)
faststep.optim.AdamW([q]).step()
assert q.detach().tolist() != [1.0, 1.0, 1.0]
machine.library.fake_cuda_machine(1, 90, 13000)
optimizer.step()
assert torch.equal(fake.plain(p), q)
""",
    )
    for line in out.splitlines():
        assert line.startswith("AdamW: cuModuleLoadData on CUDA device 0: CUDA_ERROR_NO_BINARY")
        assert line.endswith("is parameter 0 in group 0 (shape (3,), torch.float32, cuda:0)")
    assert len(out.splitlines()) == 2


def test_no_memory_for_new_states(machine: fake.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error comes through, and the next step starts from nothing."""
    pair = Twins([torch.ones(3)] * 3)
    a, b = pair.optimizers(faststep.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    pair.set_grads([torch.ones(3)] * 3)
    zeros, calls = torch.zeros_like, 0

    def full(*args: object, **kwargs: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return zeros(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", full)
        with pytest.raises(torch.OutOfMemoryError):
            b.step()
    for _ in range(2):
        a.step()
        b.step()
        pair.assert_same(a, b)
