"""An evaluation after every other step."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
held_out = torch.randn(2048, 128)


def evaluate():
    model.eval()
    with torch.no_grad():
        loss = model(held_out).square().mean().item()
    model.train()
    return loss


best = float("inf")
for step in range(100000):
    optimizer.zero_grad()
    model(torch.randn(64, 128)).square().mean().backward()
    optimizer.step()
    if step % 2 == 0:
        best = min(best, evaluate())
