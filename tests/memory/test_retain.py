"""Memory that torch frees stays with the process, and what that must not change.

Each program runs in a process of its own: what is kept belongs to a whole process.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faststep import memory
from faststep.memory.groups import group_of
from programs import Programs

BEGIN = """
import gc, os, resource, sys, threading, warnings
from pathlib import Path
import torch
import faststep
from faststep import _C, memory

MEGABYTE = 1 << 20

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

def tensor(megabytes):
    return torch.ones(int(megabytes * MEGABYTE) // 4)

torch.set_num_threads(2)
"""


Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(programs: Programs) -> Run:
    """Runs a program and returns what it prints; a failure of it is one of the test."""

    def run(program: str, *arguments: str, **environment: str) -> str:
        done = programs.run(BEGIN + program, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


TRAINING = """
at_first = peak()
if sys.argv[1] == "retain":
    assert memory.retain()
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
optimizer = faststep.optim.AdamW(model.parameters(), lr=1e-3)
if sys.argv[2] == "release":
    released = faststep.release_gradients(model, optimizer)
data = torch.randn(256, 1024)
for step in range(8):
    if step == 4:
        before = faults()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(faults() - before, peak() - at_first, loss.item())
"""


def train(program: str, *arguments: str, **environment: str) -> list[str]:
    """In a new process: that of a fork begins with memory that its parent took."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("gradients", ["hold", "release"])
def test_training_takes_no_page_faults_and_no_more_memory(run: Run, gradients: str) -> None:
    plain_faults, plain_peak, plain_loss = run(TRAINING, "plain", gradients).split()
    kept_faults, kept_peak, kept_loss = run(TRAINING, "retain", gradients).split()
    assert int(plain_faults) > (1000 if gradients == "hold" else 0)
    assert int(kept_faults) < max(int(plain_faults) / 100, 100)
    assert int(kept_peak) <= int(plain_peak) * 1.05
    assert kept_loss == plain_loss


READING = """
import resource, sys
import torch

if sys.argv[1] == "swapped":
    from faststep import clip_grad_norm_
    from faststep.optim import Adam
else:
    from torch.nn.utils import clip_grad_norm_
    from torch.optim import Adam

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

torch.set_num_threads(2)
torch.manual_seed(0)
lstm = torch.nn.LSTM(256, 256, num_layers=2, batch_first=True)
head = torch.nn.Linear(256, 96)
params = [*lstm.parameters(), *head.parameters()]
optimizer = Adam(params)
text, target = torch.randn(32, 64, 256), torch.randint(96, (32 * 64,))
passes = updates = 0
for step in range(6):
    begun = faults()
    logits = head(lstm(text)[0]).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, target).backward()
    between = faults()
    clip_grad_norm_(params, 0.5)
    optimizer.step()
    if step >= 2:
        passes, updates = passes + between - begun, updates + faults() - between
    optimizer.zero_grad()
print(passes, updates)
"""


@pytest.mark.slow
def test_an_lstm_takes_no_more_page_faults_with_imports_swapped() -> None:
    """How many it takes depends on where glibc's heap ends, which differs between processes.

    With a fixed threshold each large block is mapped by itself, and the numbers are the same, but
    for some percent where other programs run beside it.
    """
    fixed = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
    plain = [int(count) for count in train(READING, "plain", **fixed)]
    swapped = [int(count) for count in train(READING, "swapped", **fixed)]
    assert plain[0] > 4 * 1000
    assert abs(swapped[0] - plain[0]) < plain[0] / 8
    assert plain[1] > 4 * 1000  # of clip and step
    assert swapped[1] < 4  # of clip and step


def test_limit_release_and_undo(run: Run) -> None:
    run("""
assert not memory.stats().retains
early = tensor(8)
assert memory.retain()
del early  # the C library's
assert memory.stats().kept == 0
some = [tensor(8) for _ in range(4)]
assert memory.stats().used >= 32 * MEGABYTE
before = memory.stats().resident
some.clear()
assert memory.stats().kept >= 32 * MEGABYTE
assert memory.stats().resident > before - MEGABYTE
assert memory.release() >= 32 * MEGABYTE  # the system may fill huge pages at both ends
assert memory.stats().resident < before - 27 * MEGABYTE and memory.stats().retains
assert memory.retain(limit=10 * MEGABYTE)
some = [tensor(8) for _ in range(4)]
some.clear()
assert memory.stats().kept == 10 * MEGABYTE == memory.stats().limit
assert memory.retain(0)
assert memory.stats().kept == 0
assert memory.retain(2**80)
late = tensor(8)
assert memory.undo() == 0 and not memory.stats().retains
used = memory.stats().used
more = tensor(8)
assert memory.stats().used == used >= 8 * MEGABYTE
assert late.sum() == more.sum() == 2 * MEGABYTE
del late
assert memory.stats().used == memory.stats().kept == 0
assert memory.undo() == 0
assert memory.retain() and memory.retain()
late = tensor(8)
assert memory.stats().used >= 8 * MEGABYTE
""")


def test_sizes_around_the_least_and_what_others_do_with_the_memory(run: Run) -> None:
    run("""
import numpy
memory.retain()
for size in (131071, 131072, 131073, 147455, 147456, 147457, 2**21 - 1, 2**21, 2**21 + 1):
    first = torch.arange(size, dtype=torch.uint8)
    second = torch.zeros(size, dtype=torch.uint8)
    assert torch.from_dlpack(first.clone().numpy()).equal(first)
    storage = first.untyped_storage()
    storage.resize_(3 * size)
    assert (first == torch.arange(size, dtype=torch.uint8)).all() and not second.any()
    del first, storage, second
    grown = torch.empty(0, dtype=torch.uint8)
    for n in (100, size - 1, size, size + 1, 2 * size):
        grown.resize_(n).fill_(n % 251)
    assert (grown == n % 251).all()
    view = numpy.asarray(grown)
    del grown
    assert (view == n % 251).all()
    torch.from_numpy(numpy.ones(size))  # the C library's memory
try:
    torch.empty(2**60)
except RuntimeError as error:
    assert "memory" in str(error)
else:
    raise AssertionError("there is no such memory")
assert memory.stats().used < 2 * MEGABYTE * 40
""")


def test_threads_free_what_others_took(run: Run) -> None:
    run("""
import queue
memory.retain()
tensors = queue.Queue(8)
def make(seed):
    for i in range(150):
        tensors.put((seed + i, torch.full((50000 + 997 * (i % 37),), float(seed + i))))
def drop():
    while True:
        value, made = tensors.get()
        if value is None:
            return
        assert (made == value).all()
makers = [threading.Thread(target=make, args=(1000 * i,)) for i in range(3)]
droppers = [threading.Thread(target=drop) for i in range(2)]
for thread in makers + droppers:
    thread.start()
for thread in makers:
    thread.join()
for thread in droppers:
    tensors.put((None, None))
for thread in droppers:
    thread.join()
assert memory.stats().used == 0 < memory.stats().kept
""")


def test_a_child_gets_the_tensors_and_none_of_what_is_kept(run: Run) -> None:
    run("""
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
memory.retain()
mine, gone = tensor(8), tensor(16)
del gone
stop = threading.Event()
def churn():
    while not stop.is_set():
        tensor(1)
busy = threading.Thread(target=churn, daemon=True)
busy.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        good = memory.stats().kept == 0 and bool((mine == 1).all())
        more = tensor(8)
        good &= memory.stats().used >= 16 * MEGABYTE and bool((more == 1).all())
        del more, mine
        good &= memory.stats().kept >= 16 * MEGABYTE
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
busy.join()
assert (mine == 1).all() and memory.stats().kept >= 16 * MEGABYTE
""")


def test_loaders_use_it_with_and_without_workers(run: Run) -> None:
    run("""
from torch.utils.data import TensorDataset
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((20000,), float(i))
memory.retain()
rows = torch.arange(64.0).repeat_interleave(20000).view(64, 20000)
before = memory.stats().used
loader = faststep.data.DataLoader(TensorDataset(rows), batch_size=8)
batches = [batch for (batch,) in loader]
assert memory.stats().used - before >= 64 * 20000 * 4
assert torch.cat(batches).equal(rows)
del batches
for workers in (0, 2):
    for kind in (faststep.data.DataLoader, torch.utils.data.DataLoader):
        assert torch.cat(list(kind(Rows(), batch_size=8, num_workers=workers))).equal(rows)
""")


DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(600, 600))
optimizer = faststep.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.full((300, 600), 1.0 + rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert memory.stats().retains and memory.stats().used
weight = model.module.weight.detach()
both = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(both, weight)
assert both[0].equal(both[1])
del model, optimizer  # or the group's threads end with Python, which torch may abort
gc.collect()
dist.destroy_process_group()
"""


def test_two_ranks(programs: Programs) -> None:
    done = programs.ranks(2, BEGIN + DDP, FASTSTEP_RETAIN="1")
    assert done.returncode == 0, done.stderr


def test_what_is_kept_goes_back_before_a_group_is_full(run: Run, tmp_path: Path) -> None:
    run(
        """
folder = Path(sys.argv[1])
(folder / "memory.max").write_text(f"{1024 * MEGABYTE}\\n")
(folder / "memory.current").write_text(f"{500 * MEGABYTE}\\n")
_C.retain_memory(-1, str(folder), 2)
tensor(200)
assert memory.stats().kept >= 200 * MEGABYTE
(folder / "memory.current").write_text(f"{900 * MEGABYTE}\\n")
held = tensor(100)
assert memory.stats().kept >= 40 * MEGABYTE  # 124 MiB were left, of which 64 stay free
(folder / "memory.current").write_text(f"{1023 * MEGABYTE}\\n")
small = tensor(80)
assert memory.stats().kept == 0
(folder / "memory.stat").write_text(f"file 1\\ninactive_file {800 * MEGABYTE}\\n")
del held, small
assert memory.stats().kept >= 180 * MEGABYTE  # files that the kernel can drop do not count
""",
        str(tmp_path),
    )


def test_a_free_leaves_errno_as_it_is(run: Run, tmp_path: Path) -> None:
    """It looks at the group, whose files are gone."""
    run(
        """
import ctypes
_C.retain_memory(-1, sys.argv[1], 2)
path = Path(torch.__file__).parent / "lib" / "libc10.so"
library = ctypes.CDLL(str(path), use_errno=True)
take, give = library["_ZN3c109alloc_cpuEm"], library["_ZN3c108free_cpuEPv"]
take.restype, take.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
give.restype, give.argtypes = None, (ctypes.c_void_p,)
block = take(100 * MEGABYTE)
assert memory.stats().used >= 100 * MEGABYTE
ctypes.set_errno(77)
give(block)
assert memory.stats().used == 0 and ctypes.get_errno() == 77, ctypes.get_errno()
""",
        str(tmp_path),
    )


def test_what_is_kept_goes_back_before_an_allocation_fails(run: Run) -> None:
    run("""
memory.retain()
tensor(100)
tensor(300)
assert memory.stats().kept >= 300 * MEGABYTE
data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 50 * MEGABYTE, -1))
some = [tensor(100) for _ in range(3)]
try:
    more = tensor(2000)
except RuntimeError as error:
    assert "memory" in str(error)
else:
    raise AssertionError("the limit did not hold")
assert all((one == 1).all() for one in some)
""")


@pytest.mark.parametrize(("value", "retains"), [("1", True), ("0", False), ("", False)])
def test_the_variable(run: Run, value: str, retains: bool) -> None:
    assert run("print(memory.stats().retains)", FASTSTEP_RETAIN=value).split() == [str(retains)]


def test_a_wrong_variable(programs: Programs) -> None:
    done = programs.run("import faststep", FASTSTEP_RETAIN="yes")
    assert done.returncode == 1
    assert "ImportError: FASTSTEP_RETAIN=yes: it must be 1, 0 or empty" in done.stderr


LEFT_ALONE = """
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert not memory.retain()
assert "libother.so, not glibc's" in str(told[0].message)
assert told[0].category is RuntimeWarning
assert "libother.so" in memory.stats().reason and not memory.stats().retains
tensor(8)
assert memory.stats().used == 0
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_another_allocator_is_left_alone(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\n"
        "void *malloc(size_t size)\n{\n    return __libc_malloc(size);\n}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    train(BEGIN + LEFT_ALONE, LD_PRELOAD=str(library))


@pytest.mark.parametrize("limit", [1.5, "1GB", True])
def test_a_limit_that_is_no_int(limit: object) -> None:
    with pytest.raises(TypeError, match="limit must be an int, in bytes, or None"):
        memory.retain(limit)  # type: ignore[arg-type]


def test_a_negative_limit() -> None:
    with pytest.raises(ValueError, match="limit must be at least 0, not -1"):
        memory.retain(-1)
    assert not memory.stats().retains


def group_files(process: Path, mount: Path, memberships: str, **limits: str) -> None:
    process.mkdir(exist_ok=True)
    (process / "cgroup").write_text(memberships)
    for path, text in limits.items():
        file = mount / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def test_the_group_with_the_lowest_limit(tmp_path: Path) -> None:
    process, mount = tmp_path / "self", tmp_path / "cgroup"
    assert group_of(process, mount) is None
    group_files(process, mount, "0::/a/b\n", **{"a/memory.max": "500", "a/b/memory.max": "max"})
    found = group_of(process, mount)
    assert found is not None
    assert found == (mount / "a", 2, 500)
    group_files(process, mount, "0::/elsewhere\n", **{"memory.max": "900"})
    assert group_of(process, mount) == (mount, 2, 900)
    limits = {"memory/memory.limit_in_bytes": str(2**63 - 4096)}
    limits["memory/jobs/memory.limit_in_bytes"] = "700"
    group_files(process, mount, "4:cpu,memory:/jobs\n9:name=systemd:/\n", **limits)
    assert group_of(process, mount) == (mount / "memory" / "jobs", 1, 700)


REQUESTS = """
if sys.argv[1] == "retain":
    memory.retain()
held = tensor(64)
total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
def refused(size):
    try:
        return torch.empty(size, dtype=torch.uint8).numel() == 0
    except RuntimeError as error:
        assert "DefaultCPUAllocator: can't allocate memory" in str(error), error
        return True
print([refused(int(total * share)) for share in (0.4, 0.9, 1.1, 1.25, 4, 10, 100)])
del held
"""


def test_requests_that_plain_torch_refuses_are_refused(run: Run) -> None:
    assert run(REQUESTS, "retain") == run(REQUESTS, "plain") != ""


def test_what_went_back_counts_against_no_limit(run: Run) -> None:
    run("""
def data():
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
memory.retain()
tensor(8)
memory.release()
before = data()
some = [tensor(50) for _ in range(4)]
small = [tensor(0.5) for _ in range(8)]
del some
assert data() >= before + 200 * MEGABYTE
assert memory.release() >= 200 * MEGABYTE
assert data() <= before + 12 * MEGABYTE, (data() - before) / MEGABYTE
again = tensor(50)
assert (again == 1).all() and all((one == 1).all() for one in small)
del again
memory.undo()
assert data() <= before + 12 * MEGABYTE
""")


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_under_a_limit_nothing_is_reserved_or_kept(run: Run, limit: str) -> None:
    run(
        """
size = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(getattr(resource, sys.argv[1]), (size + 1000 * MEGABYTE, -1))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert not memory.retain()
assert sys.argv[1] in str(told[0].message), told[0].message
assert not memory.stats().retains
now = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) * 1024
assert now < size + 2 * MEGABYTE
del told
some = [tensor(100) for _ in range(7)]
assert all((one == 1).all() for one in some)
""",
        limit,
    )


@pytest.mark.parametrize(("limit", "line"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_a_limit_that_comes_later_counts_only_tensors(run: Run, limit: str, line: str) -> None:
    """A script may set it under `run`, which calls retain() first."""
    run(
        """
import numpy
tensor(4)
def counted():
    status = Path("/proc/self/status").read_text()
    return int(status.split(sys.argv[2] + ":")[1].split()[0]) * 1024
before = counted()
memory.retain()
assert counted() < before + 4 * MEGABYTE, (counted() - before) / MEGABYTE
old, held = tensor(50), tensor(10)
resource.setrlimit(getattr(resource, sys.argv[1]), (counted() + 200 * MEGABYTE, -1))
del old  # goes back at once, as plain torch's does
assert memory.stats().kept == 0
for _ in range(3):
    some = [tensor(20) for _ in range(8)]
    assert memory.stats().kept == 0 and all((one == 1).all() for one in some)
    del some
    arrays = [numpy.ones(5 * MEGABYTE) for _ in range(2)]
    del arrays
resource.setrlimit(getattr(resource, sys.argv[1]), (-1, -1))
del held
assert memory.stats().kept >= 10 * MEGABYTE
memory.undo()
assert counted() < before + 8 * MEGABYTE, (counted() - before) / MEGABYTE
""",
        limit,
        line,
    )


@pytest.mark.slow
def test_small_holes_leave_the_process_its_mappings(run: Run) -> None:
    run("""
def block():
    return torch.empty(1 << 15).fill_(1)
memory.retain()
some = [block() for _ in range(24000)]
del some[::2]
assert memory.release() == 12000 << 17
assert memory.stats().resident < (12000 << 17) + 600 * MEGABYTE
assert len(Path("/proc/self/maps").read_text().splitlines()) < 20000
some += [block() for _ in range(12000)]
assert all(bool((one == 1).all()) for one in some[::50])
""")


def new_group(name: str, limit: int) -> Path | None:
    """A control group for one process, where the machine lets us make one."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
    for place, file in (
        (Path("/sys/fs/cgroup/memory" + own.get("memory", "/")), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup" + own.get("", "/")), "memory.max"),
    ):
        folder = place / name
        try:
            folder.mkdir()
            (folder / file).write_text(str(limit))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        return folder
    return None


IN_A_GROUP = """
megabytes, steps = float(sys.argv[3]), int(sys.argv[4])
count, every, blocks = map(int, sys.argv[5:])
Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
import numpy
if sys.argv[1] == "retain":
    assert memory.retain()
for _ in range(steps):  # of a training, whose memory the last one leaves
    some = [tensor(megabytes) for _ in range(count)]
    del some[::every]
other = [numpy.ones(8 * MEGABYTE) for _ in range(blocks)]  # of 64 MiB
assert sum(float(one[-1]) for one in other) == blocks
print("lives")
"""


@pytest.mark.parametrize("freed", ["35 3 20 1 18", "1.9 1 420 2 12"], ids=["all", "every other"])
@pytest.mark.parametrize("how", ["plain", "retain"])
def test_the_kernel_takes_what_is_kept_in_a_group_with_a_limit(
    run: Run, how: str, freed: str
) -> None:
    """Nobody looks at the group when NumPy takes memory."""
    folder = new_group(f"faststep-{os.getpid()}-{how}", 1500 << 20)
    if folder is None:
        pytest.skip("this machine lets us make no control group")
    try:
        assert run(IN_A_GROUP, how, str(folder), *freed.split()) == "lives\n"
    finally:
        folder.rmdir()
