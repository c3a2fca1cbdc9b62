"""Hardware counters of our kernels by Nsight Compute: memory and issue utilisation, and stalls."""

import shutil
import subprocess
import sys

import pytest
import torch

import faststep
from nvcc import PLACES

from .common import CUDA, REHEARSAL

NCU = shutil.which("ncu", path=":".join(PLACES))
REFUSED = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Failed to initialize the profiler")
SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "Occupancy", "LaunchStats")


def work() -> None:
    """What is profiled: steps and lists over shapes that memory bounds."""
    for dtype in (torch.float32, torch.bfloat16):
        for shapes in (((1 << 26,),), ((1 << 20,),) * 16, ((1024,),) * 300):
            params = [torch.nn.Parameter(torch.ones(s, dtype=dtype, device=CUDA)) for s in shapes]
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer = faststep.optim.AdamW(params, max_grad_norm=1.0)
            optimizer.step()
            faststep.clip_grad_norm_(params, 0.5)
        sums = [torch.zeros(1 << 24, device=CUDA)]
        faststep._C.device_accumulate(sums, [torch.ones_like(sums[0], dtype=dtype)], 1.0, False)
    torch.cuda.synchronize()


@pytest.mark.skipif(REHEARSAL or not NCU, reason="ncu is missing")
def test_counters() -> None:
    """Its output is the result; the clocks are left as they are, for they are not ours to set."""
    command = [str(NCU), "--clock-control", "none", "--kernel-name", "regex:^fst_"]
    command += [f"--section={name}" for name in SECTIONS]
    program = "from gpu.test_counters import work; work()"
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    said = done.stdout + done.stderr
    if refusal := next((line for line in said.splitlines() if any(r in line for r in REFUSED)), ""):
        pytest.skip(f"ncu may not read the counters: {refusal.strip()}")
    print(done.stdout)
    assert done.returncode == 0, said[-3000:]
    assert "fst_update" in done.stdout
