"""Prints tensors in each step."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100000):
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss, "gradient", model[0].weight.grad, flush=True)
