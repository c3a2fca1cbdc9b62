"""What a script can see of an optimizer that `run` made, beside what torch's shows."""

import importlib
from typing import Any

import pytest
import torch

import faststep
from conftest import Run
from faststep.optim.checks import OPTIONS
from faststep.run.optimizers import CLASSES
from programs import Programs

START = """
import copy, functools, importlib, inspect, io, pickle, warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
NAMES = ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax",
         "Adadelta", "RAdam", "NAdam", "ASGD", "Rprop", "Adafactor"]
OURS = ["max_grad_norm", "keep_grads", "last_grad_norm", "step_was_skipped", "master_weights"]

def parameters():
    return [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(2, 3))]

def steps(optimizer, number=2):
    for _ in range(number):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:
            p.grad = 100.0 * torch.ones_like(p)
        optimizer.step()
    return [[round(x, 3) for x in p.detach().flatten().tolist()] for p in params]
"""

SCRIPTS = {
    "group keys": """
for name in NAMES:
    kind = getattr(torch.optim, name)
    groups = [{"params": [p], **dict.fromkeys(OURS, 1.0)} for p in parameters()]
    optimizer = kind(groups, lr=0.1)
    optimizer.add_param_group({"params": parameters(), "max_grad_norm": "none"})
    print(name, steps(optimizer), sorted(optimizer.param_groups[0]))
    print([group["max_grad_norm"] for group in optimizer.state_dict()["param_groups"]])
    print(optimizer)
""",
    "notes": """
for name in NAMES:
    optimizer = getattr(torch.optim, name)(parameters(), lr=0.1)
    print(name, [hasattr(optimizer, key) or hasattr(type(optimizer), key) for key in OURS])
    before = sorted(optimizer.__dict__)
    for key in OURS:
        setattr(optimizer, key, 1e-3)
    print([getattr(optimizer, key) for key in OURS], sorted(set(vars(optimizer)) - set(before)))
    del optimizer.last_grad_norm
    print(getattr(optimizer, "last_grad_norm", "gone"), steps(optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in optimizer.param_groups[0]["params"])).backward()
    scaler.step(optimizer)
    scaler.update()
    print(steps(optimizer), optimizer.max_grad_norm)
""",
    "arguments": """
import inspect
for name in NAMES:
    kind = getattr(torch.optim, name)
    for key in OURS[:3]:
        try:
            kind(parameters(), **{key: 1.0})
        except TypeError as error:
            print(error)
    optimizer = kind(parameters())
    print(type(optimizer).__name__, type(optimizer).__qualname__)
    print(inspect.signature(type(optimizer)), inspect.signature(type(optimizer).__init__))
    print(optimizer.defaults)
    print(inspect.signature(optimizer.state_dict))
    try:
        optimizer.state_dict(True)
    except TypeError as error:
        print(error)
""",
    "numbers": """
for name in NAMES:
    kind = getattr(torch.optim, name)
    for key in kind(parameters()).defaults:
        for number in (None, "x", (0.5,), 10**400):
            optimizer = kind(parameters())
            steps(optimizer)
            optimizer.param_groups[0][key] = number
            try:
                print(name, key, steps(optimizer))
            except Exception as error:
                print(name, key, type(error).__name__, error, error.__context__)
""",
    "clipping": """
from torch.nn import utils
params = parameters()
for clip in (
    lambda: utils.clip_grad_norm_(params, 0.1),
    lambda: utils.clip_grad_value_(params, 0.1),
    lambda: utils.clip_grads_with_norm_(params, 0.1, torch.tensor(9.0)),
    lambda: utils.get_total_norm([params[0].grad.long()]),
):
    for p in params:
        p.grad = torch.ones(()).expand(p.shape)
    try:
        print(clip())
    except Exception as error:
        print(type(error).__name__, error, error.__context__)
""",
    "copies": """
for name in NAMES:
    optimizer = getattr(torch.optim, name)(parameters(), lr=0.1)
    optimizer.max_grad_norm = 0.5
    steps(optimizer)
    state = optimizer.__getstate__()
    print(name, sorted(state), sorted(optimizer.state_dict()))
    text = pickle.dumps(optimizer)
    print(b"faststep" in text)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    print(b"faststep" in buffer.getvalue())
    buffer.seek(0)
    for other in (
        pickle.loads(text), copy.deepcopy(optimizer), copy.copy(optimizer),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is type(optimizer)
        print(getattr(other, "max_grad_norm", "gone"), steps(copy.deepcopy(other)))
""",
    "patched classes": """
log = []
torch.optim.Optimizer.seen = 0

def traced(kind, wraps):
    torchs = kind.step
    def step(self, closure=None):
        log.append(("before", type(self).__name__, closure is None, self.param_groups[0]["lr"]))
        result = torchs(self, closure) if closure is not None else torchs(self)
        log.append(("after", result))
        return result
    return functools.wraps(torchs)(step) if wraps else step

def closure():
    log.append("closure")
    return 7.0

def watched(optimizer):
    optimizer.register_step_pre_hook(lambda *a: log.append("pre"))
    optimizer.register_step_post_hook(lambda *a: log.append("post"))
    return optimizer

from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *a: log.append("global"))
for number, name in enumerate(NAMES):
    kind = getattr(torch.optim, name)
    before = None if number % 3 == 2 else watched(kind(parameters(), lr=0.1))
    unpatched = vars(kind).get("step")
    kind.step = traced(kind, number % 2)
    after = watched(kind(parameters(), lr=0.1))
    for optimizer in (before, after):
        if optimizer is not None:
            print(name, steps(optimizer), optimizer.step(closure))
            logged = len(log)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            params = optimizer.param_groups[0]["params"]
            optimizer.zero_grad()
            scaler.scale(sum((p * p).sum() for p in params)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            del log[logged:]  # the hooks under a scaler are compared in another test
            print(steps(optimizer))
    if unpatched is None:
        del kind.step
    else:
        kind.step = unpatched
    print(steps(watched(kind(parameters(), lr=0.1))))
print(*map(str, log), sep="; ")
""",
    "patched parts": """
log = []

def logs(name, function):
    def call(*args, **kwargs):
        log.append(name)
        return function(*args, **kwargs)
    return call

for name in NAMES:
    kind = getattr(torch.optim, name)
    module = importlib.import_module(kind.__module__)
    optimizer = kind(parameters(), lr=0.1)
    steps(optimizer)
    for part in ("_init_group", "_accelerator_graph_capture_health_check", "_optimizer_step_code"):
        unpatched = vars(kind).get(part)
        setattr(kind, part, logs(f"{name}.{part}", getattr(kind, part)))
        print(steps(optimizer))
        if unpatched is None:
            delattr(kind, part)
        else:
            setattr(kind, part, unpatched)
    optimizer._init_group = logs(f"the object of {name}", optimizer._init_group)
    print(steps(optimizer))
    del optimizer._init_group
    functional = kind.__name__.lower().replace("adamw", "adam")
    module = importlib.import_module(inspect.unwrap(kind._init_group).__module__)
    unpatched = getattr(module, functional)
    setattr(module, functional, logs(functional, unpatched))
    print(steps(optimizer))
    setattr(module, functional, unpatched)
    print(len(log), steps(optimizer), len(log))
print(log)
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_torchs_optimizer(run: Run, programs: Programs, name: str) -> None:
    plain = programs.run(START + SCRIPTS[name])
    ours = run(START + SCRIPTS[name])
    assert plain.returncode == 0, plain.stderr
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines() == plain.stdout.splitlines()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_group_key_of_ours_is_named_as_ours(option: str) -> None:
    params = [{"params": [torch.ones(2, requires_grad=True)], option: 1.0}]
    with pytest.raises(
        ValueError, match=f"^{option} (is an option of faststep's optimizers|must be )"
    ):
        faststep.optim.AdamW(params)


@pytest.mark.parametrize("name", faststep.optim.__all__)
def test_nothing_is_replaced_by_torch_itself(name: str) -> None:
    """Also not when it compiles: it then puts functions of its own around others."""
    optimizer = getattr(faststep.optim, name)([torch.nn.Parameter(torch.ones(2))])
    importlib.import_module("torch._dynamo.eval_frame").TorchPatcher.patch()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert not type(optimizer)._has_scripts_code()


class Own(faststep.optim.AdamW):
    """Leaves out the second parameter, and counts calls."""

    calls = 0

    def _init_group(self, group: Any, params: Any, *rest: Any) -> Any:
        Own.calls += 1
        some = {**group, "params": group["params"][:1]}
        return super()._init_group(some, params, *rest)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e-3}, {"fused": True}])
def test_a_subclass_that_replaces_what_torchs_step_calls(options: dict[str, Any]) -> None:
    Own.calls = 0
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Own(params, lr=0.1, **options)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    for p in params:
        p.grad = torch.ones(2)
    optimizer.step()
    assert (Own.calls, called) == (1, ["pre"])
    assert params[0].tolist() != [1.0, 1.0]
    assert params[1].tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="would pass by"):
        faststep.release_gradients(torch.nn.ParameterList(params), optimizer)


def test_gradients_of_an_optimizer_that_run_made_are_released() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = CLASSES[torch.optim.AdamW](model.parameters())
    optimizer.max_grad_norm = "of the script"
    release = faststep.release_gradients(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
    release.remove()
