"""Two ranks that send each gradient by itself, when all of them are there, with a delay."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def send(grad: torch.Tensor) -> None:
    time.sleep(0.002)  # a network
    dist.all_reduce(grad)


for _ in range(100000):
    optimizer.zero_grad()
    model(torch.randn(256, 256)).square().mean().backward()
    for param in model.parameters():
        send(param.grad)
        param.grad /= dist.get_world_size()
    optimizer.step()
