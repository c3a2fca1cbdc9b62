"""A tiny GPT that learns to sort digits; the optimizer clips the gradients inside its step.

    pip install .
    python examples/train_gpt.py

The change from a script with torch alone:

    -from torch.optim import AdamW
    +from faststep.optim import AdamW
     ...
    -optimizer = AdamW(model.parameters(), lr=1e-3)
    +optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
     ...
    -torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
     optimizer.step()

The model reads eight digits and a separator and writes the digits in order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from faststep.optim import AdamW

DIGITS = 8
SEPARATOR = 10
CONTEXT = 2 * DIGITS
STEPS = 400


class SortingGPT(nn.Module):
    """A causal transformer over the alphabet 0-9 and a separator."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(11, width)
        self.position = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token at every position; tokens is int64 (batch, length)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.token(tokens) + self.position.weight[:length]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def batch_of(size: int) -> Tensor:
    """Return rows of eight digits, the separator, and the same digits in order."""
    digits = torch.randint(10, (size, DIGITS))
    return torch.cat([digits, torch.full((size, 1), SEPARATOR), digits.sort(1).values], 1)


@torch.no_grad()
def accuracy(model: SortingGPT) -> float:
    """The share of unseen rows that the model sorts without a mistake."""
    rows = batch_of(500)
    written = rows[:, : DIGITS + 1]
    for _ in range(DIGITS):
        written = torch.cat([written, model(written)[:, -1:].argmax(-1)], 1)
    return (written == rows).all(1).float().mean().item()


def main() -> float:
    """Train, and return the share of rows that the model sorts without a mistake."""
    torch.manual_seed(0)
    model = SortingGPT()
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-5)
    for step in range(1, STEPS + 1):
        rows = batch_of(64)
        logits = model(rows[:, :-1])[:, DIGITS:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, DIGITS + 1 :].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            norm = optimizer.last_grad_norm.item()
            print(
                f"step {step:4}  loss {loss.item():.4f}  gradient norm before clipping {norm:.3f}"
            )
    right = accuracy(model)
    print(f"sorted without a mistake: {100 * right:.1f} % of 500 unseen rows")
    return right


if __name__ == "__main__":
    main()
