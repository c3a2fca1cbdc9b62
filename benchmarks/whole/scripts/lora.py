"""Low-rank adapters (LoRA, Hu et al., 2021) in a transformer whose own weights do not train."""

import torch
from meter import Meter, options
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

given = options()
torch.manual_seed(0)
LAYERS, HEADS, RANK = 4, 4, 8
WIDTH, LENGTH, BATCH, VOCABULARY = (16, 4, 2, 32) if given.tiny else (128, 64, 8, 1024)


class Adapted(nn.Module):
    """A frozen linear layer, and the product of two thin matrices beside it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x):
        return self.frozen(x) + 2.0 * functional.linear(functional.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.query, self.key, self.value = (Adapted(WIDTH, WIDTH) for _ in range(3))
        self.projection = Adapted(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.expand, self.contract = Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.before_attention(x)
        heads = [
            layer(y).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.contract(functional.gelu(self.expand(self.before_mlp(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.token(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


texts = torch.randint(VOCABULARY, (64, LENGTH + 1))
model = Transformer()
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = AdamW(adapters, lr=1e-3)

meter = Meter(given)
for _ in meter.steps():
    batch = texts[torch.randint(len(texts), (BATCH,))]
    meter.mark("data")
    loss = model(batch[:, :-1], batch[:, 1:])
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    nn.utils.clip_grad_norm_(adapters, 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
