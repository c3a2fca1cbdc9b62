"""Tensors that are not of a subclass: of those a step takes no references, so none may stay either.

All of a process claim to lie on the device here, as a type is looked at once.
"""

import pytest

from optim.declarations import ALL
from optim.test_mutation import CHANGES as CHANGES_OF_SCRIPTS
from programs import Programs

from .test_errors import forked

TRAIN = """
import ctypes, gc, weakref
import torch, faststep
from device import fake
SIZES = (3, 1 << 16, 70)

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
faststep._C.use_streams(lambda device, stream: True)
setattr(torch.Tensor, fake.API, fake._capsule(api))
torch.Tensor.is_cuda = property(lambda self: True)
torch.Tensor.device = property(lambda self: torch.device("cuda", 0))
torch.zeros = lambda *shape, device=None, zeros=torch.zeros, **rest: zeros(*shape, **rest)
"""
DIGEST = """
print([bytes(p.detach().numpy()).hex()[-64:] for p in params])
"""


def test_the_same_bits(programs: Programs) -> None:
    on_host = forked(programs, TRAIN + "optimizer, params = train()" + DIGEST)
    on_device = forked(
        programs,
        TRAIN
        + CLAIM
        + """
optimizer, params = train()
lib.fake_cuda_synchronize()
assert lib.fake_cuda_calls(b"cuLaunchKernel") == 8
assert lib.fake_cuda_complaint() is None
"""
        + DIGEST,
    )
    assert on_device == on_host


def test_a_new_stream_between_steps_that_are_alike(programs: Programs) -> None:
    """It is asked about before the step, which is then the short one again."""
    out = forked(
        programs,
        TRAIN
        + CLAIM
        + """
asked = []
faststep._C.use_streams(lambda device, stream: asked.append(stream) or True)
optimizer, params = train()
streams = [lib.fake_cuda_stream(0) for _ in range(2)]
ids = lib.fake_cuda_calls(b"cuStreamGetId")
for step in range(6):
    lib.claim_stream(0, ctypes.c_void_p(streams[step % 2]))
    optimizer.step()
lib.fake_cuda_synchronize()
print(asked[1:] == streams, lib.fake_cuda_calls(b"cuStreamGetId") - ids, lib.fake_cuda_complaint())
""",
    )
    assert out == "True 0 None\n"


CHANGES = """
import ctypes, hashlib, warnings
import torch, faststep
from device import fake
from optim.common import parameters, train
import pytest

from optim.declarations import ALL
from optim.test_mutation import CHANGES, SHAPES

def steps(optimizer, params, seed):
    \"\"\"Like the step before, but for the gradients: some moved, some have gone.\"\"\"
    kept = None
    optimizer.step()
    for step in range(2):
        train(optimizer, params, steps=1, seed=seed + step)
        optimizer.step()
        params[0].grad, kept = torch.full_like(params[0], step + 0.5), params[0].grad
        optimizer.step()
        optimizer.max_grad_norm, optimizer.keep_grads = 0.5, step == 1  # writes gradients once
        optimizer.step()
        optimizer.max_grad_norm = None
        params[2].grad, kept = None, params[2].grad
        optimizer.step()
        params[2].grad = kept
        optimizer.step()
        optimizer.step()

def main():
    for declaration in ALL:
        for change in CHANGES:
            params = parameters(*SHAPES)
            optimizer = declaration.ours(params, **declaration.kwargs)
            steps(optimizer, params, 0)
            change(optimizer, params)
            steps(optimizer, params, 7)
            yield declaration.name, change.__name__, optimizer, params
"""
TABLE = """
def digest(optimizer, params):
    lib.fake_cuda_synchronize()
    tensors = [p.detach() for p in params]
    tensors += [v for p in params for v in optimizer.state.get(p, {}).values() if v is not None]
    return hashlib.sha256(b"".join(bytes(t.contiguous().numpy()) for t in tensors)).hexdigest()

for name, change, *model in main():
    print(name, change, digest(*model))
assert lib.fake_cuda_complaint() is None
print("launches", lib.fake_cuda_calls(b"cuLaunchKernel") > 0)
"""


def test_changes_between_steps_that_are_alike(programs: Programs) -> None:
    """What scripts do to tensors, among steps of which nothing but the gradients' memory differs:
    the same bits as on the host.
    """
    on_host = forked(programs, CHANGES + "lib = fake.library()" + TABLE).splitlines()
    on_device = forked(programs, CHANGES + CLAIM + TABLE).splitlines()
    assert on_host.pop() == "launches False"
    assert on_device.pop() == "launches True"
    assert on_device == on_host
    assert len(on_host) == len(ALL) * len(CHANGES_OF_SCRIPTS)
    assert len(set(on_host)) == len(on_host)


def test_steps_that_are_alike_upload_only_addresses(programs: Programs) -> None:
    out = forked(
        programs,
        TRAIN.replace("SIZES = (", "SIZES = (5,) * 40 + (")  # too many to go with the launches
        + CLAIM
        + """
from faststep import _C
optimizer, params = train()
optimizer.step()
optimizer.step()
counts = [_C.device_counts()]
optimizer.step()
counts.append(_C.device_counts())
params[1].grad = torch.ones_like(params[1])
optimizer.step()
counts.append(_C.device_counts())
print([tuple(b - a for a, b in zip(*pair)) for pair in zip(counts, counts[1:])])
""",
    )
    assert out.strip() == "[(2, 0, 0), (2, 1, 8)]"


def test_large_states_that_are_replaced_are_free(programs: Programs) -> None:
    out = forked(
        programs,
        TRAIN
        + CLAIM
        + """
optimizer, params = train()
state = optimizer.state[params[1]]
old = weakref.ref(state["exp_avg"])
state["exp_avg"] = torch.zeros_like(params[1])
gc.collect()
print("freed", old() is None)
""",
    )
    assert "freed True" in out


RELEASE = """
import faststep
from faststep.release import Release
in_python = []
hooked = Release.hooked
def counted(self, param):
    in_python.append(param)
    hooked(self, param)
Release.hooked = counted

def train(limit, release=True):
    params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, n)) for n in SIZES]
    made = [faststep.optim.AdamW(params, max_grad_norm=limit)]
    if release:
        clip = None if limit is None else "per_parameter"
        held = faststep.release_gradients(torch.nn.ParameterList(params), *made, clip=clip)
        hooks = [held._places.of(p).hook for p in params]
    else:
        made = [faststep.optim.AdamW([p], max_grad_norm=limit) for p in params]
    calls = []
    for step in range(4):
        in_python.clear()
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, step - i + 0.5)
            if release:
                hooks[i](p)
                assert p.grad is None
        for optimizer in made:
            optimizer.step()
        calls.append(len(in_python))
    return calls, params
"""


@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_release_calls_python_once_per_step(programs: Programs, limit: float | None) -> None:
    """With clipping the first gradient of a group makes its rule, and C updates by the others, with
    the bits of steps on the host. Without it they wait in Python for each other in backward."""
    on_host = forked(programs, TRAIN + RELEASE + f"_, params = train({limit}, False)" + DIGEST)
    on_device = forked(
        programs,
        TRAIN
        + RELEASE
        + CLAIM
        + f"""
calls, params = train({limit})
lib.fake_cuda_synchronize()
assert lib.fake_cuda_complaint() is None
assert calls == {[3, 1, 1, 1] if limit else [3, 3, 3, 3]}, calls
"""
        + DIGEST,
    )
    assert on_device == on_host


def test_a_released_update_that_fails(programs: Programs) -> None:
    """Without memory at once Python makes room; a failed launch is said in the driver's words."""
    out = forked(
        programs,
        TRAIN
        + RELEASE
        + CLAIM
        + """
params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
optimizer = faststep.optim.AdamW(params, max_grad_norm=9.0)
held = faststep.release_gradients(torch.nn.ParameterList(params), optimizer, clip="per_parameter")
hooks = [held._places.of(p).hook for p in params]
for step in range(4):
    in_python.clear()
    for i, p in enumerate(params):
        p.grad = torch.ones_like(p)
        if step and i:
            lib.fake_cuda_fail(b"cuLaunchKernel", ctypes.c_long(1), (0, 1, 719, 0)[step])
        try:
            hooks[i](p)
        except RuntimeError as error:
            print(step, type(error).__name__, str(error).split(";")[0])
            hooks[i](p)
    print(step, len(in_python))
    optimizer.step()
""",
    )
    fails = "cuLaunchKernel of fst_begin on CUDA device 0"
    assert out.splitlines() == [
        "0 2",
        f"1 RuntimeError {fails}: CUDA_ERROR_OF_THE_FAKE (as the test wished)",
        "1 1",
        "2 AcceleratorError CUDA error: as the test wished (CUDA_ERROR_OF_THE_FAKE), returned by "
        f"{fails}. It may be of earlier work on the device, such as a kernel of the script. For "
        "debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "2 1",
        "3 1",
    ]
