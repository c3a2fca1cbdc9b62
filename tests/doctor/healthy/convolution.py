"""A network of convolutions in the usual layout, whose activations are small."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100000):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(16, 3, 16, 16)), torch.arange(16) % 10)
    loss.backward()
    optimizer.step()
