"""Scripts with one cause each, scripts that only look odd, and how to run one."""

import os
import subprocess
import sys
from pathlib import Path

START = """
import collections, io, time, zlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

STEPS = range(100000)

def deep(layers, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

def classifier(*widths):
    first, hidden, classes = widths
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, classes))

def sgd(model, lr=0.001, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)

def step_on(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

def learn(model, optimizer, loader, epochs):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
"""

PLANTED = {
    # Autocast that is open around the whole loop.
    "autocast-held": """
model = deep(4, 128)
optimizer = sgd(model)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for _ in STEPS:
        step_on(model, optimizer, torch.randn(32, 128))
""",
    "checkpoint-in-loop": """
model = deep(6, 512)
optimizer = sgd(model, momentum=0.9)
for _ in STEPS:
    step_on(model, optimizer, torch.randn(64, 512))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
    # Activations that are denormal numbers, of which a processor takes roots slowly.
    "denormals": """
model = nn.Linear(64, 64)
optimizer = sgd(model)
small = torch.full((400, 1000), 1e-20)
for _ in STEPS:
    optimizer.zero_grad()
    faint = small * small
    roots = sum(faint.sqrt() for _ in range(5))
    (model(torch.randn(32, 64)).square().mean() + roots.mean()).backward()
    optimizer.step()
""",
    "evaluation-in-loop": """
model = deep(4, 128)
optimizer = sgd(model)
held_out = torch.randn(2048, 128)
def evaluate():
    model.eval()
    with torch.no_grad():
        loss = model(held_out).square().mean().item()
    model.train()
    return loss
best = float("inf")
for step in STEPS:
    step_on(model, optimizer, torch.randn(64, 128))
    if step % 2 == 0:
        best = min(best, evaluate())
""",
    # Sums losses with their graphs.
    "memory-creep": """
model = classifier(64, 256, 10)
optimizer = sgd(model)
total = 0.0
for _ in STEPS:
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    total += loss
""",
    # Large activations, whose memory goes back to the system in each step, as that of more than
    # 32 MiB always does; what glibc does with less depends on where its heap ends.
    "page-faults": """
import ctypes
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
model = nn.Linear(16, 16)
optimizer = sgd(model)
x = torch.randn(100000, 16)
for _ in STEPS:
    optimizer.zero_grad()
    (model(x).relu() * 2 + 1).abs().mean().backward()
    optimizer.step()
""",
    "repeated-decoding": """
def encoded(index):
    made = torch.Generator().manual_seed(index)
    buffer = io.BytesIO()
    torch.save(torch.randint(8, (3, 128, 128), generator=made).float(), buffer)
    return zlib.compress(buffer.getvalue(), 6)
class Compressed(Dataset):
    def __init__(self):
        self.samples = [encoded(index) for index in range(128)]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        sample = torch.load(io.BytesIO(zlib.decompress(self.samples[index])))
        return sample.mean(0).flatten()[:256], index % 10
model = classifier(256, 64, 10)
learn(model, sgd(model), DataLoader(Compressed(), batch_size=16, shuffle=True), 1000)
""",
    # A processor that is made to look slow with bfloat16.
    "slow-bf16": """
linear = nn.functional.linear
def slow_linear(x, weight, bias=None):
    if torch.is_autocast_enabled("cpu"):
        time.sleep(0.001)
    return linear(x, weight, bias)
nn.functional.linear = slow_linear
model = deep(8, 128)
optimizer = sgd(model)
for _ in STEPS:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(32, 128)).square().mean()
    loss.backward()
    optimizer.step()
""",
    "slow-clipping": """
model = deep(60, 32)
optimizer = sgd(model)
def clip(limit):
    total = 0.0
    for param in model.parameters():
        total += param.grad.norm().item() ** 2
    factor = limit / (total**0.5 + 1e-6)
    if factor < 1:
        for param in model.parameters():
            param.grad.mul_(factor)
for _ in STEPS:
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    clip(0.01)
    optimizer.step()
""",
    "slow-optimizer": """
class PlainAdam(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["step"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * param.grad
                state["v"] = 0.999 * state["v"] + 0.001 * param.grad**2
                m = state["m"] / (1 - 0.9 ** state["step"])
                v = state["v"] / (1 - 0.999 ** state["step"])
                param -= group["lr"] * m / (v.sqrt() + 1e-8)
model = deep(40, 64)
optimizer = PlainAdam(model.parameters(), lr=0.001)
for _ in STEPS:
    step_on(model, optimizer, torch.randn(8, 64))
""",
    "slow-optimizer by hand": """
model = deep(40, 64)
speeds = [torch.zeros_like(param) for param in model.parameters()]
for _ in STEPS:
    model(torch.randn(8, 64)).square().mean().backward()
    with torch.no_grad():
        for param, speed in zip(model.parameters(), speeds, strict=True):
            speed *= 0.9
            speed += param.grad
            param -= 0.001 * speed
            param.grad = None
""",
    "spawn-imports": """
if __name__ == "__main__":
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
    model = classifier(64, 64, 10)
    loader = DataLoader(data, 16, num_workers=1, multiprocessing_context="spawn")
    learn(model, sgd(model), loader, 500)
""",
    "starved-loader": """
class Slow(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(64), index % 10
model = classifier(64, 128, 10)
learn(model, sgd(model), DataLoader(Slow(), batch_size=16, shuffle=True), 50)
""",
    "synchronising": """
model = classifier(64, 128, 10)
optimizer = sgd(model)
for step in STEPS:
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss, "gradient", model[0].weight.grad, flush=True)
""",
    "too-many-threads": """
torch.set_num_threads(32)
model = deep(10, 256)
optimizer = sgd(model)
for _ in STEPS:
    step_on(model, optimizer, torch.randn(64, 256))
""",
    "workers-restarted": """
data = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
model = classifier(64, 512, 10)
learn(model, sgd(model), DataLoader(data, batch_size=32, shuffle=True, num_workers=2), 500)
""",
}

# Two ranks, of which the second has a slow loader.
UNEVEN = """
class Slow(Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        time.sleep(0.03 * dist.get_rank())
        return torch.full((8,), float(index))
dist.init_process_group("gloo")
model = nn.Linear(8, 8)
"""

ON_RANKS = {
    # Each gradient is sent by itself, when all of them are there, with a delay.
    "exposed-communication": """
dist.init_process_group("gloo")
model = deep(4, 256)
optimizer = sgd(model)
def send(grad):
    time.sleep(0.002)  # a network
    dist.all_reduce(grad)
for _ in STEPS:
    optimizer.zero_grad()
    model(torch.randn(256, 256)).square().mean().backward()
    for param in model.parameters():
        send(param.grad)
        param.grad /= dist.get_world_size()
    optimizer.step()
""",
    # Small buckets, each of which waits for a network.
    "exposed-communication by ddp": """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(deep(8, 256), bucket_cap_mb=0.3)
optimizer = sgd(model)
def slow(group, bucket):
    time.sleep(0.005)
    return allreduce_hook(group, bucket)
model.register_comm_hook(None, slow)
for _ in STEPS:
    step_on(model, optimizer, torch.randn(256, 256))
""",
    "uneven-ranks": UNEVEN
    + """
optimizer = sgd(model, lr=1e-9)
for x in DataLoader(Slow()):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
""",
    "uneven-ranks by ddp": UNEVEN
    + """
model = nn.parallel.DistributedDataParallel(model)
optimizer = sgd(model, lr=1e-9)
for x in DataLoader(Slow()):
    step_on(model, optimizer, x)
""",
}

HEALTHY = {
    # An evaluation and a checkpoint per epoch, and a schedule.
    "micro-batches": """
data = TensorDataset(torch.randn(4096, 512), torch.randint(10, (4096,)))
model = nn.Sequential(
    nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10),
)
optimizer = sgd(model, lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
for _ in range(1000):
    for number, (x, y) in enumerate(DataLoader(data, batch_size=256)):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    with torch.no_grad():
        model(data.tensors[0][:512])
    model.train()
    torch.save(model.state_dict(), "epoch.pt")
""",
    # In the usual layout, with small activations.
    "convolutions": """
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)
optimizer = sgd(model, lr=0.01)
for _ in STEPS:
    optimizer.zero_grad()
    cross_entropy(model(torch.randn(16, 3, 16, 16)), torch.arange(16) % 10).backward()
    optimizer.step()
""",
    "two optimizers that take turns": """
maker, judge = classifier(64, 1024, 256), classifier(256, 1024, 1)
of_maker, of_judge = sgd(maker), sgd(judge)
for _ in STEPS:
    made = maker(torch.randn(256, 64))
    of_judge.zero_grad()
    (judge(made.detach()).mean() - judge(torch.randn(256, 256)).mean()).backward()
    of_judge.step()
    of_maker.zero_grad()
    (-judge(made).mean()).backward()
    of_maker.step()
""",
    # Which costs nothing on a CPU.
    "reads the loss of every step": """
model = deep(4, 512)
optimizer = sgd(model, lr=0.01)
losses = []
for _ in STEPS:
    optimizer.zero_grad()
    loss = model(torch.randn(256, 512)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    # Detached losses, and a replay buffer of fixed size.
    "keeps what looks like graphs": """
model = deep(6, 256)
optimizer = sgd(model)
kept, replay = [], collections.deque(maxlen=50)
for _ in STEPS:
    replay.append(torch.randn(256, 256))
    optimizer.zero_grad()
    loss = model(replay[len(replay) // 2]).square().mean()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach())
""",
}


def written(folder: Path, body: str) -> Path:
    """A file with the script."""
    path = folder / "train.py"
    path.write_text(START + body)
    return path


def python(folder: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `python *words` does in a folder, in one thread: other tests run beside it."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
