"""What two ranks do, started by torchrun: every case's largest difference, or its error."""

import datetime
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frameworks.loops import (
    CLIP,
    accelerated,
    accelerator,
    clipping,
    fitted,
    module_of,
    plain,
    swapped,
    trained,
    worst,
)
from frameworks.page import blocks, run_block

Cases = dict[str, Callable[[], Any]]


def _fully_sharding() -> Any:
    """accelerate's FSDP2 on CPUs, where it takes every job of several processes for DDP."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
    )
    machine = accelerator()
    machine.state.fsdp_plugin = plugin
    machine.state.distributed_type = DistributedType.FSDP
    assert machine.is_fsdp2
    return machine


def of_accelerate(folder: Path) -> Cases:
    want: list[float] = []

    def first() -> str:
        want.extend(accelerated(plain))
        return "done"

    def case(*args: Any, **options: Any) -> Callable[[], float]:
        return lambda: worst(accelerated(*args, **options), want)

    def fully(build: Any, clip: str = "accelerator") -> Callable[[], float]:
        return lambda: worst(
            accelerated(build, order="after", clip=clip, machine=_fully_sharding()), want
        )

    def resumed(number: int, build: Any, **options: Any) -> Callable[[], float]:
        path = folder / f"accelerate {number}"
        plain_path = folder / f"plain {number}"
        return lambda: worst(
            accelerated(build, folder=path, **options), accelerated(plain, folder=plain_path)
        )

    cases: Cases = {"accelerate": first}
    cases["accelerate, swapped"] = case(swapped)
    cases["accelerate, max_grad_norm"] = case(clipping, clip="step")
    for stage in (1, 2):
        name = f"accelerate, stage {stage}"
        cases[name] = case(plain, stage=stage, clip="step")
        cases[f"{name}, its clipping"] = case(plain, stage=stage)
        cases[f"{name}, after"] = case(plain, stage=stage, order="after", clip="step")
        cases[f"{name}, saved"] = resumed(stage, plain, stage=stage, clip="step")
    cases["accelerate, before"] = case(plain, stage=2, order="before", clip="step")
    cases["accelerate FSDP2, torch"] = fully(plain)
    cases["accelerate FSDP2, swapped"] = fully(swapped)
    cases["accelerate FSDP2, max_grad_norm"] = fully(clipping, "step")
    return cases


def of_lightning(folder: Path) -> Cases:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    want: list[float] = []

    def fit(build: Any, stage: int = 0, **options: Any) -> list[float]:
        strategy = DDPStrategy(process_group_backend="gloo")
        limit = None if options.get("clip", True) else CLIP
        module = module_of(build, stage, limit=limit)
        return fitted(module, strategy=strategy, devices=2, **options)

    def first() -> str:
        want.extend(fit(plain))
        return "done"

    def fully(build: Any, clip: bool = True) -> Callable[[], float]:
        def work() -> float:
            strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo")
            module = module_of(build, fully=True)
            return worst(fitted(module, clip=clip, strategy=strategy, devices=2), want)

        return work

    def resumed(stage: int) -> float:
        path = folder / f"lightning {stage}"
        before = fit(plain, stage, clip=False, save=path)
        return worst(before + fit(plain, stage, clip=False, resume=path), want)

    cases: Cases = {"Lightning": first}
    cases["Lightning, swapped"] = lambda: worst(fit(swapped), want)
    cases["Lightning, max_grad_norm"] = lambda: worst(fit(clipping, clip=False), want)
    for stage in (1, 2):
        cases[f"Lightning, stage {stage}"] = lambda stage=stage: worst(
            fit(plain, stage, clip=False), want
        )
        cases[f"Lightning, stage {stage}, its clipping"] = lambda stage=stage: worst(
            fit(plain, stage), want
        )
        cases[f"Lightning, stage {stage}, saved"] = lambda stage=stage: resumed(stage)
    cases["Lightning FSDP2, torch"] = fully(plain)
    cases["Lightning FSDP2, swapped"] = fully(swapped)
    cases["Lightning FSDP2, max_grad_norm"] = fully(clipping, False)
    return cases


def of_trainer(folder: Path) -> Cases:
    want: list[float] = []

    def first() -> str:
        want.extend(trained(folder / "plain"))
        return "done"

    cases: Cases = {"Trainer": first}
    for stage in (1, 2):
        path = folder / f"trainer {stage}"
        cases[f"Trainer, stage {stage}"] = lambda s=stage, p=path: worst(trained(p, s), want)
        cases[f"Trainer, stage {stage}, resumed"] = lambda s=stage, p=path: worst(
            trained(p, s, resume=p / "checkpoint-4"), want
        )
    return cases


def main(results: Path) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=wait)
    folder = results.parent
    cases = of_accelerate(folder) | of_lightning(folder) | of_trainer(folder)
    for number, block in enumerate(blocks()):
        if "zero.shard" in block:
            cases[f"page {number}"] = lambda block=block: run_block(block)
    found = {}
    for name, work in cases.items():
        try:
            found[name] = work()
        except Exception:
            found[name] = traceback.format_exc()
    if dist.get_rank() == 0:
        results.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
