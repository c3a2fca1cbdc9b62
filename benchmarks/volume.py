"""What a rank of a sharded optimizer sends and holds: volume.py STAGE MODEL, which ranks.py starts.

Prints what rank 0 measured, as JSON. MODEL is one of sharded.MODELS. A step has several backward
passes, all but the last inside no_sync(). Memory is the growth of the resident memory since before
the model was made, after a step and before zero_grad(), when what was freed is given back.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from faststep.cli.scripts.gpt import GPT
from ranks import answer_of
from sharded import LR, MAX_NORM, MODELS, load, memory, sent_by_loopback

MICRO_STEPS = (1, 2, 8)
STEPS = 2  # that are measured, after one that is not


class Held(NamedTuple):
    """What rank 0 found."""

    sent: dict[str, float]  # bytes of all ranks in a step of so many backward passes
    memory: int  # bytes
    parameters: int  # bytes


def resident() -> int:
    """Bytes that this process has in memory and uses."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory("VmRSS")


def hold(stage: int, label: str) -> Held:
    """The part of one rank."""
    from faststep.optim import AdamW
    from faststep.zero import shard

    config = MODELS[label]
    load("faststep")
    before = resident()
    torch.manual_seed(0)
    model = GPT(config)
    parameters = sum(param.nbytes for param in model.parameters())
    optimizer = shard(model, AdamW(model.parameters(), lr=LR), stage=stage, max_grad_norm=MAX_NORM)
    tokens = torch.randint(config.vocabulary, (2, config.context + 1))

    def backward() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()

    found, sent = {}, 0
    for passes in MICRO_STEPS:
        for number in range(1 + STEPS):
            dist.barrier()
            if number == 1:
                sent = sent_by_loopback()
            optimizer.zero_grad()
            for _ in range(passes - 1):
                with optimizer.no_sync():
                    backward()
            backward()
            optimizer.step()
        dist.barrier()
        found[str(passes)] = (sent_by_loopback() - sent) / STEPS
    return Held(found, resident() - before, parameters)


if __name__ == "__main__":
    answer_of(lambda: hold(int(sys.argv[1]), sys.argv[2])._asdict())
