"""The registry of hooked parameters: which parameter it finds, what it keeps, when hooks run."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import faststep
from faststep.grads.hooks import Hooked
from programs import Programs


def new_param() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def noting(seen: list[str], name: str) -> Callable[[Tensor], None]:
    return lambda _: seen.append(name)


def backward(*params: Tensor) -> None:
    torch.stack([param.sum() for param in params]).sum().backward()


def test_a_hook_runs_after_those_that_were_there() -> None:
    seen: list[str] = []
    param, hooked = new_param(), Hooked[str]()
    hooked.add(param, "mine", noting(seen, "mine"))
    param.register_post_accumulate_grad_hook(noting(seen, "other"))
    backward(param)
    hooked.remove()
    hooked.add(param, "again", noting(seen, "again"))
    backward(param)
    assert seen == ["mine", "other", "other", "again"]
    assert hooked.of(param) == "again"


def test_another_tensor_with_the_id_of_a_dead_one_is_not_found() -> None:
    hooked = Hooked[int]()
    params = [new_param() for _ in range(100)]
    dead = set(map(id, params))
    for number, param in enumerate(params):
        hooked.add(param, number)
    del param
    params.clear()
    assert list(hooked) == []
    params = [new_param() for _ in range(200)]
    assert dead & set(map(id, params))
    assert [param for param in params if hooked.of(param) is not None] == []
    assert hooked.of_each(params) == [None] * 200
    for number, param in enumerate(params):
        hooked.add(param, number)
    assert [hooked.of(param) for param in params] == list(range(200))
    assert hooked.of_each(reversed(params)) == list(range(200))[::-1]


def test_a_copy_is_another_parameter() -> None:
    param, hooked = new_param(), Hooked[str]()
    hooked.add(param, "mine")
    assert hooked.of(param.detach()) is None
    assert hooked.of(nn.Parameter(param)) is None
    assert hooked.of(param) == "mine"


def test_no_parameter_is_kept() -> None:
    hooked, seen = Hooked[str](), list[str]()
    one, two = new_param(), new_param()
    hooked.add(one, "one", noting(seen, "one"))
    hooked.add(two, "two", noting(seen, "two"))
    alive = weakref.ref(one)
    del one
    assert alive() is None
    assert [(param is two, entry) for param, entry in hooked] == [(True, "two")]
    hooked.remove()
    backward(two)
    assert not seen


def test_those_that_left_lose_their_hooks() -> None:
    hooked, seen = Hooked[str](), list[str]()
    params = [new_param() for _ in range(3)]
    for name, param in zip("abc", params, strict=True):
        hooked.add(param, name, noting(seen, name))
    hooked.keep_only(iter(params[1:]))
    backward(*params)
    assert sorted(seen) == ["b", "c"]
    assert hooked.of(params[0]) is None
    assert [entry for _, entry in hooked] == ["b", "c"]


@pytest.mark.parametrize("how", ["dropped", "in a cycle", "removed"])
def test_no_hook_outlives_the_registry(how: str) -> None:
    param, hooked = new_param(), Hooked[list[object]]()
    entry: list[object] = []
    hooked.add(param, entry, noting([], "mine"))
    hooked.add(other := new_param(), entry)  # an entry without a hook
    assert param._post_accumulate_grad_hooks
    assert not other._post_accumulate_grad_hooks
    if how == "removed":
        hooked.remove()
        hooked.remove()
        assert len(hooked) == 0
    else:
        if how == "in a cycle":
            vars(hooked)["itself"] = hooked
        del hooked
        gc.collect()
    assert not param._post_accumulate_grad_hooks


def test_nothing_is_removed_at_exit(programs: Programs) -> None:
    """Parameters may be gone by then, and half of torch."""
    script = """
import torch
from faststep.grads import hooks
before = hooks._remove
hooks._remove = lambda known: print("removed")
kept, param = hooks.Hooked(), torch.nn.Parameter(torch.ones(2))
kept.add(param, None, print)
other = hooks.Hooked()
del other
"""
    done = programs.run(script)
    assert done.stdout.split() == ["removed"], done.stderr


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_in_the_optimizer_twice_has_one_hook() -> None:
    param = new_param()
    optimizer = faststep.optim.SGD([param, param], lr=0.5)
    release = faststep.release_gradients(nn.ParameterList([param]), optimizer)
    assert len(param._post_accumulate_grad_hooks) == 1
    for _ in range(2):
        backward(param)
        assert param.grad is None
        optimizer.step()
    assert torch.equal(param, torch.zeros(3))
    release.remove()
    assert not param._post_accumulate_grad_hooks
