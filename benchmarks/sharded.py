"""Training steps of one rank: sharded.py WHO MODEL STEPS, which ranks.py starts.

Prints what rank 0 measured, as JSON. WHO is a key of TRAINERS, MODEL one of MODELS. A step is
forward, backward, clipping by the global norm and AdamW. Bytes are those that the loopback device
sent, by all ranks together. Peaks are those of the resident memory of rank 0 above what it was
before the model was made.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from faststep.cli.scripts.gpt import GPT, GPTConfig
from ranks import UnavailableError, answer_of

MAX_NORM = 1.0
LR = 1e-4
MODELS = {
    "GPT, 27M": GPTConfig(layers=8, heads=8, width=512, vocabulary=2048),
    "tiny": GPTConfig(layers=2, heads=2, width=32, context=16),
}
WARM = 2  # steps before those that are measured

Step = Callable[[Callable[[], Tensor]], float]  # a whole step; returns the seconds after backward


class Measured(NamedTuple):
    """What rank 0 found."""

    seconds: list[float]  # of whole steps
    update: list[float]  # of them, what came after backward: clipping and the optimizer's step
    sent: float  # bytes per step on the wire, of all ranks
    peak: int  # bytes
    parameters: int  # bytes


def _by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
) -> Step:
    """The loop of a script: backward, clip, step, zero_grad."""

    def step(loss_of: Callable[[], Tensor]) -> float:
        loss_of().backward()
        start = time.perf_counter()
        clip()
        optimizer.step()
        seconds = time.perf_counter() - start
        optimizer.zero_grad()
        return seconds

    return step


def ddp(model: nn.Module) -> tuple[nn.Module, Step]:
    """DistributedDataParallel and torch's fused AdamW."""
    whole = DistributedDataParallel(model, gradient_as_bucket_view=True)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    return whole, _by_hand(
        whole, optimizer, lambda: torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    )


def redundancy(model: nn.Module) -> tuple[nn.Module, Step]:
    """torch's ZeroRedundancyOptimizer: states alone are sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    whole = DistributedDataParallel(model, gradient_as_bucket_view=True)
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
    )
    return whole, _by_hand(
        whole, optimizer, lambda: torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    )


def _fully_sharded(model: nn.Module) -> list[nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return list(model.parameters())


def fsdp2(model: nn.Module) -> tuple[nn.Module, Step]:
    """torch's fully_shard per block and fused AdamW."""
    params = _fully_sharded(model)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    return model, _by_hand(
        model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    )


def fsdp2_with_ours(model: nn.Module) -> tuple[nn.Module, Step]:
    """torch's fully_shard per block; the optimizer of faststep clips in its step."""
    from faststep.optim import AdamW

    optimizer = AdamW(_fully_sharded(model), lr=LR, max_grad_norm=MAX_NORM)
    return model, _by_hand(model, optimizer, lambda: None)


def ours(stage: int, **options: Any) -> Callable[[nn.Module], tuple[nn.Module, Step]]:
    """faststep.zero.shard, on the bare module."""

    def build(model: nn.Module) -> tuple[nn.Module, Step]:
        from faststep.optim import AdamW
        from faststep.zero import shard

        optimizer = AdamW(model.parameters(), lr=LR)
        sharded = shard(model, optimizer, stage=stage, max_grad_norm=MAX_NORM, **options)
        return model, _by_hand(model, sharded, lambda: None)

    return build


def deepspeed(stage: int) -> Callable[[nn.Module], tuple[nn.Module, Step]]:
    """DeepSpeed's engine with torch's fused AdamW."""

    def build(model: nn.Module) -> tuple[nn.Module, Step]:
        import deepspeed as package

        package.init_distributed(dist_backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)

        def step(loss_of: Callable[[], Tensor]) -> float:
            engine.backward(loss_of())
            start = time.perf_counter()
            engine.step()
            return time.perf_counter() - start

        return engine, step

    return build


DDP, REDUNDANCY, FSDP2 = "DDP, torch fused", "ZeroRedundancyOptimizer", "FSDP2, torch fused"
FSDP2_OURS = "FSDP2, faststep"
STAGE = "faststep, stage {}"
IN_FORWARD = "faststep, stage {}, gathered in forward"
DEEPSPEED = "DeepSpeed, stage {}"
OUR_STAGES = tuple(name.format(stage) for name in (STAGE, IN_FORWARD) for stage in (1, 2))
TRAINERS: dict[str, Callable[[nn.Module], tuple[nn.Module, Step]]] = {
    **{STAGE.format(stage): ours(stage) for stage in (1, 2)},
    **{IN_FORWARD.format(stage): ours(stage, gather="forward") for stage in (1, 2)},
    FSDP2_OURS: fsdp2_with_ours,
    DDP: ddp,
    REDUNDANCY: redundancy,
    FSDP2: fsdp2,
    **{DEEPSPEED.format(stage): deepspeed(stage) for stage in (1, 2, 3)},
}


def sent_by_loopback() -> int:
    """Bytes that the loopback device has sent since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise UnavailableError("/proc/net/dev has no loopback device")


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (the highest since the start or `reset_peak`) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise UnavailableError(f"/proc/self/status has no {field}")


def load(who: str) -> None:
    """Import and start what is not the trainer's own: kernels, threads, packages."""
    model = GPT(MODELS["tiny"])
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    loss: Tensor = model(tokens, tokens)
    loss.backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    if who.startswith("DeepSpeed"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        try:
            import deepspeed  # noqa: F401
        except ImportError as error:
            raise UnavailableError(str(error)) from error


def reset_peak() -> None:
    """Let VmHWM start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def train(who: str, label: str, steps: int) -> Measured:
    """The part of one rank."""
    config = MODELS[label]
    load(who)
    torch.manual_seed(0)
    reset_peak()
    before = memory("VmRSS")
    model = GPT(config)
    parameters = sum(param.nbytes for param in model.parameters())
    whole, step = TRAINERS[who](model)
    torch.manual_seed(1 + dist.get_rank())
    seconds, update, sent = [], [], 0
    for number in range(WARM + steps):
        tokens = torch.randint(config.vocabulary, (2, config.context + 1))
        dist.barrier()
        if number == WARM:
            sent = sent_by_loopback()
        start = time.perf_counter()
        after = step(lambda tokens=tokens: whole(tokens[:, :-1], tokens[:, 1:]))  # type: ignore[misc]
        dist.barrier()
        if number >= WARM:
            seconds.append(time.perf_counter() - start)
            update.append(after)
    sent = sent_by_loopback() - sent
    return Measured(seconds, update, sent / steps, memory("VmHWM") - before, parameters)


if __name__ == "__main__":
    answer_of(lambda: train(sys.argv[1], sys.argv[2], int(sys.argv[3]))._asdict())
