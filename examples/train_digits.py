"""An MLP on scikit-learn's digits with mixed precision and gradient clipping.

    pip install . scikit-learn
    python examples/train_digits.py

The change from a script with torch alone:

    -from torch.amp import GradScaler
    -from torch.optim import AdamW
    +from faststep.amp import GradScaler
    +from faststep.optim import AdamW
     ...
    -scaler.unscale_(optimizer)
    -torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    -scaler.step(optimizer)
    +scaler.step(optimizer, max_norm=1.0)
     scaler.update()

A change of the two imports is enough to run the script. With the last change the step unscales and
clips in its own two passes over memory.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from faststep.amp import GradScaler
from faststep.optim import AdamW

EPOCHS = 15
BATCH_SIZE = 64


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images in [0, 1] and labels of a training set, and the same of a test set."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]
    return images[train], labels[train], images[test], labels[test]


def main() -> float:
    """Train and return the accuracy on the test set."""
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = AdamW(model.parameters(), lr=2e-3)
    scaler = GradScaler("cpu")
    accuracy = 0.0
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(
            f"epoch {epoch:2}  loss {sum(losses) / len(losses):.4f}  "
            f"test accuracy {100 * accuracy:.1f} %  "
            f"last gradient norm {optimizer.last_grad_norm.item():.3f}"
        )
    return accuracy


if __name__ == "__main__":
    main()
