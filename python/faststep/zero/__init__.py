"""Sharded training for plain torchrun scripts: ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from .._torch.compiler import uncompiled
from ..optim.request import check_limit
from .admitted import Kept
from .build import build
from .deepspeed import Loop, from_deepspeed_config
from .engine import Options
from .estimate import Estimate, StageMemory, estimate
from .optimizer import ShardedOptimizer

__all__ = [
    "Estimate",
    "Loop",
    "ShardedOptimizer",
    "StageMemory",
    "estimate",
    "from_deepspeed_config",
    "shard",
]


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    stage: Literal[1, 2, 3] = 2,
    process_group: Any = None,
    replicate_group: Any = None,
    bucket_mb: float = 25,
    gather: Literal["step", "forward"] = "step",
    master_weights: bool | Literal["fp32", "remainder16"] | None = None,
    max_grad_norm: float | None = None,
    blocks: Sequence[nn.Module] | None = None,
    offload: Literal["optimizer", "params"] | None = None,
    timeout: float = 60,
) -> ShardedOptimizer:
    """Spread optimizer states, updates, gradients (stage 2) and parameters (stage 3) over ranks.

    ::

        torch.distributed.init_process_group("gloo")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = faststep.zero.shard(model, optimizer, stage=2)

    The loop stays as it is: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`,
    schedulers. During backward each rank receives the mean of one slice of the gradients; `step`
    updates the slice and gathers the parameters. Each rank sends 2 (N-1)/N of the parameters' bytes
    per step. The result has the bits of one process that steps with the same mean gradients.

    This takes the place of DistributedDataParallel. Like it, `shard` gives all ranks the parameters
    and buffers of rank 0. A model that is inside of one already is taken over. See
    docs/sharding.md.

    Args:
        model: the module that the loop calls, in CPU memory or on the current CUDA device: a plain
            one, or one inside DistributedDataParallel, which then reduces nothing by itself.
        optimizer: of a class of faststep.optim but Adafactor and Muon, or of the same class of
            torch.optim, or of a subclass that replaces none of its methods; with or without state.
            Do not step it any more.
        stage: 1 keeps memory for whole gradients from step to step. 2 frees them bucket by bucket
            during backward, and keeps slices. 3 applies torch's `fully_shard` to the model, whose
            parameters become DTensors. Default: 2.
        process_group: the ranks, with gloo, or NCCL for CUDA parameters. Default: None, all ranks;
            one process is the ordinary fused optimizer.
        replicate_group: the ranks that own the same slices, one of each `process_group`: those of
            other nodes, where `process_group` has those of this node. Gradients are then reduced
            into slices inside, and the slices are added up across; stages 1 and 2. Default: None.
        bucket_mb: MiB from which a bucket of gradients is complete; stages 1 and 2. Default: 25.
        gather: "step" returns from `step` when all parameters are there. "forward" returns at
            once, and the next forward waits for each module's parameters when it comes to them, as
            does whoever reads them through the module. Those kept elsewhere are read after
            `wait()`; see docs/sharding.md; stages 1 and 2. Default:
            "step".
        master_weights: keep fp32 masters, and fp32 states, of the bf16 and fp16 parameters that a
            rank owns. The step updates the masters, and parameters are these, rounded to the
            nearest. Parameters of other dtypes have none. `state_dict()` has the masters as
            "master_weights"; without them in a state dict, or in an optimizer that keeps none, they
            begin as the parameters. False drops those of the optimizer. True is "fp32"; with
            "remainder16" a rank keeps the other halves of its bf16 parameters in their place.
            Default: None, as the optimizer does.
        max_grad_norm: clip all gradients by their global norm inside the step. Default: None, that
            of the optimizer, if it has one.
        blocks: modules that stage 3 shards one by one, before the rest of the model. Default: None,
            the outermost modules of classes of which there are several, in whatever container.
            Those that hold over a third of the model, as stages or stacks do, are taken apart. The
            result has their names as `blocks`.
        offload: "optimizer" keeps states and masters in host memory, and updates the parameters
            there: each rank those that it owns. See :func:`faststep.offload`. "params" keeps a
            rank's parts of parameters and gradients there too, by torch's CPUOffloadPolicy, at
            stage 3. See docs/offload.md. Default: None.
        timeout: seconds within which all ranks must come to `shard`, `state_dict` and
            `load_state_dict`. After it those that have come raise an error that names the others,
            before anything is sent, and can go on. Messages of backward and `step` have the timeout
            of the process group. Default: 60.

    Returns:
        An optimizer over the same `param_groups`: the same list and dicts.

    Raises:
        TypeError: an optimizer of another class, or `differentiable`; a DistributedDataParallel
            model with a communication hook or mixed_precision; a parameter that is sharded already,
            or is no dense tensor of a floating dtype in CPU memory or on the current CUDA device
            with NCCL.
        ValueError: an argument out of range, a parameter that is not the model's, or one in fp16
            with `master_weights="remainder16"`.
        NotImplementedError: `offload="params"` in one process.
        RuntimeError: ranks differ in their parameters. All ranks name the first one that differs.
            A rank did not call it within `timeout`. For stage 3 also: a parameter that has a
            gradient or hooks.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", arXiv:1910.02054.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
    if stage == 3 and gather != "step":
        raise ValueError('gather="forward" is for stages 1 and 2: fully_shard gathers by itself')
    if stage == 3 and replicate_group is not None:
        raise ValueError(
            "replicate_group is for stages 1 and 2: for stage 3 call fully_shard with a mesh of "
            "two dimensions, and use an optimizer of faststep.optim"
        )
    if stage != 3 and blocks is not None:
        raise ValueError("blocks are for stage 3")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, not {bucket_mb}")
    if gather not in ("step", "forward"):
        raise ValueError(f'gather must be "step" or "forward", not {gather!r}')
    if offload not in (None, "optimizer", "params"):
        raise ValueError(f'offload must be None, "optimizer" or "params", not {offload!r}')
    if offload == "params" and stage != 3:
        raise ValueError('offload="params" is for stage 3: stages 1 and 2 offload "optimizer"')
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout}")
    check_limit("max_grad_norm", max_grad_norm)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r:.60}")
    if isinstance(optimizer, ShardedOptimizer):
        raise TypeError("shard(): this optimizer is sharded already")
    model = uncompiled(model)
    kept = Kept.of(optimizer, master_weights)
    asked = Options(stage, bucket_mb * 2**20, max_grad_norm, gather, kept, offload)
    return build(model, optimizer, asked, process_group, replicate_group, blocks, timeout)
