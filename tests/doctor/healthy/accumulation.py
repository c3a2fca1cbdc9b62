"""Micro-batches, an evaluation and a checkpoint per epoch, and a schedule."""

import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(4096, 512), torch.randint(10, (4096,)))
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024),
    torch.nn.ReLU(),
    torch.nn.Linear(1024, 1024),
    torch.nn.Linear(1024, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
for _ in range(1000):
    for number, (x, y) in enumerate(DataLoader(data, batch_size=256)):
        (torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    with torch.no_grad():
        model(data.tensors[0][:512])
    model.train()
    torch.save(model.state_dict(), "epoch.pt")
