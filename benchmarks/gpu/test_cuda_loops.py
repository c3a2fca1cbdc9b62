"""Whole training loops, in turns; what is measured is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cuda_loops import LOOPS
from cuda_works import REHEARSAL

SCRIPT = Path(__file__).with_name("cuda_loops.py")


def test_loops() -> None:
    options = ["--device", "cpu", "--tiny", "--loops", next(iter(LOOPS))] if REHEARSAL else []
    command = [sys.executable, str(SCRIPT), "--rounds", "1", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=170, check=False)
    print(done.stdout)
    assert done.returncode == 0
