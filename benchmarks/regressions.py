"""Whether a run has lost speed against the one that was published last on such a machine."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import OURS
from faststep.cli.console import table


@dataclass(frozen=True)
class Floor:
    """What a kind of row may lose without a reason in the code.

    Args:
        kept: the part of a ratio that must be left.
        reason: what makes rows of this kind differ from run to run.
    """

    kept: float
    reason: str


# From eight published runs of one machine: 0.76 to 1 of the best run's ratio was left in rows of
# large tensors, 0.5 to 0.6 in those of small ones and of the loader.
FLOORS = {
    "large": Floor(0.75, "others use the memory's bandwidth"),
    "small": Floor(
        0.5, "others use the third-level cache, which a step of small tensors waits for"
    ),
    "loader": Floor(0.5, "processes and threads wait for two cores that others use too"),
}
LARGE = 1 << 22  # elements, which no second-level cache holds
SEGMENTS = 5  # of a run's rounds: how much their medians differ is the run's own spread
MOST_ALLOWED = math.log(3.0)  # however noisy a run was


@dataclass(frozen=True)
class Row:
    """A work in both runs.

    Args:
        name: family and label.
        kind: key of FLOORS.
        rivals: how many were in both runs.
        kept: our lead over the rivals now, as a part of the one then: the median over the rivals.
        must: the least part that noise explains.
    """

    name: str
    kind: str
    rivals: int
    kept: float
    must: float

    @property
    def lost(self) -> bool:
        return self.kept < self.must


def kind_of_machine(results: dict[str, Any]) -> str:
    """CPU model, threads and instruction set; not the versions of the rivals."""
    return str(results["machine"]).split(";")[0]


def published(results: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The published runs of this kind of machine, the newest first: names begin with the date."""
    found = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        run = json.loads(path.read_text())
        if kind_of_machine(run) == kind_of_machine(results):
            found.append(run)
    return found


def _kind_of(work: dict[str, Any]) -> str:
    if work["family"] == "loader":
        return "loader"
    return "large" if work["elements"] >= LARGE else "small"


def _ratio(work: dict[str, Any], rival: str) -> float:
    seconds = work["seconds"]
    return statistics.median(seconds[rival]) / statistics.median(seconds[OURS])


def _spread(work: dict[str, Any], rival: str) -> float:
    """The standard error of the logarithm of a ratio, from segments of the run."""
    ours, theirs = work["seconds"][OURS], work["seconds"][rival]
    if min(len(ours), len(theirs)) < 2 * SEGMENTS:
        return 0.0  # the floor has to do
    parts = []
    for i in range(SEGMENTS):
        mine, other = (
            statistics.median(t[i * len(t) // SEGMENTS : (i + 1) * len(t) // SEGMENTS])
            for t in (ours, theirs)
        )
        parts.append(math.log(other / mine))
    return statistics.stdev(parts) / math.sqrt(SEGMENTS)


def _row(now: dict[str, Any], then: dict[str, Any]) -> Row | None:
    rivals = [
        name
        for name, times in now["seconds"].items()
        if times and not name.startswith(OURS) and then["seconds"].get(name)
    ]
    if not rivals or not now["seconds"].get(OURS) or not then["seconds"].get(OURS):
        return None
    change = statistics.median(math.log(_ratio(now, r) / _ratio(then, r)) for r in rivals)
    spread = statistics.median(math.hypot(_spread(now, r), _spread(then, r)) for r in rivals)
    kind = _kind_of(now)
    allowed = min(max(-math.log(FLOORS[kind].kept), 3 * spread), MOST_ALLOWED)
    name = f"{now['family']}, {now['label']}"
    return Row(name, kind, len(rivals), math.exp(change), math.exp(-allowed))


def compared(now: dict[str, Any], runs: list[dict[str, Any]]) -> list[Row]:
    """The works of this run that are in an earlier one, against the newest that has them."""
    rows = []
    for work in now["works"]:
        key = (work["family"], work["label"])
        earlier = (w for run in runs for w in run["works"] if (w["family"], w["label"]) == key)
        for then in earlier:
            row = _row(work, then)
            if row:
                rows.append(row)
                break
    return rows


def regressions_text(rows: list[Row], machine: str, markdown: bool = False) -> str:
    """A table of what was kept, and why rows may differ."""
    if not rows:
        return f"Nothing to compare with: no results are published of {machine}."
    lines = [
        [row.name, str(row.rivals), f"{row.kept:.2f}", f"{row.must:.2f}", "LOST" * row.lost]
        for row in rows
    ]
    lost = sum(row.lost for row in rows)
    reasons = "; ".join(f"{kind}: {floor.reason}" for kind, floor in FLOORS.items())
    return (
        f"{lost} of {len(rows)} rows lost more than noise explains, against the results published "
        f"last of {machine}.\n\n"
        + table(["row", "rivals", "lead kept", "must be", ""], lines, markdown)
        + f"\n\nWhy equal programs differ. {reasons}."
    )
