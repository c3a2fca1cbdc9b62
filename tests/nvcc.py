"""nvcc, and where it is not the reason to skip a test."""

import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
PLACES = [os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in HOMES if home)]
NVCC = shutil.which("nvcc", path=os.pathsep.join(PLACES)) or ""
FLAGS = "--options-file=cuda/compile.flags"
TARGETS = (ROOT / "cuda/targets.flags").read_text()
ARCHITECTURES = re.findall(r"\bsm_\d+\b", TARGETS)
needs_nvcc = pytest.mark.skipif(not NVCC, reason="nvcc is not installed")
