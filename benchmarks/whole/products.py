"""The matrix products and convolutions of a script, and how fast this machine multiplies.

    python benchmarks/whole/products.py RESULT.json SCRIPT ARGUMENTS...

counts the operations of one step. The script runs unchanged, but for the meter, which it imports.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import meter

from faststep.doctor.rates import Products, measured


def main(result: Path, script: str) -> None:
    products = Products()
    numbers = meter.Meter.steps

    def steps(self: meter.Meter) -> Iterator[int]:
        """Number the steps; the last one is counted."""
        given = self._given
        for step in numbers(self):
            if step + 1 < given.warm_up + given.steps:
                yield step
                continue
            with products:
                yield step

    meter.Meter.steps = steps  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")
    result.write_text(json.dumps(measured(products)))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    main(Path(sys.argv.pop(0)), sys.argv[0])
