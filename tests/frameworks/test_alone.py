"""The loops of the frameworks in one process, against the same loops with torch's optimizer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import faststep

from .loops import (
    CLIP,
    TOLERANCE,
    accelerated,
    accelerator,
    clipping,
    fitted,
    module_of,
    plain,
    swapped,
    worst,
)
from .page import Words, blocks, gpt, run_block

KINDS = [(swapped, True), (clipping, False)]
over_kinds = pytest.mark.parametrize(("build", "clip"), KINDS, ids=["swapped", "max_grad_norm"])


def needs(*packages: str) -> None:
    for name in packages:
        pytest.importorskip(name, reason=f"{name} is not installed: make frameworks installs it")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


@over_kinds
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(build: Any, clip: bool, precision: str) -> None:
    needs("accelerate")
    want = accelerated(plain, machine=accelerator(mixed_precision=precision))
    how = "accelerator" if clip else "step"
    got = accelerated(build, clip=how, machine=accelerator(mixed_precision=precision))
    limit = TOLERANCE if precision == "no" else 2e-2  # a bf16 product has 8 bits
    assert worst(got, want) <= limit
    assert got[0] != got[-1]


def scaled(scaler: Any) -> Any:
    """accelerate makes a scaler on GPUs only; this one takes its place."""
    from accelerate.utils import AutocastKwargs

    machine = accelerator(kwargs_handlers=[AutocastKwargs(enabled=False)])
    machine.scaler = scaler
    machine.native_amp = True
    machine.state._mixed_precision = "fp16"
    return machine


@over_kinds
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_accelerate_with_a_scaler(build: Any, clip: bool, scaler: Any) -> None:
    needs("accelerate")
    want = accelerated(plain)
    machine = scaled(scaler("cpu", init_scale=64.0))
    got = accelerated(build, clip="accelerator" if clip else "step", machine=machine)
    assert worst(got, want) <= TOLERANCE
    assert isinstance(machine.scaler, scaler)


@over_kinds
def test_accelerate_saves_and_loads(build: Any, clip: bool, tmp_path: Path) -> None:
    needs("accelerate")
    want = accelerated(plain, folder=tmp_path / "torch")
    got = accelerated(build, clip="accelerator" if clip else "step", folder=tmp_path / "ours")
    assert worst(got, want) <= TOLERANCE


@over_kinds
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(build: Any, clip: bool, precision: str) -> None:
    needs("lightning")
    want = fitted(module_of(plain), precision=precision)
    got = fitted(module_of(build), clip=clip, precision=precision)
    assert worst(got, want) <= (TOLERANCE if precision == "32-true" else 2e-2)
    assert worst(got, fitted(module_of(plain), clip=False, precision=precision)) > 1e-3


@over_kinds
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_lightning_with_a_scaler(build: Any, clip: bool, scaler: Any) -> None:
    needs("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    def run(build: Any, clip: bool, scaler: Any) -> list[float]:
        plugin = MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=64.0))
        return fitted(module_of(build), clip=clip, plugins=[plugin])

    want = run(plain, True, torch.amp.GradScaler)
    assert worst(run(build, clip, scaler), want) <= 5e-3  # an fp16 product has 11 bits


def test_lightning_refuses_to_clip_twice_with_a_scaler() -> None:
    needs("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fitted(module_of(clipping), clip=True, plugins=[plugin])


@over_kinds
def test_lightning_resumes(build: Any, clip: bool, tmp_path: Path) -> None:
    needs("lightning")
    want = fitted(module_of(plain))
    before = fitted(module_of(build), clip=clip, save=tmp_path / "saved")
    after = fitted(module_of(build), clip=clip, resume=tmp_path / "saved")
    assert worst(before + after, want) <= TOLERANCE


def test_what_lightnings_wrapper_shows() -> None:
    """In the hooks of a module, and in manual optimization."""
    needs("lightning")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = clipping([weight])
    wrapped: Any = LightningOptimizer(optimizer)
    weight.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert wrapped.max_grad_norm == CLIP
    torch.testing.assert_close(wrapped.last_grad_norm, torch.tensor(12.0**0.5))
    wrapped.max_grad_norm = 0.5
    assert optimizer.max_grad_norm == 0.5


def trained(
    kind: Any,
    clip: float = 0.5,
    by_class: bool = False,
    folder: str = "",
    resume: Any = None,
    **more: Any,
) -> list[float]:
    """The losses of transformers.Trainer."""
    from transformers import Trainer, TrainingArguments

    model = gpt()
    args = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_grad_norm=clip, logging_steps=1, save_steps=3, report_to=[], use_cpu=True,
        learning_rate=0.01, disable_tqdm=True, seed=3,
    )  # fmt: skip
    options: dict[str, Any] = {}
    if by_class:
        options["optimizer_cls_and_kwargs"] = (kind, {"lr": 0.01, **more})
    else:
        optimizer = kind(model.parameters(), lr=0.01, **more)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 6)
        options["optimizers"] = (optimizer, scheduler)
    trainer = Trainer(model, args, train_dataset=Words(), **options)
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("by_class", [False, True], ids=["optimizers", "optimizer_cls_and_kwargs"])
def test_trainer(by_class: bool, tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    ours = faststep.optim.AdamW
    want = trained(torch.optim.AdamW, by_class=by_class, folder=str(tmp_path / "torch"))
    got = trained(ours, by_class=by_class, folder=str(tmp_path / "ours"))
    assert len(want) == 6
    assert worst(got, want) <= TOLERANCE * 4  # losses near 4
    inside = trained(ours, 0, by_class, str(tmp_path / "inside"), max_grad_norm=0.5)
    assert worst(inside, want) <= TOLERANCE * 4
    resume = str(tmp_path / "inside" / "checkpoint-3")
    again = trained(ours, 0, by_class, str(tmp_path / "again"), resume, max_grad_norm=0.5)
    assert worst(again, want) <= TOLERANCE * 4


def test_peft() -> None:
    needs("peft", "transformers")
    from peft import LoraConfig, get_peft_model

    def run(kind: Any, **options: Any) -> tuple[list[float], int]:
        torch.manual_seed(2)
        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(gpt(), config)
        optimizer = kind(model.parameters(), lr=0.01, **options)
        losses = []
        for row in Words():  # type: ignore[attr-defined]
            tokens: Tensor = row["input_ids"][None]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if not options:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 8:
                return losses, len(optimizer.state)
        raise AssertionError

    want, states = run(torch.optim.AdamW)
    assert states == 4
    for options in ({}, {"max_grad_norm": CLIP}):
        got, ours = run(faststep.optim.AdamW, **options)
        assert worst(got, want) <= TOLERANCE * 4
        assert ours == states


def test_timm() -> None:
    needs("PIL")
    if not any((Path(folder) / "timm").is_dir() for folder in sys.path):
        pytest.skip("timm is not installed: make frameworks installs it")
    script = Path(__file__).parent / "with_timm.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "as torch's"


ALONE = [code for code in blocks() if "zero.shard" not in code and "timm" not in code]


@pytest.mark.parametrize("code", ALONE, ids=range(len(ALONE)))
def test_the_page(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("accelerate", "lightning", "transformers", "peft")
    monkeypatch.chdir(tmp_path)
    if "Accelerator" in code:
        accelerator()  # forget the options of the one before
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert run_block(code) == "done"
