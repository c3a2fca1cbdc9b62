"""Five convolutions on a batch of 32 x 3 x 64 x 64."""

from itertools import pairwise

import torch
from meter import Meter, options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

given = options()
torch.manual_seed(0)
batch, size = (2, 8) if given.tiny else (32, 64)
images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
layers = []
for before, after in pairwise((3, 32, 64, 64, 128, 128)):
    layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
optimizer = AdamW(model.parameters(), lr=1e-4)

meter = Meter(given)
for _ in meter.steps():
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
        loss = cross_entropy(model(images), labels)
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    clip_grad_norm_(model.parameters(), 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
