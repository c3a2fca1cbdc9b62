"""The modules of the benchmarks, which import each other as neighbours do."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
