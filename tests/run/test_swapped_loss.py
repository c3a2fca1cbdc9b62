"""`run` puts faststep's cross-entropy in the place of torch's."""

from conftest import Run

SCRIPT = """
import pickle, torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy
assert cross_entropy is F.cross_entropy
assert pickle.loads(pickle.dumps(cross_entropy)) is cross_entropy
logits, target = torch.randn(300, 1024, requires_grad=True), torch.arange(300)
loss = nn.CrossEntropyLoss()(logits, target)
scripted = torch.jit.script(nn.CrossEntropyLoss())(logits, target)
print(*(isinstance(x.grad_fn, torch.autograd.function.BackwardCFunction) for x in (loss, scripted)))
loss.backward()
"""


def test_modules_and_functions_are_swapped(run: Run) -> None:
    done = run(SCRIPT, options=("--only", "loss"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]
    assert (
        "torch.nn.functional.cross_entropy -> faststep.nn.functional.cross_entropy" in done.stderr
    )
    assert "calls: 1 of cross_entropy" in done.stderr


def test_without_the_part_it_is_torchs(run: Run) -> None:
    done = run(SCRIPT, options=("--only", "optim,amp"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "False"
