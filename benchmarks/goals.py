"""What the benchmarks must show, and whether a run shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench_rows import (
    DTENSORS,
    FEW_BYTES,
    GPT_BELOW,
    HOST_TENSORS,
    LARGE,
    MANY_SMALL,
    RELEASED,
    SMOKE,
)
from contenders import OURS, SWAPPED
from dtensor_steps import TORCH
from faststep import _C
from faststep.cli.console import table, times
from loader_rows import BEST, COPY, LOADER_WORKS
from sharded import DDP, DEEPSPEED, FSDP2, IN_FORWARD, OUR_STAGES
from timing import Outcome
from windows import BY_HAND, IN_PAIRS, RECIPE
from workloads import FAMILIES, OTHER_OPTIMIZERS


@dataclass(frozen=True)
class Goal:
    """A ratio to reach: the rival takes at least ``at_least`` times as long as ``contender``.

    The rival "copy_" stands for the machine's copy rate: the contender's bytes per second over it.
    """

    family: str
    label: str
    rival: str
    at_least: float
    contender: str = OURS


def _few_bytes() -> list[Goal]:
    """Of formats with fewer bytes: on AVX-512, and on instruction sets with shorter vectors."""
    long = _C.cpu_info()["isa"] == "avx512"
    fp32 = "torch fused, fp32"
    ratios = {
        "adamw int8 states": (1.55, 1.3),
        "adamw bf16 states": (1.25, 1.25),
        "adamw remainders int8": (1.7, 1.5),
        "chain remainders int8": (2.5, 2.0),
    }
    goals = [
        goal
        for family, (most, least) in ratios.items()
        for label in FEW_BYTES
        for goal in (
            Goal(family, label, fp32, most if long else least),
            Goal(family, label, "copy_", 0.8),
        )
    ]
    states = ("adamw int8 states", "adamw bf16 states")
    goals += [Goal(family, MANY_SMALL, "faststep, fp32", 1.0) for family in states]
    return [*goals, Goal("adamw int8 states", "16 x 1M", "bitsandbytes AdamW8bit", 20.0)]


def _goals() -> tuple[Goal, ...]:
    goals = [
        Goal("chain", label, rival, ratio)
        for rival, ratios in (
            ("torch fused", (1.8, 1.8, 1.7)),
            ("torch foreach", (5.0, 4.0, 5.0)),
            ("torch default", (5.0, 4.0, 5.0)),
        )
        for label, ratio in zip(LARGE, ratios, strict=True)
    ]
    goals += [
        Goal("chain", MANY_SMALL, "torch fused", 50.0),
        Goal("chain", MANY_SMALL, "torch foreach", 100.0),
        Goal("chain", MANY_SMALL, "torch default", 100.0),
        Goal("chain", "GPT-2 small", "DeepSpeedCPUAdam", 1.6),
        *(Goal("chain", label, "torch fused", 1.2, SWAPPED) for label in LARGE),
        Goal("chain", MANY_SMALL, "torch fused", 15.0, SWAPPED),
        Goal("adamw", MANY_SMALL, "torch fused", 25.0),
        Goal("adamw", MANY_SMALL, "DeepSpeedCPUAdam", 10.0),
    ]
    for rival in ("torch fused", "DeepSpeedCPUAdam"):
        goals += [Goal("adamw", label, rival, 1.0) for label in LARGE]
    goals += [Goal("sgd", label, "torch fused", 1.0) for label in LARGE]
    goals += [Goal("sgd", MANY_SMALL, "torch fused", 20.0)]
    goals += [Goal("lion", label, "optimi Lion", 3.0) for label in (*LARGE, MANY_SMALL)]
    for name in OTHER_OPTIMIZERS:
        goals += [Goal(name.lower(), "ResNet-50", "torch default", 2.0)]
        goals += [Goal(name.lower(), MANY_SMALL, "torch default", 30.0)]
    goals += [
        *(Goal("clip", label, "torch", 1.8) for label in ("GPT-2 small", GPT_BELOW)),
        Goal("clip", MANY_SMALL, "torch", 20.0),
        *(Goal("chain", label, "copy_", 0.9) for label in LARGE),
        Goal("sums", "GPT-2 small", BY_HAND, 2.5),
        Goal("sums", "GPT-2 small", BY_HAND, 2.5, IN_PAIRS),
        Goal("mean", "GPT-2 small", BY_HAND, 1.7),
        *(Goal("release", label, RECIPE, 5.0) for label in RELEASED),
        *(Goal("loader", work.label, BEST, work.at_least) for work in LOADER_WORKS),
        *(
            Goal("loader", work.label, COPY, 0.9)
            for work in LOADER_WORKS
            if COPY in dict(work.others)
        ),
        *(Goal("sharded", "GPT, 27M", DDP, 1.0, who) for who in OUR_STAGES),
        *(
            Goal("sharded", "GPT, 27M", rival, 1.0 / 0.65, who)
            for who in OUR_STAGES
            for rival in (FSDP2, *(DEEPSPEED.format(stage) for stage in (1, 2)))
        ),
        *(
            Goal("sharded update", "GPT, 27M", DDP, 1.5, IN_FORWARD.format(stage))
            for stage in (1, 2)
        ),
        *(
            Goal("dtensors", label, TORCH, ratio)
            for label, ratio in zip(DTENSORS, (5.0, 1.3, 20.0), strict=True)
        ),
        *_few_bytes(),
        *(Goal("host", f"{tensors} x 1", "torch fused", 20.0) for tensors in HOST_TENSORS),
    ]
    return tuple(goals)


GOALS = _goals()
HOW = {SWAPPED: ", only imports swapped", IN_PAIRS: ", in pairs"}
HOW |= {who: who.removeprefix(OURS) for who in OUR_STAGES}
RIVALS = {"copy_": "copy_'s bytes/s", BEST: "torch at its best"}


def _measured(goal: Goal, outcome: Outcome) -> float:
    if goal.rival == "copy_":
        return outcome.rate(goal.contender) / outcome.copy_rate
    return outcome.ratio(goal.rival, goal.contender)


def goals_text(outcomes: Sequence[Outcome], markdown: bool = False) -> str:
    """A table of the goals of the works that were run, beside what was measured.

    Args:
        outcomes: what was measured.
        markdown: write Markdown instead of plain text.
    """
    by_work = {(outcome.work.family, outcome.work.label): outcome for outcome in outcomes}
    rows = []
    for goal in GOALS:
        if (goal.family, goal.label) not in by_work:
            continue
        measured = _measured(goal, by_work[goal.family, goal.label])
        verdict = "reached" if measured >= goal.at_least else "missed"
        if math.isnan(measured) or SMOKE:
            verdict = "not judged: smoke run" if SMOKE else "not measured"
        title = FAMILIES[goal.family].title.split(":")[0]
        how = HOW.get(goal.contender, "")
        rows.append(
            [
                f"{title}{how}: {goal.label}",
                RIVALS.get(goal.rival, goal.rival),
                times(goal.at_least),
                times(measured),
                verdict,
            ]
        )
    return table(["work", "against", "at least", "measured", ""], rows, markdown)
