"""1024-2048-2048-1024, on a batch of 256."""

import torch
import torch.optim as optim
from meter import Meter, options
from torch import nn
from torch.nn.functional import mse_loss

given = options()
torch.manual_seed(0)
batch, width = (4, 8) if given.tiny else (256, 1024)
inputs, targets = torch.randn(batch, width), torch.randn(batch, width)
model = nn.Sequential(
    nn.Linear(width, 2 * width),
    nn.GELU(),
    nn.Linear(2 * width, 2 * width),
    nn.GELU(),
    nn.Linear(2 * width, width),
)
optimizer = optim.AdamW(model.parameters(), lr=1e-4)

meter = Meter(given)
for _ in meter.steps():
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
        loss = mse_loss(model(inputs), targets)
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
