"""PPO that balances a pole on a cart, in eight environments; a step is a rollout and 16 updates.

Cart and pole: Barto, Sutton and Anderson, 1983. PPO: Schulman et al., 2017, as CleanRL writes it.
"""

import torch
from meter import Meter, options
from torch import nn, optim
from torch.distributions import Categorical

given = options()
torch.manual_seed(0)
ENVIRONMENTS, LENGTH = (2, 8) if given.tiny else (8, 128)
EPOCHS, PARTS = 4, 4
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def move(state, action):
    """0.02 s of Euler's method; gives the new state, and which poles have fallen."""
    x, speed, angle, spin = state.unbind(1)
    force = action * 20.0 - 10.0
    sine, cosine = angle.sin(), angle.cos()
    push = (force + 0.05 * spin.square() * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    pull = push - 0.05 * turn * cosine / 1.1
    moved = [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn]
    state = torch.stack(moved, 1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)


def begin(count):
    return torch.rand(count, 4) * 0.1 - 0.05


def net(outputs):
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = net(2), net(1)

    def forward(self, states):
        return Categorical(logits=self.actor(states)), self.critic(states).squeeze(-1)


@torch.no_grad()
def rollout(agent, state):
    """States, actions, their logarithms of probability, advantages and returns, and the end."""
    shape = (LENGTH, ENVIRONMENTS)
    states, actions = torch.empty(*shape, 4), torch.empty(shape)
    chances, values, falls = torch.empty(shape), torch.empty(shape), torch.empty(shape)
    for t in range(LENGTH):
        choices, values[t] = agent(state)
        states[t], actions[t] = state, choices.sample()
        chances[t] = choices.log_prob(actions[t])
        state, fallen = move(state, actions[t])
        state = torch.where(fallen[:, None], begin(ENVIRONMENTS), state)
        falls[t] = fallen.float()
    later, advantage = agent(state)[1], torch.zeros(ENVIRONMENTS)
    advantages = torch.empty(shape)
    for t in reversed(range(LENGTH)):
        goes_on = 1.0 - falls[t]
        surprise = 1.0 + GAMMA * later * goes_on - values[t]
        advantage = surprise + GAMMA * LAMBDA * goes_on * advantage
        advantages[t], later = advantage, values[t]
    kept = (states.flatten(0, 1), *(x.flatten() for x in (actions, chances, advantages)))
    return (*kept, (advantages + values).flatten()), state


def loss_of(agent, states, actions, chances, advantages, returns):
    choices, values = agent(states)
    ratio = (choices.log_prob(actions) - chances).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = torch.max(-advantages * ratio, -advantages * bounded).mean()
    value = 0.5 * (values - returns).square().mean()
    return policy + 0.5 * value - 0.01 * choices.entropy().mean()


model = Agent()
optimizer = optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
state = begin(ENVIRONMENTS)

meter = Meter(given)
for _ in meter.steps():
    memory, state = rollout(model, state)
    meter.mark("data")
    for _ in range(EPOCHS):
        for part in torch.randperm(LENGTH * ENVIRONMENTS).chunk(PARTS):
            batch = [x[part] for x in memory]
            meter.mark("data")
            loss = loss_of(model, *batch)
            meter.mark("forward")
            optimizer.zero_grad()
            loss.backward()
            meter.mark("backward")
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            meter.mark("clip")
            optimizer.step()
            meter.mark("step")
    meter.loss(loss.item())
