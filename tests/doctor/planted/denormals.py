"""Activations that are denormal numbers, of which a processor takes roots slowly."""

import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
small = torch.full((400, 1000), 1e-20)
for _ in range(100000):
    optimizer.zero_grad()
    faint = small * small
    roots = sum(faint.sqrt() for _ in range(5))
    (model(torch.randn(32, 64)).square().mean() + roots.mean()).backward()
    optimizer.step()
