"""`faststep run`: scripts see torch's classes, get faststep's objects, and end as under Python."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Run
from programs import Programs


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS = """
import importlib, inspect, torch
from torch.optim import AdamW
from torch.optim.adamw import AdamW as Again
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_again
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import DataLoader as LoaderAgain
from torch.amp import GradScaler
import warnings
warnings.simplefilter("ignore")

def parameters():
    return [torch.ones(3, requires_grad=True)]

def is_ours(thing):
    return type(thing).__module__.startswith("faststep.")

names = ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax",
         "Adadelta", "RAdam", "NAdam", "ASGD", "Rprop", "Adafactor"]
for name in names:
    kind = getattr(torch.optim, name)
    assert kind.__module__.startswith("torch.optim"), kind
    made = kind(parameters(), lr=0.1)
    assert is_ours(made) and isinstance(made, kind) and isinstance(made, torch.optim.Optimizer)
    shown = inspect.signature(kind).parameters
    assert "params" in shown and "cls" not in shown
assert is_ours(AdamW(parameters()))
assert is_ours(Again(params=parameters(), fused=True)) and AdamW is Again
assert is_ours(importlib.import_module("torch.optim").AdamW([{"params": parameters(), "lr": 1.0}]))
assert type(torch.optim.LBFGS(parameters())).__module__ == "torch.optim.lbfgs"
loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(6.0)), batch_size=2)
assert is_ours(loader) and DataLoader is LoaderAgain and isinstance(loader, DataLoader)
assert is_ours(DataLoader[int]([1, 2], batch_size=None, num_workers=0))
for kind in (GradScaler, torch.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler):
    scaler = kind(enabled=False)
    assert is_ours(scaler) and isinstance(scaler, kind) and isinstance(scaler, torch.amp.GradScaler)
assert clip_grad_norm_ is clip_again is torch.nn.utils.clip_grad_norm_
assert clip_grad_norm_.__module__ == "torch.nn.utils.clip_grad"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)]
print("all", len(names))
"""


def test_every_form_of_import_finds_torchs_class_and_makes_our_object(run: Run) -> None:
    assert good(run(IMPORTS)) == "all 12\n"


SAVED = """
import inspect, torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

class Mine(save_on_cpu):
    pass

def is_ours(thing):
    return type(thing).__module__.startswith("faststep.")

for pin in (False, True):
    context = save_on_cpu(pin, device_type="cuda")
    assert isinstance(context, save_on_cpu) and isinstance(context, saved_tensors_hooks)
    assert is_ours(context) == EXPECTED and not is_ours(Mine(pin_memory=pin))
    x = torch.arange(4.0, requires_grad=True)
    with context:
        y = (x.sin() * x).exp()
    y.sum().backward()
    model = wrappers.offload_wrapper(torch.nn.Linear(4, 4))
    torch.nn.init.ones_(model._checkpoint_wrapped_module.weight)
    model(x.detach()).sum().backward()
    compiled = torch.compile(lambda x: x.exp(), backend="aot_eager")
    with save_on_cpu(pin):
        z = compiled(x)
    z.sum().backward()
    print(x.grad, model._checkpoint_wrapped_module.weight.grad)
print(list(inspect.signature(save_on_cpu).parameters))
"""


def test_tensors_saved_on_the_cpu(run: Run, programs: Programs) -> None:
    torchs = good(programs.run(SAVED.replace("EXPECTED", "False")))
    assert good(run(SAVED.replace("EXPECTED", "True"))) == torchs


LEFT = """
import copy, io, pickle, torch

class Mine(torch.optim.AdamW):
    def __init__(self, params, extra):
        super().__init__(params, lr=extra)

class Loader(torch.utils.data.DataLoader):
    pass

class Scaler(torch.amp.GradScaler):
    pass

def parameters():
    return [torch.ones(3, requires_grad=True)]

mine = Mine(parameters(), extra=0.5)
assert Mine.__mro__[1] is torch.optim.AdamW
assert not any("faststep" in kind.__module__ for kind in Mine.__mro__)
assert mine.defaults["lr"] == 0.5 and type(copy.deepcopy(mine)) is Mine
assert type(pickle.loads(pickle.dumps(mine))) is Mine  # a class of __main__
assert type(Loader([1, 2])) is Loader and type(Scaler("cpu")) is Scaler
before = torch.ones(3, requires_grad=True)
recorded = before.clone()
recorded.grad = torch.ones(3)
torch.optim.AdamW([recorded], differentiable=True).step()
assert torch.autograd.grad(recorded.sum(), before)[0].any()
try:
    torch.optim.AdamW(parameters(), no_such=1)
except TypeError as error:
    print(error)

ours = torch.optim.AdamW(parameters())
torch.optim.lr_scheduler.StepLR(ours, 1)
ours.param_groups[0]["params"][0].grad = torch.ones(3)
ours.step()
other = pickle.loads(pickle.dumps(ours))
assert type(other) is type(copy.deepcopy(ours)) is type(ours) is not torch.optim.AdamW
whole = [torch.ones(3, requires_grad=True), torch.ones(3, 2, requires_grad=True)]
factored = torch.optim.Adafactor(whole)
for _ in range(3):
    sum(p.sum() for p in whole).backward()
    factored.step()
factored.state[whole[0]]["step"] = torch.tensor(3)  # of a type that only torch takes
factored.step()
assert factored.state[whole[0]]["step"] == factored.state[whole[1]]["step"] == 4
plain = Mine(parameters(), 0.1)
plain.load_state_dict(ours.state_dict())
ours.load_state_dict(plain.state_dict())
buffer = io.BytesIO()
torch.save(ours.state_dict(), buffer)
buffer.seek(0)
assert torch.load(buffer, weights_only=True)["state"][0]["step"] == 1
"""


def test_subclasses_and_options_that_we_lack_stay_torchs(run: Run) -> None:
    done = run(LEFT, options=("--verbose",))
    assert "unexpected keyword argument 'no_such'" in good(done)
    assert "optim.AdamW stayed torch's: __main__.Mine is a subclass" in done.stderr
    assert "1 of AdamW.step stayed torch's: differentiable=True" in done.stderr
    assert "1 of Adafactor.step stayed torch's: parameters that are not dense" in done.stderr
    assert "utils.DataLoader stayed torch's: __main__.Loader is a subclass" in done.stderr
    assert "amp.GradScaler stayed torch's: __main__.Scaler is a subclass" in done.stderr


REFUSED = """
import torch
from torch import nn

def trained(use_scaler):
    torch.manual_seed(0)
    rows = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=use_scaler)
    for _ in range(3):
        scaler.scale(rows(torch.tensor([1, 2, 2])).pow(2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return rows.weight.detach()

def complexes():
    value = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam([value], lr=0.1)
    for _ in range(3):
        (value * value.conj()).real.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return value.detach()

print(trained(False).tolist(), trained(True).tolist(), complexes().tolist())
rows = nn.Embedding(10, 3, sparse=True)
optimizer = torch.optim.Adam(rows.parameters())
rows(torch.tensor([1])).sum().backward()
try:
    optimizer.step()
except RuntimeError as error:
    print(error, error.__context__)

def stepped(grad):
    p = torch.ones(2)
    p.grad = grad.clone()
    torch.optim.SGD([p], lr=0.1).step()
    return p

print(torch.jit.trace(stepped, torch.ones(2), check_trace=False)(torch.zeros(2)))
"""


def test_steps_that_we_refuse_are_torchs(run: Run, programs: Programs) -> None:
    """Sparse gradients, with and without a scaler, and complex numbers; with torch's error."""
    done = run(REFUSED, options=("--verbose",))
    assert good(done) == good(programs.run(REFUSED))
    assert "3 of Adam.step stayed torch's: Adam: parameter 0" in done.stderr
    assert "1 of SGD.step stayed torch's: in torch.jit.trace" in done.stderr
    assert "nothing was updated" not in done.stderr


TRAINED = """
import os, torch
from torch.optim import AdamW
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 2))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
scaler = torch.amp.GradScaler("cpu")
for _ in range(2):
    for x, y in DataLoader(data, 4, shuffle=True):
        loss = (model(x) - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        print(loss.item())
if hasattr(os, "fork") and os.fork() == 0:
    raise SystemExit(0)  # the child prints no table
os.wait()
"""


def test_losses_are_torchs_and_the_table_says_what_was_used(run: Run, programs: Programs) -> None:
    done = run(TRAINED)
    losses = [float(line) for line in good(done).split()]
    assert losses == pytest.approx([float(line) for line in good(programs.run(TRAINED)).split()])
    assert len(losses) == 16
    first, *rest = done.stderr.splitlines()
    assert first.startswith("faststep run: torch.optim -> faststep.optim; torch.amp.GradScaler -> ")
    assert rest[0].startswith("faststep run: made 1 optim.AdamW, 1 amp.GradScaler, 2 utils.DataLo")
    assert rest[1] == "faststep run: AdamW (faststep's): 1 object, 16 steps"
    assert sum("page faults per step" in line for line in rest) == 1
    assert sum("faststep's norm is right to 1e-8" in line for line in rest) == 1
    rows = {line.split()[2]: line.split()[3] for line in rest if line.endswith("%")}
    assert rows["AdamW"] == rows["clipping"] == "15"
    assert rows["GradScaler"] == "60"


def test_only_some_parts_and_a_rank_that_is_silent(run: Run) -> None:
    source = (
        "import torch\nprint(type(torch.optim.SGD([torch.ones(1)])).__module__,"
        " type(torch.utils.data.DataLoader([1])).__module__,"
        " type(torch.autograd.graph.save_on_cpu()).__module__)"
    )
    done = run(source, options=("--only", "data"))
    assert good(done) == "torch.optim.sgd faststep.run.loaders torch.autograd.graph\n"
    assert done.stderr.startswith("faststep run: torch.utils.data.DataLoader -> faststep.data.")
    silent = run(source, options=("--only=optim",), RANK="1")
    assert good(silent) == (
        "faststep.run.optimizers torch.utils.data.dataloader torch.autograd.graph\n"
    )
    assert silent.stderr == ""


LAST = "class Last:\n    def __del__(self): print('gone')\nlast = Last()\n"
ENDS = {
    "chained": "try:\n    {}[1]\nexcept KeyError as e:\n    raise ValueError('x') from e\n",
    "syntax": "x = 1\ny = = 2\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "hook": "import sys\nsys.excepthook = lambda k, v, t: print('hook', k, t.tb_lineno)\n1 / 0\n",
    "names": "import sys\nprint(__name__, __file__, __package__, __spec__, sys.argv, sys.path[0],"
    " sys.modules['__main__'].sys is sys, sorted(vars()))\n",
    "objects at exit": f"{LAST}raise SystemExit(3)\n",
    "objects at an error": f"{LAST}1 / 0\n",
    "atexit": "import atexit\natexit.register(print, 'last')\nraise SystemExit(3)\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_programs_end_as_under_python(run: Run, tmp_path: Path, name: str) -> None:
    done = run(ENDS[name], "--lr", "-m", "--", "run", options=("--only", "clip"))
    command = [sys.executable, str(tmp_path / "script.py"), "--lr", "-m", "--", "run"]
    plain = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = [s for s in done.stderr.splitlines() if not s.startswith("faststep run: ")]
    assert done.stdout == plain.stdout
    assert lines == plain.stderr.splitlines()
    assert done.returncode == plain.returncode


def test_modules_packages_and_what_is_not_there(programs: Programs, tmp_path: Path) -> None:
    package = tmp_path / "some"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("x = 1\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom .part import x\n"
        "print(__name__, __package__, __spec__.name, sys.argv, x)\n"
    )
    code = "import sys\nsys.path[0] = '{}'\nfrom faststep.cli import main\nraise SystemExit(main())"
    code = code.format(tmp_path)
    options = ("run", "--only", "clip")
    done = programs.run(code, *options, "-m", "some", "--only", "x")
    path = str(package / "__main__.py")
    assert good(done) == f"__main__ some some.__main__ {[path, '--only', 'x']} 1\n"
    assert good(programs.run(code, *options, "--", str(package / "part.py"))) == ""
    for missing, message in (
        (("-m", "nowhere"), "No module named nowhere"),
        (("nowhere.py",), "can't open file"),
    ):
        done = programs.run(code, *options, *missing)
        assert done.returncode == 2
        assert message in done.stderr


OF_A_FOLDER = """
import atexit, os, sys
print(__file__, __spec__, __package__, sys.argv, sys.path[0], sorted(globals()))
atexit.register(lambda: print(sys.modules["__main__"].late))
os.chdir("/")
import beside_it
late = beside_it.late
"""


@pytest.mark.parametrize("is_archive", [False, True])
def test_folders_and_archives(programs: Programs, tmp_path: Path, is_archive: bool) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "__main__.py").write_text(OF_A_FOLDER)
    (folder / "beside_it.py").write_text("late = 1")
    name = "program.zip" if is_archive else "program"
    if is_archive:
        shutil.make_archive(str(folder), "zip", folder)
    words = (name, "--lr", "1")
    plain = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    done = programs.faststep(tmp_path, "run", "--only", "clip", *words)
    assert re.sub(" at 0x[0-9a-f]+", "", good(done)) == re.sub(" at 0x[0-9a-f]+", "", plain.stdout)
    (tmp_path / "empty").mkdir()
    done = programs.faststep(tmp_path, "run", "empty")
    assert done.returncode == 2
    assert f"can't find '__main__' module in '{tmp_path}/empty'" in done.stderr


PROCESSES = """
import multiprocessing, torch

class Workers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        made = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        return type(made).__module__.startswith("faststep")

from torch.nn.utils import clip_grad_norm_

def child(optimizer, answers):
    made = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    clip = clip_grad_norm_.__globals__["__name__"].split(".")[0]
    answers.put((type(optimizer).__module__, type(made).__module__, clip))

def ranked(rank, optimizer, answers):
    child(optimizer, answers)

if __name__ == "__main__":
    optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(ranked, (optimizer, answers), 1)
    print("spawn", *answers.get())
    for method in ("forkserver", "fork"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        process = context.Process(target=child, args=(optimizer, answers))
        process.start()
        print(method, *answers.get())
        process.join()
    for method in ("spawn", "fork"):
        options = {"num_workers": 1, "multiprocessing_context": method}
        loader = torch.utils.data.DataLoader(Workers(), 2, **options)
        print([batch.tolist() for batch in loader])
"""


def test_processes_are_swapped_and_workers_that_are_spawned_are_not(run: Run) -> None:
    ours = "faststep.run.optimizers"
    done = run(PROCESSES)
    assert good(done).splitlines() == [
        *(f"{method} {ours} {ours} faststep" for method in ("spawn", "forkserver", "fork")),
        *("[[False, False]]", "[[True, True]]"),
    ]
    assert done.stderr.count("made ") == 1
    assert "2 processes were started anew, with faststep's classes; they are not in" in done.stderr


MET = """
import threading, torch

class Mine(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)

class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__([torch.nn.Parameter(torch.ones(1))], {})
    def step(self, closure=None):
        return self.inner.step(closure)

def trained(kind, number, **options):
    p = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Around(torch.optim.SGD([p])) if kind is Around else kind([p], lr=0.1, **options)
    for _ in range(number):
        p.grad = torch.ones(2, 2)
        if kind is torch.optim.SparseAdam:
            p.grad = p.grad.to_sparse()
        else:
            torch.nn.utils.clip_grad_norm_([p], 1.0)
        optimizer.step(lambda: p.sum())

trained(torch.optim.LBFGS, 2)
if "all" in __import__("sys").argv:
    trained(torch.optim.AdamW, 3)
    trained(torch.optim.AdamW, 4)
    trained(torch.optim.SparseAdam, 5)
    trained(Mine, 6)
    trained(Around, 7)
    thread = threading.Thread(target=trained, args=(torch.optim.Adam, 8))
    thread.start()
    thread.join()
"""


def test_every_optimizer_is_listed_with_its_steps(run: Run) -> None:
    """Also where none is of faststep; two of one class have a row each."""
    done = run(MET)
    good(done)
    assert "made no object of faststep's classes" in done.stderr
    assert "LBFGS (torch's): 1 object, 2 steps" in done.stderr
    lines = done.stderr.splitlines()
    assert {line.split()[2] for line in lines if line.endswith("%")} == {"LBFGS", "clipping", "all"}
    done = run(MET, "all")
    good(done)
    for listed in (
        "AdamW (faststep's): 2 objects, 7 steps",
        "SparseAdam (torch's): 1 object, 5 steps",
        "Mine (__main__'s, a subclass of torch's AdamW): 1 object, 6 steps",
        "Around (__main__'s): 1 object, 7 steps",
        "SGD (faststep's): 1 object, 7 steps",
        "Adam (faststep's): 1 object, 8 steps",
    ):
        assert f"faststep run: {listed}\n" in done.stderr
    rows = [line.split()[2:5] for line in done.stderr.splitlines() if line.endswith("%")]
    assert ["AdamW", "3"] in [row[:2] for row in rows]
    assert ["AdamW", "2", "4"] in rows


@pytest.mark.parametrize("options", [("-c", "CODE"), ("-",)])
def test_code_that_lies_in_no_file(options: tuple[str, ...]) -> None:
    code = "import sys\nprint(sys.argv, sys.path[0], __name__, sorted(vars()))\n1 / 0\n"
    shown = []
    for before in ((), ("-m", "faststep", "run", "--only", "clip")):
        words = [code if word == "CODE" else word for word in options]
        command = [sys.executable, *before, *words, "--only", "x"]
        done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
        lines = [s for s in done.stderr.splitlines() if not s.startswith("faststep run: ")]
        shown.append((done.returncode, done.stdout, lines))
    assert shown[0] == shown[1]
    assert shown[0][0] == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_program_with_a_closed_stream(closed: str, tmp_path: Path) -> None:
    code = "import sys\nopen(sys.argv[1], 'w').write('written')\nsys.exit(3)\n"
    run = [sys.executable, "-m", "faststep", "run", "-c", code, str(tmp_path / "file")]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *run], check=False)
    assert done.returncode == 3
    assert (tmp_path / "file").read_text() == "written"


def test_a_spawned_process_sends_objects_of_the_scripts_classes(run: Run) -> None:
    source = """
import multiprocessing

class Own:
    pass

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(type(pool.apply(Own)) is Own)
"""
    assert good(run(source, options=("--only", "clip"))) == "True\n"
