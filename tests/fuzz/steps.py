"""Calls of Plan, in odd orders and with hostile arguments."""

import weakref
from typing import Any

import torch

from faststep import _C
from faststep.optim.codes import new_scales

from . import hostile
from .arguments import FLOATS, junk, maybe_bad, odd_int
from .functions import gradients_of, must_agree, params_for, plain_values
from .hostile import Key
from .odd_tensors import any_tensor, packed
from .world import World

RULES = _C.rules()
# 0-d states beside the step counter: csrc/rules/numbers.def.
NUMBERS = {"nadam": ("mu_product",), "asgd": ("eta", "mu")}
OF_COUNTERS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64)
ADAFACTORS = ("row_var", "col_var", "variance")
HYPER = {
    "beta2_decay": -0.8,
    "eps[0]": 1e-7,
    "eps[1]": 1e-3,
    "d": 1.0,
    "alpha": 0.9,
    "rho": 0.9,
    "etas[0]": 0.5,
    "etas[1]": 1.2,
    "step_sizes[1]": 50.0,
    "lr": 0.01,
    "betas[0]": 0.9,
    "betas[1]": 0.99,
    "eps": 1e-8,
    "keep1": 0.9,
    "keep2": 0.99,
}


class Stepping:
    """A plan with the parameters and the state that it steps again and again."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        self.plan = _C.Plan()
        world.objects.setdefault("Plan", []).append(self.plan)
        self.rule = rng.choice(list(RULES))
        number, states, names = RULES[self.rule]
        self.has_step = self.rule not in ("sgd", "momentum", "lion") or world.chance(0.1)
        self.is_factored = self.rule == "adafactor"
        self.has_step = self.has_step or self.is_factored
        has_master = world.chance(0.2) and not self.is_factored
        steps = ("step",) if self.has_step else ()
        own = ADAFACTORS if self.is_factored else tuple(f"s{i}" for i in range(states))
        master = ("master",) if has_master else ()
        can_code = states > 0 and not self.is_factored
        self.codes_from = rng.choice((0, 0, 1, 5)) if can_code else 0
        scales = ("scales",) if self.codes_from else ()
        self.keys = (*steps, *NUMBERS.get(self.rule, ()), *own, *scales, *master)
        hyper = tuple(HYPER.get(name, 0.0) for name in names)
        masters = (has_master, world.chance(0.5))  # the second: as remainders
        kinds = (*masters, rng.choice((None, None, 0, 2**64 - 1)) if self.has_step else None)
        kinds = (*kinds, self.codes_from)
        self.spec = (number, self.keys, self.has_step, hyper, world.chance(0.1), None, *kinds)
        self.lists = world.contain([params_for(world) for _ in range(rng.choice((1, 1, 2, 3)))])
        self.specs = world.contain([self.spec for _ in self.lists])
        self.state = world.contain({})
        for params in self.lists:
            for param in params:
                self.give_state(world, param)

    def params(self) -> list[Any]:
        """Of all groups; hostile objects may have left anything in the lists."""
        lists = [some for some in self.lists if isinstance(some, list)]
        return [param for some in lists for param in list.__iter__(some)]

    def give_state(self, world: World, param: torch.Tensor) -> None:
        if not isinstance(param, torch.Tensor) or world.chance(0.03):
            return
        row: dict[Any, Any] = world.contain({})
        has_master = self.spec[6] and param.dtype in (torch.bfloat16, torch.float16)
        for key in self.keys:
            if key == "step" or key in NUMBERS.get(self.rule, ()):
                value = torch.tensor(1.0, dtype=world.rng.choice(OF_COUNTERS))
            elif key == "scales":
                value = new_scales(RULES[self.rule][1], param.detach(), None)
            elif world.chance(0.95):
                dtype = torch.float32 if has_master else param.dtype
                dtype = torch.int16 if key == "master" and self.spec[7] else dtype
                if key != "master" and 0 < self.codes_from <= param.numel():
                    dtype = world.rng.choice((dtype, torch.int8, torch.uint8))
                like = torch.zeros_like(param.detach(), dtype=dtype)
                value = _of_factor(like, key) if self.is_factored else like
            else:
                value = any_tensor(world.rng, tuple(param.shape))
            row[key] = world.track(value)
        if world.chance(0.1):
            row = _with_hostile_keys(world, row)
        self.state[param] = row
        if world.chance(0.05):
            self.state[Key(param, world.chance(0.3))] = row


def _of_factor(like: torch.Tensor, key: str) -> torch.Tensor:
    """A state of Adafactor for a parameter like this one."""
    shape = like.shape
    if key == "variance" or len(shape) < 2:
        return like
    row = key == "row_var"
    return like.new_zeros((*shape[:-1], 1) if row else (*shape[:-2], 1, shape[-1]))


def _with_hostile_keys(world: World, row: dict[Any, Any]) -> Any:
    kind = world.rng.randrange(3)
    if kind == 0:
        return world.contain(hostile.HostileDict(row))
    if kind == 1:
        return world.contain({hostile.HostileStr(key): value for key, value in row.items()})
    return world.contain({**{Key(key, world.chance(0.3)): None for key in row}, **row})


def stepping(world: World) -> Stepping:
    """One that was used before, or a new one."""
    some = world.objects.setdefault("Stepping", [])
    if not some or (len(some) < 3 and world.chance(0.3)):
        some.append(Stepping(world))
    return world.rng.choice(some)  # type: ignore[no-any-return]


def _scalars(world: World) -> Any:
    rng = world.rng
    grad_scale = rng.choice((None, None, torch.tensor(2.0), torch.tensor(0.5).double()))
    found = rng.choice((None, torch.zeros(()), torch.zeros(()), torch.ones(())))
    norm = rng.choice((None, torch.zeros((), dtype=torch.float64)))
    row = [grad_scale, found, norm]
    if world.chance(0.05):
        row[rng.randrange(3)] = any_tensor(rng)
    for tensor in row:
        if tensor is not None:
            world.track(tensor)
    scalars: dict[Any, Any] = {-1: tuple(row)}
    if world.chance(0.05):
        scalars = {Key(-1, world.chance(0.5)): tuple(row), **scalars}
    return world.contain(scalars)


def _fresh(world: World, lists: list[Any]) -> Any:
    if world.chance(0.8):
        return None
    pairs: list[Any] = [
        (g, i) for g, some in enumerate(lists) if isinstance(some, list) for i in range(len(some))
    ]
    pairs = [pair for pair in pairs if world.chance(0.7)]
    if pairs and world.chance(0.2):
        pairs[world.rng.randrange(len(pairs))] = junk(world)
    return world.contain(pairs)


def _rewrite(world: World, own: Stepping) -> None:
    """Changes something between steps: gradients come and go, states are replaced."""
    rng = world.rng
    for param in own.params():
        if not isinstance(param, torch.Tensor):
            continue
        try:
            if world.chance(0.2):
                world.set_grad(param, None)
            elif world.chance(0.3):
                world.set_grad(param, torch.randn_like(param.detach()))
            elif world.chance(0.05):
                param.data = param.detach().clone()
            elif world.chance(0.05):
                own.give_state(world, param)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError):
            continue
    if own.lists and isinstance(own.lists[-1], list) and world.chance(0.1):
        own.lists[-1].append(world.track(torch.nn.Parameter(packed(rng))))


def plan_step(world: World) -> None:
    rng = world.rng
    own = stepping(world)
    if world.chance(0.5):
        _rewrite(world, own)
    found = world.chance(0.2)
    clip = rng.choice((float("nan"), float("nan"), 1.0, 1e9, *FLOATS))
    phase = rng.choice((0, 0, 0, 0, 1, 2, odd_int(rng)))
    scalars = _scalars(world)
    right = (own.lists, own.specs, own.state, _fresh(world, own.lists), scalars)
    right = (*right, found, clip, world.chance(0.2), phase)
    args, good = maybe_bad(world, right, good=0.55)
    kept = [t for t in own.params() if isinstance(t, torch.Tensor)]
    if world.chance(0.3):
        kept += gradients_of(kept)
    for row in own.state.values():
        if isinstance(row, dict):
            kept += [value for value in dict.values(row) if isinstance(value, torch.Tensor)]

    check = _sgd_check(world, own, right) if good and own.rule == "sgd" else None
    world.call(
        "Plan.step",
        own.plan.step,
        args,
        kept=kept,
        nothing_done=lambda result: result[0] != "done",
        check=check,
    )


def _sgd_check(world: World, own: Stepping, right: tuple[Any, ...]) -> Any:
    """What a plain SGD step does to ordinary parameters, or None where it is not as clear."""
    _, _, _, _, scalars, found, clip, _, phase = right
    row = scalars.get(-1) if type(scalars) is dict else None
    params = own.params()
    if not row or row[0] is not None or found or clip == clip or phase != 0 or row[1] is not None:
        return None
    with_grads = [p for p in params if isinstance(p, torch.Tensor) and p.grad is not None]
    values = plain_values([*with_grads, *(p.grad for p in with_grads)])
    if values is None:
        return None
    grads = values[len(with_grads) :]
    sign = -1.0 if own.spec[4] else 1.0
    refs = [weakref.ref(p) for p in with_grads]

    def check(result: Any) -> None:
        if result[0] != "done":
            return
        for ref, was, grad in zip(refs, values, grads, strict=False):
            param = ref()
            if param is not None:
                must_agree("Plan.step", param, was - sign * HYPER["lr"] * grad)

    return check


def plan_forget(world: World) -> None:
    world.call("Plan.forget", stepping(world).plan.forget, ())


def plan_settle(world: World) -> None:
    args, _ = maybe_bad(world, (world.rng.randrange(-1, 9), object(), object()))
    world.call("Plan.settle", stepping(world).plan.settle, args)


def plan_applied(world: World) -> None:
    plan: Any = stepping(world).plan
    change = world.rng.choice((lambda: plan.applied, lambda: setattr(plan, "applied", junk(world))))
    world.call("Plan.applied", change, ())


def plan_new(world: World) -> None:
    args, _ = maybe_bad(world, ())
    world.call("Plan", _C.Plan, args if world.chance(0.7) else (junk(world),))


STEPS = {
    "Plan": plan_new,
    "Plan.applied": plan_applied,
    "Plan.forget": plan_forget,
    "Plan.settle": plan_settle,
    "Plan.step": plan_step,
}
