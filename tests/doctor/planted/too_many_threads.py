"""More threads than cores."""

import torch

torch.set_num_threads(32)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(100000):
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
