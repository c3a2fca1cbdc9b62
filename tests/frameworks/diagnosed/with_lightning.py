"""Lightning's Trainer.fit, with validation, a progress bar, logs and checkpoints."""

import sys
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Signs(Dataset):
    def __init__(self, count, seconds=0.0):
        self.inputs = torch.randn(count, 64)
        self.labels = (self.inputs.sum(1) > 0).long()
        self.seconds = seconds

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index], self.labels[index]


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 2))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = DataLoader(Signs(4096, float(sys.argv[1])), batch_size=8, shuffle=True)
trainer = lightning.Trainer(max_epochs=1000, accelerator="cpu", devices=1, gradient_clip_val=1.0)
trainer.fit(Classifier(), data, DataLoader(Signs(256), batch_size=256))
