"""ResNet-50 under fp16 autocast with a GradScaler, 64 x 3 x 224 x 224."""

import timm
import torch
from cuda_meter import CudaMeter, options

given = options()
torch.manual_seed(0)
batch, size = (2, 32) if given.tiny else (64, 224)
model = timm.create_model("resnet50", num_classes=1000).to(given.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(given.device)

meter = CudaMeter(given)
images = torch.randn(batch, 3, size, size, device=given.device)
labels = torch.arange(batch, device=given.device)
for _ in meter.steps():
    with torch.autocast(given.device, torch.float16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    meter.loss(loss)
