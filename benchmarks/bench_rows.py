"""The rows of the benchmarks, and how often each is measured."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from contenders import OURS, Contender, contenders_of
from workloads import OTHER_OPTIMIZERS, SHAPES, Work, count_elements

SMOKE = os.environ.get("FASTSTEP_BENCH_SMOKE") == "1"

MANY_SMALL = "2000 x 64"
HOST_TENSORS = (300, 5000)
RELEASED = ("150 x 64", "2000 x 64")
# Sharded parameters: how many, and the elements of each on all ranks together.
DTENSORS = {"150 x 4096": (150, 4096), "150 x 256K": (150, 1 << 18), "1000 x 64": (1000, 64)}
LARGE = ("16 x 1M", "ResNet-50", "GPT-2 small")
FEW_BYTES = ("16 x 1M", "GPT-2 small")  # of states and parameters in 8 and 16 bits
GPT_BELOW = "GPT-2 small, norm below the limit"
SWEEP_CONTENDERS = (OURS, "torch fused", "torch default")


def all_works(largest: int) -> list[Work]:
    """Every row: the four sets of shapes, variants of the chain, and the sweeps.

    Args:
        largest: elements of the largest tensor in the sweep over elements.
    """
    shapes = {name: make() for name, make in SHAPES.items()}
    if SMOKE:
        # The same lists of tensors, cut short and with every dimension at most 8.
        shapes = {
            name: tuple(tuple(min(8, n) for n in shape) for shape in sizes[:24])
            for name, sizes in shapes.items()
        }
        largest = min(largest, 10_000)
    works = [Work(family, name, shapes[name]) for name in shapes for family in ("chain", "adamw")]
    works += [
        Work(narrow, name, shapes[name])
        for narrow in ("adamw bf16 states", "adamw int8 states")
        for name in (MANY_SMALL, *FEW_BYTES)
    ]
    works += [
        Work(halves, name, shapes[name])
        for halves in ("adamw remainders", "adamw remainders int8", "chain remainders int8")
        for name in FEW_BYTES
    ]
    works += [Work(family, name, shapes[name]) for family in ("sgd", "lion") for name in shapes]
    works += [
        Work(name.lower(), label, shapes[label])
        for name in OTHER_OPTIMIZERS
        for label in (MANY_SMALL, "ResNet-50")
    ]
    works += [Work("clip", name, shapes[name]) for name in (MANY_SMALL, "GPT-2 small")]
    works += [
        Work("chain", f"{MANY_SMALL}, norm below the limit", shapes[MANY_SMALL], true_norm=0.5),
        Work("chain", "16 x 1M, norm below the limit", shapes["16 x 1M"], true_norm=0.5),
        Work("clip", GPT_BELOW, shapes["GPT-2 small"], true_norm=0.5),
        Work("chain", f"{MANY_SMALL}, cold caches", shapes[MANY_SMALL], cold=True),
        Work("chain", f"{MANY_SMALL}, new gradients", shapes[MANY_SMALL], fresh_gradients=True),
    ]
    for tensors in (10, 100) if SMOKE else (10, 100, 1000, 10_000):
        label = f"{tensors} x 64, sweep"
        only = SWEEP_CONTENDERS
        works.append(Work("chain", label, ((64,),) * tensors, sweep="tensors", only=only))
    elements = 1000
    while elements <= largest:
        label = f"1 x {elements:.0e}, sweep".replace("e+0", "e")
        only = SWEEP_CONTENDERS
        works.append(Work("chain", label, ((elements,),), sweep="elements", only=only))
        elements *= 10
    return works


def host_works() -> list[Work]:
    """The rows about the host's part of a CUDA step: tensors of one element."""
    return [
        Work("host", f"{tensors} x 1", ((1,),) * (24 if SMOKE else tensors))
        for tensors in HOST_TENSORS[: 1 if SMOKE else None]
    ]


def window_works() -> list[Work]:
    """The rows about accumulation and release, which windows.py measures."""
    if SMOKE:
        return [Work(family, "24 x 8", ((8,),) * 24) for family in ("sums", "mean", "release")]
    gpt = SHAPES["GPT-2 small"]()
    works = [Work("sums", "GPT-2 small", gpt, dtype=torch.bfloat16)]
    works += [Work("mean", "GPT-2 small", gpt)]
    for label in RELEASED:
        tensors, elements = map(int, label.split(" x "))
        works.append(Work("release", label, ((elements,),) * tensors))
    return works


@dataclass(frozen=True)
class Plan:
    """How often a work is measured: in each of ``blocks`` turns ``rounds`` of every contender, and
    more of one whose rounds are short."""

    blocks: int
    rounds: int


def plan_of(work: Work) -> Plan:
    """More rounds where a round is short; the slowest contender decides.

    torch's default chain takes about 100 us per small tensor and 10 ns per element.
    """
    if SMOKE:
        return Plan(blocks=1, rounds=2)
    slowest = 1e-4 * len(work.shapes) + 1e-8 * count_elements(work.shapes)
    rounds = min(40, max(7, round(7.0 / slowest)))
    return Plan(blocks=7, rounds=max(1, round(rounds / 7)))


def turns_of(work: Work) -> list[tuple[int, Contender]]:
    """The blocks of a work and whose turn it is, in every second block the other way round."""
    everyone = contenders_of(work)
    blocks = range(plan_of(work).blocks)
    return [(block, one) for block in blocks for one in everyone[:: -1 if block % 2 else 1]]
