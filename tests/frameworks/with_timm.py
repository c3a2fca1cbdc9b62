"""timm's factory makes torch's AdamW and ours; run in a process of its own, for the stand-in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from frameworks.loops import batches, cross_entropy, net, worst
from frameworks.page import blocks, run_block
from frameworks.stand_in import stand_in_for_torchvision

stand_in_for_torchvision()

from timm.optim import OptimInfo, create_optimizer_v2  # noqa: E402
from timm.optim._optim_factory import default_registry  # noqa: E402

import faststep  # noqa: E402

for name, kind in (("torchs", torch.optim.AdamW), ("ours", faststep.optim.AdamW)):
    default_registry.register(OptimInfo(name, kind, has_betas=True))

losses, groups = {}, {}
for name, options in (
    ("torchs", {}),
    ("ours", {}),
    ("clipped", {"max_grad_norm": 0.1}),
):
    model = net()
    known = "ours" if name == "clipped" else name
    optimizer = create_optimizer_v2(model, known, lr=0.01, weight_decay=0.05, **options)
    groups[name] = [
        ([p.numel() for p in group["params"]], group["weight_decay"], group["lr"])
        for group in optimizer.param_groups
    ]
    assert getattr(optimizer, "max_grad_norm", None) == options.get("max_grad_norm")
    losses[name] = []
    for x, y in batches():
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[name].append(loss.item())
assert [decay for _, decay, _ in groups["torchs"]] == [0.0, 0.05]
assert groups["torchs"] == groups["ours"] == groups["clipped"]
assert worst(losses["ours"], losses["torchs"]) < 1e-6
assert worst(losses["clipped"], losses["torchs"]) > 1e-6
assert [run_block(block) for block in blocks() if "timm" in block] == ["done"]
print("as torch's")
