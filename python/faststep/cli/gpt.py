"""A small byte-level GPT in plain torch, and the text it learns: the standard library's source."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from .console import CommandError

__all__ = ["GPT", "GPTConfig", "standard_library_text", "windows"]

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})


@dataclass(frozen=True)
class GPTConfig:
    """Size of the model; tokens are bytes, so the vocabulary has 256 entries."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    """Pre-norm causal self-attention followed by a pre-norm MLP, both with a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        deeper: Tensor = x + self.contract(hidden)
        return deeper


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next byte.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("projection.weight", "contract.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
                )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of ``targets`` (batch, length) given ``tokens``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def standard_library_text(limit: int = 16 << 20) -> Tensor:
    """Read the ``*.py`` files of the running interpreter's standard library.

    Args:
        limit: stop after this many bytes.

    Returns:
        The files' bytes in path order, a 1-d uint8 tensor.

    Raises:
        CommandError: the interpreter ships no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= limit:
                break
    if len(text) < 1 << 16:
        raise CommandError(f"found no standard library source to train on under {root}")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def windows(text: Tensor, context: int) -> TensorDataset:
    """Samples of `context` + 1 bytes; the targets are the tokens one byte later.

    Args:
        text: 1-d uint8 tensor of more than `context` bytes.
        context: bytes from the start of a window to that of the next.

    Returns:
        A dataset over the text's own memory.
    """
    return TensorDataset(text.unfold(0, context + 1, context))
