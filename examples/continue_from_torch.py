"""Move a training from torch's AdamW to faststep's and back, by ordinary checkpoints.

    pip install .
    python examples/continue_from_torch.py

The change in a script that resumes:

    -optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    +optimizer = faststep.optim.AdamW(model.parameters(), lr=3e-3)
     optimizer.load_state_dict(torch.load("checkpoint.pt")["optimizer"])
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import faststep


def train(
    optimizer_class: type[torch.optim.Optimizer], start: Path | None, end: Path, steps: int
) -> float:
    """Load a checkpoint, take some steps, save a checkpoint, and return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    inputs = torch.randn(256, 8)
    targets = inputs.prod(1, keepdim=True).tanh()
    optimizer = optimizer_class(model.parameters(), lr=3e-3)
    if start is not None:
        checkpoint = torch.load(start)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, end)
    return loss.item()


def main() -> tuple[float, float]:
    """Return two last losses: of torch alone, and of torch, faststep and torch in turn."""
    ours, theirs = faststep.optim.AdamW, torch.optim.AdamW
    with tempfile.TemporaryDirectory() as folder:
        a, b, c = (Path(folder) / f"{name}.pt" for name in "abc")
        straight = train(theirs, None, c, steps=300)
        print(f"300 steps of torch                                  loss {straight:.6f}")
        first = train(theirs, None, a, steps=100)
        print(f"100 steps of torch                                  loss {first:.6f}")
        second = train(ours, a, b, steps=100)
        print(f"100 more of faststep, from torch's checkpoint       loss {second:.6f}")
        mixed = train(theirs, b, c, steps=100)
        print(f"100 more of torch, from faststep's checkpoint       loss {mixed:.6f}")
    return straight, mixed


if __name__ == "__main__":
    main()
