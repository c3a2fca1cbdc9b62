"""Scripts with accelerate, Lightning and Trainer under `faststep run`: plain torch's losses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from programs import Programs

from .loops import TOLERANCE, worst

MODEL = """
import logging, sys, warnings
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
inputs = torch.randn(64, 8)
labels = (inputs.sum(1) > 0).long()
losses = []
"""

ACCELERATE = """
from accelerate import Accelerator
from torch.optim import AdamW

machine = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = DataLoader(TensorDataset(inputs, labels), 4, shuffle=True)
optimizer = AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
net, optimizer, loader, schedule = machine.prepare(net, optimizer, loader, schedule)
for x, y in loader:
    with machine.accumulate(net):
        loss = cross_entropy(net(x), y)
        machine.backward(loss)
        if machine.sync_gradients:
            machine.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(type(optimizer.optimizer).__module__, *losses)
"""

LIGHTNING = """
import lightning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, number):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=1, gradient_clip_val=0.1, accumulate_grad_batches=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=sys.argv[1],
)
trainer.fit(Module(), DataLoader(TensorDataset(inputs, labels), 4, shuffle=True))
print(type(trainer.optimizers[0]).__module__, *losses)
"""

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

words = torch.randint(0, 50, (16, 12))
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    sys.argv[1], num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.01,
    max_grad_norm=0.1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, optim=sys.argv[2],
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": w, "labels": w} for w in words])
trainer.log = lambda logs, *more: losses.extend([logs["loss"]] if "loss" in logs else [])
trainer.train()
print(type(trainer.optimizer.optimizer).__module__, *losses)
"""


def printed(script: Path, *command: str, arguments: tuple[str, ...]) -> tuple[str, list[float]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    module, *losses = done.stdout.splitlines()[-1].split()
    return module, [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("package", "text", "option"),
    [
        ("accelerate", ACCELERATE, ""),
        ("lightning", LIGHTNING, ""),
        ("transformers", TRAINER, "adamw_torch"),
        ("transformers", TRAINER, "adamw_torch_fused"),
    ],
)
def test_scripts_that_are_not_changed(package: str, text: str, option: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make frameworks installs it")
    script = tmp_path / "script.py"
    script.write_text(MODEL + text)
    arguments = (str(tmp_path / "out"), option)
    plain, expected = printed(script, arguments=arguments)
    ours, losses = printed(script, "-m", "faststep", "run", arguments=arguments)
    assert (plain, ours) == ("torch.optim.adamw", "faststep.run.optimizers")
    assert len(losses) >= 8
    assert worst(losses, expected) < TOLERANCE


def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="not installed: make frameworks installs it")
    script = tmp_path / "script.py"
    script.write_text(MODEL + ACCELERATE)
    plainly = ("--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no")
    launch = ("-m", "accelerate.commands.launch", *plainly, "--dynamo_backend=no")
    plain, expected = printed(script, *launch, arguments=())
    ours, losses = printed(script, *launch, "--module", "faststep", "run", arguments=())
    assert (plain, ours) == ("torch.optim.adamw", "faststep.run.optimizers")
    assert len(losses) == 16
    assert worst(losses, expected) < TOLERANCE


RANKS = """
import os, sys, torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"{type(optimizer.optim).__module__} {os.environ['RANK']}\\n")  # at once
del model, optimizer  # torch may abort where they end after the group
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("count", "before"), [(2, ()), (1, ("--no-python", sys.executable))])
def test_torchrun(count: int, before: tuple[str, ...], tmp_path: Path, programs: Programs) -> None:
    """Each rank is swapped, and the first one alone says so."""
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    torchrun = "from torch.distributed.run import main\nmain()"
    words = (f"--nproc-per-node={count}", *before, "-m", "faststep", "run", str(script))
    done = programs.run(torchrun, *words, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"faststep.run.optimizers {rank}" for rank in range(count)
    ]
    assert done.stderr.count("AdamW (faststep's): 1 object, 3 steps") == 1
