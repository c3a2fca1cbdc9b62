"""What only some optimizers have: states that do not begin as zeros, and torch's own classes."""

import pytest
import torch

import faststep
import faststep.optim as optim
from programs import Programs

from .common import assert_same_bits, parameters, set_gradients, train
from .declarations import ADAGRAD, ALL, ASGD, NADAM, OTHERS, RPROP, Declaration

OURS = {"Adafactor", *(declaration.name for declaration in ALL + OTHERS)}


def test_the_module_takes_the_place_of_torchs() -> None:
    """Every public name is there: ours where we have the class, torch's object where not."""
    for name in dir(torch.optim):
        if not name.startswith("_"):
            same = getattr(optim, name) is getattr(torch.optim, name)
            assert same == (name not in OURS), name
            assert name in dir(optim)
    assert {"LBFGS", "Muon", "Optimizer", "SparseAdam"} <= {*dir(optim)} - OURS
    with pytest.raises(AttributeError, match=r"'faststep\.optim' has no attribute 'NoSuch'"):
        _ = optim.NoSuch
    assert not hasattr(optim, "_adafactor")


def test_submodules_are_imported_as_of_torch(programs: Programs) -> None:
    lines = (
        "import faststep.optim as optim, torch",
        "p = torch.nn.Parameter(torch.ones(3))",
        "scheduler = optim.lr_scheduler.StepLR(optim.RMSprop([p], lr=0.1), 1)",
        "from faststep.optim import LBFGS, Optimizer, lr_scheduler, swa_utils",
        "assert issubclass(LBFGS, Optimizer) and swa_utils.AveragedModel",
    )
    done = programs.run("\n".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("declaration", [RPROP, ADAGRAD, NADAM, ASGD], ids=lambda d: d.name)
def test_skipped_first_step(declaration: Declaration) -> None:
    """What the first step that happens begins with: Rprop's states with the learning rate then."""
    results = []
    for skips in (True, False):
        params = parameters((33,), (4, 5))
        optimizer = declaration.ours(params, **declaration.kwargs)
        if skips:
            set_gradients(params, 9)
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            del optimizer.found_inf
        optimizer.param_groups[0]["lr"] = 0.25
        train(optimizer, params, steps=2)
        results.append(params)
    assert_same_bits(*results, "training after a skipped first step")


def test_a_later_skip_keeps_rprops_states() -> None:
    params = parameters((33,))
    optimizer = RPROP.ours(params, lr=0.25)
    train(optimizer, params, steps=3)
    before = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    scaler = faststep.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    params[0].grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert {*before} == {*optimizer.state[params[0]]}
    for key, value in before.items():
        assert torch.equal(optimizer.state[params[0]][key], value), key


@pytest.mark.skipif(
    torch.__version__.startswith(("2.10.", "2.11.")), reason="torch raises KeyError: 'sum' there"
)
def test_adagrads_states_of_a_later_group() -> None:
    """torch reads the value of the defaults, not of the group."""
    results = []
    for cls in (ADAGRAD.ours, ADAGRAD.torchs):
        params = parameters((3,), (4, 2))
        optimizer = cls(params[:1], initial_accumulator_value=0.5)
        optimizer.add_param_group({"params": params[1:], "initial_accumulator_value": 7.0})
        train(optimizer, params, steps=2)
        results.append([*params, *(optimizer.state[p]["sum"] for p in params)])
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_rmsprops_options_may_begin_later() -> None:
    """A buffer that a state lacks is refused, as torch's loop does, and nothing moves."""
    params = parameters((5,))
    optimizer = optim.RMSprop(params)
    train(optimizer, params)
    optimizer.param_groups[0]["momentum"] = 0.9
    before = params[0].detach().clone()
    with pytest.raises(KeyError, match="momentum_buffer"):
        train(optimizer, params)
    assert torch.equal(params[0], before)


def test_centered_rmsprop_with_nearly_constant_gradients() -> None:
    """The variance that a step divides by is not negative where torch's is not."""
    for cls in (optim.RMSprop, torch.optim.RMSprop):
        param = torch.zeros(64).requires_grad_()
        optimizer = cls([param], lr=1e-6, centered=True, foreach=False)
        noise = torch.Generator().manual_seed(0)
        for _ in range(1500):
            param.grad = torch.linspace(0.01, 3, 64) * (1 + 1e-3 * torch.randn(64, generator=noise))
            optimizer.step()
        assert not param.isnan().any(), cls


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("declaration", [NADAM, ASGD], ids=lambda d: d.name)
def test_numbers_are_torchs(
    declaration: Declaration, dtype: torch.dtype, default: torch.dtype
) -> None:
    """0-d states have torch's bits, before and after a checkpoint, which casts them."""
    torch.set_default_dtype(default)
    settings = [{**declaration.kwargs, "foreach": False}, declaration.variants["plain"]]
    for kwargs in settings:
        runs = []
        for cls in (declaration.ours, declaration.torchs):
            params = parameters((3,), (4, 2), (0,), dtype=dtype)
            optimizer = cls(params, **{**kwargs, "foreach": False})
            train(optimizer, params[1:], steps=2)
            train(optimizer, params, steps=3)
            loaded = cls(params, **{**kwargs, "foreach": False})
            loaded.load_state_dict(optimizer.state_dict())
            train(loaded, params, steps=3)
            runs.append((params, [optimizer.state[p] for p in params], loaded.state))
        (ours, before, after), (torchs, torchs_before, torchs_after) = runs
        for p, q, mine, its in zip(ours, torchs, before, torchs_before, strict=True):
            for key in ("step", *declaration.numbers):
                assert_same_bits([mine[key], after[p][key]], [its[key], torchs_after[q][key]], key)
            if dtype == torch.float64:
                torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


def test_numbers_that_cannot_be_used() -> None:
    """Refused before anything is written, by name."""
    params = parameters((3,), (4,))
    optimizer = NADAM.ours(params)
    train(optimizer, params)
    good, before = optimizer.state[params[1]]["mu_product"], params[0].detach().clone()
    taken = (
        "state 'mu_product' of .* is not a one-element tensor of type float32, float64, bfloat16 "
        "or float16; nothing"
    )
    for bad, error in (
        (torch.ones(2), taken),
        (torch.tensor(1), taken),
        (0.5, taken),
        (None, "state 'mu_product' of .* is None"),
    ):
        optimizer.state[params[1]]["mu_product"] = bad
        with pytest.raises((RuntimeError, TypeError), match=error):
            train(optimizer, params)
        assert torch.equal(params[0], before)
        assert optimizer.state[params[0]]["step"].item() == 1.0
    del optimizer.state[params[1]]["mu_product"]
    with pytest.raises(KeyError, match="mu_product"):
        train(optimizer, params)
    optimizer.state[params[1]] = {"step": torch.tensor(1.0), "mu_product": torch._neg_view(-good)}
    optimizer.state[params[1]].update({key: torch.zeros(4) for key in ("exp_avg", "exp_avg_sq")})
    train(optimizer, params)
    mine, its = (optimizer.state[p]["mu_product"] for p in params)
    assert torch.equal(mine, its)
