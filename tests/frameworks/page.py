"""The code of docs/frameworks.md, run with the names that its reader has."""

import re
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from .loops import batches, net

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "frameworks.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[str]:
    return CODE.findall(PAGE.read_text())


class Words(torch.utils.data.Dataset[Any]):
    """Sixteen rows of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 16:
            raise IndexError(index)
        row = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**options, **dropout, bos_token_id=0, eos_token_id=0))


def run_block(code: str) -> str:
    """Run one, and see that the model that it has trained is another than before.

    It writes to the current directory, which ranks share.
    """
    model = gpt() if "Trainer(model" in code or "peft" in code else net()
    before = [p.detach().clone() for p in model.parameters()]
    names: dict[str, Any] = {"model": model, "loader": batches(), "loss_fn": cross_entropy}
    names |= {"torch": torch, "net": model, "dataset": Words(), "__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    after = list(model.parameters())
    changed = len(before) != len(after) or not all(map(torch.equal, before, after))
    return "done" if changed else "nothing was trained"
