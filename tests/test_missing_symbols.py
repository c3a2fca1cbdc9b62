"""What a torch without one of the names that faststep looks for changes: the time, nothing else."""

import json
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from programs import Programs

COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
SHIM = Path(__file__).parent / "c/without_symbol.c"
pytestmark = pytest.mark.skipif(not shutil.which(COMPILER[0]), reason="no C compiler is installed")

# the symbol, and the line of `info` that tells of it
SYMBOLS = {
    "torch_parallel_for": (
        "threads",
        "the calling thread only: this torch exports no torch_parallel_for, so its 2 threads stay "
        "unused",
    ),
    "_ZN2at12hasCallbacksEv": (
        "profilers",
        "told of every step: this torch exports no at::hasCallbacks, which says whether one runs",
    ),
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE": (
        "version counters",
        "moved by torch.autograd.graph.increment_version, which takes longer: this torch exports "
        "no torch::autograd::impl::bump_version that works",
    ),
}

WORK = r"""
import hashlib, json, warnings, torch, faststep
from torch.autograd.profiler import profile
from faststep.cli import info

torch.set_num_threads(2)
torch.manual_seed(0)
digest = hashlib.sha256()

def note(*tensors):
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).numpy().tobytes())
        digest.update(b"%d" % tensor._version)

shapes = [(3, 4), (), (5,), (300, 400), (1200, 1000)]
params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
optimizers = [faststep.optim.AdamW(params[:3]), faststep.optim.SGD(params[3:], momentum=0.9)]
scaler = faststep.amp.GradScaler("cpu", init_scale=8.0)
for step in range(5):
    for p in params:
        p.grad = torch.randn(p.shape) * 8
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizers[0])
    note(faststep.clip_grad_norm_(params[:3], 1.0))
    scaler.step(optimizers[0])
    scaler.step(optimizers[1], max_norm=1.0)
    scaler.update()
    note(*params, *(p.grad for p in params))
for optimizer in optimizers:
    for state in optimizer.state.values():
        note(*(v for v in state.values() if isinstance(v, torch.Tensor)))
data = torch.utils.data.TensorDataset(torch.randn(500, 7), torch.arange(500))
for batch in faststep.data.DataLoader(data, 32, shuffle=True):
    note(*batch)
with profile() as seen:
    optimizers[1].step()
steps = [event.name for event in seen.function_events if event.name.startswith("Optimizer.step")]
print(json.dumps([digest.hexdigest(), steps, info.collect()]))
"""


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    built = tmp_path_factory.mktemp("shim") / "without_symbol.so"
    command = [*COMPILER, "-O2", "-shared", "-fPIC", str(SHIM), "-o", str(built), "-ldl"]
    subprocess.run(command, check=True)
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {built}"  # a sanitizer comes first
    started = Programs(LD_PRELOAD=preloaded)
    yield started
    started.close()


def work(shimmed: Programs, symbol: str) -> tuple[str, list[str], dict[str, str]]:
    done = shimmed.run(WORK, WITHOUT_SYMBOL=symbol)  # the shim looks at each call
    assert done.returncode == 0, done.stderr
    digest, steps, info = json.loads(done.stdout)
    return digest, steps, info


@pytest.fixture(scope="module")
def with_all(shimmed: Programs) -> tuple[str, list[str], dict[str, str]]:
    return work(shimmed, "")


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_missing_symbol_costs_time_only(
    shimmed: Programs, with_all: tuple[str, list[str], dict[str, str]], symbol: str
) -> None:
    """The same bits and version counters, a step that profilers see, and info says what lacks."""
    digest, steps, info = work(shimmed, symbol)
    assert digest == with_all[0]
    assert steps == with_all[1] == ["Optimizer.step#SGD.step"]
    line, text = SYMBOLS[symbol]
    assert info[line] == text
    assert with_all[2][line] != text
    assert {name for name in info if info[name] != with_all[2][name]} == {line}


def imported_after(programs: Programs, change: str) -> subprocess.CompletedProcess[str]:
    return programs.run(f"import ctypes, torch\n{change}\nimport faststep")


def test_without_the_exchange_api(programs: Programs) -> None:
    done = imported_after(
        programs, "del torch.Tensor.__dlpack_c_exchange_api__; torch.__version__ = '2.9.1'"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: faststep reads tensors by DLPack's C exchange API, which torch has from 2.10 "
        "on; this is torch 2.9.1: pip install 'torch>=2.10'"
    )


def test_with_another_version_of_the_exchange_api(programs: Programs) -> None:
    done = imported_after(
        programs,
        "words = (ctypes.c_uint64 * 16)(2)\n"
        "new = ctypes.pythonapi.PyCapsule_New\n"
        "new.restype = ctypes.py_object\n"
        "new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]\n"
        "name = b'dlpack_exchange_api'\n"
        "api = new(ctypes.addressof(words), name, None)\n"
        "torch.Tensor.__dlpack_c_exchange_api__ = api; torch.__version__ = '9.9.9'",
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: faststep reads tensors by version 1 of DLPack's C exchange API; torch 9.9.9 "
        "offers version 2: it needs a newer faststep, or this one an older torch"
    )


def test_info_says_why_torch_is_asked_every_time(programs: Programs) -> None:
    code = (
        "import torch, sys\n"
        "torch._neg_view = lambda tensor: tensor\n"
        "from faststep.cli import main\n"
        "sys.argv = ['faststep', 'info', '--json']\n"
        "main()\n"
    )
    done = programs.run(code)
    assert "a parameter's record does not show that it is negated" in done.stdout
