"""What was measured of whole steps, as tables and a chart; also writes them into the pages.

python benchmarks/whole/written.py benchmarks/results/whole/NAME.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from modes import FUSED, KEPT, PLAIN, RETAIN, RUN
from turns import Interval, interval, ratios
from works import WORKS

from faststep.cli.busy import busy_note
from faststep.cli.console import table

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- begin: written by benchmarks/whole/written.py -->", "<!-- end -->"
NONE = "-"
LEAST_ROUNDS = 3
# Compared with each other: with fused steps, and where both keep freed memory.
BESIDE = ((FUSED, RUN), (RETAIN, RUN), (RETAIN, KEPT), ("run, torch's loss", RUN))
Work = dict[str, Any]


def gain(work: Work, of: str, to: str) -> Interval | None:
    """How much longer a step takes in one mode than in another, with its interval."""
    modes = work["modes"]
    if of not in modes or to not in modes or not modes[to]["turns"][0]:
        return None
    return interval(ratios(modes[of]["turns"], modes[to]["turns"]))


def _cell(found: Interval | None) -> str:
    return NONE if found is None else f"{found[0]:.2f}x ({found[1]:.2f} to {found[2]:.2f})"


def _bound(work: Work) -> str:
    """The share of the fastest mode's step that its products take at this machine's rate."""
    products = work.get("products")
    if not products:
        return NONE
    rate = products["bf16" if "bf16" in work["work"] else "fp32"]
    least = min(found["seconds"] for found in work["modes"].values())
    return f"{100 * products['operations'] / rate / least:.0f} %" if rate else NONE


def _in_ms(seconds: float) -> str:
    """Three digits, without an exponent."""
    return f"{1e3 * seconds:.0f}" if seconds >= 1.0 else f"{1e3 * seconds:.3g}"


def _ms(work: Work, mode: str) -> str:
    found = work["modes"].get(mode)
    return _in_ms(found["seconds"]) if found else NONE


def _faults(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == round(value) else f"{value:.2g}"


def _gains(works: list[Work]) -> str:
    """The times of plain torch, what every mode gains over it, and what nobody can gain."""
    modes = list(dict.fromkeys(mode for work in works for mode in work["modes"]))
    pairs = [(PLAIN, mode) for mode in modes if mode not in (PLAIN, FUSED)]
    pairs += [(of, to) for of, to in BESIDE if of in modes and to in modes]
    rows = [
        [
            f"{work['work']}: {work['what']}",
            _ms(work, PLAIN),
            *(_cell(gain(work, of, to)) for of, to in pairs),
            _bound(work),
        ]
        for work in works
    ]
    titles = [to if of == PLAIN else f"{to} over {of}" for of, to in pairs]
    header = ["step", "torch, ms", *titles, "products"]
    return table(header, rows, markdown=True)


def _memory(works: list[Work]) -> str:
    """Page faults and peaks, and how far the losses are from those of plain torch."""
    rows = []
    for work in works:
        plain = work["modes"][PLAIN]
        for mode, found in work["modes"].items():
            rows.append(
                [
                    f"{work['work']}: {mode}",
                    _faults(found["faults"]),
                    f"{100 * found['faults'] / max(plain['faults'], 1e-9):.1f} %",
                    f"{found['peak'] / 2**20:.0f}",
                    f"{found['peak'] / plain['peak']:.2f}x",
                    f"{found['loss_difference']:.1e}",
                ]
            )
    header = ["step", "page faults", "of plain's", "peak MiB", "of plain's", "loss differs by"]
    return table(header, rows, markdown=True)


def _phases(works: list[Work]) -> str:
    """The median ms of each phase of a step."""
    rows = [
        [f"{work['work']}: {mode}", *map(_in_ms, found["phases"].values())]
        for work in works
        for mode, found in work["modes"].items()
    ]
    header = ["ms of a step", *next(iter(works[0]["modes"].values()))["phases"]]
    return table(header, rows, markdown=True)


def as_tables(results: dict[str, Any]) -> str:
    """All that was measured, as Markdown."""
    works = results["works"]
    absent = [
        f"- {work['work']}, {mode}: {reason}"
        for work in works
        for mode, reason in work["absent"].items()
    ]
    workers = [
        f"- {work['work']}: the loader has {work['workers']['best']} workers, with "
        "which plain torch was fastest of 0, 1 and 2"
        for work in works
        if "workers" in work
    ]
    return "\n\n".join(
        part
        for part in (
            f"{results['machine']}; {results['date']}. Gains are over plain torch where nothing "
            "else is said, with intervals of 95 %. Products: the share of the fastest mode's step "
            "that its matrix products and convolutions take at the rate of this machine's own "
            "products, which nobody can gain. It is above 100 % where convolutions and recurrent "
            "layers run faster than the products that they amount to.",
            _gains(works),
            _memory(works),
            _phases(works),
            "\n".join([*workers, *absent]),
            busy_note(results["others"]),
        )
        if part
    )


def chart(results: dict[str, Any], path: Path) -> None:
    """Draw for each script how much faster its step is under `run`."""
    from matplotlib.figure import Figure

    measured = [work for work in results["works"] if {PLAIN, RUN} <= work["modes"].keys()]
    gains = {}
    for work in measured:
        if found := gain(work, PLAIN, RUN):
            gains[f"{work['work']} ({_ms(work, PLAIN)} ms)"] = found
    names = sorted(gains, key=gains.__getitem__)
    means = [gains[name][0] for name in names]
    errors = [[m - gains[n][1] for n, m in zip(names, means, strict=True)]]
    errors += [[gains[n][2] - m for n, m in zip(names, means, strict=True)]]
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, means, xerr=errors, color="tab:blue", capsize=2)
    axes.bar_label(bars, [f"{mean:.2f}x" for mean in means], padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0, 1.15 * max(high for _, _, high in gains.values()))
    axes.set_xlabel("time of a step with plain torch / under python -m faststep run")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def caption(results: dict[str, Any]) -> str:
    """The chart on a page, and how it was measured."""
    also = sum(bool(WORKS[work["work"]].arguments) for work in results["works"])
    autocast = f", {also} of them under bf16 autocast too," if also else ""
    means = [found[0] for work in results["works"] if (found := gain(work, PLAIN, RUN))]
    return (
        "![Gains of ten training scripts](docs/whole.png)\n\n"
        f"Ten unmodified scripts{autocast} are {min(means):.2f} to {max(means):.2f} times as fast "
        f"under `faststep run`.\nProcesses took turns, in at most {results['rounds']} rounds.\n"
        "Whiskers are 95 % intervals, and numbers in brackets the step of plain torch.\n"
        f"{results['machine']}; {results['date']}.\n"
        "[All ways and figures](docs/benchmarks.md#whole-steps)."
    )


def into(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page.

    Raises:
        ValueError: the page does not have both marks.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place between {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def unfit(results: dict[str, Any]) -> str:
    """Why pages must not show what was measured; empty if they may."""
    others = results["others"]
    if note := busy_note(others):
        return note
    if others != others:
        return "Nothing is known of what else the machine did."
    measured = {work["work"] for work in results["works"]}
    if missing := [name for name in WORKS if not WORKS[name].arguments and name not in measured]:
        return f"These were not measured: {', '.join(missing)}."
    if results.get("rounds", 0) < LEAST_ROUNDS:
        return f"There were fewer than {LEAST_ROUNDS} rounds."
    return ""


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    if reason := unfit(results):
        raise SystemExit(f"{reason} Measure again.")
    chart(results, ROOT / "docs" / "whole.png")
    into(ROOT / "README.md", caption(results))
    into(ROOT / "docs" / "benchmarks.md", as_tables(results))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main()
