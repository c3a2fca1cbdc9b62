"""Two ranks under DistributedDataParallel with small buckets, each of which waits for a network."""

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
model = DistributedDataParallel(layers, bucket_cap_mb=0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def slow(group, bucket):
    time.sleep(0.005)
    return allreduce_hook(group, bucket)


model.register_comm_hook(None, slow)
for _ in range(100000):
    optimizer.zero_grad()
    model(torch.randn(256, 256)).square().mean().backward()
    optimizer.step()
