"""A diffusion model of points in the plane, an MLP, as tiny-diffusion trains it."""

import math

import torch
from meter import Meter, again_and_again, options
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

given = options()
torch.manual_seed(0)
STEPS, BATCH, WIDTH, POINTS = (50, 4, 8, 64) if given.tiny else (50, 32, 128, 8000)


def moons(count):
    """Two half circles, one inside the other."""
    angle, upper = torch.rand(count) * math.pi, torch.rand(count) < 0.5
    x = torch.where(upper, angle.cos(), 1.0 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.03 * torch.randn(count, 2)


def waves(x):
    """Sines and cosines of the numbers of x."""
    steps = torch.exp(-math.log(10_000.0) * torch.arange(WIDTH // 2) / (WIDTH // 2))
    angles = 25.0 * x[:, None] * steps
    return torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(x))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3 * WIDTH, WIDTH), nn.GELU(), *(Block() for _ in range(3))
        )
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, points, times):
        parts = [waves(points[:, 0]), waves(points[:, 1]), waves(times / STEPS)]
        return self.last(self.layers(torch.cat(parts, 1)))


kept = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, STEPS), 0)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(moons(POINTS)), BATCH, shuffle=True, drop_last=True)
batches = again_and_again(loader)

meter = Meter(given)
for _ in meter.steps():
    (points,) = next(batches)
    noise, times = torch.randn(points.shape), torch.randint(STEPS, (BATCH,))
    share = kept[times][:, None]
    noisy = share.sqrt() * points + (1.0 - share).sqrt() * noise
    meter.mark("data")
    loss = mse_loss(model(noisy, times), noise)
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
