"""Adafactor against torch's, value by value, and in all that its class takes over."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import faststep
from faststep import _C
from faststep.optim import Adafactor

from .common import records

SHAPES = (
    *((), (1,), (5,), (300,), (40_000,)),
    *((1, 1), (3, 1), (1, 7), (4, 5), (257, 3), (70, 64), (3, 700), (300, 65), (9000, 3)),
    *((6, 4, 3, 3), (64, 32, 1, 1), (2, 3, 90, 70), (5, 1, 40), (3, 40, 1)),
)
LARGE = ((300, 250), (40, 9000), (2, 270, 260), (70_000, 2), (2, 70_000))
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
    torch.float16: {"rtol": 2e-2, "atol": 1e-2},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    {"beta2_decay": -0.3, "eps": (1e-3, 0.1), "d": 2.0},
    {"beta2_decay": 0.0, "eps": (0.0, 0.0)},
    {"lr": torch.tensor(0.05, dtype=torch.float64), "foreach": True, "weight_decay": 0.01},
)
Made = tuple[list[Parameter], Any]


def drawn(shapes: tuple[tuple[int, ...], ...], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    double = torch.float64
    return [torch.randn(s, generator=generator, dtype=double).to(dtype) for s in shapes]


def made(
    kind: type[torch.optim.Optimizer],
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Made:
    params = [Parameter(value * 0.5) for value in drawn(shapes, 0, dtype)]
    return params, kind(params, **options)


def set_grads(params: list[Parameter], step: int) -> None:
    shapes = tuple(tuple(p.shape) for p in params)
    for param, grad in zip(params, drawn(shapes, 100 + step, params[0].dtype), strict=True):
        param.grad = grad * 0.1


def pair(**options: Any) -> tuple[Made, Made]:
    return made(Adafactor, **options), made(torch.optim.Adafactor, **options)


def train(run: Made, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads(run[0], step)
        run[1].step()


def assert_same(ours: Made, theirs: Made) -> None:
    """Parameters, and states by torch's keys, dtypes and shapes."""
    for index, (mine, its) in enumerate(zip(ours[0], theirs[0], strict=True)):
        near = TOLERANCES[mine.dtype]
        where = f"parameter {index} {tuple(mine.shape)}: "
        torch.testing.assert_close(mine, its, **near, msg=lambda text, at=where: at + text)
        my_state, its_state = ours[1].state.get(mine, {}), theirs[1].state.get(its, {})
        assert [*my_state] == [*its_state]
        for key, value in its_state.items():
            # in 16 bits torch squares a norm that it has rounded
            loose = {"rtol": 2 * near["rtol"], "atol": near["atol"] / 10}
            torch.testing.assert_close(my_state[key], value, **loose, msg=lambda t, k=key: k + t)


def errors(run: Made, exact: Made) -> list[float]:
    """The mean distance of each parameter from the one that was computed in double."""
    pairs = zip(run[0], exact[0], strict=True)
    return [float((p.detach().double() - q.detach()).abs().mean()) for p, q in pairs]


@pytest.fixture
def all_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of faststep's class reaches torch's operators."""

    def fail(*args: object) -> None:
        pytest.fail("torch made the step")

    monkeypatch.setattr(Adafactor, "_step_by_torch", fail)


@pytest.mark.usefixtures("all_in_c")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values(dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = dict(options)
    if dtype == torch.float16 and options.get("eps", (None, 0))[0] == 0.0:
        options = {**options, "eps": (1e-3, 0.0)}  # squares that are 0 in fp16
    ours, theirs = pair(dtype=dtype, **options)
    train(ours)
    train(theirs)
    if dtype != torch.float16:  # in which torch's product of row and column underflows
        assert_same(ours, theirs)
    eps1, eps2 = options.get("eps", (None, 1e-3))
    options["eps"] = (torch.finfo(dtype).eps if eps1 is None else eps1, eps2)
    exact = [Parameter(p.double()) for p in made(Adafactor, dtype=dtype)[0]]
    exact_run = exact, torch.optim.Adafactor(exact, **options)
    for step in range(3):
        for p, grad in zip(exact, drawn(SHAPES, 100 + step, dtype), strict=True):
            p.grad = (grad * 0.1).double()
        exact_run[1].step()
    for mine, its in zip(errors(ours, exact_run), errors(theirs, exact_run), strict=True):
        assert mine <= min(1.25 * its + 4 * torch.finfo(dtype).eps, 0.02)


@pytest.mark.usefixtures("all_in_c")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_split_matrices(dtype: torch.dtype) -> None:
    ours, theirs = pair(shapes=LARGE, dtype=dtype, weight_decay=0.1)
    train(ours, 2)
    train(theirs, 2)
    assert_same(ours, theirs)


def relaid(tensor: Tensor, how: str) -> Tensor:
    if how == "transposed":
        return (
            tensor.permute(*reversed(range(tensor.dim())))
            .contiguous()
            .permute(*reversed(range(tensor.dim())))
        )
    if how == "spaced":
        return torch.stack([tensor, tensor], -1)[..., 0]
    if how == "negated":
        return torch._neg_view(-tensor)
    return tensor


@pytest.mark.usefixtures("all_in_c")
@pytest.mark.parametrize("of_grad", ["plain", "transposed", "spaced", "negated"])
@pytest.mark.parametrize("of_param", ["plain", "transposed", "spaced"])
def test_layouts(of_param: str, of_grad: str) -> None:
    runs = []
    shapes = ((37, 70), (6, 4, 3, 3), (300,), (270, 260))
    for kind in (Adafactor, torch.optim.Adafactor):
        values = drawn(shapes, 0, torch.float64)
        params = [Parameter(relaid(value, of_param)) for value in values]
        optimizer = kind(params)
        for step in range(2):
            for p, grad in zip(params, drawn(shapes, step, torch.float64), strict=True):
                p.grad = relaid(grad, of_grad)
            optimizer.step()
        runs.append((params, optimizer))
    assert_same(*runs)


@pytest.mark.usefixtures("all_in_c")
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e30, 0.0])
def test_values_that_are_not_finite(bad: float) -> None:
    ours, theirs = pair(shapes=((5,), (4, 5), (70, 80), (3, 2, 2)))
    for run in (ours, theirs):
        for step in range(3):
            set_grads(run[0], step)
            for p in run[0]:
                if step == 1:
                    p.grad.view(-1)[1] = bad
            run[1].step()
    for mine, its in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, its, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_nan_parameters_move_by_the_least_scale() -> None:
    ours, theirs = pair(shapes=((5,), (4, 5)))
    for run in (ours, theirs):
        with torch.no_grad():
            run[0][0][0] = float("nan")
            run[0][1][0, 0] = float("nan")
        train(run)
    for mine, its in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, its, equal_nan=True)
        assert mine.isnan().sum() == 1


def test_groups_frozen_parameters_and_missing_gradients() -> None:
    runs = []
    for kind in (Adafactor, torch.optim.Adafactor):
        params = made(kind)[0]
        params[2].requires_grad_(False)
        groups = [
            {"params": params[:6], "lr": 0.1},
            {"params": params[6:], "d": 3.0, "maximize": True},
        ]
        optimizer = kind(groups, weight_decay=0.1)
        for step in range(4):
            set_grads(params, step)
            params[2].grad = None
            params[step].grad = None
            params[-1].grad = None
            optimizer.step()
            if step == 1:
                new = [Parameter(value) for value in drawn(((3, 3),), 7, torch.float32)]
                optimizer.add_param_group({"params": new})
                params += new
        runs.append((params, optimizer))
    assert_same(*runs)


def test_the_first_parameters_epsilon_is_that_of_its_group() -> None:
    """torch's loop takes it for all, in whatever type they are."""
    runs = []
    for kind in (Adafactor, torch.optim.Adafactor):
        values = (torch.full((4, 4), 1e-5, dtype=d) for d in (torch.bfloat16, torch.float32))
        params = [Parameter(value) for value in values]
        optimizer = kind(params)
        for p in params:
            p.grad = torch.full_like(p, 1e-4)
        optimizer.step()
        runs.append(params)
    torch.testing.assert_close(runs[0][1], runs[1][1])


@pytest.mark.parametrize("way", ["to torch", "from torch", "through a file", "copied", "pickled"])
def test_checkpoints(way: str, tmp_path: Path) -> None:
    ours, theirs = pair(weight_decay=0.1)
    train(ours)
    train(theirs)
    if way == "copied":
        both = copy.deepcopy((ours[0], ours[1]))
        train(both, 2, 3)
        train(ours, 2, 3)
        assert all(map(torch.equal, both[0], ours[0]))
        return
    if way == "pickled":
        copied = pickle.loads(pickle.dumps(ours[1]))
        assert type(copied) is Adafactor
        both = [p for group in copied.param_groups for p in group["params"]], copied
        train(both, 2, 3)
        train(ours, 2, 3)
        assert all(map(torch.equal, both[0], ours[0]))
        return
    kind = torch.optim.Adafactor if way == "to torch" else Adafactor
    source = theirs if way == "from torch" else ours
    saved = copy.deepcopy(source[1].state_dict())
    assert saved["param_groups"] == theirs[1].state_dict()["param_groups"]
    if way == "through a file":
        torch.save(saved, tmp_path / "saved.pt")
        saved = torch.load(tmp_path / "saved.pt")
    params = [Parameter(p.detach().clone()) for p in source[0]]
    loaded = params, kind(params)
    loaded[1].load_state_dict(saved)
    train(loaded, 2, 3)
    train(theirs, 2, 3)
    assert_same(loaded, theirs)


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"lr": -1.0},
    {"lr": torch.ones(2)},
    {"beta2_decay": 0.5},
    {"eps": (-1.0, 1e-3)},
    {"eps": (None, -1.0)},
    {"d": 0.5},
    {"weight_decay": -1.0},
    {"max_grad_norm": 1.0},
)


@pytest.mark.parametrize("options", ARGUMENTS, ids=str)
def test_arguments(options: dict[str, Any]) -> None:
    errors = []
    for kind in (Adafactor, torch.optim.Adafactor):
        with pytest.raises((TypeError, ValueError)) as caught:
            kind([Parameter(torch.ones(3))], **options)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def _complex(optimizer: Any, params: list[Parameter]) -> None:
    more = Parameter(torch.ones(3, dtype=torch.complex64))
    more.grad = torch.ones_like(more)
    optimizer.add_param_group({"params": [more]})


def _sparse(optimizer: Any, params: list[Parameter]) -> None:
    params[2].grad = params[2].grad.to_sparse()


def _scaled(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.grad_scale = torch.ones(())


def _without_step(optimizer: Any, params: list[Parameter]) -> None:
    del optimizer.state[params[2]]["step"]


def _without_col(optimizer: Any, params: list[Parameter]) -> None:
    del optimizer.state[params[2]]["col_var"]


def _without_variance(optimizer: Any, params: list[Parameter]) -> None:
    del optimizer.state[params[1]]["variance"]


def _wrong_row(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[2]]["row_var"] = torch.ones(5, 1)


def _wrong_variance(optimizer: Any, params: list[Parameter]) -> None:
    optimizer.state[params[1]]["variance"] = torch.ones(7)


def _empty(optimizer: Any, params: list[Parameter]) -> None:
    params[2].data = torch.ones(0, 5)
    params[2].grad = torch.ones(0, 5)
    optimizer.state.pop(params[2])


REFUSED: tuple[tuple[Callable[[Any, list[Parameter]], None], str], ...] = (
    (_complex, "does not support complex parameters"),
    (_sparse, "does not support sparse gradients"),
    (_scaled, "Grad scaling should occur outside of optimizer.step"),
    (_without_step, "step"),
    (_without_col, "row_var and col_var should be defined when grad is multidimensional"),
    (_without_variance, "variance should be defined when grad is a vector"),
    (_wrong_row, "row_var.*parameter 2.*not of the parameter's shape with dimension 1 of size 1"),
    (_wrong_variance, "variance.*parameter 1.*not of the parameter's shape"),
    (_empty, "division by zero"),
)


@pytest.mark.parametrize(("damage", "text"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_are_torchs_and_nothing_is_updated(
    damage: Callable[[Any, list[Parameter]], None], text: str
) -> None:
    kinds = []
    for run in pair(shapes=((40,), (5,), (4, 5), (3, 2))):
        params, optimizer = run
        train(run, 2)
        set_grads(params, 2)
        damage(optimizer, params)
        before = [p.detach().clone() for p in params]
        states = copy.deepcopy([optimizer.state[p] for p in (params[0], params[3])])
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the other class's is compared
            optimizer.step()
        kinds.append(type(caught.value))
        if type(optimizer) is Adafactor:
            caught.match(text)
            assert all(map(torch.equal, params, before))
            for param, was in zip((params[0], params[3]), states, strict=True):
                assert all(torch.equal(optimizer.state[param][key], was[key]) for key in was)
    assert kinds[0] is kinds[1]


def test_a_negative_count_is_refused() -> None:
    params, optimizer = made(Adafactor, ((4, 5),))
    train((params, optimizer), 1)
    optimizer.state[params[0]]["step"].fill_(-3.0)
    with pytest.raises(RuntimeError, match=r"state 'step' of parameter 0 .*is negative"):
        optimizer.step()


def test_a_parameter_with_several_elements_in_one_place() -> None:
    param = Parameter(torch.ones(1, 4).expand(3, 4))
    param.grad = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="several elements in one memory location"):
        Adafactor([param]).step()


class Counted(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _watched(run: Made) -> None:
    with Counted() as mode:
        run[1].step()
    assert mode.calls > 10 * len(run[0])


def _under_autocast(run: Made) -> None:
    for param in run[0]:  # whose product of row and column is rounded to 16 bits then
        param.grad = torch.arange(1.0, 1.0 + param.numel()).reshape(param.shape)
    with torch.autocast("cpu", torch.bfloat16):
        run[1].step()


def _other_gradients(run: Made) -> None:
    p = run[0][2]
    p.grad_dtype = None
    p.grad = p.grad.double()
    run[1].state[p] = {}
    run[1].step()
    p.grad = None
    run[1].state[p] = {}


def _strided_states(run: Made) -> None:
    state = run[1].state[run[0][2]]
    state["row_var"] = torch.stack([state["row_var"]] * 2, -1)[..., 0]
    run[1].step()


def _shared_gradient(run: Made) -> None:
    run[0][2].grad = run[0][2].data
    run[1].step()


def _whole_count(run: Made) -> None:
    run[1].state[run[0][1]]["step"] = torch.tensor(2)
    run[1].step()


def _row_of_vector(run: Made) -> None:
    """Nobody reads it."""
    run[1].state[run[0][1]]["row_var"] = torch.ones(1)
    run[1].step()


@pytest.mark.parametrize(
    "use",
    [
        *(_watched, _under_autocast, _other_gradients, _strided_states),
        *(_shared_gradient, _whole_count, _row_of_vector),
    ],
)
def test_what_torchs_operators_do(use: Callable[[Made], None]) -> None:
    """They do it for the parameters concerned, and C for the rest."""
    ours, theirs = pair(shapes=((40,), (5,), (4, 5), (3, 2)))
    for run in (ours, theirs):
        train(run, 2)
        set_grads(run[0], 2)
        use(run)
        train(run, 2, 3)
    assert_same(ours, theirs)


def _spec(rule: str, keys: tuple[str, ...], *hyper: float) -> tuple[Any, ...]:
    return _C.rules()[rule][0], keys, bool(keys), hyper, False, None


FACTORED = _spec(
    "adafactor", ("step", "row_var", "col_var", "variance"), 0.01, -0.8, 1e-7, 1e-3, 1.0, 0.0
)
SGD = _spec("sgd", (), 0.01, 0.0, 0.0, 0.0, 0.0)
ALONE: tuple[Any, ...] = (0, float("nan"), False, 0)


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ([FACTORED, SGD], ALONE),
        ([FACTORED, FACTORED], (1, *ALONE[1:])),
        ([FACTORED, FACTORED], (0, 1.0, False, 0)),
        ([FACTORED, FACTORED], (0, float("nan"), True, 0)),
        ([FACTORED, FACTORED], (0, float("nan"), False, 1)),
    ],
)
def test_a_plan_refuses_what_this_step_lacks(specs: Any, options: tuple[Any, ...]) -> None:
    scalars = {-1: (None, None, None)}
    with pytest.raises(ValueError, match="adafactor"):
        _C.Plan().step([[], []], specs, {}, None, scalars, *options)


def test_a_plan_that_steps_by_another_rule_before() -> None:
    """It takes a parameter's elements in the order of memory, Adafactor in that of the shape."""
    results = []
    for specs in ([SGD, FACTORED, FACTORED], [FACTORED, FACTORED]):
        plan, param = _C.Plan(), Parameter(torch.linspace(-1, 1, 20).view(5, 4).t())
        param.grad = torch.linspace(1, 2, 20).view(4, 5)
        states = {
            "step": torch.zeros(()),
            "row_var": torch.zeros(4, 1),
            "col_var": torch.zeros(1, 5),
        }
        start = param.detach().clone()
        for spec in specs:
            scalars = {-1: (None, None, None)}
            answer = plan.step([[param]], [spec], {param: states}, None, scalars, *ALONE)
            assert answer[0] == "done"
            if spec is SGD:
                with torch.no_grad():
                    param.copy_(start)
        results.append(param)
    assert torch.equal(*results)


@pytest.mark.parametrize("first", [0, 3, 25])
def test_parameters_that_share_memory(first: int) -> None:
    runs = []
    for kind in (Adafactor, torch.optim.Adafactor):
        base = drawn(((50,),), 0, torch.float32)[0]
        params = [Parameter(base[:30]), Parameter(base[first : first + 20].view(4, 5))]
        params += [Parameter(torch.ones(3, 3))]
        run = params, kind(params)
        train(run)
        runs.append(run)
    assert_same(*runs)


def test_versions_and_inference_mode() -> None:
    params, optimizer = made(Adafactor, ((40,), (4, 5)))
    train((params, optimizer), 1)
    tensors = [*params, *(optimizer.state[params[1]][key] for key in ("row_var", "col_var"))]
    before = [t._version for t in tensors]
    saved = (params[0] * params[0]).sum()
    optimizer.step()
    assert all(t._version > was for t, was in zip(tensors, before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    with torch.inference_mode():
        frozen = Parameter(torch.ones(3, 3), requires_grad=False)
        frozen.grad = torch.ones(3, 3)
    for known in (True, False):
        with records(known):
            kept = params[0].detach().clone()
            refused = Adafactor([params[0], frozen])
            with pytest.raises(RuntimeError, match="inference mode"):
                refused.step()
            assert torch.equal(params[0], kept)
            with torch.inference_mode():
                refused.step()


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, faststep.amp.GradScaler])
def test_scalers(scaler: Any) -> None:
    finals = []
    for kind in (Adafactor, torch.optim.Adafactor):
        params, optimizer = made(kind, ((40,), (4, 5)))
        amp = scaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            grads = drawn(((40,), (4, 5)), step, torch.float32)
            if step == 2:
                grads[0][3] = float("inf")
            loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
            amp.scale(loss).backward()
            amp.unscale_(optimizer)
            faststep.clip_grad_norm_(params, 1.0)
            amp.step(optimizer)
            amp.update()
        assert amp.get_scale() == 4.0
        assert optimizer.state[params[0]]["step"] == 3.0
        finals.append((params, optimizer))
    assert_same(*finals)


def test_schedulers_closures_and_hooks() -> None:
    finals = []
    for kind in (Adafactor, torch.optim.Adafactor):
        run = params, optimizer = made(kind, ((40,), (4, 5)), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        for step in range(3):
            set_grads(params, step)

            def closure(params: list[Parameter] = params) -> Tensor:
                assert torch.is_grad_enabled()
                return params[0].sum()

            assert torch.is_tensor(optimizer.step(closure))
            scheduler.step()
        assert seen == ["before", "after"] * 3
        finals.append(run)
    assert_same(*finals)


def test_accumulate() -> None:
    finals = []
    for kind in (Adafactor, torch.optim.Adafactor):
        model = torch.nn.Linear(6, 5)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        optimizer = kind(model.parameters())
        accumulator = faststep.accumulate(optimizer, 2)
        for step in range(4):
            x = drawn(((3, 6),), step, torch.float32)[0]
            with accumulator:
                accumulator.backward(model(x).square().mean())
            if accumulator.ready:
                optimizer.step()
                optimizer.zero_grad()
        finals.append(([*model.parameters()], optimizer))
    assert_same(*finals)


def test_release_refuses_it() -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(TypeError, match="Adafactor"):
        faststep.release_gradients(model, Adafactor(model.parameters()))


def test_parameters_in_a_tuple_and_replaced_objects() -> None:
    """Everything may be replaced between steps."""
    ours, theirs = pair(shapes=((40,), (4, 5), (3, 2)))
    for params, optimizer in (ours, theirs):
        train((params, optimizer), 1)
        optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()
        optimizer.state = dict(reversed(optimizer.state.items()))
        params[1].data = params[1].data.clone()
        train((params, optimizer), 2, 1)
    for mine, its in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, its)


def test_compiled_steps() -> None:
    ours, theirs = pair(shapes=((4, 5),))
    for params, optimizer in (ours, theirs):
        set_grads(params, 0)
        torch.compile(optimizer.step, backend="eager")()
    assert_same(ours, theirs)
