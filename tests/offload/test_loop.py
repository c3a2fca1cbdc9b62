"""offload() in a loop that is not plain: state dicts, groups, late parameters, faults, forks."""

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.flop_counter import FlopCounterMode

import faststep
from faststep import _C
from faststep.offloading import memory, offloaded
from faststep.offloading.slab import Slab

from .common import Odd, assert_same, bits, tokens

AdamW = functools.partial(faststep.optim.AdamW, lr=0.01, betas=(0.9, 0.95))
FEW = {"master_weights": "remainder16", "state_dtype": "int8"}


def steps(model: nn.Module, optimizer: Any, count: int = 2, seed: int = 1) -> None:
    for batch in tokens(count, seed):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def both(dtype: torch.dtype = torch.float32, **options: Any) -> list[tuple[Any, Any]]:
    """The same model and optimizer twice; the first is offloaded."""
    made = []
    for offloads in (True, False):
        model = Odd(dtype)
        optimizer = AdamW(model.parameters(), **options)
        if offloads:
            faststep.offload(optimizer, model=model)
        steps(model, optimizer)
        made.append((model, optimizer))
    return made


def left_by(pairs: list[tuple[Any, Any]]) -> list[list[Any]]:
    return [bits(model.state_dict(), optimizer.state_dict()) for model, optimizer in pairs]


@pytest.mark.parametrize(
    ("dtype", "options", "native"),
    [(torch.float32, {}, False), (torch.bfloat16, FEW, False), (torch.bfloat16, FEW, True)],
    ids=["fp32", "few bits", "few bits, native"],
)
def test_state_dicts_from_and_to_runs_without_offload(
    dtype: torch.dtype, options: dict[str, Any], native: bool
) -> None:
    pairs = both(dtype, **options)
    saved = []
    for _, optimizer in pairs:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(native=native), file)
        saved.append(file.getvalue())
    assert abs(len(saved[0]) - len(saved[1])) < 2000  # no slab with each tensor
    loaded = [torch.load(io.BytesIO(one)) for one in saved]
    for (model, optimizer), state_dict in zip(pairs, reversed(loaded), strict=True):
        steps(model, optimizer, seed=5)
        optimizer.load_state_dict(state_dict)
        steps(model, optimizer, seed=6)
    assert_same(*left_by(pairs))


@pytest.mark.parametrize("saves", [True, False])
def test_distributed_checkpoints_from_and_to_runs_without_offload(
    saves: bool, tmp_path: Path
) -> None:
    """Into an optimizer that has not stepped; torch then makes a step with gradients of zero."""
    pairs = both()
    for model, _ in pairs:
        model.unused.requires_grad_(False)  # torch loads no checkpoint without its state
    model, optimizer = pairs[not saves]
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    again = Odd()
    again.load_state_dict(model.state_dict())
    again.unused.requires_grad_(False)
    loaded = AdamW(again.parameters())
    if not saves:
        faststep.offload(loaded, model=again)
    state = get_optimizer_state_dict(again, loaded)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, loaded, state)
    for one in ((again, loaded), *pairs):
        steps(*one, seed=4)
    found = left_by([(again, loaded), *pairs])
    assert_same(found[0], found[1])
    assert_same(found[1], found[2])


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_not_offloaded(way: Any) -> None:
    pairs = both()
    copied = [way(pair) for pair in pairs]
    assert copied[0][1]._stepper is None
    assert not copied[0][1]._step_supports_amp_scaling  # so a scaler unscales, as for any other
    for model, optimizer in (*pairs, *copied):
        steps(model, optimizer, seed=3)
    assert_same(*left_by(copied))
    assert_same(*left_by(pairs))


def test_groups_that_come_and_go() -> None:
    results = []
    for offloads in (True, False):
        model = Odd()
        first, second = [model.embedding.weight, model.scalar], [model.turned, model.last]
        optimizer = AdamW(first)
        if offloads:
            faststep.offload(optimizer, model=model)
        steps(model, optimizer)
        optimizer.add_param_group({"params": second, "lr": 0.1})
        steps(model, optimizer)
        model.frozen.requires_grad_(True)
        optimizer.add_param_group({"params": [model.frozen]})
        model.turned.requires_grad_(False)
        steps(model, optimizer)
        model.turned.requires_grad_(True)
        del optimizer.state[optimizer.param_groups[0]["params"].pop()]
        steps(model, optimizer)
        results.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


def test_a_forward_waits_for_its_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    before = model[1].weight.detach().clone()
    optimizer = AdamW(model.parameters())
    handle = faststep.offload(optimizer, model=model)
    handle._copies.pipe.pace(0.0, 2e6)  # 0.36 s for all
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    assert handle._copies._under_way
    model[0](torch.ones(2, 300))
    assert not {0, 1} & handle._copies._under_way
    assert not torch.equal(model[1].weight, before)  # reading it waits
    assert not handle._copies._under_way
    assert type(vars(model[1])["_parameters"]) is dict


def test_who_passes_modules_by_waits_by_itself() -> None:
    param = nn.Parameter(torch.ones(1000))
    model = nn.Module()
    model.weight = param
    optimizer = AdamW(model.parameters())
    handle = faststep.offload(optimizer, model=model)
    handle._copies.pipe.pace(0.0, 4e4)
    param.grad = torch.ones(1000)
    optimizer.step()
    assert param[0] == 1.0
    handle.wait()
    assert param[0] < 1.0
    param.grad = torch.ones(1000)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2  # it waits
    assert not handle._copies._under_way


@pytest.mark.parametrize(("tile", "threads"), [(1, 1), (1, 4), (40000, 3), (1 << 30, 4)])
def test_bits_do_not_depend_on_tiles_and_threads(
    tile: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_TILE", tile)
    results = []
    for offloads in (True, False):
        model = nn.Linear(500, 333, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 0.25)
        nn.init.zeros_(model.bias)
        optimizer = AdamW(model.parameters(), max_grad_norm=0.1, **FEW)
        if offloads:
            faststep.offload(optimizer, threads=threads)
        for step in range(3):
            (model(torch.full((2, 500), step + 0.5).bfloat16()).float() ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


# ---- memory


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.float32, {}, 16.0),
        (torch.bfloat16, {"master_weights": True}, 16.0),
        (torch.bfloat16, FEW, 8.3),
    ],
)
def test_host_bytes_of_a_parameter(
    dtype: torch.dtype, options: dict[str, Any], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    init = Slab.__init__
    monkeypatch.setattr(
        Slab, "__init__", lambda self, size, link: (sizes.append(size), init(self, size, link))[1]
    )
    model = nn.Sequential(*(nn.Linear(512, 512, dtype=dtype) for _ in range(4)))
    optimizer = AdamW(model.parameters(), **options)
    faststep.offload(optimizer)
    for _ in range(2):
        model(torch.ones(2, 512, dtype=dtype)).sum().backward()
        optimizer.step()
    count = sum(param.numel() for param in model.parameters())
    assert len(sizes) == 1
    assert sizes[0] / count <= most * 1.03
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    used = {one.untyped_storage().data_ptr() for one in states}
    assert len(used) == len(states)  # a storage each
    span = max(used) - min(used)
    assert span <= sizes[0]  # in one mapping


def test_fraction_keeps_the_last_on_the_device() -> None:
    params = [nn.Parameter(torch.ones(100)) for _ in range(4)]
    handle = faststep.offload(AdamW(params), 0.5)
    assert [param in handle._copies.places for param in params] == [True, True, False, False]


def test_nothing_is_left_behind() -> None:
    def run() -> weakref.ref[Any]:
        model = Odd()
        optimizer = AdamW(model.parameters())
        seen = weakref.ref(faststep.offload(optimizer, model=model))
        steps(model, optimizer)
        return seen

    before = len(os.listdir("/proc/self/task"))
    gc.collect()
    gc.disable()  # nothing waits for the collector
    try:
        seen = run()
        assert seen() is None
    finally:
        gc.enable()
    assert len(os.listdir("/proc/self/task")) <= before


def test_remove_gives_states_their_own_memory() -> None:
    pairs = both()
    handle = faststep.grads.owners.offloading.of(pairs[0][1])
    rooms = [room for place in handle._copies.places.entries() for room in place.rooms.values()]
    handle.remove()
    for model, optimizer in pairs:
        steps(model, optimizer, seed=3)
    assert_same(*left_by(pairs))
    states = [v for state in pairs[0][1].state.values() for v in state.values()]
    assert not {id(room) for room in rooms} & {id(one) for one in states}
    faststep.offload(pairs[0][1], 0.5)  # once more
    for model, optimizer in pairs:
        steps(model, optimizer, seed=4)
    assert_same(*left_by(pairs))


# ---- faults


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    model, optimizer = both()[0]
    found = left_by([(model, optimizer)])
    model(next(tokens(1))).backward()
    optimizer.state[model.turned]["exp_avg"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"exp_avg.*nothing was updated"):
        optimizer.step()
    del optimizer.state[model.turned]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.step()
    optimizer.state[model.turned] = optimizer.state[model.turned] | {
        "exp_avg": found_state(found, model)
    }
    assert_same(left_by([(model, optimizer)])[0], found[0])
    optimizer.step()


def found_state(found: list[Any], model: Any) -> Tensor:
    """The first moment of `turned`, as it was."""
    wanted = [
        one for one in found[0] if isinstance(one, tuple) and one[1:3] == ((77, 130), (1, 77))
    ]
    flat = wanted[1][3].view(torch.float32)
    return torch.empty_like(model.turned.detach()).copy_(flat.view(77, 130))


@pytest.mark.parametrize("where", ["arrive", "settle", "wait"])
def test_an_exception_on_the_way_does_no_harm(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = both(max_grad_norm=0.1)
    copies = faststep.grads.owners.offloading.of(pairs[0][1])._copies
    copies.wait()
    pipe = copies.pipe

    class Failing:
        """The threads, of which one call raises once."""

        left = 1

        def __getattr__(self, name: str) -> Any:
            if name == where and self.left:
                self.left = 0
                raise KeyboardInterrupt
            return getattr(pipe, name)

    copies.pipe = Failing()
    for model, optimizer in pairs:
        batch = next(tokens(1, 9))
        for _ in range(2):
            optimizer.zero_grad()
            try:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                break
            except KeyboardInterrupt:
                pass
    with contextlib.suppress(KeyboardInterrupt):
        copies.wait()
    assert copies.pipe.left == 0
    for model, optimizer in pairs:
        steps(model, optimizer, seed=8)
    assert_same(*left_by(pairs))


@pytest.mark.parametrize(
    ("state", "text"), [(3, "nothing was updated"), (4, "some parameters were updated")]
)
def test_a_copy_that_fails_is_an_error(state: int, text: str) -> None:
    class Failing:
        def __init__(self, pipe: Any) -> None:
            self.pipe = pipe

        def wait(self, number: int) -> int:
            self.pipe.wait(number)
            return state

        def __getattr__(self, name: str) -> Any:
            return getattr(self.pipe, name)

    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param])
    copies = faststep.offload(optimizer)._copies
    param.sum().backward()
    optimizer.step()
    pipe = copies.pipe
    copies.pipe = Failing(pipe)
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    copies.pipe = pipe
    optimizer.step()


def test_reduced_gradients_are_copied_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel writes them after the hooks."""
    monkeypatch.setattr(offloaded, "world_size", lambda: 2)
    monkeypatch.setattr(offloaded, "reducing_model", lambda params: object())
    pairs = both(max_grad_norm=0.1)
    for model, optimizer in pairs:
        model(next(tokens(1))).backward()
        handle = faststep.grads.owners.offloading.of(optimizer)
        if handle is not None:
            assert all(place.seen is None for place in handle._copies.places.entries())
        optimizer.step()
        optimizer.zero_grad()
    assert_same(*left_by(pairs))


def test_sparse_gradients_go_to_torch() -> None:
    results = []
    for offloads in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 20, sparse=True), nn.Linear(20, 3))
        optimizer = faststep.optim.Adagrad(model.parameters(), lr=0.1)
        if offloads:
            faststep.offload(optimizer)
        for step in range(3):
            model[0].sparse = step == 1
            model(torch.tensor([1, 5, 7])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(bits(model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


def test_a_child_says_that_it_has_no_threads() -> None:
    model, optimizer = both()[0]
    offloading = faststep.grads.owners.offloading.of(optimizer)
    offloading.wait()
    child = os.fork()
    if not child:
        code = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.scalar.grad = torch.ones(())
                optimizer.step()
        except RuntimeError as error:
            code = 0 if "before a fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps(model, optimizer)


# ---- updates in backward


def test_updates_in_backward_free_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = AdamW(model.parameters())
    handle = faststep.offload(optimizer, in_backward=True)
    model(torch.ones(2, 1024)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    handle.wait()
    changed = [not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True)]
    assert all(changed[2:])  # those of the first layer may still wait for the step
    optimizer.step()
    assert not torch.equal(start[0], model[0].weight)


def test_a_step_by_operators_ends_updates_in_backward() -> None:
    """Their gradients are gone, so that the operators find none."""
    found = []
    for offloads in (True, False):
        model = nn.Linear(30, 30)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = AdamW(model.parameters())
        if offloads:
            faststep.offload(optimizer, in_backward=True)
        for step in range(3):
            model(torch.ones(2, 30)).square().sum().backward()
            with FlopCounterMode(display=False) if step == 1 else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        found.append([*model.parameters()])
    torch.testing.assert_close(*found)


def test_updates_in_backward_refuse_what_comes_too_late() -> None:
    def trained(**options: Any) -> Any:
        param = nn.Parameter(torch.ones(5))
        optimizer = AdamW([param], **options)
        faststep.offload(optimizer, in_backward=True)
        param.sum().backward()
        return param, optimizer

    param, optimizer = trained()
    with pytest.raises(RuntimeError, match="a second gradient of a parameter"):
        param.sum().backward()
    param, optimizer = trained()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        faststep.clip_grad_norm_([param], 1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["eps"] = 0.5
    with pytest.raises(RuntimeError, match="was changed between backward"):
        optimizer.step()
    param, optimizer = trained()
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="cannot skip, unscale or clip"):
        optimizer.step()
    param, optimizer = trained(max_grad_norm=0.5)  # clips, so that the update waits
    assert param.grad is not None
    optimizer.step()
    assert optimizer.last_grad_norm > 2.0


def test_tensors_of_scripts_lie_elsewhere() -> None:
    """Under a default device that is not the host."""
    found, batches = [], list(tokens(3))
    for offloads in (True, False):
        model = Odd()
        optimizer = AdamW(model.parameters(), max_grad_norm=0.1)
        with torch.device("meta"):
            if offloads:
                faststep.offload(optimizer)
            for batch in batches:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((model, optimizer))
    assert_same(*left_by(found))


# ---- what is refused


class Own(faststep.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (torch.optim.AdamW, {}, TypeError, "optimizers of faststep.optim, not torch"),
        (Own, {}, TypeError, "with the step of faststep.optim"),
        (faststep.optim.Adafactor, {}, NotImplementedError, "Adafactor"),
        (AdamW, {"fraction": 1.5}, ValueError, "from 0 to 1, not 1.5"),
        (AdamW, {"fraction": float("nan")}, ValueError, "from 0 to 1"),
        (AdamW, {"threads": 0}, ValueError, "threads must be from 1 to 256, not 0"),
        (AdamW, {"threads": 257}, ValueError, "threads must be from 1 to 256"),
        (AdamW, {"model": [nn.Linear(2, 2)]}, TypeError, "model must be a torch.nn.Module"),
        (
            functools.partial(AdamW, state_dtype="bf16", rounding="stochastic"),
            {"in_backward": True},
            NotImplementedError,
            "stochastic",
        ),
    ],
)
def test_refusals(make: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    optimizer = make([nn.Parameter(torch.ones(3))])
    with pytest.raises(error, match=text):
        faststep.offload(optimizer, **options)
    assert optimizer not in faststep.grads.owners.offloading


def test_twice_or_released() -> None:
    model = nn.Linear(3, 3)
    optimizer = AdamW(model.parameters())
    release = faststep.release_gradients(model, optimizer)
    with pytest.raises(RuntimeError, match="are released"):
        faststep.offload(optimizer)
    release.remove()
    faststep.offload(optimizer)
    with pytest.raises(RuntimeError, match="offloaded already"):
        faststep.offload(optimizer)
    with pytest.raises(RuntimeError, match="is offloaded, and offload"):
        faststep.release_gradients(model, optimizer)


def test_parameters_that_are_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_fsdp_shard", lambda param: True)
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(NotImplementedError, match="FullyShardedDataParallel"):
        faststep.offload(optimizer)
    assert optimizer._stepper is None


def test_a_gradient_that_did_not_arrive_is_an_error() -> None:
    """The threads refuse a step whose gradients they do not have."""
    values, room = torch.ones(9), torch.ones(9)
    pipe, plan = _C.OffloadPipe(1, 1), _C.Plan()
    pipe.set([(torch.ones(9), values, room, torch.zeros(1, dtype=torch.float64))])
    plan.offload(pipe)
    values.grad = room
    spec = (_C.rules()["sgd"][0], (), False, (1.0, 0.0, 0.0, 0.0, 0.0), False, None)
    scalars = {-1: (None, None, None)}
    with pytest.raises(RuntimeError, match="did not reach the host"):
        plan.step([[values]], [spec], {}, None, scalars, 0, float("nan"), False, 0)
    assert torch.equal(values, torch.ones(9))
