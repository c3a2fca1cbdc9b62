"""What a script can see of loaders, scalers and losses under `run`, beside what torch's show."""

import pytest

from conftest import Run
from programs import Programs

START = """
import copy, inspect, io, pickle, warnings
import torch
import torch.utils.data._utils.fetch as fetch
import torch.utils.data.dataloader as dataloader
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler
from torch.utils.data import SequentialSampler, Subset, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
data = TensorDataset(torch.arange(6.0))

class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return (torch.tensor(index * index),)

def batches(loader):
    return [batch[0].tolist() for batch in loader]

def tried(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def logs(kind, name):
    inner = getattr(kind, name)
    def call(*args, **kwargs):
        print("called", kind.__name__, name)
        return inner(*args, **kwargs)
    setattr(kind, name, call)
    return lambda: setattr(kind, name, inner)
"""

SCRIPTS = {
    "names of a loader": """
loader = DataLoader(data, 2)
names = ["state_dict", "load_state_dict", "stats", "explain", "path", "device", "transforms"]
print(sorted(vars(loader)), [hasattr(loader, name) for name in names])
for name in ("device", "transforms", "worker_method", "skip_errors"):
    print(tried(lambda: DataLoader(data, 2, **{name: None})))
for name in names:
    setattr(loader, name, 3)
print([getattr(loader, name) for name in names], batches(loader))
print(inspect.signature(type(loader)), inspect.getfullargspec(DataLoader).args)
""",
    "pickles": """
loader = DataLoader(data, 2, shuffle=True)
scaler = GradScaler("cpu", init_scale=8.0)
scaler.scale(torch.ones(()))
print(batches(loader), sorted(vars(scaler)))
for one in (loader, scaler):
    text = pickle.dumps(one)
    buffer = io.BytesIO()
    torch.save(one, buffer)
    print(b"faststep" in text, b"faststep" in buffer.getvalue())
    for other in (pickle.loads(text), copy.copy(one), copy.deepcopy(one)):
        print(type(other) is type(one), sorted(vars(other)))
        print(batches(other) if one is loader else other.state_dict())
""",
    "arguments of a scaler": """
for name in ("min_scale", "max_scale", "hysteresis"):
    print(tried(lambda: GradScaler("cpu", **{name: 1.0})))
model = nn.Linear(2, 2)
optimizer = torch.optim.LBFGS(model.parameters())
scaler = GradScaler("cpu")
scaler.scale(model(torch.ones(2, 2)).sum()).backward()
print(tried(lambda: scaler.step(optimizer, max_norm=1.0)))
""",
    "a replaced scaler": """
for kind in (GradScaler, torch.cpu.amp.GradScaler):
    for name in ("scale", "unscale_", "step", "update", "state_dict", "load_state_dict"):
        logs(kind, name)
model = nn.Linear(2, 2)
for make in (lambda: GradScaler("cpu", init_scale=4.0), lambda: torch.cpu.amp.GradScaler()):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make()
    for step in range(3):
        scaler.scale(model(torch.ones(2, 2)).sum()).backward()
        if step == 1:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.load_state_dict(scaler.state_dict())
""",
    "replaced loaders": """
parts = [(DataLoader, "__iter__"), (DataLoader, "_get_iterator"), (Subset, "__getitems__"),
         (dataloader._BaseDataLoaderIter, "__next__"), (TensorDataset, "__getitem__"),
         (dataloader._SingleProcessDataLoaderIter, "_next_data"),
         (ConcatDataset, "__getitem__"), (RandomSampler, "__iter__"), (BatchSampler, "__iter__"),
         (SequentialSampler, "__iter__"), (fetch._MapDatasetFetcher, "fetch")]
sets = (data, Squares(), Subset(data, [3, 1, 2]), ConcatDataset([data, data]))
loaders = [DataLoader(one, 2, shuffle=shuffle) for one in sets for shuffle in (False, True)]
for kind, name in parts:
    undo = logs(kind, name)
    for loader in loaders:
        print(batches(loader))
    undo()
    print(batches(loaders[0]))
""",
    "replaced constructors": """
import functools
inner = DataLoader.__init__
DataLoader.__init__ = functools.partialmethod(inner, batch_size=4)
print(batches(DataLoader(data)))
DataLoader.__init__ = inner
for kind, device in ((GradScaler, ["cpu"]), (torch.cpu.amp.GradScaler, [])):
    inner = kind.__init__
    kind.__init__ = functools.partialmethod(inner, init_scale=2.0)
    print(kind(*device).get_scale())
    kind.__init__ = inner
class Logged(dataloader._SingleProcessDataLoaderIter):
    def _next_data(self):
        print("mine")
        return super()._next_data()
for module, name, other in ((dataloader, "_SingleProcessDataLoaderIter", Logged),
                            (torch, "stack", lambda *args, **out: torch.zeros(7)),
                            (torch, "randperm", lambda n, **options: torch.arange(n))):
    inner = getattr(module, name)
    setattr(module, name, other)
    for one in (data, Squares()):
        print(batches(DataLoader(one, 2, shuffle=True)))
    setattr(module, name, inner)
""",
    "names that a script has for itself": """
class Own(Squares):
    def __getitem__(self, index):
        return (torch.tensor([index, getattr(self, "when", -1)]),)
    def state_dict(self):
        print("asked", flush=True)
    load_state_dict = state_dict
    def set_epoch(self, epoch):
        self.when = epoch
class Stream(Own, torch.utils.data.IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(6))
    def __getattr__(self, name):
        return {}[name]  # no AttributeError
class Order(torch.utils.data.Sampler):
    generator = property(lambda self: print("asked for a generator"))
    epoch = property(lambda self: print("asked for an epoch"))
    def __len__(self):
        return 4
    def __iter__(self):
        return iter([3, 1, 2, 0])
    state_dict = load_state_dict = Own.state_dict
method = Own.set_epoch
for one, sampler in ((Own(), None), (Own(), Order()), (data, Order()), (Stream(), None)):
    one.when = 0
    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        loader = DataLoader(one, 2, sampler=sampler, **options)
        for epoch in (1, 2):
            if one is not data:
                one.set_epoch(epoch)
            print(batches(loader), sorted(vars(loader)))
print(Own.set_epoch is method)
""",
    "warnings": """
for one in (data, Squares()):
    for options in ({"num_workers": 0}, {"num_workers": 1}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = DataLoader(one, 3, pin_memory=True, **options)
            if options["num_workers"]:
                torch._utils.cpu_count = lambda: 0
            batches(loader)
        print([(w.category.__name__, str(w.message), w.filename, w.lineno) for w in caught])
""",
    "processes": """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=print)
process.start()
process.join()
print(tried(process.start))
""",
    "workers that a script ends": """
for one in (data, Squares()):
    for options in ({}, {"num_workers": 2}):
        iterator = iter(DataLoader(one, 2, **options))
        print(next(iterator))
        if options:
            iterator._shutdown_workers()
            iterator._shutdown_workers()
""",
    "printed losses": """
logits = torch.randn(512, 1024, requires_grad=True)
target = torch.randint(1024, (512,))
for options in ({}, {"reduction": "none"}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
    loss = nn.functional.cross_entropy(logits, target, **options)
    print(type(loss.grad_fn).__name__, loss.grad_fn.name())
""",
    "names in profiles": """
for one in (data, Squares()):
    for options in ({}, {"num_workers": 1}):
        with torch.profiler.profile() as profile:
            batches(DataLoader(one, 2, **options))
        events = [(event.key, event.count) for event in profile.key_averages()]
        print([event for event in events if "DataLoader" in event[0]])
""",
    "steps of Adafactor that only torch makes": """
with torch.inference_mode():
    made = torch.ones(2)
def half(state):
    state.pop("row_var", None)
def widened(state):
    state["row_var"] = torch.ones(7)
for param in (nn.Parameter(made, requires_grad=False), nn.Parameter(torch.ones(0)),
              nn.Parameter(torch.ones(1).expand(3)), nn.Parameter(torch.ones(2, 3))):
    for change in (dict.clear, half, widened):
        optimizer = torch.optim.Adafactor([param], lr=0.1)
        for _ in range(3):
            param.grad = torch.ones(param.shape)
            print(tried(optimizer.step), [round(x, 3) for x in param.flatten().tolist()])
            if param.ndim == 2:
                change(optimizer.state[param])
""",
    "numbers that a script sets": """
import fractions
for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "Adadelta", "RAdam", "NAdam"):
    for key, value in [("lr", "x"), ("lr", None), ("lr", 1j), ("lr", torch.ones(2)), ("eps", "x"),
                       ("weight_decay", None), ("betas", (0.5,)), ("betas", None), ("lr", 1)]:
        p = nn.Parameter(torch.ones(3))
        optimizer = getattr(torch.optim, name)([p], lr=0.1, foreach=False)
        for _ in range(2):
            p.grad = torch.ones(3)
            print(name, key, tried(optimizer.step))
            if key in optimizer.param_groups[0]:
                optimizer.param_groups[0][key] = value
        optimizer.param_groups[0][key] = 0.1 if key != "betas" else (0.9, 0.99)
        print(tried(optimizer.step), [round(x, 3) for x in p.tolist()])
p = nn.Parameter(torch.ones(3))
optimizer = torch.optim.RMSprop([p], lr=0.1, momentum=torch.tensor(0.5))
for _ in range(2):
    p.grad = torch.ones(3)
    optimizer.step()
print([round(x, 3) for x in p.tolist()], sorted(optimizer.state[p]))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_torchs(run: Run, programs: Programs, name: str) -> None:
    plain = programs.run(START + SCRIPTS[name])
    ours = run(START + SCRIPTS[name])
    assert plain.returncode == 0, plain.stderr
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines() == plain.stdout.splitlines()
