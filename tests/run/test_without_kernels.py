"""Optimizers of CUDA parameters on a machine without usable kernels: they stay torch's."""

from conftest import Run
from programs import Programs

# Before the script: a torch with CUDA, whose parameters are marked by their value.
START = """
import torch
from faststep.run import kernels, swaps

class OnCuda(torch.nn.Parameter):
    is_cuda = property(lambda self: self.dim() == 2)

swaps.cuda_is_used = lambda: True
swaps.has_kernels_for = lambda tensor: False

def params(*shapes):
    return (OnCuda(torch.ones(shape)) for shape in shapes)
"""


def test_they_are_torchs_as_the_script_made_them(run: Run) -> None:
    done = run(
        START
        + """
import copy
def show(optimizer):
    kind = type(optimizer)
    sizes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    print(kind.__module__.split(".")[0], kind is torch.optim.AdamW, sizes)

show(torch.optim.AdamW(params((2, 3), (4,)), lr=0.1))
show(torch.optim.AdamW(params=params((4,)), lr=0.1))
show(torch.optim.AdamW([{"params": params((4,))}, {"params": params((1, 1)), "lr": 0.2}]))
show(torch.optim.AdamW([("a", p) for p in params((1, 2))]))
optimizer = torch.optim.AdamW(params((2, 3)), lr=0.1)
(p,) = optimizer.param_groups[0]["params"]
p.grad = torch.ones_like(p)
optimizer.step()
print(hasattr(optimizer, "max_grad_norm"), round(float(p[0, 0]), 3))
""",
        options=("--verbose",),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "torch True [[(2, 3), (4,)]]",
        "faststep False [[(4,)]]",
        "torch True [[(4,)], [(1, 1)]]",
        "torch True [[(1, 2)]]",
        "False 0.899",
    ]
    said = done.stderr
    assert "made 1 optim.AdamW" in said
    assert "AdamW (torch's): 4 objects, 1 step" in said
    why = "no CUDA kernels of this package can be used here"
    assert f"4 of optim.AdamW stayed torch's: {why}" in said


def test_the_first_line_says_so(programs: Programs) -> None:
    """Where torch has CUDA and this package was built without kernels, or the driver is too old."""
    code = """
import torch
from faststep.cli import main
from faststep.run import kernels, swaps
torch.version.cuda = {cuda!r}
kernels._C.has_kernels = lambda: {built}
def check():
    raise RuntimeError("too old")
kernels._C.check_driver = check
raise SystemExit(main())
"""
    lines = [
        programs.run(code.format(cuda=cuda, built=built), "run", "-c", "pass")
        for cuda, built in (("12.8", False), ("12.8", True), (None, False))
    ]
    firsts = [done.stderr.splitlines()[0] for done in lines]
    but = ", but torch's on CUDA: "
    assert f"{but}no CUDA kernels of this package can be used here;" in firsts[0]
    assert f"{but}too old;" in firsts[1]
    assert but not in firsts[2]
