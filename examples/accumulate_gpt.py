"""Gradient accumulation: a byte-level GPT trained by torch, by faststep, and with three mistakes.

    pip install .
    python examples/accumulate_gpt.py

The text is the standard library's own source, cut into documents of uneven length. Five ways to
train on windows of eight micro-batches are compared with one large batch of the same documents:

    one large batch       the result that the others should have
    before: torch         loss / count, and everything once per window, by hand
    after: faststep       accumulate(normalize="tokens")
    a mean of means       loss_mean / 8: short documents weigh as much as long ones
    clipped too early     clip_grad_norm_ in every micro-step
    zeroed too early      zero_grad in every micro-step: only the last document counts

The difference between the correct script with torch alone and the one with faststep:

    -optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    +optimizer = faststep.optim.AdamW(model.parameters(), lr=LR, max_grad_norm=LIMIT)
    +accum = faststep.accumulate(optimizer, WINDOW, model=model, normalize="tokens")
     for window in windows:
    -    count = sum(map(tokens_of, window))
         for document in window:
    -        (loss_of(model, document) / count).backward()
    -    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    +        with accum:
    +            accum.add_count(tokens_of(document))
    +            accum.backward(loss_of(model, document))
         optimizer.step()
         optimizer.zero_grad()
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import faststep
from faststep.cli.scripts.gpt import GPT, GPTConfig

WINDOW = 8
STEPS = 60
LR = 2e-3
LIMIT = 0.5
LONGEST = 96

Window = list[Tensor]


def standard_library(size: int) -> Tensor:
    """The first bytes of its files, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    files = (p for p in sorted(root.rglob("*.py")) if others.isdisjoint(p.relative_to(root).parts))
    return torch.frombuffer(
        bytearray().join(p.read_bytes() for p in files)[:size], dtype=torch.uint8
    )


def windows(steps: int) -> Iterator[Window]:
    """Yield windows of documents of 8 to 96 bytes; the same ones at each call."""
    text, source = standard_library(4 << 20), torch.Generator().manual_seed(1)
    for _ in range(steps):
        lengths = 8 + torch.rand(WINDOW, generator=source).pow(2.0).mul(LONGEST - 8).long()
        starts = torch.randint(len(text) - LONGEST - 1, (WINDOW,), generator=source)
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        yield [text[start : start + length + 1].long() for start, length in pairs]


def new_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, heads=4, width=64, context=LONGEST))


def tokens_of(document: Tensor) -> int:
    """The number of bytes that the model predicts."""
    return len(document) - 1


def loss_of(model: GPT, document: Tensor) -> Tensor:
    """The loss, summed over the document's bytes."""
    tokens, targets = document[None, :-1], document[None, 1:]
    return model(tokens, targets) * tokens_of(document)


def large_batch(model: GPT, window: Window) -> Tensor:
    """The loss of all documents at once, padded: the mean over their bytes."""
    rows = nn.utils.rnn.pad_sequence(window, batch_first=True, padding_value=-100)
    tokens, targets = rows[:, :-1].clamp(min=0), rows[:, 1:]
    places = torch.arange(tokens.shape[1])
    x = model.token(tokens) + model.position(places)
    for block in model.blocks:
        x = block(x)
    logits = model.head(model.norm(x))
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def train_by_hand(backward: Callable[[GPT, Window], None], clip: bool = True) -> list[float]:
    """Train with torch alone, and return each window's loss before its step.

    `backward` makes the gradients of a window.
    """
    model, curve = new_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for window in windows(STEPS):
        curve.append(measured(model, window))
        backward(model, window)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return curve


@torch.no_grad()
def measured(model: GPT, window: Window) -> float:
    return large_batch(model, window).item()


def at_once(model: GPT, window: Window) -> None:
    large_batch(model, window).backward()


def before(model: GPT, window: Window) -> None:
    count = sum(map(tokens_of, window))
    for document in window:
        (loss_of(model, document) / count).backward()


def mean_of_means(model: GPT, window: Window) -> None:
    for document in window:
        (loss_of(model, document) / tokens_of(document) / WINDOW).backward()


def clipped_too_early(model: GPT, window: Window) -> None:
    count = sum(map(tokens_of, window))
    for document in window:
        (loss_of(model, document) / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def zeroed_too_early(model: GPT, window: Window) -> None:
    count = sum(map(tokens_of, window))
    for document in window:
        model.zero_grad()
        (loss_of(model, document) / count).backward()


def after() -> list[float]:
    """faststep."""
    model, curve = new_model(), []
    optimizer = faststep.optim.AdamW(model.parameters(), lr=LR, max_grad_norm=LIMIT)
    accum = faststep.accumulate(optimizer, WINDOW, model=model, normalize="tokens")
    for window in windows(STEPS):
        curve.append(measured(model, window))
        for document in window:
            with accum:
                accum.add_count(tokens_of(document))
                accum.backward(loss_of(model, document))
        optimizer.step()
        optimizer.zero_grad()
    return curve


def main() -> dict[str, list[float]]:
    """Train in each way and return the losses."""
    curves = {
        "one large batch": train_by_hand(at_once),
        "before: torch": train_by_hand(before),
        "after: faststep": after(),
        "a mean of means": train_by_hand(mean_of_means),
        "clipped too early": train_by_hand(clipped_too_early, clip=False),
        "zeroed too early": train_by_hand(zeroed_too_early),
    }
    exact = curves["one large batch"]
    print("                    loss at the end   largest distance from one large batch")
    for name, curve in curves.items():
        apart = max(abs(a - b) for a, b in zip(curve, exact, strict=True))
        print(f"{name:20}{sum(curve[-10:]) / 10:15.4f}{apart:30.2e}")
    return curves


if __name__ == "__main__":
    main()
