"""Two models and two optimizers, which take turns."""

import torch

maker = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
judge = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
of_maker = torch.optim.SGD(maker.parameters(), lr=0.001)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.001)
for _ in range(100000):
    made = maker(torch.randn(256, 64))
    of_judge.zero_grad()
    (judge(made.detach()).mean() - judge(torch.randn(256, 256)).mean()).backward()
    of_judge.step()
    of_maker.zero_grad()
    (-judge(made).mean()).backward()
    of_maker.step()
