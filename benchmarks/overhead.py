"""What `run --log`, `run --live` and the doctor's first run add: `python benchmarks/overhead.py`.

Clocks of threads count what the watching thread takes, and what the hooks add to the shortest of
steps that compute nothing. Steps by the clock, with over without in blocks in turns, have the noise
of the machine: their median and quartiles.
"""

import os
import pty
import statistics
import threading
import time

import torch
from torch.utils.data import DataLoader

from faststep._torch.data_loader import BaseDataLoaderIter
from faststep.cli.live import Log, Page
from faststep.doctor.recorder import Recorder
from faststep.doctor.watching import Watch


def train(width: int, seconds: float) -> tuple[float, float]:
    """Seconds of a step: the least by the clock of this thread, and the mean by the wall's."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(width // 32 + 1)))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(64, width)
    begun, taken = time.perf_counter(), []
    for _ in DataLoader(range(1 << 30), batch_size=None):
        before = time.thread_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.thread_time() - before)
        if time.perf_counter() - begun > seconds:
            break
    return min(taken), (time.perf_counter() - begun) / len(taken)


def watched(kind: str) -> tuple[float, ...]:
    """The share of a core that the watching thread takes, and what `train` returns beside it."""
    plain = DataLoader.__iter__, BaseDataLoaderIter.__next__
    if kind == "doctor":
        made = Recorder(1e9, 0, 1e9, 1e9, False, print)
        made.start()
    else:
        display = (Page if kind == "--live" else Log)(os.fdopen(os.dup(terminal), "w"))
        made = Watch([display], print)
        made.__enter__()
    clock = time.pthread_getcpuclockid(made._sampler._thread.ident)
    begun, used = time.perf_counter(), time.clock_gettime(clock)
    step = train(256, 2.0)[1]
    share = (time.clock_gettime(clock) - used) / (time.perf_counter() - begun)
    hooked = train(1, 0.5)[0]
    made._sampler.stop()
    DataLoader.__iter__, BaseDataLoaderIter.__next__ = plain
    return share, hooked, step


screen, terminal = pty.openpty()
threading.Thread(target=lambda: [*iter(lambda: os.read(screen, 1 << 16), b"")], daemon=True).start()
torch.set_num_threads(1)
for kind in ("--log", "--live", "doctor"):
    found, plain = [], []
    for turn in range(12):
        if turn % 4 in (1, 2):  # without, with, with, without
            found.append(watched(kind))
        else:
            plain.append((train(1, 0.5)[0], train(256, 2.0)[1]))
    share = statistics.median(one[0] for one in found)
    hooks = min(one[1] for one in found) - min(one[0] for one in plain)
    ratios = [one[2] / other[1] for one, other in zip(found, plain, strict=True)]
    low, mid, high = statistics.quantiles(ratios)
    print(f"{kind}: thread {share:.2%}, hooks {1e6 * hooks:.1f} us per step, step of", end=" ")
    print(f"{1e3 * plain[0][1]:.1f} ms: {mid:.3f} ({low:.3f} to {high:.3f})")
