"""An optimizer that is written in Python and loops over parameters."""

import torch


class PlainAdam(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["step"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * param.grad
                state["v"] = 0.999 * state["v"] + 0.001 * param.grad**2
                m = state["m"] / (1 - 0.9 ** state["step"])
                v = state["v"] / (1 - 0.999 ** state["step"])
                param -= group["lr"] * m / (v.sqrt() + 1e-8)


model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))
optimizer = PlainAdam(model.parameters(), lr=0.001)
for _ in range(100000):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
