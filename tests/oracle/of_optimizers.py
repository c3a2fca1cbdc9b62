"""Scripts with an optimizer alone: states, groups, errors, and what its step calls."""

import collections
import contextlib
import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import optimizer as of_torch

from .watch import Library, Watch

CLASSES = (
    *("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "Adafactor"),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=source).to(dtype)) for s in ((3, 2), (5,), ())]


def _grads(params: Any, step: int, size: float = 1.0) -> None:
    source = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=source) * size).to(p.dtype)


def every_class(library: Library, watch: Watch) -> None:
    for name in CLASSES:
        for dtype in DTYPES:
            params = _params(dtype)
            optimizer = getattr(library.optim, name)(params, lr=0.01)
            for step in range(4):
                _grads(params, step)
                watch("result", optimizer.step())
            watch(name, [(p, p.grad) for p in params])
            watch.states("state", optimizer)
            watch("said", [repr(optimizer), type(optimizer).__name__])


def arguments_that_are_refused(library: Library, watch: Watch) -> None:
    p = _params()
    for name in CLASSES:
        cls = getattr(library.optim, name)
        for params in (p[0], [], {p[0]}, ["x"], [p[0] * 2], [{"params": p}, {"params": p}]):
            watch.error(name, lambda cls=cls, params=params: cls(params) and None)
        for options in ({"lr": -1.0}, {"weight_decay": -1.0}, {"eps": -1.0}, {"betas": (2.0, 0.0)}):
            watch.error(name, lambda cls=cls, options=options: cls(p, **options) and None)
        watch.error(name, lambda cls=cls: cls([p[0], p[0]]) and None)
        watch.error(name, lambda cls=cls: cls(p).add_param_group({"params": [p[1]]}))


def flags_that_exclude_each_other(library: Library, watch: Watch) -> None:
    for name in ("SGD", "Adam", "AdamW", "Adagrad"):
        cls = getattr(library.optim, name)
        for options in (
            {"fused": True, "foreach": True},
            {"fused": True, "differentiable": True},
            {"capturable": True},
        ):

            def step(cls: Any = cls, options: Any = options) -> None:
                params = _params()
                optimizer = cls(params, lr=0.1, **options)
                _grads(params, 0)
                optimizer.step()
                watch("stepped", params)

            watch.error(name, step)


def checkpoints(library: Library, watch: Watch) -> None:
    for name in CLASSES:
        params = _params()
        cls = getattr(library.optim, name)
        optimizer = cls(params, lr=0.01)
        optimizer.register_state_dict_pre_hook(lambda *_: watch("before state_dict"))
        optimizer.register_load_state_dict_post_hook(lambda *_: watch("after load"))
        for step in range(2):
            _grads(params, step)
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        others = _params()
        other = cls(others, lr=0.5)
        other.load_state_dict(torch.load(file, weights_only=True))
        for twin in (optimizer, other, copy.deepcopy(optimizer)):
            own = twin.param_groups[0]["params"]
            _grads(own, 9)
            twin.step()
            watch(name, own)
            watch.states("state", twin)
        fewer, saved = cls(_params()[:1]), other.state_dict()
        watch.error("other sizes", lambda o=fewer, saved=saved: o.load_state_dict(saved))


def sparse_gradients(library: Library, watch: Watch) -> None:
    for name in (*CLASSES, "SparseAdam"):
        table = nn.Embedding(6, 3, sparse=True)
        dense = nn.Linear(3, 1)

        def train(name: str = name, table: nn.Module = table, dense: nn.Module = dense) -> None:
            made = [*table.parameters()] + ([] if name == "SparseAdam" else [*dense.parameters()])
            optimizer = getattr(library.optim, name)(made, lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                dense(table(torch.tensor([1, 4, 1, step]))).sum().backward()
                optimizer.step()
            watch.states("state", optimizer)

        watch.error(name, train)
        watch("after", [*table.parameters(), *dense.parameters()])


def complex_parameters(library: Library, watch: Watch) -> None:
    for name in CLASSES:
        source = torch.Generator().manual_seed(5)
        p = nn.Parameter(torch.randn(4, dtype=torch.complex64, generator=source))

        def train(name: str = name, p: nn.Parameter = p) -> None:
            optimizer = getattr(library.optim, name)([p], lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                p.abs().square().sum().backward()
                optimizer.step()
            watch.states("state", optimizer)

        watch.error(name, train)
        watch("after", p)


def gradients_through_a_step(library: Library, watch: Watch) -> None:
    for name in CLASSES:

        def train(name: str = name) -> None:
            start = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
            p = start.clone()
            grad = torch.tensor([0.3, 0.1, -0.2], requires_grad=True)
            optimizer = getattr(library.optim, name)([p], lr=0.1, differentiable=True)
            p.grad = grad
            for _ in range(2):
                optimizer.step()
            p.square().sum().backward()
            watch(name, [start.grad, grad.grad])

        watch.error(name, train)


def own_init_group(library: Library, watch: Watch) -> None:
    class Counted(library.optim.AdamW):  # type: ignore[name-defined]
        def _init_group(self, group: Any, *args: Any) -> Any:
            watch("group", len(group["params"]))
            return super()._init_group(group, *args)

    params = _params()
    optimizer = Counted(params, lr=0.1)
    for step in range(2):
        _grads(params, step)
        optimizer.step()
    watch("after", params)


def missing_and_zero_gradients(library: Library, watch: Watch) -> None:
    for name in CLASSES:
        params = _params()
        options = {} if name == "Rprop" else {"weight_decay": 0.1}
        optimizer = getattr(library.optim, name)(params, lr=0.1, **options)
        _grads(params, 0)
        optimizer.step()
        params[1].grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        watch(name, [(p, p.grad) for p in params])
        watch.states("state", optimizer)


def small_second_moments(library: Library, watch: Watch) -> None:
    """States that were rounded separately, under a root."""
    for dtype in (torch.float16, torch.bfloat16):
        for size in (1e-3, 3e-5):
            params = _params(dtype)
            optimizer = library.optim.RMSprop(params, lr=1e-3, eps=1e-3, centered=True)
            for step in range(20):
                _grads(params, step, size)
                optimizer.step()
            watch("finite", [bool(p.isfinite().all()) for p in params])


def norms_of_fp16(library: Library, watch: Watch) -> None:
    clip = library.clip
    for size in (1.0, 6e4):
        for kind in (2.0, 1.0, float("inf")):
            p = nn.Parameter(torch.ones(64, dtype=torch.float16))
            p.grad = torch.full_like(p, size)
            watch.error(
                "norm",
                lambda p=p, k=kind: clip.clip_grad_norm_([p], 1.0, k, error_if_nonfinite=True),
            )
            watch("grad", p.grad)


def dictionaries_by_class(library: Library, watch: Watch) -> None:
    params = _params()
    optimizer = library.optim.SGD(params, lr=0.1)
    watch("instances", [isinstance(optimizer, c) for c in (library.optim.SGD, torch.optim.SGD)])
    watch("bases", issubclass(type(optimizer), torch.optim.Optimizer))


def state_of_few_elements(library: Library, watch: Watch) -> None:
    """What a script does to one storage concerns no other state."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(40)]
    optimizer = library.optim.AdamW(params, lr=0.1)
    _grads(params, 0)
    optimizer.step()
    first = optimizer.state[params[0]]["exp_avg"]
    with contextlib.suppress(RuntimeError):  # faststep's are not resizable: docs/api/optim.md
        first.untyped_storage().resize_(0)
    watch("others", [optimizer.state[p]["exp_avg"].sum() for p in params[1:]])


def hooks_and_closures(library: Library, watch: Watch) -> None:
    """In which order they run, what they see, and what they may change."""
    for name in CLASSES:
        params = _params()
        optimizer = getattr(library.optim, name)(params, lr=0.1)

        def log(event: str, params: Any = params) -> Any:
            return lambda *_: watch(event, [params[0], torch.is_grad_enabled()])

        def closure(optimizer: Any = optimizer, params: Any = params) -> Tensor:
            watch("closure", torch.is_grad_enabled())
            optimizer.zero_grad()
            loss: Tensor = sum((p * p).sum() for p in params)  # type: ignore[assignment]
            loss.backward()
            return loss

        def flip(*_: Any, params: Any = params) -> None:
            for p in params:
                p.grad = -p.grad

        _grads(params, 0)
        handles = [
            optimizer.register_step_post_hook(log("own post")),
            of_torch.register_optimizer_step_post_hook(log("global post")),
            optimizer.register_step_pre_hook(log("own pre")),
            of_torch.register_optimizer_step_pre_hook(log("global pre")),
        ]
        try:
            optimizer.step()
            with torch.no_grad():
                watch("loss", optimizer.step(closure))
                watch("mode", torch.is_grad_enabled())
        finally:
            for handle in handles:
                handle.remove()
        optimizer.register_step_pre_hook(flip)
        optimizer.step()
        watch("flipped", [(p, p.grad) for p in params])
        given = optimizer.register_step_pre_hook(lambda o, *_, call=closure: ((o, call), {}))
        watch("result", optimizer.step())
        given.remove()
        optimizer.register_step_pre_hook(lambda *_: 5)
        try:
            optimizer.step()
        except RuntimeError as error:
            watch("bad hook", str(error).partition(">")[2])
        watch("after", [params, torch.is_grad_enabled()])


def hooks_of_state_dicts(library: Library, watch: Watch) -> None:
    for name in CLASSES:
        optimizer = getattr(library.optim, name)(_params(), lr=0.1)
        optimizer.register_state_dict_pre_hook(lambda _: watch("pre"))
        optimizer.register_state_dict_pre_hook(lambda _: watch("first"), prepend=True)
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": 7})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, saved: {
                **saved, "param_groups": [{**g, "lr": g["lr"] / 2} for g in saved["param_groups"]]
            }
        )  # fmt: skip
        optimizer.register_load_state_dict_post_hook(
            lambda o: watch("now", o.param_groups[0]["lr"])
        )
        saved = optimizer.state_dict()
        watch("note", saved["note"])
        optimizer.load_state_dict(saved)


def hooks_that_a_closure_sets(library: Library, watch: Watch) -> None:
    """They are called at the end of the same step, and one that it removes is not."""
    for name in ("SGD", "AdamW", "Adafactor"):
        params = _params()
        optimizer = getattr(library.optim, name)(params, lr=0.1)
        register = (
            optimizer.register_step_post_hook,
            of_torch.register_optimizer_step_post_hook,
        )
        for add in register:
            handles: list[Any] = []

            def closure(
                params: Any = params, handles: list[Any] = handles, add: Any = add
            ) -> float:
                _grads(params, 0)
                if handles:
                    handles.pop().remove()
                else:
                    handles.append(add(lambda _, args, kwargs: watch("post", [len(args), kwargs])))
                return 1.0

            for _ in range(2):
                watch("loss", optimizer.step(closure))


def state_dicts_that_hooks_replace(library: Library, watch: Watch) -> None:
    params = _params()
    optimizer = library.optim.AdamW(params, lr=0.1)
    _grads(params, 0)
    optimizer.step()
    optimizer.register_state_dict_post_hook(lambda _, states: {"mine": states["state"]})
    watch.error("saved", optimizer.state_dict)


def states_of_the_script(library: Library, watch: Watch) -> None:
    """Beside those of parameters, and mappings that are no dictionaries."""
    for name in ("SGD", "AdamW", "Adafactor"):
        params = _params()
        optimizer = getattr(library.optim, name)(params, lr=0.1)
        for key, value in (("count", 5), ("none", None), ("of", {"a": 1}), ("list", [1])):
            optimizer.state[key] = value
        _grads(params, 0)
        optimizer.step()
        watch.states("saved", optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        for param in params:
            optimizer.state[param] = collections.UserDict(optimizer.state[param])
        watch.error("with mappings", optimizer.step)
        watch.states("saved", optimizer)
        watch("params", params)


def nesterov_that_is_no_number(library: Library, watch: Watch) -> None:
    for nesterov in (None, "", "yes", 1):
        params = _params()
        optimizer = library.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=nesterov)
        for step in range(2):
            _grads(params, step)
            watch.error("stepped", optimizer.step)
        watch("params", params)


def steps_that_are_traced(library: Library, watch: Watch) -> None:
    def stepping(kind: Any) -> Any:
        def stepped(param: Tensor, grad: Tensor) -> Tensor:
            param = param.clone()
            param.grad = grad.clone()
            kind([param], lr=0.1).step()
            return param

        return stepped

    for name in ("SGD", "AdamW"):
        stepped, example = stepping(getattr(library.optim, name)), (torch.ones(2), torch.ones(2))
        watch("graph", make_fx(stepped)(*example).code)
        traced = torch.jit.trace(stepped, example, check_trace=False)
        watch("result", traced(torch.full((2,), 2.0), torch.full((2,), 3.0)))
