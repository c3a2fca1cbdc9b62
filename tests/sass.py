"""Prints what the loops of the kernels cost, from their machine code.

    python tests/sass.py                     for sm_90, compiled with the flags of cuda/
    python tests/sass.py --arch sm_80 sm_90
    python tests/sass.py --cubin FILE        a cubin, with rules if nvcc had -lineinfo
    python tests/sass.py --record            writes tests/cuda/budgets.json anew

Per element: instructions (the longest way, and the shortest), operations of the fp64 pipe. Per
iteration: elements of a thread, 16-byte loads, how many of them are issued before the first wait,
16-byte stores, other loads (of arguments), branches. Per kernel: registers, bytes of stack,
instructions that spill. Per multiprocessor: KB in flight. machine/figures.py says how a loop is
recognised.
"""

import argparse
import re
from pathlib import Path

import nvcc
from machine.budgets import record
from machine.figures import Loop, loops_of
from machine.listing import disassemble, nvdisasm

COLUMNS = {
    "instructions": "instr/el",
    "shortest": "shortest",
    "elements": "elems",
    "loads": "loads",
    "before_wait": "at once",
    "stores": "stores",
    "other_loads": "other",
    "branches": "branch",
    "fp64": "fp64/el",
    "registers": "regs",
    "stack": "stack",
    "spills": "spills",
    "in_flight": "KB/SM",
}


def loops_in(cubin: Path, arch: str) -> list[Loop]:
    return [loop for kernel in disassemble(cubin).values() for loop in loops_of(kernel, arch)]


def table(loops: list[Loop]) -> str:
    width = max((len(loop.name) for loop in loops), default=0)
    lines = [" ".join([" " * (width + 7), *(f"{title:>8}" for title in COLUMNS.values())])]
    for loop in loops:
        figures = loop.figures()
        figures["in_flight"] = round(figures["in_flight"] / 1000)
        cells = [f"{figures[key]:>8g}" for key in COLUMNS]
        if not loop.types:  # not per element, but per iteration
            cells[0], cells[1] = f"={len(loop.way.code)}".rjust(8), f"={loop.way.shortest}".rjust(8)
        lines.append(" ".join([f"{loop.name:{width}} {loop.at:#6x}", *cells]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=["sm_90"])
    parser.add_argument("--cubin", type=Path)
    parser.add_argument("--match", default="", help="a regular expression for names of loops")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    if not nvdisasm():
        raise SystemExit("nvdisasm is not found: pip install nvidia-cuda-nvdisasm")
    if given.record:
        return record()
    for arch in given.arch:
        cubin = given.cubin or nvcc.cubin(arch)
        print(f"{arch}: {cubin}")
        found = [loop for loop in loops_in(cubin, arch) if re.search(given.match, loop.name)]
        print(table(found))


if __name__ == "__main__":
    main()
