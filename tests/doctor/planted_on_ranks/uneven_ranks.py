"""Two ranks, of which the second has a slow loader, and the first waits for its gradients."""

import time

import torch
import torch.distributed as dist


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        time.sleep(0.03 * dist.get_rank())
        return torch.full((8,), float(index))


dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for x in torch.utils.data.DataLoader(Slow()):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
