"""Rows of 32 numbers in ten classes: an MLP on shuffled batches of a TensorDataset."""

import torch
import torch.utils.data as data
from meter import Meter, again_and_again, options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

given = options()
torch.manual_seed(given.seed)
ROWS, BATCH, WIDTH = (64, 8, 8) if given.tiny else (50_000, 256, 128)
centres = torch.randn(10, 32)
labels = torch.randint(10, (ROWS,))
rows = centres[labels] + 2.0 * torch.randn(ROWS, 32)

model = nn.Sequential(
    nn.Linear(32, WIDTH, bias=False),
    nn.BatchNorm1d(WIDTH),
    nn.ReLU(),
    nn.Linear(WIDTH, WIDTH, bias=False),
    nn.BatchNorm1d(WIDTH),
    nn.ReLU(),
    nn.Linear(WIDTH, 10),
)
optimizer = Adam(model.parameters(), lr=1e-3)
loader = data.DataLoader(data.TensorDataset(rows, labels), BATCH, shuffle=True, drop_last=True)
batches = again_and_again(loader)

meter = Meter(given)
for _ in meter.steps():
    x, y = next(batches)
    meter.mark("data")
    loss = cross_entropy(model(x), y)
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    clip_grad_norm_(model.parameters(), 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
