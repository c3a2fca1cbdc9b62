"""How fast AdamW on a device can be against torch's, as far as the machine code tells.

The time of a pass per element is the longest of three: its bytes by the memory's bandwidth; its
instructions by the rate at which warps issue them; and the bytes that it loads by those that all
multiprocessors have in flight during one trip to memory. torch's kernels were counted in the same
way (`python tests/sass.py --rival FILE`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine.figures import Way, ways_through
from machine.graph import blocks, loops
from machine.listing import Kernel, disassemble
from nvcc import ROOT

RIVALS = ROOT / "tests/cuda/rivals.json"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- begin: written by python tests/sass.py --predict -->", "<!-- end -->"
# An H200: bytes and instructions of warps per second, multiprocessors, seconds to memory and back.
BANDWIDTH, ISSUES, PROCESSORS, TRIP = 4.3e12, 9.3e11, 132, 0.8e-6
WARP = 32
# The share of issue slots that a kernel can fill: at best, and with some waiting.
SHARES = (1.0, 0.7)


@dataclass(frozen=True)
class Pass:
    bytes: float  # per element
    loaded: float = 0.0
    instructions: float = 0.0  # 0: taken to be bound by memory
    in_flight: float = 0.0  # bytes of a multiprocessor

    def seconds(self, share: float) -> float:
        memory = self.bytes / BANDWIDTH
        issue = self.instructions / WARP / (ISSUES * share)
        trips = self.loaded * TRIP / (self.in_flight * PROCESSORS) if self.in_flight else 0.0
        return max(memory, issue, trips)


def ours(budgets: dict[str, Any], name: str, loads: float, stores: float) -> Pass | None:
    own = budgets["loops"].get(name, {}).get("sm_90")
    return own and Pass(loads + stores, loads, own["instructions"], own["in_flight"])


def rows(
    budgets: dict[str, Any], rivals: dict[str, Any]
) -> list[tuple[str, list[Any], list[Pass]]]:
    """Name, passes of faststep and passes of torch."""
    found = []
    for kind, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        own = rivals["kernels"][kind]
        torch = Pass(7 * size, 4 * size, own["shortest"], own["in_flight"])
        update = ours(budgets, f"fst_update adam {kind}", 4 * size, 3 * size)
        norm = ours(budgets, f"fst_begin {kind}", size, 0)
        measure, change = Pass(size), Pass(2 * size)  # of torch: by memory's bandwidth alone
        found += [
            (f"{kind}: step", [update], [torch]),
            (f"{kind}: clip, step", [norm, update], [measure, change, torch]),
            (f"{kind}: unscale, clip, step", [norm, update], [change, measure, change, torch]),
        ]
    return found


def table(budgets: dict[str, Any]) -> str:
    rivals = json.loads(RIVALS.read_text())
    lines = [
        "| AdamW, parameters and states in | bytes per element | of torch | instructions "
        "| of torch | time of torch / time of faststep |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, own, other in rows(budgets, rivals):
        moved, rest = (f"{sum(p.bytes for p in passes if p):g}" for passes in (own, other))
        if None in own:
            lines.append(f"| {name} | {moved} | {rest} | not specialised | | |")
            continue
        least, most = sorted(
            sum(p.seconds(share) for p in other) / sum(p.seconds(share) for p in own)
            for share in SHARES
        )
        counted = f"{sum(p.instructions for p in own):.0f}"
        kernel = f"{other[-1].instructions:.0f}" + (" and more" if len(other) > 1 else "")
        ratio = (
            f"{least:.2f}x" if round(least, 2) == round(most, 2) else f"{least:.2f}x to {most:.2f}x"
        )
        lines.append(f"| {name} | {moved} | {rest} | {counted} | {kernel} | {ratio} |")
    return "\n".join(lines)


def written(page: str, text: str) -> str:
    """The page with the table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}"


def rival_of(kernel: Kernel) -> tuple[str, dict[str, float]] | None:
    """torch's fused Adam: 512 threads a block, four elements at a time in the loop over words."""
    found = re.search(r"FusedAdamMathFunctorI(f|N3c108BFloat16|N3c104Half)[EL]", kernel.name)
    if not found:
        return None
    kind, size = {"f": ("fp32", 4), "N3c104Half": ("fp16", 2)}.get(found[1], ("bf16", 2))
    code = blocks(kernel)
    best: Way | None = None
    for head, body in loops(code).items():
        words = sum(one.loads(4 * size) for n in body for one in code[n].code)
        if words == 4:
            ways = ways_through(code, head, body).values()
            best = max(ways, key=lambda way: len(way.code))
            best.word = 4 * size
    if not best:
        return None
    blocks_that_fit = (64 << 10) // (-(-kernel.registers // 8) * 8 * 512)
    return kind, {
        "instructions": round(len(best.code) / 4, 1),
        "shortest": round(best.shortest / 4, 1),
        "registers": kernel.registers,
        "before_wait": best.before_wait,
        "in_flight": blocks_that_fit * 512 * best.before_wait * best.word,
    }


def rival(cubin: Path) -> dict[str, dict[str, float]]:
    return dict(own for kernel in disassemble(cubin).values() if (own := rival_of(kernel)))
