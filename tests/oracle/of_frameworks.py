"""Scripts with accelerate and Lightning, where they are installed."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from .watch import Library, Watch


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def accelerate_finds_skipped_steps(library: Library, watch: Watch) -> None:
    if importlib.util.find_spec("accelerate") is None:
        watch("accelerate is not installed")
        return
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)  # whose state the others read
    model = _model()
    inner = library.optim.AdamW(model.parameters(), lr=0.1)
    scaler = library.GradScaler("cpu", init_scale=16.0)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    scheduler = AcceleratedScheduler(library.optim.lr_scheduler.StepLR(inner, 1), optimizer)
    for step in range(5):
        loss = model(torch.full((2, 4), 0.1 * step)).square().mean()
        scaler.scale(loss * float("inf") if step in (1, 2) else loss).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        watch("skipped", optimizer.step_was_skipped)
        watch("lr", scheduler.get_last_lr())
        watch.model("after", model)


def lightning_in_mixed_precision(library: Library, watch: Watch) -> None:
    if importlib.util.find_spec("lightning") is None:
        watch("lightning is not installed")
        return
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Fitted(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(batch).square().mean()
            return loss * float("inf") if index == 1 else loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            watch.model("before the step", self)

        def configure_optimizers(self) -> Any:
            optimizer = library.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [library.optim.lr_scheduler.StepLR(optimizer, 1)]

    scaler = library.GradScaler("cpu", init_scale=16.0)
    batches = torch.linspace(-1, 1, 40).reshape(10, 4)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        plugins=[MixedPrecision("bf16-mixed", "cpu")]
        if scaler is None
        else [MixedPrecision("16-mixed", "cpu", scaler)],
    )
    model = Fitted()
    trainer.fit(model, library.DataLoader(batches, batch_size=3))
    watch.model("after", model)
    watch("scaler", scaler.state_dict())
    watch("lr", trainer.optimizers[0].param_groups[0]["lr"])
