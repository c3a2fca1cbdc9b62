"""The doctor's answer as one HTML file, without scripts and without the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape

from ..doctor import Answer

COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#009988"),
    *("#cc3311", "#555588", "#888888"),
)
STYLE = """
:root { color-scheme: light dark; --line: #8886 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
svg { width: 100%; height: auto; display: block }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
ul.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem }
ul.key span { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
code { overflow-wrap: anywhere }
"""


def page(answer: Answer) -> str:
    """The whole file."""
    step = answer.as_json()["step"]
    parts = [
        f"<h1>{escape(answer.verdict)}</h1>",
        f"<p>A step takes {1e3 * step['mean']:.3g} ms: the mean of {step['count']}.</p>",
        *(f"<p>{escape(text)}</p>" for text in answer.of_the_machine()),
        "<h2>A step</h2>",
        _bar(answer.phases),
    ]
    if answer.findings:
        parts += ["<h2>Findings</h2>", "<ol>"]
        for one in answer.findings:
            gain = f"{one.gain:.2f}x" if one.gain > 1.0 else "ends in an error"
            where = f"<br><code>{escape(one.line)}</code>" if one.line else ""
            text = escape(one.text)
            parts.append(f"<li><b>{escape(one.cause)}</b>, {gain}: {text}{where}</li>")
        parts.append("</ol>")
    if answer.trials:
        parts += ["<h2>Trials</h2>", _table(*answer.table_of_trials())]
        parts += ["<h2>Losses of the trials</h2>", _losses(answer)]
    if answer.found["switched"]:
        parts += ["<h2>Switches</h2>", _table(*answer.table_of_switches())]
    if answer.left:
        parts.append(f"<p>There was no time to try: {escape(', '.join(answer.left))}.</p>")
    if answer.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in answer.notes)
        parts.append(f"<h2>The system</h2><ul>{notes}</ul>")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>faststep doctor</title>'
        f"<style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _bar(shares: Mapping[str, float]) -> str:
    """The step as one bar, and what its colours are."""
    total = sum(shares.values()) or 1.0
    at, boxes, keys = 0.0, [], []
    for (name, share), colour in zip(shares.items(), COLOURS, strict=False):
        width = 1000.0 * share / total
        title = f"{name}: {share:.1%}"
        boxes.append(
            f'<rect x="{at:.1f}" width="{width:.1f}" height="60" fill="{colour}">'
            f"<title>{title}</title></rect>"
        )
        keys.append(_key(title, colour))
        at += width
    return (
        f'<svg viewBox="0 0 1000 60" role="img">{"".join(boxes)}</svg>'
        f'<ul class="key">{"".join(keys)}</ul>'
    )


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _losses(answer: Answer) -> str:
    """The losses of the script as it is and of each trial, over each other."""
    curves = {"as it is": answer.found["losses"]}
    curves |= {trial.remedy: trial.losses for trial in answer.trials}
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    bottom = min(finite, default=0.0)
    height = max(finite, default=1.0) - bottom or 1.0
    last = max(1, *(len(curve) - 1 for curve in curves.values()))
    lines, keys = [], []
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        points = " ".join(
            f"{1000 * number / last:.1f},{150 - 140 * (value - bottom) / height:.1f}"
            for number, value in enumerate(curve)
            if math.isfinite(value)
        )
        line = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        lines.append(line)
        keys.append(_key(name, colour))
    return (
        f'<svg viewBox="0 0 1000 160" role="img"><title>losses</title>{"".join(lines)}</svg>'
        f'<ul class="key">{"".join(keys)}</ul>'
    )


def _key(name: str, colour: str) -> str:
    return f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
