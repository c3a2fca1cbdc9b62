"""Updates without an optimizer, in a loop over parameters."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))
speeds = [torch.zeros_like(param) for param in model.parameters()]
for _ in range(100000):
    model(torch.randn(8, 64)).square().mean().backward()
    with torch.no_grad():
        for param, speed in zip(model.parameters(), speeds, strict=True):
            speed *= 0.9
            speed += param.grad
            param -= 0.001 * speed
            param.grad = None
