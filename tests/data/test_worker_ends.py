"""A program with worker processes ends when it should, and so do they."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

START = """
import os, signal, sys, threading, time, torch
from faststep.data import DataLoader
signal.signal(signal.SIGINT, signal.default_int_handler)
class Wide(torch.utils.data.Dataset):
    def __len__(self): return 40000
    def __getitem__(self, index): return torch.full((50_000,), float(index))
ours = DataLoader(Wide(), 2, num_workers=2, persistent_workers=%s)
iterator = iter(ours)
batch = next(iterator)
"""


def run_program(text: str) -> str:
    """Its output; it must end without a word of complaint."""
    process = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.stderr == ""
    assert process.returncode in (0, 3)
    return process.stdout


@pytest.mark.parametrize(
    ("persistent", "text"),
    [
        (False, ""),
        (True, "class Cycle: pass\nc = Cycle(); c.c = c; c.i = iterator\nsys.exit(3)"),
    ],
)
def test_the_program_ends(persistent: bool, text: str) -> None:
    out = run_program(
        START % persistent + "print(*[w.pid for w in iterator._workers], flush=True)\n" + text
    )
    time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in out.split())


def test_ctrl_c() -> None:
    text = (
        START % False
        + """
print("ready", flush=True)
try:
    for batch in iterator:
        pass
except KeyboardInterrupt:
    pass
del iterator
assert batch.shape == (2, 50_000)
print(ours._faststep.workers._latest.memory.counts()["taken"], flush=True)
"""
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (0, "0\n", "")
