"""`faststep.offload` of parameters that are DTensors: what holds without it, once more."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import faststep
from faststep._torch.dtensor import any_dtensor
from faststep.grads.params import params_of
from faststep.offloading import Offload
from offload.common import assert_same, bits
from ranks import on_cases, on_ranks

from .common import backward, fully_sharded, net
from .test_optimizers import CLASSES

AGAIN = {
    "test_accumulation": "windows windows_by_model windows_that_fail in_float32",
    "test_clipping": "in_the_step several_meshes on_one_rank_only sums_that_wait watched",
    "test_different_ranks": "scaled step_that_fails_on_one_rank",
    "test_fsdp2_models": "frozen_inside frozen_across unused mixed_precision accumulated "
    "kept_state_dict",
    "test_freed": "freed",
    "test_more_models": "compiled several_dtypes",
    "test_optimizers": "fsdp2 offloaded tensor_parallel sequence_parallel "
    "other_placements states_with_other_placements several_meshes changed_between_steps",
    "test_scaler": "overflow_on_one_rank flags_that_differ",
    "test_states": "optimizer_state_dicts of_one_process remainders saved_to_files own_state_dicts",
}
CASES = [(2, module, name) for module, names in AGAIN.items() for name in names.split()]


@contextlib.contextmanager
def all_offloaded() -> Iterator[None]:
    """Inside, optimizers of DTensors are offloaded when they are made; some of them step."""
    answers: list[Any] = []
    step = Offload.step

    def noted(self: Offload, request: Any) -> Any:
        answers.append(step(self, request))
        return answers[-1]

    def offloading(made: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            made(self, *args, **options)
            if any_dtensor(params_of(self)):
                faststep.offload(self, threads=1)

        return init

    with pytest.MonkeyPatch.context() as patch:
        for name in dict.fromkeys(name for name, _ in CLASSES.values()):
            kind = getattr(faststep.optim, name)
            patch.setattr(kind, "__init__", offloading(kind.__init__))
        patch.setattr(Offload, "step", noted)
        yield
    assert any(answer is not None for answer in answers)


LAST = [
    ("test_optimizers", "hybrid"),
    ("test_scaler", "overflow_on_one_rank"),
    ("test_clipping", "in_the_step"),
]


@on_cases([*CASES, *((4, *case) for case in LAST)])
def test_again(rank: int, world: int, module: str, name: str) -> None:
    tests = importlib.import_module(f"{__package__}.{module}")
    with all_offloaded():
        getattr(tests, f"test_{name}").body(rank, world)


@on_ranks(2, scaler=["torch", "faststep"])
def test_scales_that_round(rank: int, world: int, scaler: str) -> None:
    """Of bf16 gradients, and an overflow on one rank; the script reads them after the step."""
    kind: Any = torch.amp.GradScaler if scaler == "torch" else faststep.amp.GradScaler
    found: list[list[Any]] = [[], []]
    for number, some in enumerate(found):
        model = fully_sharded().bfloat16()
        optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1, master_weights=True)
        if number:
            faststep.offload(optimizer)
        scale = kind("cpu", init_scale=3.0, growth_interval=2)
        for step in range(4):
            loss = model(torch.randn(4, 6).bfloat16()).float().square().mean()
            scale.scale(loss).backward()
            if step == 1 and rank == 1:
                next(iter(model.parameters())).grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
            scale.step(optimizer)
            scale.update()
            some += bits([param.grad for param in model.parameters()], *model.parameters())
            some.append(scale.get_scale())
            optimizer.zero_grad()
        some += bits(optimizer.state_dict())
    assert_same(*found)


@on_ranks(2)
def test_removed(rank: int, world: int) -> None:
    """States have memory of their own again, with the same bits."""
    found = []
    for removes in (False, True):
        model = fully_sharded()
        optimizer = faststep.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            if removes and step != 1:
                handle = faststep.offload(optimizer)
            backward(model, rank, step)
            optimizer.step()
            if removes and step != 1:
                handle.remove()
        found.append(bits(*model.parameters(), optimizer.state_dict()))
    assert_same(*found)


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    model = fully_sharded()
    optimizer = faststep.optim.SGD(model.parameters(), lr=0.1)
    for options in ({"model": model}, {"in_backward": True}):
        with pytest.raises(NotImplementedError, match=r"DTensors with in_backward= or model="):
            faststep.offload(optimizer, **options)
    plain = net()
    optimizer = faststep.optim.SGD(plain.parameters(), lr=0.1)
    faststep.offload(optimizer, model=plain)
    optimizer.add_param_group({"params": list(model.parameters())})
    with pytest.raises(NotImplementedError, match="with model= does not take DTensors"):
        optimizer.step()
