"""Clips gradients by hand."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(60)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


def clip(limit):
    total = 0.0
    for param in model.parameters():
        total += param.grad.norm().item() ** 2
    factor = limit / (total**0.5 + 1e-6)
    if factor < 1:
        for param in model.parameters():
            param.grad.mul_(factor)


for _ in range(100000):
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    clip(0.01)
    optimizer.step()
