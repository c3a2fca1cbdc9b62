"""Scripts with a GradScaler: hooks, own steps and patches see what torch's scaler shows."""

import copy
import functools
import itertools
import pickle
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_torch

from .watch import Library, Watch

STEPS = 5
OVERFLOWS = (1, 3)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _backward(model: nn.Module, scaler: Any, step: int, overflows: Any = OVERFLOWS) -> Tensor:
    inputs = torch.full((3, 4), 0.1 * (step + 1))
    loss = model(inputs).square().mean()
    scaler.scale(loss * float("inf") if step in overflows else loss).backward()
    return loss


def _train(
    library: Library, watch: Watch, optimizer: Any, model: nn.Module, **options: Any
) -> None:
    scaler = library.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        watch("loss", _backward(model, scaler, step))
        watch("result", scaler.step(optimizer))
        scaler.update(**options)
        watch("scale", scaler.get_scale())
        watch.model("after", model)
    watch.states("state", optimizer)


def plain_training(library: Library, watch: Watch) -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax"):
        model = _model()
        _train(library, watch, getattr(library.optim, name)(model.parameters(), lr=0.1), model)


def pre_hook(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: watch.model("pre", model))
    _train(library, watch, optimizer, model)


def pre_hook_adds_noise(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.Adam(model.parameters(), lr=0.1)

    def add(*_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn_like(p.grad))

    optimizer.register_step_pre_hook(add)
    _train(library, watch, optimizer, model)


def post_hook_averages(library: Library, watch: Watch) -> None:
    model = _model()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = library.optim.AdamW(model.parameters(), lr=0.1)

    def follow(*_: Any) -> None:
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)
        watch("average", average)

    optimizer.register_step_post_hook(follow)
    _train(library, watch, optimizer, model)


def global_hooks(library: Library, watch: Watch) -> None:
    model = _model()
    handles = [
        of_torch.register_optimizer_step_pre_hook(lambda *_: watch.model("global pre", model)),
        of_torch.register_optimizer_step_post_hook(lambda *_: watch.model("global post", model)),
    ]
    try:
        _train(library, watch, library.optim.SGD(model.parameters(), lr=0.1), model)
    finally:
        for handle in handles:
            handle.remove()


def hook_that_comes_late(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    scaler = library.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        _backward(model, scaler, step)
        scaler.unscale_(optimizer)
        if step == 2:
            optimizer.register_step_pre_hook(lambda *_: watch.model("late", model))
        scaler.step(optimizer)
        scaler.update()
        watch.model("after", model)


def patched_on_the_instance(library: Library, watch: Watch) -> None:
    """As accelerate finds skipped steps."""
    for wrap in (functools.partial, lambda call, *args: lambda *more: call(*args, *more)):
        model = _model()
        optimizer = library.optim.AdamW(model.parameters(), lr=0.1)
        inner = optimizer.step

        def counted(step: Any, *args: Any, model: nn.Module = model) -> Any:
            watch.model("called", model)
            return step(*args)

        optimizer.step = wrap(counted, inner)
        _train(library, watch, optimizer, model)


def patched_by_method_type(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    cls = type(optimizer)

    def step(self: Any, closure: Any = None) -> Any:
        watch.model("called", model)
        return cls.step(self, closure)

    optimizer.step = types.MethodType(step, optimizer)
    _train(library, watch, optimizer, model)


def scheduler_over_a_patch(library: Library, watch: Watch) -> None:
    """A scheduler wraps what was patched before it."""
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    inner = optimizer.step

    def counted(self: Any, *args: Any) -> Any:
        watch.model("called", model)
        return inner(*args)

    optimizer.step = types.MethodType(counted, optimizer)
    scheduler = library.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = library.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        _backward(model, scaler, step, (0, 3))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        watch("lr", scheduler.get_last_lr())


def patched_class(library: Library, watch: Watch) -> None:
    model = _model()
    cls = library.optim.AdamW
    before = cls.__dict__.get("step")
    inner = cls.step

    def traced(self: Any, *args: Any) -> Any:
        watch.model("traced", model)
        return inner(self, *args)

    cls.step = traced
    try:
        _train(library, watch, cls(model.parameters(), lr=0.1), model)
    finally:
        if before is None:
            del cls.step
        else:
            cls.step = before


def own_step(library: Library, watch: Watch) -> None:
    class Signs(library.optim.SGD):  # type: ignore[name-defined]
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    watch("grad", p.grad)
                    p.sub_(group["lr"] * p.grad.sign())

    model = _model()
    _train(library, watch, Signs(model.parameters(), lr=0.1), model)


def own_step_around_torchs(library: Library, watch: Watch) -> None:
    class Centred(library.optim.AdamW):  # type: ignore[name-defined]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = p.grad - p.grad.mean()
                    watch("grad", p.grad)
            return super().step(closure)

    model = _model()
    _train(library, watch, Centred(model.parameters(), lr=0.1), model)


def step_of_a_mixin(library: Library, watch: Watch) -> None:
    class Counts:
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return super().step(closure)  # type: ignore[misc]

    class Counted(Counts, library.optim.Adam):  # type: ignore[name-defined]
        pass

    model = _model()
    optimizer = Counted(model.parameters(), lr=0.1)
    _train(library, watch, optimizer, model)
    watch("calls", optimizer.calls)


def scheduler_at_skipped_steps(library: Library, watch: Watch) -> None:
    for overflows in ((0,), (1,), (0, 1, 2)):
        model = _model()
        optimizer = library.optim.SGD(model.parameters(), lr=0.1)
        scheduler = library.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = library.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            _backward(model, scaler, step, overflows)
            watch("result", scaler.step(optimizer))
            scaler.update()
            scheduler.step()
            watch("lr", scheduler.get_last_lr())
        watch("count", getattr(optimizer, "_step_count", None))


def unscaled_and_clipped(library: Library, watch: Watch) -> None:
    for fused in (None, True):
        model = _model()
        optimizer = library.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = library.GradScaler("cpu", init_scale=64.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            _backward(model, scaler, step)
            scaler.unscale_(optimizer)
            watch.model("unscaled", model)
            watch("norm", library.clip.clip_grad_norm_(model.parameters(), 0.01))
            scaler.step(optimizer)
            scaler.update()
            watch.model("after", model)


def fp16_gradients(library: Library, watch: Watch) -> None:
    for fused in (None, True):
        p = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = library.optim.SGD([p], lr=0.1, fused=fused)
        scaler = library.GradScaler("cpu", init_scale=4.0)
        scaler.scale((p * 2).sum()).backward()
        watch.error("step", lambda s=scaler, o=optimizer: s.step(o))
        watch("after", [p, p.grad])
        watch.error("update", scaler.update)


def closure_as_argument(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    scaler = library.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        _backward(model, scaler, step, (1,))

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((3, 4), 0.3 * step)).sum()
            loss.backward()
            return loss

        watch.error("result", lambda: scaler.step(optimizer, closure))
        watch.model("after", model)
        scaler.update()


def two_optimizers(library: Library, watch: Watch) -> None:
    """A GAN's, with one scaler; one of them overflows."""
    generator, judge = _model(), nn.Linear(2, 1)
    of_generator = library.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    of_judge = library.optim.SGD(judge.parameters(), lr=0.01)
    of_judge.register_step_post_hook(lambda *_: watch.model("judge", judge))
    scaler = library.GradScaler("cpu", init_scale=16.0)
    for step in range(4):
        fake = generator(torch.full((3, 4), 0.2 * step + 0.1))
        of_judge.zero_grad()
        loss = judge(fake.detach()).square().mean() + (judge(torch.ones(3, 2)) - 1).square().mean()
        scaler.scale(loss).backward()
        watch("judge's step", scaler.step(of_judge))
        of_generator.zero_grad()
        loss = (judge(fake) - 1).square().mean()
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        watch("generator's step", scaler.step(of_generator))
        scaler.update()
        watch("scale", scaler.get_scale())
        watch.model("generator", generator)


def accumulated_by_hand(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.AdamW(model.parameters(), lr=0.05)
    scaler = library.GradScaler("cpu", init_scale=32.0)
    for step in range(8):
        _backward(model, scaler, step, (5,))
        if step % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step < 4)
        watch.model("after", model)


def own_scaler(library: Library, watch: Watch) -> None:
    class Watched(library.GradScaler):  # type: ignore[name-defined]
        def _unscale_grads_(self, *args: Any) -> Any:
            watch("unscale")
            return super()._unscale_grads_(*args)

        def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
            watch("maybe")
            return super()._maybe_opt_step(*args, **kwargs)

        def unscale_(self, optimizer: Any) -> None:
            watch("unscale_")
            super().unscale_(optimizer)

    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    scaler = Watched("cpu", init_scale=16.0)
    for step in range(3):
        _backward(model, scaler, step, (1,))
        scaler.step(optimizer)
        scaler.update()
        watch.model("after", model)


def what_a_scaler_records(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    scaler = library.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        _backward(model, scaler, step, (1,))
        scaler.step(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        watch("found", list(state["found_inf_per_device"].values()))
        watch("stage", str(state["stage"]))
        watch("lent", [hasattr(optimizer, name) for name in ("grad_scale", "found_inf")])
        scaler.update()
        watch("state", scaler.state_dict())
    twin = copy.deepcopy(scaler) if not scaler._per_optimizer_states else scaler
    watch("twin", twin.state_dict())


def first_steps_are_skipped(library: Library, watch: Watch) -> None:
    """A skipped step leaves no state, nor part of one."""
    names = ("SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop")
    for name in (*names, "ASGD"):
        momentum = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        model = _model()
        optimizer = getattr(library.optim, name)(model.parameters(), lr=0.1, **momentum)
        scaler = library.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            model[2].bias.requires_grad_(step > 1)  # type: ignore[index]
            _backward(model, scaler, step, (0, 2))
            watch("result", scaler.step(optimizer))
            scaler.update()
            watch("state", optimizer.state_dict())
            watch("length", len(optimizer.state))
            optimizer.zero_grad()


def errors_in_the_step(library: Library, watch: Watch) -> None:
    """The gradients are unscaled before, and a step that is skipped raises none."""

    def spoil(optimizer: Any) -> None:
        del optimizer.param_groups[0]["lr"]

    def halve(optimizer: Any) -> None:
        del next(iter(optimizer.state.values()))["exp_avg_sq"]

    for change in (spoil, halve):
        for overflows in ((), (1,)):
            model = _model()
            optimizer = library.optim.AdamW(model.parameters(), lr=0.1)
            scaler = library.GradScaler("cpu", init_scale=64.0)
            _backward(model, scaler, 0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            change(optimizer)
            _backward(model, scaler, 1, overflows)
            try:
                watch("result", scaler.step(optimizer))
            except KeyError:
                watch("raised")
            watch("gradients", [p.grad for p in model.parameters()])
            state = scaler._per_optimizer_states[id(optimizer)]
            watch("found", list(state["found_inf_per_device"].values()))
            watch("stage", str(state["stage"]))


def patched_scaler(library: Library, watch: Watch) -> None:
    """What a scaler's step calls is replaced in the object, and in its class."""
    for owner in ("object", "class"):
        for name in ("unscale_", "_unscale_grads_", "_maybe_opt_step"):
            model = _model()
            optimizer = library.optim.SGD(model.parameters(), lr=0.1)
            scaler = library.GradScaler("cpu", init_scale=64.0)
            place = scaler if owner == "object" else torch.amp.GradScaler
            inner = getattr(place, name)

            def traced(*args: Any, inner: Any = inner, name: str = name) -> Any:
                watch("called", name)
                return inner(*args)

            setattr(place, name, traced)
            try:
                for step in range(2):
                    _backward(model, scaler, step)
                    scaler.step(optimizer)
                    scaler.update()
            finally:
                setattr(place, name, inner)


def frozen_and_unused(library: Library, watch: Watch) -> None:
    model = _model()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    unused = nn.Parameter(torch.ones(3))
    groups = [{"params": model.parameters()}, {"params": [unused], "lr": 1.0}]
    optimizer = library.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    _train(library, watch, optimizer, model)
    watch("unused", unused)


ORDERS = (
    "step update step update",
    "unscale step update unscale step update",
    "unscale pickle unscale step step unscale update pickle",
    "step unscale step update update",
    "update step update",
    "closure step closure update",
)


def any_order_of_calls(library: Library, watch: Watch) -> None:
    """Of steps and updates, before a loss was scaled and after; with gradients and without."""
    for started in (True, False):
        for grads in ((1.0,), (None,), (float("inf"), None)):
            for fused in (None, True):
                for calls in ORDERS:
                    params = [nn.Parameter(torch.ones(1)) for _ in grads]
                    for p, grad in zip(params, grads, strict=True):
                        p.grad = None if grad is None else torch.tensor([grad])
                    optimizer = library.optim.SGD(params, lr=0.1, fused=fused)
                    scaler = library.GradScaler("cpu", init_scale=8.0)
                    if started:
                        scaler.scale(torch.zeros(()))
                    call_of = {
                        "unscale": functools.partial(scaler.unscale_, optimizer),
                        "step": functools.partial(scaler.step, optimizer),
                        "closure": functools.partial(scaler.step, optimizer, closure=list),
                        "update": scaler.update,
                        "pickle": lambda s=scaler: pickle.loads(pickle.dumps(s)).state_dict(),
                    }
                    for call in calls.split():
                        watch.error(call, call_of[call])
                    watch("after", [params, scaler.state_dict()])


def arguments_of_a_scaler(library: Library, watch: Watch) -> None:
    for options in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        watch.error("factor", lambda o=options: library.GradScaler("cpu", **o) and None)
        watch("off", library.GradScaler("cpu", enabled=False, **options).state_dict())
    scaler = library.GradScaler("cpu", 4.0)
    ones = torch.ones(2)
    scaled = scaler.scale([ones, (ones, ones)])
    watch("scaled", [type(scaled).__name__, type(scaled[1]).__name__, scaled])
    watch("lazy", [*scaler.scale(one for one in (ones,))])
    watch.error("neither", lambda: scaler.scale(3))
    watch.error("empty", lambda: scaler.load_state_dict({}))
    scale = scaler._scale
    for new in (4.0, torch.tensor(4.0), 3, torch.tensor([4.0]), torch.tensor([1.0, 2.0]),
                torch.tensor(1.0, requires_grad=True), torch.ones((), device="meta")):  # fmt: skip
        p = nn.Parameter(ones.clone())
        p.grad = ones.clone()
        scaler.unscale_(library.optim.SGD([p], lr=0.1))
        watch.error("update", lambda new=new: scaler.update(new))
        watch("now", [scaler.get_scale(), scaler._scale is scale, scaler.state_dict()])
        watch.error("plain update", scaler.update)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.1)
    scaler.set_growth_interval(1)
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        _backward(model, scaler, step)
        scaler.step(optimizer)
        scaler.update()
        watch("scale", [scaler.get_scale(), scaler.state_dict()])


def disabled(library: Library, watch: Watch) -> None:
    scaler = library.GradScaler("cpu", enabled=False)
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.tensor([float("inf")])
    optimizer = library.optim.SGD([p], lr=0.1)
    loss = torch.ones(())
    watch("the loss", scaler.scale(loss) is loss)
    scaler.unscale_(optimizer)
    watch("result", scaler.step(optimizer, closure=lambda: 7.0))
    scaler.update()
    scaler.load_state_dict({})
    watch("after", [p, scaler.get_scale(), pickle.loads(pickle.dumps(scaler)).state_dict()])


def one_gradient_of_two_parameters(library: Library, watch: Watch) -> None:
    """torch divides it by the scale once per parameter."""
    for size, unscales in itertools.product((7, 70_000), (False, True)):
        params = [nn.Parameter(torch.linspace(-1, 1, size)) for _ in range(2)]
        optimizer = library.optim.SGD(params, lr=0.1)
        scaler = library.GradScaler("cpu", init_scale=8.0)
        grad = torch.linspace(1, 2, size) * 64
        for param in params:
            param.grad = grad
        scaler.scale(torch.ones(()))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        watch("stepped", [some[:: size // 7] for some in (*params, grad)])
