"""The hardware's reciprocals and roots over all mantissas, and what the kernels make of them."""

import re
import subprocess
from pathlib import Path

import pytest

from nvcc import NVCC, ROOT

from .common import REHEARSAL

SOURCE = "tests/gpu/quick_math.cu"


def built(folder: Path, architecture: str) -> Path:
    program = folder / "quick_math"
    options = ["--options-file=cuda/nvcc.flags", f"-arch={architecture}"]
    subprocess.run([NVCC, *options, SOURCE, "-o", str(program)], cwd=ROOT, check=True)
    return program


@pytest.mark.skipif(not NVCC, reason="nvcc is not installed")
def test_all_mantissas(tmp_path: Path) -> None:
    program = built(tmp_path, "sm_90" if REHEARSAL else "native")
    if REHEARSAL:
        pytest.skip("it compiles; the arithmetic is a real device's")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True)
    print(done.stdout)
    found = re.findall(r"(.*): (\d+) tried, (\d+) left, (\d+) wrong", done.stdout)
    assert [name for name, *_ in found] == [
        *("reciprocal within one place", "root", "quotient", "descent")
    ]
    for name, tried, left, wrong in found:
        assert int(tried) == 64 << 23
        assert int(wrong) == 0, name
        assert int(left) < int(tried) // 4, f"{name}: most are left to the slow way"
