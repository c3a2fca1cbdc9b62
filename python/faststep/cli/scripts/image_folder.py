"""ResNet-18 on 16 x 3 x 128 x 128, cropped and flipped from a folder of JPEGs."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from meter import Meter, again_and_again, options
from PIL import Image
from torch import nn, optim
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

given = options()
torch.manual_seed(given.seed)
FILES, STORED, CROP, BATCH, WIDTH = (4, 72, 64, 4, 8) if given.tiny else (128, 160, 128, 16, 64)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_files(folder):
    """Two classes of noise: smooth and smoother."""
    for label, size in (("a", 16), ("b", 12)):
        (folder / label).mkdir(parents=True)
        for i in range(FILES):
            noise = torch.rand(1, 3, size, size) * 255
            pixels = interpolate(noise, (STORED, STORED), mode="bicubic")[0].clamp(0, 255).byte()
            array = pixels.permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(array).save(folder / label / f"{i}.jpg", quality=90)


class Images(Dataset):
    """A folder of images, as torchvision's ImageFolder reads it."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*/*.jpg"))
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        top, left = torch.randint(STORED - CROP + 1, (2,)).tolist()
        pixels = pixels[:, top : top + CROP, left : left + CROP]
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return (pixels.float() / 255 - self.mean) / self.std, int(path.parent.name == "b")


class ResidualBlock(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Identity()
        if before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet18():
    layers = [nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = WIDTH
    for after in (WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH):
        layers += [
            ResidualBlock(before, after, 1 if after == before else 2),
            ResidualBlock(after, after, 1),
        ]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 2))


temporary = tempfile.TemporaryDirectory()
files = given.files or Path(temporary.name)
if not (files / "b").exists():
    make_files(files)
torch.manual_seed(given.seed)
model = resnet18()
optimizer = optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
dataset = Images(files)
loader = DataLoader(
    dataset,
    BATCH,
    shuffle=True,
    drop_last=True,
    num_workers=given.workers,
    persistent_workers=given.workers > 0,
)
batches = again_and_again(loader)

meter = Meter(given)
for _ in meter.steps():
    images, labels = next(batches)
    meter.mark("data")
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
        loss = cross_entropy(model(images), labels)
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    clip_grad_norm_(model.parameters(), 5.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
