"""A GPT of four layers of 256 learns the standard library's source: 8 x 256 of 8192 words."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from meter import Meter, options

given = options()
torch.manual_seed(given.seed)
WIDTH, LENGTH, BATCH, VOCABULARY = (16, 8, 2, 64) if given.tiny else (256, 256, 8, 8192)


def read_text(files):
    """The numbers of the words in the first files; all rare words have one number."""
    folder = Path(sysconfig.get_path("stdlib"))
    source = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py"))[:files])
    words = re.findall(r"\w+|[^\w\s]|\s+", source)
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    return torch.tensor([numbers.get(word, VOCABULARY - 1) for word in words])


text = read_text(1 if given.tiny else 60)
model = GPT(GPTConfig(layers=4, heads=4, width=WIDTH, context=LENGTH, vocabulary=VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

meter = Meter(given)
for _ in meter.steps():
    starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
    windows = torch.stack([text[i : i + LENGTH + 1] for i in starts])
    meter.mark("data")
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
        loss = model(windows[:, :-1], windows[:, 1:])
    meter.mark("forward")
    loss.backward()
    meter.mark("backward")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    meter.mark("clip")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    meter.mark("step")
    meter.loss(loss.item())
