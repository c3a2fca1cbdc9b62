"""Training loops as scripts have them, on a real device, against torch's fused optimizer.

The same model sees the same batches. Losses agree to rounding, and our loop never waits for the
device.
"""

import contextlib
import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import faststep
from faststep import zero

from .common import REHEARSAL, no_synchronization

pytestmark = pytest.mark.skipif(REHEARSAL, reason="autograd's operators are a real device's")
STEPS = 12
Optimizers = Callable[..., Any]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(33, 257), nn.GELU(), nn.LayerNorm(257), nn.Linear(257, 10)]
    return nn.Sequential(*layers).to("cuda", dtype)


def batches(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    pairs = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 33, generator=source)
        pairs.append((inputs.to("cuda", dtype), inputs[:, :10].argmax(1).to("cuda")))
    return pairs


def close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(
        torch.stack(ours).cpu(), torch.stack(theirs).cpu(), rtol=tolerance, atol=tolerance
    )


def adamw(params: Any, **options: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-2, fused=True, **options)


def our_adamw(params: Any, **options: Any) -> Any:
    return faststep.optim.AdamW(params, lr=1e-2, **options)


def loop(
    make: Optimizers,
    clip: Callable[..., Any],
    make_scaler: Any = None,
    dtype: torch.dtype | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> list[Tensor]:
    """The losses of a loop, under autocast and with a scaler if asked."""
    model = wrap(model_of())
    optimizer, losses = make(model.parameters()), []
    scaler = make_scaler("cuda", init_scale=2.0**14, growth_interval=5) if make_scaler else None
    for step, (inputs, targets) in enumerate(batches()):
        waits = contextlib.nullcontext() if make is adamw or step < 3 else no_synchronization()
        with waits:
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.detach())
            if scaler is None:
                loss.backward()
                clip(model.parameters(), 0.5)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return losses


TORCHS, OURS = (adamw, nn.utils.clip_grad_norm_), (our_adamw, faststep.clip_grad_norm_)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype | None) -> None:
    close(loop(*OURS, dtype=dtype), loop(*TORCHS, dtype=dtype), 1e-4 if dtype is None else 2e-2)


def test_a_scaler() -> None:
    ours = loop(*OURS, faststep.amp.GradScaler, torch.float16)
    close(ours, loop(*TORCHS, torch.amp.GradScaler, torch.float16), 1e-2)


def test_a_compiled_model() -> None:
    close(loop(*OURS, wrap=torch.compile), loop(*TORCHS, wrap=torch.compile))


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1,
        timeout=datetime.timedelta(seconds=60), device_id=torch.device("cuda", 0),
    )  # fmt: skip
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel() -> None:
    """Its gradients are views of buckets, some of which are not on 16 bytes."""

    def wrap(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    with one_rank():
        close(loop(*OURS, wrap=wrap), loop(*TORCHS, wrap=wrap))


def test_fully_shard() -> None:
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)

    losses = []
    with one_rank():
        for make, clip in (OURS, TORCHS):
            model = wrap(model_of())
            optimizer = make(model.parameters())
            own = []
            for inputs, targets in batches():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                clip(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                own.append(loss.detach())
            losses.append(own)
    close(*losses)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard(stage: Any) -> None:
    model, losses = model_of(), []
    with one_rank():
        optimizer = zero.shard(model, adamw(model.parameters()), stage=stage, max_grad_norm=0.5)
        for inputs, targets in batches():
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    close(losses, loop(*TORCHS))


def test_a_whole_step_in_a_graph() -> None:
    model, wanted = model_of(), loop(*TORCHS)
    optimizer = our_adamw(model.parameters(), capturable=True, max_grad_norm=0.5)
    pairs = batches()
    inputs, targets = (one.clone() for one in pairs[0])

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for pair in pairs[:3]:
            inputs.copy_(pair[0]), targets.copy_(pair[1])
            losses.append(step().clone())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss = step()
    for pair in pairs[3:]:
        inputs.copy_(pair[0]), targets.copy_(pair[1])
        graph.replay()
        losses.append(loss.clone())
    close(losses, wanted)


def test_masters() -> None:
    """bf16 parameters beside fp32 masters, against fp32 parameters cast before each forward."""
    model, whole = model_of(torch.bfloat16), model_of()
    with torch.no_grad():
        for param, rounded in zip(whole.parameters(), model.parameters(), strict=True):
            param.copy_(rounded)
    optimizer = our_adamw(model.parameters(), master_weights=True)
    reference = adamw(whole.parameters())
    for inputs, targets in batches(torch.bfloat16):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for param, rounded in zip(whole.parameters(), model.parameters(), strict=True):
            param.grad = rounded.grad.float()
        optimizer.step(), reference.step()
        optimizer.zero_grad()
        for param, rounded in zip(whole.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(rounded.float(), param, rtol=2**-7, atol=1e-5)


def test_release() -> None:
    """Updates in backward, of gradients that autograd makes."""
    model, losses = model_of(), []
    optimizer = our_adamw(model.parameters(), max_grad_norm=None)
    release = faststep.release_gradients(model, optimizer)
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        losses.append(loss.detach())
    release.remove()
    close(losses, loop(adamw, lambda params, limit: None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulation(dtype: torch.dtype) -> None:
    """Windows of four micro-batches; bf16 gradients are summed in fp32."""
    model, whole, window = model_of(dtype), model_of(), 4
    optimizer, reference = our_adamw(model.parameters()), adamw(whole.parameters())
    sums = faststep.accumulate(optimizer, window, model=model, dtype=torch.float32)
    ours, theirs = [], []
    for number, (inputs, targets) in enumerate(batches()):
        with sums:
            loss = nn.functional.cross_entropy(model(inputs.to(dtype)), targets)
            sums.backward(loss)
        assert sums.ready is (number % window == window - 1)
        ours.append(loss.detach().float())
        loss = nn.functional.cross_entropy(whole(inputs), targets)
        (loss / window).backward()
        theirs.append(loss.detach())
        if sums.ready:
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
    sums.remove()
    close(ours, theirs, 1e-4 if dtype is torch.float32 else 5e-2)


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(33, 257), torch.nn.GELU(), torch.nn.Linear(257, 10))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cuda")
x = torch.randn(640, 33)
data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))
for inputs, targets in torch.utils.data.DataLoader(data, 32, shuffle=True, pin_memory=True):
    inputs, targets = inputs.cuda(non_blocking=True), targets.cuda(non_blocking=True)
    with torch.autocast("cuda", torch.float16):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item())
torch.save(optimizer.state_dict(), "state.pt")
"""


def test_run(tmp_path: Path) -> None:
    """A script in plain torch prints the same losses under `run`, and saves the same keys."""
    (tmp_path / "train.py").write_text(SCRIPT)
    printed, states, said = [], [], ""
    for command in ([], ["-m", "faststep", "run"]):
        done = subprocess.run(
            [sys.executable, *command, "train.py"],
            cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(torch.tensor([float(line) for line in done.stdout.split()]))
        states.append(torch.load(tmp_path / "state.pt"))
        said = done.stderr
    print(said)
    assert "torch.optim -> faststep.optim" in said
    torch.testing.assert_close(*printed, rtol=1e-2, atol=1e-2)
    assert states[0].keys() == states[1].keys()
    assert [s.keys() for s in states[0]["state"].values()] == [
        s.keys() for s in states[1]["state"].values()
    ]
