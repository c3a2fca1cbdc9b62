"""Tensors that are not of a subclass: of those a step takes no references, so none may stay either.

All of a process claim to lie on the device here, as a type is looked at once.
"""

from __future__ import annotations

from .test_errors import run_python

TRAIN = """
import ctypes, gc, weakref
import torch, faststep
from device import fake
SIZES = (3, 1 << 20, 70)

def train():
    params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, n)) for n in SIZES]
    optimizer = faststep.optim.AdamW(params, max_grad_norm=1.0)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, step - i + 0.5)
        optimizer.step()
    return optimizer, params
"""
CLAIM = """
lib = fake.library()
api = lib.claim_api(ctypes.c_void_p(fake._capsule_pointer(getattr(torch.Tensor, fake.API))), 0)
lib.claim_stream(0, ctypes.c_void_p(lib.fake_cuda_stream(0)))
setattr(torch.Tensor, fake.API, fake._capsule(api))
torch.Tensor.is_cuda = property(lambda self: True)
torch.Tensor.device = property(lambda self: torch.device("cuda", 0))
torch.zeros = lambda *shape, device=None, zeros=torch.zeros, **rest: zeros(*shape, **rest)
"""
DIGEST = """
print([bytes(p.detach().numpy()).hex()[-64:] for p in params])
"""


def test_the_same_bits() -> None:
    on_host = run_python(TRAIN + "optimizer, params = train()" + DIGEST)
    on_device = run_python(
        TRAIN
        + CLAIM
        + """
optimizer, params = train()
lib.fake_cuda_synchronize()
assert lib.fake_cuda_calls(b"cuLaunchKernel") == 8
assert lib.fake_cuda_complaint() is None
"""
        + DIGEST
    )
    assert on_device == on_host


def test_large_states_that_are_replaced_are_free() -> None:
    out = run_python(
        TRAIN
        + CLAIM
        + """
optimizer, params = train()
state = optimizer.state[params[1]]
old = weakref.ref(state["exp_avg"])
state["exp_avg"] = torch.zeros_like(params[1])
gc.collect()
print("freed", old() is None)
"""
    )
    assert "freed True" in out
