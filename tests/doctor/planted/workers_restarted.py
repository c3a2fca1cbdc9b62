"""Short epochs, each of which starts the workers again."""

import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
for _ in range(500):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
