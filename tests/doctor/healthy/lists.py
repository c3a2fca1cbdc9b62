"""Keeps what looks like graphs: detached losses, and a replay buffer of fixed size."""

import collections

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
kept, replay = [], collections.deque(maxlen=50)
for _ in range(100000):
    replay.append(torch.randn(256, 256))
    optimizer.zero_grad()
    loss = model(replay[len(replay) // 2]).square().mean()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach())
