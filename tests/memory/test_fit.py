"""Blocks that are computed again in backward, so that a step stays within a limit."""

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from faststep import memory
from faststep.memory import fitting
from faststep.memory.activations import saved_by
from faststep.memory.fitting import _Choice
from faststep.memory.recompute import Offloaded, Recomputed
from programs import Programs

WIDTH, ROWS = 8, 6
NBYTES = 4 * ROWS * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turns", torch.zeros(()))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.turns += 1
        inside = self.linear(self.norm(x)).sigmoid() * self.turns
        result: Tensor = x + self.dropout(inside) * scale
        return result


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Plain(nn.Module):
    """Saves its hidden layer, once as linear's output and once as sigmoid's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.two(functional.silu(self.one(x)))
        return result


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def step_of(model: nn.Module, x: Tensor | None = None) -> Callable[[], None]:
    x = torch.randn(ROWS, WIDTH) if x is None else x
    return lambda: model(x).backward()


@pytest.fixture
def all_fit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step seems to take 1 MB with checkpoints in all blocks, and 1 GB with fewer."""

    def seen(step: Callable[[], object], _: torch.device) -> tuple[int, int]:
        step()
        are_all = all(isinstance(block.forward, Recomputed) for block in model.blocks)
        return 0, 10**6 if are_all else 10**9

    monkeypatch.setattr(fitting, "step_memory", seen)


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """All that training changes, with gradients."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(ROWS, WIDTH))
        loss.backward()
        grads += [param.grad for param in model.parameters() if param.grad is not None]
        optimizer.step()
    return [*grads, *model.state_dict().values(), torch.get_rng_state()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.usefixtures("all_fit")
def test_training_has_the_same_bits_and_the_model_its_names(model: Model) -> None:
    plain = copy.deepcopy(model)
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    fitted = memory.fit(model, step_of(model), "500MB")
    assert [row.checkpointed for row in fitted.rows] == [True] * 4
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == names
    assert type(model.blocks[0]) is Block
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    calls: list[nn.Module] = []
    model.blocks[0].register_forward_hook(lambda block, *_: calls.append(block))
    expected = train(plain)
    assert equal(train(model), expected)
    assert calls == [model.blocks[0]] * 3
    for one in copies:
        assert one.blocks[0].forward._block is one.blocks[0]
        assert equal(train(one), expected)
    buffers = copy.deepcopy(list(plain.buffers()))
    x = torch.randn(ROWS, WIDTH)
    for one in (plain, model):
        torch.manual_seed(2)
        loss = one(x)
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            one(x)
    assert not equal(buffers, list(plain.buffers()))
    assert equal(list(model.buffers()), list(plain.buffers()))
    assert equal([one.grad for one in model.parameters()], [one.grad for one in plain.parameters()])
    assert model.blocks[0](torch.randn(ROWS, WIDTH), scale=2.0).requires_grad
    fitted.remove()
    fitted.remove()
    assert not any("forward" in vars(block) for block in model.blocks)


def test_blocks_are_offloaded_where_that_takes_less_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, where copies take no time: here torch's own class saves."""

    def seen(step: Callable[[], object], _: torch.device) -> tuple[int, int]:
        step()
        put = [type(vars(block).get("forward")) for block in model.blocks]
        return 0, 10**6 if put == [Offloaded] * 4 else 10**9

    monkeypatch.setattr(fitting, "step_memory", seen)
    monkeypatch.setattr(fitting, "seconds_per_byte", lambda device: 0.0)
    monkeypatch.setattr(_Choice, "best", lambda self, limit: 0b1111 << 4)
    expected = train(copy.deepcopy(model))
    fitted = memory.fit(model, step_of(model), "500MB")
    assert [row[-2:] for row in fitted.rows] == [(False, True)] * 4
    assert "offloaded" in str(fitted)
    for one in (copy.deepcopy(model), model):
        assert equal(train(one), expected)
    fitted.remove()
    assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.usefixtures("all_fit")
def test_a_block_keeps_a_forward_of_its_own(model: Model) -> None:
    block = model.blocks[0]
    own = block.forward
    block.forward = own
    fitted = memory.fit(model, step_of(model), "500MB")
    assert block.forward is not own
    with pytest.raises(ValueError, match="fitted already"):
        memory.fit(model, step_of(model))
    fitted.remove()
    assert block.forward is own


@pytest.mark.parametrize("fails_at", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.usefixtures("all_fit")
def test_measuring_leaves_no_trace(model: Model, fails_at: int | None, has_grads: bool) -> None:
    if has_grads:
        step_of(model)()
    grads = [(param.grad, copy.deepcopy(param.grad)) for param in model.parameters()]
    state = {name: (one, one.clone()) for name, one in model.state_dict(keep_vars=True).items()}
    drawn = torch.get_rng_state(), random.getstate()
    calls = []

    def step() -> None:
        calls.append(1)
        model(torch.randn(ROWS, WIDTH) + random.random()).backward()
        if len(calls) == fails_at:
            raise KeyError("the script's")

    if fails_at is None:
        memory.fit(model, step, "500MB").remove()
    else:
        with pytest.raises(KeyError, match="the script's"):
            memory.fit(model, step, "500MB")
    assert not any("forward" in vars(block) or block._forward_hooks for block in model.blocks)
    for param, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert param.grad is grad
        assert value is None or (grad is not None and torch.equal(grad, value))
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is one and torch.equal(one, old) for name, (one, old) in state.items())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]


class _WithOddBuffers(Plain):
    """A sparse one, and one that forward makes as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("links", torch.eye(WIDTH).to_sparse())
        self.register_buffer("shifts", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.shifts.resize_(len(x)).fill_(0.5)
        return super().forward(torch.sparse.mm(self.links, x.t()).t() + self.shifts[:, None])


def test_odd_buffers_and_sparse_gradients_are_put_back() -> None:
    model = Model(_WithOddBuffers)
    model.rows = nn.Embedding(9, WIDTH, sparse=True)

    def step() -> None:
        model(model.rows(torch.arange(ROWS) % 9)).backward()

    step()
    model.blocks[0].shifts.resize_(2)
    before = copy.deepcopy([model.rows.weight.grad, *model.buffers()])
    memory.fit(model, step, "500GB")
    now = [model.rows.weight.grad, *model.buffers()]
    assert [one.layout for one in now] == [one.layout for one in before]
    assert equal([one.to_dense() for one in now], [one.to_dense() for one in before])


@pytest.mark.usefixtures("all_fit")
def test_remove_leaves_what_a_script_has_put_around_a_forward(model: Model) -> None:
    fitted = memory.fit(model, step_of(model), "500MB")
    block, calls = model.blocks[0], []
    inner = block.forward

    def around(*args: Any) -> Any:
        calls.append(1)
        return inner(*args)

    block.forward = around
    fitted.remove()
    assert block.forward is around
    model(torch.randn(ROWS, WIDTH)).backward()
    assert calls == [1]  # not again in backward
    assert not any("forward" in vars(one) for one in model.blocks[1:])


@pytest.mark.usefixtures("all_fit")
def test_a_model_may_be_compiled_afterwards(model: Model) -> None:
    plain = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH)
    memory.fit(model, step_of(model, x), "500MB")
    called = torch.compile(model, backend="aot_eager")
    for one in (plain, called):
        torch.manual_seed(2)
        one(x).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))


class _Draws(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (0.5 + random.random()) + float(np.random.random()))


def recomputed(model: Model) -> Model:
    for block in model.blocks:
        Recomputed(block).put()
    return model


def test_python_and_numpy_draw_the_same_numbers_again() -> None:
    found = []
    for change in (lambda model: model, recomputed):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        model = change(Model(_Draws))
        model(torch.randn(ROWS, WIDTH)).backward()
        drawn = torch.tensor([random.random(), float(np.random.random())])
        found.append([*(param.grad for param in model.parameters()), drawn])
    assert equal(*found)


def of_an_input(model: Model, x: Tensor) -> None:
    loss = model.blocks[0](x=x).sum()
    x.add_(1)
    loss.backward()


def of_a_parameter(model: Model, x: Tensor) -> None:
    loss = model(x)
    with torch.no_grad():
        model.blocks[0].one.bias.add_(1)  # which nothing saves
    loss.backward()


def for_one_call(model: Model, x: Tensor) -> None:
    params = {name: 2 * param for name, param in model.named_parameters()}
    torch.func.functional_call(model, params, (x,)).backward()


@pytest.mark.parametrize("step", [of_an_input, of_a_parameter, for_one_call])
def test_a_change_after_forward_is_an_error(step: Callable[[Model, Tensor], None]) -> None:
    """The second forward would have other results, and the gradients would be wrong."""
    with pytest.raises(RuntimeError, match="a checkpointed Plain cannot be computed again"):
        step(recomputed(Model(Plain)), torch.randn(ROWS, WIDTH))


def test_transforms_of_torch_func_compute_nothing_again() -> None:
    model, x = Model(Plain), torch.randn(ROWS, WIDTH)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def gradients() -> list[Tensor]:
        call = torch.func.grad(lambda some: torch.func.functional_call(model, some, (x,)))
        return [*call(params).values()]

    plain = gradients()
    recomputed(model)
    assert equal(plain, gradients())


def test_saved_bytes() -> None:
    model = Model(Plain)
    step = step_of(model)
    once = [2 * NBYTES] * 4  # silu's input and output
    assert list(saved_by(step, model, list(model.blocks))[0].values()) == once
    twice, outside = saved_by(lambda: (step(), step()), model, list(model.blocks))
    assert outside[:-1] == [0, *[NBYTES] * 3]  # inputs of the second block and those behind it
    assert outside[-1] > NBYTES  # that of the head, and what the loss saves
    assert list(twice.values()) == once  # of micro-batches, one after the other
    without = torch.no_grad()(lambda: model(torch.ones(1, WIDTH)))
    assert set(saved_by(without, model, list(model.blocks))[0].values()) == {0}
    model.blocks[1], model.blocks[2] = model.blocks[3], model.blocks[3]
    found, _ = saved_by(step, model, [model.blocks[0], model.blocks[3]])
    assert list(found.values()) == [2 * NBYTES, 3 * 2 * NBYTES]


def test_measuring_keeps_nothing_that_backward_does_not_read() -> None:
    model, x, unread = Model(Plain), torch.randn(ROWS, WIDTH), []

    def step() -> None:
        unread.append(weakref.ref(model.head(x).exp()))  # whose backward would read itself
        model(x).backward()

    saved_by(step, model, list(model.blocks))
    gc.collect()
    assert unread[0]() is None


def test_blocks_that_are_checkpointed_save_nothing_more() -> None:
    class Again(Plain):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return result

    model = Model(Again)
    assert set(saved_by(step_of(model), model, list(model.blocks))[0].values()) == {0}


def test_blocks_that_write_to_their_inputs_are_not_chosen() -> None:
    """torch's checkpoint refuses them in backward."""

    class Writes(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu_())

    model = Model(Writes)
    model.blocks[3] = Plain()
    found, _ = saved_by(step_of(model), model, list(model.blocks))
    assert list(found.values()) == [0, 0, 0, 2 * NBYTES]


def test_the_choice_takes_the_least_time() -> None:
    draws = random.Random(0)
    for _ in range(200):
        count = draws.randint(1, 5)
        blocks: list[nn.Module] = [nn.Linear(draws.randint(1, 9), 1) for _ in range(count)]
        saved = [draws.choice([0, 40, 40, 100, 70]) for _ in range(count)]
        seconds = [draws.choice([1.0, 1.0, 2.0, 0.5]) for _ in range(count)]
        link = draws.choice([None, 0.01, 0.02, 0.05])
        choice = _Choice(blocks, saved, [0] * (count + 1), seconds, 1000, 1010 + sum(saved), link)
        limit = 1000 + draws.randint(0, 10 + sum(saved))
        every = [one for one in range(4**count if link else 2**count) if not one & one >> count]
        within = [one for one in every if choice.predicted(one) <= limit]
        best = choice.best(limit)
        if best is None:
            assert not within
        else:
            assert best in within
            assert choice.cost(best) == min(map(choice.cost, within))


def test_of_equal_blocks_the_first_are_chosen() -> None:
    seconds = [2.0, 1.0, 1.5, 1.0, 0.5, 0.9]
    choice = _Choice([nn.Identity()] * 6, [100] * 6, [0] * 7, seconds, 0, 610)
    assert [choice.best(limit) for limit in (610, 609, 410, 110)] == [0, 1, 0b11, 0b11111]
    assert choice.best(109) == 0b111111
    assert choice.best(99) is None


def test_a_choice_among_many_blocks_of_all_sizes() -> None:
    draws = random.Random(0)
    saved = [draws.randint(10**6, 10**7) for _ in range(60)]
    seconds = [draws.random() for _ in saved]
    choice = _Choice([nn.Identity()] * 60, saved, [0] * 61, seconds, 0, sum(saved))
    best = choice.best(sum(saved) // 2)
    assert best is not None
    assert 0.99 < choice.predicted(best) / (sum(saved) // 2) <= 1


@pytest.mark.parametrize("limit", [0, "6 GX", "", "-1MB", "1.GB"])
def test_a_limit_that_is_no_size(model: Model, limit: Any) -> None:
    with pytest.raises(ValueError, match="is no size"):
        memory.fit(model, step_of(model), limit)


@pytest.mark.parametrize(
    ("limit", "size"),
    [(7, 7), ("7", 7), ("500MB", 5 * 10**8), ("1.5 GiB", 3 * 2**29), ("2KB", 2000), ("9B", 9)],
)
def test_limits(limit: int | str, size: int) -> None:
    assert fitting._limit_of(limit) == size


def compiled() -> nn.Module:
    model = Model(Plain)
    model.compile()
    return model


def distributed() -> nn.Module:
    """As far as it can be without a group of processes."""
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = Model(Plain)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (compiled, "the model is compiled"),
        (lambda: torch.compile(Model(Plain)), "the model is compiled"),
        (distributed, "inside of DistributedDataParallel"),
        (lambda: nn.Linear(WIDTH, 1), "has no repeated blocks"),
        (lambda: Model(Plain, 1), "has no repeated blocks"),
        (lambda: Model(lambda: Plain().to("meta")), "on the CPU or one CUDA device"),
    ],
)
def test_models_that_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory.fit(make(), lambda: None)


def test_models_that_are_divided_are_refused() -> None:
    model = Model(Plain)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="divided over ranks"):
            memory.fit(model, lambda: None)
    finally:
        dist.destroy_process_group()


def test_a_limit_that_is_no_size_at_all(model: Model) -> None:
    with pytest.raises(TypeError, match="limit must be an int"):
        memory.fit(model, step_of(model), 1.5)  # type: ignore[arg-type]


def test_a_step_that_updates(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model)
    with pytest.raises(ValueError, match="has changed parameters"):
        memory.fit(model, lambda: (step(), optimizer.step()))


PEAKS = """
from pathlib import Path
import torch
from torch import nn
from faststep import memory
from faststep.memory.activations import step_memory

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1)
    def forward(self, x):
        for _ in range(4):
            x = nn.functional.silu(x * self.scale.weight)
        return x

torch.set_num_threads(1)
memory.retain()
model = nn.Sequential(*(Block() for _ in range(8)))
x = torch.randn(2**18)  # a block saves seven tensors of 1 MiB, beside its input and output
step = lambda: model(x).mean().backward()
step()
model.zero_grad()
fitted = memory.fit(model, step, "1TB")
assert fitted.peak == fitted.plain and not any(row.checkpointed for row in fitted.rows)
assert "nothing is checkpointed" in str(fitted), fitted
saved = sum(row.saved for row in fitted.rows)
assert saved == 8 * 7 * 2**20, saved
counts = []
for share in (0.7, 0.45):
    limit = int(fitted.plain - (1 - share) * saved)
    found = memory.fit(model, step, limit)
    counts.append(sum(row.checkpointed for row in found.rows))
    start, peak = step_memory(step, torch.device("cpu"))
    model.zero_grad()
    assert max(peak, found.peak) <= limit + 2**20, (peak, str(found))
    assert peak > limit - 12 * 2**20, (peak, str(found))
    assert "measured peak" in str(found) and not found.rows[-1].checkpointed
    found.remove()
try:
    memory.fit(model, step, start + 2**20)
except MemoryError as error:
    assert "the least peak that was reached is" in str(error)
else:
    raise AssertionError("there is less")
assert not any("forward" in vars(block) for block in model)
print(counts)
"""


def test_the_peak_is_near_the_limit(programs: Programs) -> None:
    done = programs.run(PEAKS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[3, 5]"
