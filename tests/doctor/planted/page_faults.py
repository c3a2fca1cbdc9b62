"""Large activations, whose memory goes back to the system in each step."""

import torch

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.randn(400000, 16)
for _ in range(100000):
    optimizer.zero_grad()
    (model(x).relu() * 2 + 1).abs().mean().backward()
    optimizer.step()
