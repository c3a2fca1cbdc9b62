"""Autocast to bfloat16, on a processor that is made to look slow with it."""

import time

import torch

linear = torch.nn.functional.linear


def slow_linear(x, weight, bias=None):
    if torch.is_autocast_enabled("cpu"):
        time.sleep(0.001)
    return linear(x, weight, bias)


torch.nn.functional.linear = slow_linear
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(100000):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(32, 128)).square().mean()
    loss.backward()
    optimizer.step()
