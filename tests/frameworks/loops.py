"""The training loops of accelerate and Lightning, as their users write them, on tiny models."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import faststep
from faststep import zero

CLIP = 0.1  # below every norm of these gradients
STEPS = 2  # micro-batches per step
TOLERANCE = 1e-6  # of losses near 0.7: rounding of fp32, where an unclipped step gives 1e-2

Build = Callable[[Any], torch.optim.Optimizer]


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def swapped(params: Any) -> torch.optim.Optimizer:
    return faststep.optim.AdamW(params, lr=0.01)


def clipping(params: Any) -> torch.optim.Optimizer:
    return faststep.optim.AdamW(params, lr=0.01, max_grad_norm=CLIP)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def batches() -> DataLoader[Any]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=source)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), 4)


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def accelerator(**options: Any) -> Any:
    """A new one; accelerate keeps the state of the last."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **options)


def accelerated(
    build: Build,
    *,
    stage: int = 0,
    order: str = "between",
    clip: str = "accelerator",
    folder: Path | None = None,
    machine: Any = None,
) -> list[float]:
    """Losses of a loop under accelerate.

    Args:
        stage: of zero.shard; 0 leaves it out.
        order: where shard stands: "before" prepare, "between" two, or "after" it.
        clip: "accelerator" by its function, "step" nowhere in the loop.
        folder: save there after half an epoch, and go on from what is loaded at its end.
    """
    machine = machine or accelerator()
    model, loader = net(), batches()
    optimizer: Any = build(model.parameters())
    limit = CLIP if clip == "step" else None
    if stage and order == "before":
        optimizer = zero.shard(model, optimizer, stage=stage, max_grad_norm=limit)
    if order == "between":
        model, loader = machine.prepare(model, loader)
        if stage:
            optimizer = zero.shard(model, optimizer, stage=stage, max_grad_norm=limit)
        optimizer = machine.prepare(optimizer)
    else:
        model, optimizer, loader = machine.prepare(model, optimizer, loader)
    if stage and order == "after":
        made = zero.shard(model, optimizer.optimizer, stage=stage, max_grad_norm=limit)
        optimizer.optimizer = made
    scheduler = machine.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 3))
    losses = _epoch(machine, model, optimizer, loader, scheduler, clip, folder)
    if folder is not None:
        machine.load_state(str(folder))
        losses = losses[:4] + _epoch(machine, model, optimizer, loader, scheduler, clip, None)
        _check_saved_model(machine, model, folder / "model")
    return losses


def _check_saved_model(machine: Any, model: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_file

    machine.save_model(model, str(folder))
    machine.wait_for_everyone()
    saved = load_file(str(folder / "model.safetensors"))
    wanted = machine.unwrap_model(model).state_dict()
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


def _epoch(
    machine: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    scheduler: Any,
    clip: str,
    folder: Path | None,
) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(loader):
        if folder is not None and number == 4:
            machine.save_state(str(folder))
        with machine.accumulate(model):
            loss = cross_entropy(model(x), y)
            machine.backward(loss)
            if machine.sync_gradients and clip == "accelerator":
                machine.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def module_of(build: Build, stage: int = 0, fully: bool = False, limit: float | None = None) -> Any:
    """A LightningModule that keeps its losses; `limit` is max_grad_norm of shard."""
    from lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if fully:
                mesh = self.device_mesh["data_parallel"]
                torch.distributed.fsdp.fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = build(self.parameters())
            if stage:
                model = self.trainer.strategy.model
                optimizer = zero.shard(model, optimizer, stage=stage, max_grad_norm=limit)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def fitted(
    module: Any,
    *,
    clip: bool = True,
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> list[float]:
    """The losses of Trainer.fit, of two epochs; `save` ends after one and saves."""
    from lightning import Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = {
        "max_epochs": 2 if save is None else 1,
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": STEPS,
        "gradient_clip_val": CLIP if clip else None,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(**settings | options)
        trainer.fit(module, batches(), ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
    return list(module.losses)


def trained(folder: Path, stage: int = 0, resume: Path | None = None) -> list[float]:
    """The losses of Trainer's steps, whose own function clips; it saves after four of six."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from .page import Words, gpt

    class Shards(TrainerCallback):
        """Shards when Trainer has wrapped the model, and gathers what rank 0 saves."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            made = zero.shard(trainer.model_wrapped, trainer.optimizer.optimizer, stage=stage)
            trainer.optimizer.optimizer = made

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if control.should_save:
                trainer.optimizer.optimizer.consolidate_state_dict()

    settings = {"max_steps": 6, "save_steps": 4, "logging_steps": 1, "max_grad_norm": CLIP}
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=0.01,
        per_device_train_batch_size=2, ddp_backend="gloo", **settings,
    )  # fmt: skip
    callbacks = [Shards()] if stage else []
    trainer = Trainer(gpt(), args, train_dataset=Words(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]
