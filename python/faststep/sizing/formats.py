"""The formats in which an optimizer of faststep keeps states and masters."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import optim
from ..zero.estimate import PROBE, States, states_of

STATES = ("fp32", "bf16", "int8")
MASTERS = ("none", "fp32", "remainder16")
KINDS = [name for name in optim.__all__ if name != "Adafactor"]  # which has none of the formats
_LOW = (torch.bfloat16, torch.float16)


class Format(NamedTuple):
    """What an optimizer keeps of parameters.

    Args:
        states: "fp32", "bf16" or "int8".
        masters: "none", "fp32" or "remainder16".
        bytes: of states and masters, by the dtype of the parameters.
    """

    states: str
    masters: str
    bytes: Mapping[torch.dtype, States]

    @property
    def options(self) -> str:
        """The optimizer's arguments."""
        masters = "" if self.masters == "none" else f', master_weights="{self.masters}"'
        return masters + ("" if self.states == "fp32" else f', state_dtype="{self.states}"')

    def __str__(self) -> str:
        masters = "" if self.masters == "none" else f" and {self.masters} masters"
        return f"{self.states} states{masters}"


def formats_of(optimizer: str, dtypes: Sequence[torch.dtype]) -> list[Format]:
    """All that fit parameters of these dtypes; those of `shard`'s defaults come first."""
    masters = MASTERS[1:] if any(dtype in _LOW for dtype in dtypes) else MASTERS[:1]
    found = []
    for master, states in itertools.product(masters, STATES):
        try:
            found.append(_format(optimizer, dtypes, states, master))
        except ValueError:  # the class, or a dtype, does not go with the format
            continue
    return found


def _format(kind: str, dtypes: Sequence[torch.dtype], states: str, masters: str) -> Format:
    options: dict[str, Any] = {} if masters == "none" else {"master_weights": masters}
    if states != "fp32" or masters != "none":
        options["state_dtype"] = states
    found = {}
    for dtype in dtypes:
        probe = nn.Parameter(torch.zeros(PROBE, dtype=dtype, device="cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a decay that is none of a plan's business
            made = getattr(optim, kind)([probe], lr=1e-3, **options)
        found[dtype] = states_of(made)
    return Format(states, masters, found)
