"""A loop with accelerate: accumulation, clipping and a schedule."""

import sys
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signs(Dataset):
    def __init__(self, seconds):
        self.inputs = torch.randn(4096, 64)
        self.labels = (self.inputs.sum(1) > 0).long()
        self.seconds = seconds

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index], self.labels[index]


loader = DataLoader(Signs(float(sys.argv[1])), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100000)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(1000):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}  loss {loss.item():.4f}")
