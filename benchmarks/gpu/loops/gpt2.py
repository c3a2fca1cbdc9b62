"""GPT-2 small under bf16 autocast, 8 x 1024 tokens; --small has 4 layers of 256, 8 x 256 tokens."""

import torch
from cuda_meter import CudaMeter, options
from gpt import GPT, GPTConfig

given = options()
torch.manual_seed(0)
layers, width, length, words = (4, 256, 256, 8192) if given.small else (12, 768, 1024, 50304)
if given.tiny:
    layers, width, length, words = 2, 64, 16, 64
config = GPTConfig(layers=layers, heads=width // 64, width=width, context=length, vocabulary=words)
model = GPT(config).to(given.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

meter = CudaMeter(given)
text = torch.arange(8 * length + 1, device=given.device) ** 2 % (words - 7)
for step in meter.steps():
    tokens, targets = ((text[i : i + 8 * length] + step).view(8, length) % words for i in (0, 1))
    with torch.autocast(given.device, torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    meter.loss(loss)
