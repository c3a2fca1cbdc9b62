"""Two layers of LSTM that predict the next of 32 x 64 characters."""

import torch
import torch.nn as nn
import torch.optim as optim
from meter import Meter, options
from torch.nn.functional import cross_entropy

given = options()
torch.manual_seed(0)
BATCH, LENGTH, WIDTH, CHARACTERS = (2, 4, 8, 16) if given.tiny else (32, 64, 256, 96)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, text, state):
        hidden, state = self.lstm(self.embedding(text), state)
        return self.head(hidden), state


text = torch.randint(CHARACTERS, (BATCH, 50 * LENGTH + 1))
model = Reader()
optimizer = optim.Adam(model.parameters(), lr=2e-3)
state = None

meter = Meter(given)
for step in meter.steps():
    start = step % 50 * LENGTH
    part = text[:, start : start + LENGTH + 1]
    state = tuple(part.detach() for part in state) if start and state else None
    meter.mark("data")
    logits, state = model(part[:, :-1], state)
    loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad()
    meter.mark("step")
    meter.loss(loss.item())
