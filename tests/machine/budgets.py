"""What the loops may cost: tests/cuda/budgets.json, against what was measured."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from machine.figures import Loop, loops_of
from machine.listing import disassemble
from nvcc import ROOT, cubin, version

FILE = ROOT / "tests/cuda/budgets.json"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
AT_MOST = ["instructions", "fp64", "registers", "stack", "spills"]
AT_LEAST = ["before_wait", "in_flight"]
SAME = ["elements", "loads", "stores"]  # of 16 bytes

Figures = dict[str, float]
Table = dict[str, dict[str, Figures]]  # by name of the loop and architecture


def load() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def worst(loops: list[Loop]) -> dict[str, Figures]:
    """The figures by name; of several loops with a name those of the longest, with the least in
    flight."""
    found: dict[str, Figures] = {}
    for loop in loops:
        own = loop.figures()
        before = found.setdefault(loop.name, own)
        if own["instructions"] > before["instructions"]:
            found[loop.name], own = own, before
        for key in AT_LEAST:
            found[loop.name][key] = min(found[loop.name][key], own[key])
    return found


def measure_one(arch: str) -> list[Loop]:
    kernels = disassemble(cubin(arch)).values()
    return [loop for kernel in kernels for loop in loops_of(kernel, arch)]


def measure(watched: list[str], architectures: list[str]) -> Table:
    """The figures of the watched loops, but for those in double."""
    with ThreadPoolExecutor(2) as pool:
        loops = dict(zip(architectures, pool.map(measure_one, architectures), strict=True))
    table: Table = {}
    for arch, found in loops.items():
        narrow = [loop for loop in found if not (loop.types and loop.types.wide)]
        for name, figures in worst(narrow).items():
            if any(re.match(pattern, name) for pattern in watched):
                table.setdefault(name, {})[arch] = figures
    return table


def complaints(found: Table, budgets: Table, slack: float = 1.0) -> list[str]:
    """What costs more than its budget, sorted by loop. `slack` is for another nvcc than the one
    that was measured."""
    said = []
    for name, architectures in budgets.items():
        for arch, budget in architectures.items():
            own = found.get(name, {}).get(arch)
            if not own:
                said.append(f"{name}, {arch}: no such loop")
                continue
            for key, limit in budget.items():
                above = key in AT_MOST and own[key] > limit * slack
                below = key in AT_LEAST and own[key] < limit / slack
                if above or below or (key in SAME and own[key] != limit):
                    said.append(f"{name}, {arch}: {key} {own[key]:g}, budget {limit:g}")
    said += [f"{name}: no budget" for name in found if name not in budgets]
    return sorted(said)


def record() -> None:
    file = load()
    found = measure(file["watched"], ARCHITECTURES)
    kept = [*AT_MOST, *AT_LEAST, *SAME]
    file["nvcc"] = version()
    file["loops"] = {
        name: {arch: {key: own[key] for key in kept} for arch, own in found[name].items()}
        for name in sorted(found)
    }
    text = json.dumps(file, indent=1)
    FILE.write_text(re.sub(r"{\s+(\"instr[^}]*)}", one_line, text) + "\n")


def one_line(found: re.Match[str]) -> str:
    return "{" + re.sub(r"\s+", " ", found[1]).strip() + "}"
