"""A variational autoencoder of images of 28 x 28, as torch's example has it, with a GradScaler."""

import torch
from meter import Meter, again_and_again, options
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

given = options()
torch.manual_seed(0)
IMAGES, BATCH, HIDDEN = (16, 4, 8) if given.tiny else (4096, 128, 400)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 40))
        self.decoder = nn.Sequential(nn.Linear(20, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 784))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, 1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def loss_of(images, decoded, mean, log_variance):
    likeness = binary_cross_entropy_with_logits(decoded, images, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (likeness + divergence) / len(images)


images = interpolate(torch.rand(IMAGES, 1, 7, 7), (28, 28), mode="bilinear").flatten(1)
model = Autoencoder()
optimizer = Adam(model.parameters(), lr=1e-3)
scaler = GradScaler("cpu")
loader = DataLoader(TensorDataset(images), BATCH, shuffle=True, drop_last=True)
batches = again_and_again(loader)

meter = Meter(given)
for _ in meter.steps():
    (x,) = next(batches)
    meter.mark("data")
    loss = loss_of(x, *model(x))
    meter.mark("forward")
    scaler.scale(loss).backward()
    meter.mark("backward")
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 100.0)
    meter.mark("clip")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
