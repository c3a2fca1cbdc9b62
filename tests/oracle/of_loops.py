"""Scripts of training loops: averages, SAM, Lookahead, schedulers, data."""

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from .watch import Library, Watch


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _loss(model: nn.Module, step: int) -> Tensor:
    inputs = torch.linspace(-1, 1, 20).reshape(5, 4) * (step + 1)
    return nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 0, 1]))


def sam(library: Library, watch: Watch) -> None:
    class Sharp(torch.optim.Optimizer):
        """Climbs by the gradient, and descends by that found there."""

        def __init__(self, params: Any, base: Any, rho: float, **options: Any) -> None:
            super().__init__(params, {"rho": rho, **options})
            self.base = base(self.param_groups, **options)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            params = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            moves = [p.grad * (self.param_groups[0]["rho"] / norm) for p in params]
            torch._foreach_add_(params, moves)
            with torch.enable_grad():
                self.zero_grad()
                loss = closure()
            torch._foreach_sub_(params, moves)
            self.base.step()
            return loss

    model = _model()
    optimizer = Sharp(model.parameters(), library.optim.SGD, 0.05, lr=0.1, momentum=0.9)
    for step in range(4):
        _loss(model, step).backward()

        def closure(step: int = step) -> Tensor:
            loss = _loss(model, step)
            loss.backward()
            return loss

        watch("loss", optimizer.step(closure))
        optimizer.zero_grad()
    watch.model("after", model)


def lookahead(library: Library, watch: Watch) -> None:
    class Lookahead:
        """Holds another optimizer, and shares its groups and states."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.calls = optimizer, 0
            self.param_groups, self.state = optimizer.param_groups, optimizer.state
            self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

        def step(self, closure: Any = None) -> Any:
            loss = self.optimizer.step(closure)
            self.calls += 1
            if self.calls % 2 == 0:
                fast = [p for g in self.param_groups for p in g["params"]]
                for mean, p in zip(self.slow, fast, strict=True):
                    mean.lerp_(p.detach(), 0.5)
                    p.data.copy_(mean)
            return loss

    model = _model()
    outer = Lookahead(library.optim.Adam(model.parameters(), lr=0.05))
    scaler = library.GradScaler("cpu", init_scale=8.0)
    for step in range(5):
        loss = _loss(model, step)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        scaler.step(outer)
        scaler.update()
        outer.optimizer.zero_grad()
        watch("calls", outer.calls)
        watch.model("after", model)


def averaged_weights(library: Library, watch: Watch) -> None:
    model = _model()
    average = library.optim.swa_utils.AveragedModel(model)
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    plain = library.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    swa = library.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        if step > 3:
            average.update_parameters(model)
            swa.step()
        else:
            plain.step()
        watch("lr", optimizer.param_groups[0]["lr"])
    watch.model("average", average)


def groups_that_grow(library: Library, watch: Watch) -> None:
    model = _model()
    layers = [module for module in model if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]
    optimizer = library.optim.AdamW(layers[1].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": layers[0].parameters(), "lr": 0.01})
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        watch.model("after", model)
    watch.states("state", optimizer)


def parameters_that_move(library: Library, watch: Watch) -> None:
    """`.data` replaced, a row pruned with its states, gradients of other layouts."""
    p = nn.Parameter(torch.arange(12.0).reshape(4, 3))
    optimizer = library.optim.Adam([p], lr=0.1)
    for step in range(4):
        p.grad = torch.ones(3, p.shape[0]).t() * (step + 1)
        optimizer.step()
        if step == 1:
            state = optimizer.state.pop(p)
            p = nn.Parameter(p.detach()[:2].clone())
            optimizer.param_groups[0]["params"] = [p]
            optimizer.state[p] = {
                key: value[:2].clone() if value.dim() else value for key, value in state.items()
            }
        if step == 2:
            p.data = p.data.clone()
        watch("p", p)
    watch.states("state", optimizer)


def steps_with_closures(library: Library, watch: Watch) -> None:
    for name in ("SGD", "AdamW", "LBFGS"):
        model = _model()
        optimizer = getattr(library.optim, name)(model.parameters(), lr=0.05)

        def closure(optimizer: Any = optimizer, model: nn.Module = model) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, 1)
            loss.backward()
            return loss

        watch(name, [optimizer.step(closure) for _ in range(3)])
        watch.model("after", model)


def steps_under_autocast(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.SGD(model.parameters(), lr=0.1)
    scaler = library.GradScaler("cpu", enabled=False)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model, step)
        scaler.scale(loss).backward()
        watch("result", scaler.step(optimizer))
        scaler.update()
        optimizer.zero_grad()
    watch.model("after", model)
    watch("scaler", [scaler.get_scale(), scaler.state_dict()])


class _Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("seven")
        return {"x": torch.tensor(index), "name": str(index), "pair": (index, float(index))}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (torch.full((2,), random.random()) for _ in range(5))


def batches(library: Library, watch: Watch) -> None:
    data = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    loader = library.DataLoader(data, batch_size=4, shuffle=True)
    for _ in range(2):
        watch("epoch", [*loader])
        watch("next number", torch.rand(()))
    loader = library.DataLoader(_Squares(), batch_size=3)
    batches = iter(loader)
    for _ in range(5):
        watch.error("batch", lambda: next(batches))
    watch("stream", [*library.DataLoader(_Stream(), batch_size=2)])
    watch("one by one", [*library.DataLoader(_Stream(), batch_size=None)])
    for options in ({"num_workers": -1}, {"prefetch_factor": 2}, {"persistent_workers": True}):
        watch.error("refused", lambda o=options: library.DataLoader(data, **o) and None)
    watch("length", [len(loader), len(library.DataLoader(data, 3, drop_last=True))])


def clipping(library: Library, watch: Watch) -> None:
    clip = library.clip
    model = _model()
    watch("none", clip.clip_grad_norm_(model.parameters(), 1.0))
    watch("empty", clip.clip_grad_norm_([], 1.0))
    for limit in (0.01, 100.0, float("inf")):
        model.zero_grad()
        _loss(model, 2).backward()
        watch("norm", clip.clip_grad_norm_(model.parameters(), limit))
        watch.model("clipped", model)
        clip.clip_grad_value_(model.parameters(), 1e-3)
        watch.model("by value", model)
    grads = [p.grad for p in model.parameters()]
    watch("total", clip.get_total_norm([g for g in grads if g is not None], 1.0))
    grads[0].fill_(float("nan"))  # type: ignore[union-attr]
    watch.error(
        "nan", lambda: clip.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    )


def copies_in_training(library: Library, watch: Watch) -> None:
    model = _model()
    optimizer = library.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = library.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        _loss(model, step).backward()
        optimizer.step()
        scheduler.step()
    both = copy.deepcopy((model, optimizer))
    for twin_model, twin in (both, (model, optimizer)):
        twin.zero_grad()
        _loss(twin_model, 5).backward()
        twin.step()
        watch.model("after", twin_model)
        watch.states("state", twin)
