"""low_precision_weights() against the same training under autocast without it."""

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import faststep
from faststep.amp import low_precision_weights
from faststep.cli.scripts.gpt import GPT, GPTConfig
from faststep.optim.masters import MASTER
from ranks import on_ranks

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "amp.md"


class Residual(nn.Module):
    """Convolutions with and without a bias, norms, a shortcut, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.inner = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.first(x)
        for norm, conv in zip(self.norms, self.inner, strict=True):
            x = x + conv(norm(x).relu())
        return functional.cross_entropy(self.head(self.up(x).mean((2, 3))), targets)


class Twice(nn.Module):
    """A Linear that is called two times in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh()).square().mean()


def gpt(tied: bool = False) -> GPT:
    model = GPT(GPTConfig(layers=2, heads=2, width=32, context=16, vocabulary=61))
    if tied:
        model.head.weight = model.token.weight
    return model


def token_batches() -> Iterator[tuple[Tensor, ...]]:
    made = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(61, (4, 17), generator=made)
        yield tokens[:, :-1], tokens[:, 1:]


def image_batches() -> Iterator[tuple[Tensor, ...]]:
    made = torch.Generator().manual_seed(1)
    while True:
        yield (
            torch.randn(4, 3, 8, 8, generator=made),
            torch.randint(10, (4,), generator=made),
        )


def row_batches() -> Iterator[tuple[Tensor, ...]]:
    made = torch.Generator().manual_seed(1)
    while True:
        yield (torch.randn(8, 16, generator=made),)


WORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]]]] = {
    "GPT": (gpt, token_batches),
    "CNN": (Residual, image_batches),
    "twice": (Twice, row_batches),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 1e-2}),
    "clipping": ("AdamW", {"lr": 1e-2, "max_grad_norm": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD": ("SGD", {"lr": 0.1}),
    "bf16 states": ("AdamW", {"lr": 1e-2, "betas": (0.9, 0.99), "state_dtype": "bf16"}),
    "int8 states": (
        "AdamW",
        {"lr": 1e-2, "betas": (0.9, 0.95), "state_dtype": "int8", "min_8bit_size": 256},
    ),
}


def begin(work: str, name: str = "AdamW", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = WORKS[work][0]()
    kind, own = OPTIMIZERS[name]
    return model, getattr(faststep.optim, kind)(model.parameters(), **own, **options)


def loss_of(model: nn.Module, batch: tuple[Tensor, ...], dtype: torch.dtype = BF16) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        loss: Tensor = model(*batch)
    return loss


def train(
    model: nn.Module, optimizer: Any, batches: Iterator[Any], steps: int = 4, each: int = 1
) -> list[float]:
    """The losses."""
    losses = []
    for _ in range(steps):
        for batch in itertools.islice(batches, each):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wide(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The fp32 values of the parameters by their names, by the code of the page."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    names = {"model": model, "optimizer": optimizer}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["weights"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two have the same bits, of the same types."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("work", WORKS)
def test_bits_of_autocast(work: str, name: str) -> None:
    plain, converted = begin(work, name), begin(work, name)
    names = low_precision_weights(*converted)
    assert {converted[0].get_parameter(one).dtype for one in names} == {BF16}
    losses = [train(*pair, WORKS[work][1]()) for pair in (plain, converted)]
    assert losses[0] == losses[1]
    assert same(wide(*converted), plain[0].state_dict())
    for one in names:
        mine, theirs = converted[0].get_parameter(one), plain[0].get_parameter(one)
        assert torch.equal(mine, theirs.to(BF16))
        state = dict(converted[1].state[mine])
        del state[MASTER]
        assert same(state, plain[1].state[theirs])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_that_were_there_go_on(name: str) -> None:
    plain, converted = begin("GPT", name), begin("GPT", name)
    batches = [token_batches(), token_batches()]
    before = [train(*pair, at) for pair, at in zip((plain, converted), batches, strict=True)]
    params = list(converted[0].parameters())
    low_precision_weights(*converted)
    assert all(one is two for one, two in zip(params, converted[0].parameters(), strict=True))
    after = [train(*pair, at) for pair, at in zip((plain, converted), batches, strict=True)]
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert same(wide(*converted), plain[0].state_dict())


def test_remainders_keep_the_bits_of_the_weights() -> None:
    model, optimizer = begin("GPT", master_weights="remainder16")
    weight = model.get_parameter("head.weight")
    with torch.no_grad():  # ties, a tie below a power of two, NaN, inf and the largest number
        bits = [0x3F808000, 0x3F818000, -0x407F8000, 0x3FFF8000, 0x7F7FFFFF, 0x7F800000, 0x00008000]
        weight[0, :7] = torch.tensor(bits, dtype=torch.int32).view(F32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    names = low_precision_weights(model, optimizer)
    assert optimizer.state[weight][MASTER].dtype is torch.int16
    assert same(wide(model, optimizer), before)
    others = weight != before["head.weight"].to(BF16)
    assert others[0, :7].tolist() == [True, False, True, False, False, False, True], "even ones"
    for name in names:
        others = model.get_parameter(name) != before[name].to(BF16)
        assert others.sum() <= 4
    with torch.no_grad():
        weight[0, :7] = 0.01
    plain = begin("GPT")
    close = [train(*pair, token_batches(), 20) for pair in (plain, (model, optimizer))]
    assert close[0] == pytest.approx(close[1], rel=0.02)


def test_what_autocast_does_not_cast_stays() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.norm()

    def normed() -> nn.Linear:
        return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "scaled": Scaled(4, 4),
            "normed": normed(),
            "wide": nn.Linear(4, 4).double(),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "of_another": nn.Linear(4, 4),
            "own": nn.Linear(4, 4),
            "layer": nn.TransformerEncoderLayer(4, 1, 4),
            "embedding": nn.Embedding(5, 4),
            "tied": nn.Linear(4, 5),
            "norm": nn.LayerNorm(4),
            "twin": nn.Linear(4, 4, bias=False),
        }
    )
    model["tied"].weight = model["embedding"].weight
    model["twin"].weight = model["linear"].weight
    model["own"].forward = lambda x: x
    params = [p for name, p in model.named_parameters() if "of_another" not in name]
    names = low_precision_weights(model, faststep.optim.SGD(params, lr=0.1))
    assert names == ["linear.weight", "linear.bias", "tied.bias"]
    assert {n for n, p in model.named_parameters() if p.dtype is BF16} == set(names)
    assert low_precision_weights(model, faststep.optim.SGD(model["of_another"].parameters(), 0.1))


def test_a_tied_head_stays_and_the_rest_has_the_bits() -> None:
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = gpt(tied=True)
        pairs.append((model, faststep.optim.AdamW(model.parameters(), lr=1e-2)))
    assert "token.weight" not in low_precision_weights(*pairs[1])
    assert pairs[1][0].head.weight.dtype is F32
    losses = [train(*pair, token_batches()) for pair in pairs]
    assert losses[0] == losses[1]


def test_evaluation_has_the_bits() -> None:
    plain, converted = begin("CNN"), begin("CNN")
    low_precision_weights(*converted)
    found = []
    for model, _ in (plain, converted):
        with torch.no_grad():
            found.append(loss_of(model.eval(), next(image_batches())))
    assert torch.equal(*found)


def test_encoder_layers_have_the_bits_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), layer).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        before = model(x)
        low_precision_weights(model, faststep.optim.SGD(model.parameters(), lr=0.1))
        assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.autocast("cpu", dtype=F16),
    ],
    ids=["without", "fp16"],
)
def test_other_precisions_are_refused(context: Callable[[], Any]) -> None:
    model, optimizer = begin("GPT")
    low_precision_weights(model, optimizer)
    message = r"'blocks\.0\.qkv\.weight' is torch\.bfloat16 .*its Linear must be called under "
    with context(), pytest.raises(RuntimeError, match=message):
        model(*next(token_batches()))


def test_fp16_with_a_scaler() -> None:
    losses, weights = [], []
    for converts in (False, True):
        model, optimizer = begin("GPT")
        if converts:
            low_precision_weights(model, optimizer, F16)
        scaler = faststep.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        found = []
        for batch in itertools.islice(token_batches(), 40):
            loss = loss_of(model, batch, F16)
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.item(), scaler.get_scale()]
        losses.append(found)
        weights.append(wide(model, optimizer))
    assert losses[0] == losses[1]
    assert losses[0][1] < 2.0**40, "it has overflowed"
    assert same(*weights)


def test_a_compiled_model() -> None:
    losses = []
    for compiles in (False, True):
        model, optimizer = begin("GPT")
        low_precision_weights(model, optimizer)
        run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
        losses.append(train(run, optimizer, token_batches(), 2))
    assert losses[0] == losses[1]


def test_a_copy_is_checked_too() -> None:
    model, optimizer = begin("GPT")
    low_precision_weights(model, optimizer)
    copied = copy.deepcopy(model)
    batch = next(token_batches())
    assert torch.equal(loss_of(copied, batch), loss_of(model, batch))
    with pytest.raises(RuntimeError, match="must be called under"):
        copied(*batch)


def through_a_file(path: Path, *saved: Any) -> Callable[[], Any]:
    torch.save(saved, path)
    return lambda: torch.load(path)


@pytest.mark.parametrize("masters", ["fp32", "remainder16"])
def test_checkpoints(masters: str, tmp_path: Path) -> None:
    """Saved in the middle, a run goes on with the same bits, with the call and without it."""
    model, optimizer = begin("GPT", master_weights=masters)
    low_precision_weights(model, optimizer)
    batches = token_batches()
    train(model, optimizer, batches)
    states = optimizer.state_dict()
    load = through_a_file(tmp_path / "saved.pt", wide(model, optimizer), model.state_dict(), states)
    rest = list(itertools.islice(batches, 3))
    losses = train(model, optimizer, iter(rest), 3)

    for which in (0, 1) if masters == "fp32" else (1,):
        again = begin("GPT", master_weights=masters)
        low_precision_weights(*again)
        saved = load()
        again[0].load_state_dict(saved[which])
        again[1].load_state_dict(saved[2])
        assert same(wide(*again), load()[0])
        assert train(*again, iter(rest), 3) == losses
        assert same(wide(*again), wide(model, optimizer))

    without = begin("GPT")
    saved = load()
    without[0].load_state_dict(saved[0])
    without[1].load_state_dict(saved[2])
    assert same(without[0].state_dict(), load()[0])
    theirs = train(*without, iter(rest), 3)
    assert theirs == losses if masters == "fp32" else theirs == pytest.approx(losses, rel=1e-3)

    load = through_a_file(tmp_path / "plain.pt", *(one.state_dict() for one in without))
    expected = train(*without, iter(rest), 3)
    back = begin("GPT", master_weights=masters)
    for one, state in zip(back, load(), strict=True):
        one.load_state_dict(state)
    low_precision_weights(*back)
    assert same(wide(*back), load()[0])
    theirs = train(*back, iter(rest), 3)
    assert theirs == expected if masters == "fp32" else theirs == pytest.approx(expected, rel=1e-3)


def test_sums_of_micro_batches_are_in_lower_precision() -> None:
    """What differs: autocast adds fp32 gradients, as accumulate(dtype=torch.float32) does."""
    pairs = [begin("GPT") for _ in range(3)]
    for pair in pairs[1:]:
        low_precision_weights(*pair)
    plain, converted = (train(*pair, token_batches(), 2, 3) for pair in pairs[:2])
    assert plain[:3] == converted[:3]
    assert plain != converted
    assert plain == pytest.approx(converted, rel=0.02)
    model, optimizer = pairs[2]
    accum = faststep.accumulate(optimizer, 3, normalize="sum", dtype=F32)
    summed = []
    for batch in itertools.islice(token_batches(), 6):
        with accum:
            loss = loss_of(model, batch)
            accum.backward(loss)
            summed.append(loss.item())
        if accum.ready:
            optimizer.step()
            optimizer.zero_grad()
    accum.remove()
    assert summed == plain
    assert same(wide(model, optimizer), pairs[0][0].state_dict())


@on_ranks(2)
def test_ddp_reduces_in_lower_precision(rank: int, world: int) -> None:
    losses = []
    for converts in (False, True):
        model, optimizer = begin("GPT")
        if converts:
            low_precision_weights(model, optimizer)
        ddp = DistributedDataParallel(model)
        batches = itertools.islice(token_batches(), rank, None, world)
        losses.append(train(ddp, optimizer, batches, 3))
        total = model.get_parameter("head.weight").detach().float().sum()
        dist.all_reduce(both := total.clone())
        assert both == 2 * total
    assert losses[0][0] == losses[1][0]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        low_precision_weights(ddp, optimizer)


@on_ranks(1)
def test_shards_take_the_masters_over(rank: int, world: int) -> None:
    model, optimizer = begin("GPT")
    low_precision_weights(model, optimizer)
    before = wide(model, optimizer)
    sharded = faststep.zero.shard(model, optimizer)
    for group in sharded.param_groups:
        group.update(lr=0.0)
    train(model, sharded, token_batches(), 1)
    states = sharded.state_dict()["state"]
    for place, (name, param) in enumerate(model.named_parameters()):
        value = states[place].get(MASTER, param).detach()
        assert torch.equal(value.view(param.shape), before[name]), name


def test_released_gradients_have_the_bits() -> None:
    losses = []
    for releases in (False, True):
        model, optimizer = begin("GPT")
        low_precision_weights(model, optimizer)
        release = faststep.release_gradients(model, optimizer) if releases else None
        losses.append(train(model, optimizer, token_batches()))
        if release is not None:
            release.remove()
    assert losses[0] == losses[1]


def linear(**options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4))
    return model, faststep.optim.AdamW(model.parameters(), **options)


def with_grad() -> tuple[nn.Module, Any]:
    model, optimizer = linear()
    model[0].bias.grad = torch.zeros(4)
    return model, optimizer


def with_one_memory() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model, faststep.optim.AdamW(model.parameters())


def with_subclass() -> tuple[nn.Module, Any]:
    class Marked(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = Marked(torch.ones(4, 4))
    return model, faststep.optim.AdamW(model.parameters())


def with_lazy() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    return model, faststep.optim.AdamW(model[0].parameters())


def with_shared() -> tuple[nn.Module, Any]:
    model, optimizer = linear()
    model.share_memory()
    return model, optimizer


def with_narrow() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    return model, faststep.optim.AdamW(model.parameters())


def converted_before() -> tuple[nn.Module, Any]:
    model, optimizer = linear()
    low_precision_weights(model, optimizer)
    return model, optimizer


def of_torch(kind: Any = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4))
    return model, kind(model.parameters())


def released() -> tuple[nn.Module, Any]:
    model, optimizer = linear()
    optimizer.release = faststep.release_gradients(model, optimizer)  # keep it
    return model, optimizer


REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], torch.dtype, type, str]] = {
    "dtype": (linear, F32, ValueError, "dtype must be .*, not torch.float32"),
    "gradient": (with_grad, BF16, RuntimeError, r"'0\.bias' has a gradient"),
    "memory": (with_one_memory, BF16, ValueError, r"'0\.weight' shares its memory with another"),
    "subclass": (with_subclass, BF16, TypeError, r"'0\.weight' is a Marked"),
    "lazy": (with_lazy, BF16, ValueError, r"'1\.weight' is not made yet"),
    "shared": (with_shared, BF16, ValueError, r"'0\.weight' shares its memory with other proc"),
    "no master": (with_narrow, BF16, ValueError, r"parameter 2 in group 0 .* has no master"),
    "nothing": (converted_before, BF16, ValueError, "found nothing to convert"),
    "torch's": (of_torch, BF16, TypeError, r"optimizers of faststep\.optim .*, not torch\.optim"),
    "Adafactor": (
        lambda: of_torch(faststep.optim.Adafactor),
        BF16,
        TypeError,
        r"that keep masters, not faststep\.optim\.adafactor\.Adafactor",
    ),
    "released": (released, BF16, RuntimeError, "are accumulated or released"),
    "remainders": (
        lambda: linear(master_weights="remainder16"),
        F16,
        ValueError,
        "is for torch.bfloat16, not torch.float16",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals_change_nothing(why: str) -> None:
    make, dtype, error, message = REFUSED[why]
    model, optimizer = make()
    before = [(param.dtype, param.data_ptr()) for param in model[0].parameters()]
    masters = optimizer._keeps_masters if hasattr(optimizer, "_keeps_masters") else None
    with pytest.raises(error, match=message):
        low_precision_weights(model, optimizer, dtype)
    assert [(param.dtype, param.data_ptr()) for param in model[0].parameters()] == before
    assert getattr(optimizer, "_keeps_masters", None) == masters
