"""A GPT of four layers of 256 learns the standard library's source: 8 x 256 of 8192 words."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from meter import Meter, options
from torch import nn
from torch.nn import functional

given = options()
torch.manual_seed(given.seed)
LAYERS, HEADS = 4, 4
WIDTH, LENGTH, BATCH, VOCABULARY = (16, 8, 2, 64) if given.tiny else (256, 256, 8, 8192)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.before_attention(x)).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        hidden = functional.gelu(self.expand(self.before_mlp(x)), approximate="tanh")
        return x + self.contract(hidden)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(files):
    """The numbers of the words in the first files; all rare words have one number."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py"))[:files])
    words = re.findall(r"\w+|[^\w\s]|\s+", source)
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    return torch.tensor([numbers.get(word, VOCABULARY - 1) for word in words])


text = read_text(1 if given.tiny else 60)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

meter = Meter(given)
for _ in meter.steps():
    starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
    windows = torch.stack([text[i : i + LENGTH + 1] for i in starts])
    meter.mark("data")
    loss = model(windows[:, :-1], windows[:, 1:])
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    meter.mark("step")
    meter.loss(loss.item())
