"""Autocast that is open around the whole loop."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for _ in range(100000):
        optimizer.zero_grad()
        model(torch.randn(32, 128)).square().mean().backward()
        optimizer.step()
