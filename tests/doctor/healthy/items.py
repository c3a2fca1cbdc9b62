"""Reads the loss of every step, which costs nothing on a CPU."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(100000):
    optimizer.zero_grad()
    loss = model(torch.randn(256, 512)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
