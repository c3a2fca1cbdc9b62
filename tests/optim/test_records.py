"""Steps that recognize unchanged tensors by torch's records: see faststep/_torch/records.py."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import faststep
from faststep import _C
from faststep._torch import records as _records
from faststep._torch.kinds import different_tensors
from faststep._torch.tensors import record_of, storage_record_of
from programs import Programs

from .common import assert_same_bits, generator, parameters, records
from .declarations import ALL, Declaration

COUNT = r"""
import ctypes, torch
get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
name = b"dlpack_exchange_api"
api = get(torch.Tensor.__dlpack_c_exchange_api__, name)
words = (ctypes.c_uint64 * 8).from_address(api)
copy = (ctypes.c_uint64 * 8)(*words)
Ask = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
ask, calls = Ask(words[5]), []
counting = Ask(lambda object, out: calls.append(1) or ask(object, out))
copy[5] = ctypes.cast(counting, ctypes.c_void_p).value
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
torch.Tensor.__dlpack_c_exchange_api__ = new(ctypes.addressof(copy), name, None)
import faststep
params = [torch.nn.Parameter(torch.ones(5)) for _ in range(10)]
others = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (0,), (0, 3))]
optimizer = faststep.optim.AdamW([*params, *others])
for step in range(6):
    for p in [*params, *others]:
        p.grad = torch.ones_like(p)
    before = len(calls)
    optimizer.step()
    print(len(calls) - before)
for step in range(6):
    for p in params:
        p.grad = torch.ones(5)
    before = len(calls)
    faststep.clip_grad_norm_(params, 1.0)
    print(len(calls) - before)
scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
scaler.scale(torch.ones(()))
for step in range(6):
    for p in [*params, *others]:
        p.grad = torch.ones_like(p)
    before = len(calls)
    scaler.step(optimizer)
    print(len(calls) - before)
    scaler.update()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the allocator of Linux")
def test_no_more_than_a_record_is_read() -> None:
    """malloc_usable_size is exact under AddressSanitizer, and rounded up by 8 bytes without."""
    usable = ctypes.CDLL(None).malloc_usable_size
    usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    layout = _records.find()[0]
    assert layout is not None
    for name, tensor in different_tensors():
        words = max(_records._WORDS, layout.kind + 2)
        assert usable(record_of(tensor)) >= 8 * words, name
    assert usable(storage_record_of(torch.zeros(4))) >= 8 * _records._STORAGE_WORDS
    leaf = torch.zeros(4, requires_grad=True)
    meta = _records._words(record_of(leaf), _records._WORDS)[layout.meta_in_impl]
    assert usable(meta) >= 8 * _records._META_WORDS


def test_records_are_found_in_this_torch() -> None:
    layout, reason = _records.find()
    assert layout is not None, reason
    assert reason == ""


def test_what_memory_held_before_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a record ends with bits that torch never sets, a new gradient is still like the old."""
    expected = _records.find()

    def in_used_memory() -> Iterator[tuple[str, Tensor]]:
        yield from (("an equal tensor", tensor) for tensor in _records._equal_tensors())

    monkeypatch.setattr(_records, "different_tensors", in_used_memory)
    assert _records.find() == expected
    assert expected[0] is not None
    described = {_records._seen(expected[0], tensor)[-2:] for _, tensor in in_used_memory()}
    assert len(described) == 1


@pytest.mark.parametrize("allocator", ["malloc", "debug"])
def test_what_is_compared_does_not_depend_on_pythons_allocator(
    monkeypatch: pytest.MonkeyPatch, allocator: str
) -> None:
    monkeypatch.setenv("PYTHONMALLOC", allocator)
    # With the debug allocator a search for leaks finds no pointers in Python's own blocks.
    monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0")
    code = "import faststep; print(faststep._layout[:-1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert faststep._layout is not None
    assert done.stdout.strip() == str(faststep._layout[:-1])


@pytest.mark.parametrize(("value", "asked"), [("1", False), ("0", True)])
def test_torch_is_not_asked_again(programs: Programs, value: str, asked: bool) -> None:
    done = programs.run(COUNT, FASTSTEP_RECORDS=value)
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.split()]
    assert counts[0] >= 30, "of every new tensor torch was asked"
    assert (counts[5] >= 30) is asked
    assert asked or counts[5] == 0
    # of gradients like earlier ones clipping asks once: the first of a shape and type
    assert counts[6:12] == ([10] * 6 if asked else [1] + [0] * 5)
    assert counts[12] >= 30, "the first step that writes gradients binds them anew"
    assert (counts[17] >= 30) is asked
    assert asked or counts[17] <= 2, "the scale and the flag"


@pytest.mark.parametrize("change", [*_records._OF_ANY, *_records._OF_A_PARAMETER])
def test_a_change_that_is_not_seen_turns_records_off(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def nothing(tensor: Tensor) -> None:
        pass

    for changes in (_records._OF_ANY, _records._OF_A_PARAMETER):
        if change in changes:
            monkeypatch.setitem(changes, change, nothing)
    layout, reason = _records.find()
    assert layout is None
    assert reason.endswith(f"record does not show {change}")


def test_records_are_found_whatever_the_defaults_are() -> None:
    """A script may set torch's default device and dtype before it imports faststep."""
    expected = _records.find()
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        assert _records.find() == expected


def test_records_that_lie_elsewhere_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_records, "record_of", lambda tensor: id(tensor))
    layout, reason = _records.find()
    assert layout is None
    assert reason == "ValueError: the numbers [13, 17, 19] are in 0 places of a record"
    monkeypatch.undo()
    monkeypatch.setattr(_records, "_WORDS", 12)
    assert _records.find()[0] is None


def kinds_of_gradients(p: Parameter) -> Iterator[Tensor | None]:
    """Gradients as scripts make them, each for a few steps, so that old ones are remembered."""
    source = generator(5)
    shape = tuple(p.shape)
    drawn = [torch.randn(shape, generator=source) for _ in range(12)]
    kept = drawn[0].clone()
    yield from (kept, kept, kept)
    yield from (drawn[1].clone(), drawn[2].clone(), drawn[3].clone())
    yield None
    yield None
    yield drawn[4].clone()
    transposed = drawn[5].t().contiguous().t()
    yield from (transposed, transposed, transposed.clone())
    yield from (drawn[6].double().float(), drawn[6][:, :1].expand(shape), drawn[6].clone())
    negated = torch.complex(drawn[7], drawn[8]).conj().imag
    assert negated.is_neg()
    yield from (negated.resolve_neg(), negated, negated.clone())
    packed = torch._neg_view(drawn[8])
    yield from (drawn[8], packed, packed, drawn[8], packed.t().contiguous().t())
    yield from (torch.from_numpy(np.ones(shape, dtype=np.float32)), drawn[9].clone())
    flat = torch.randn(200, generator=source)
    yield from (flat[:12].view(shape), flat[13:25].view(shape), flat[13:25].view(shape))
    yield torch._lazy_clone(drawn[10])
    yield from (drawn[11].requires_grad_(), drawn[11].detach().clone())


def test_bits_of_negated_views() -> None:
    """Neither shape nor strides tell whether a tensor is a lazily negated view."""
    assert faststep._layout is not None
    assert faststep._layout.negated.bit_count() == 1
    assert faststep._layout.negated & ~faststep._layout.next_mask == 0, "compared in every step"


@pytest.mark.parametrize("known", [True, False])
def test_negated_numbers(known: bool) -> None:
    """In any step, traced or not, with and without the bit that tells."""
    with records() if known else records(negated=0):
        expected, param = Parameter(torch.tensor(0.5)), Parameter(torch.tensor(0.5))
        optimizers = [faststep.optim.AdamW([p]) for p in (expected, param)]
        for step in range(8):
            number = torch.complex(torch.tensor(1.0), torch.tensor(step - 2.5)).conj().imag
            expected.grad = number.resolve_neg()
            param.grad = number if step % 3 == 2 else number.resolve_neg()
            for optimizer in optimizers:
                optimizer.step()
            assert_same_bits([param], [expected])


@pytest.mark.parametrize("scaled", ["never", "always", "every third", "but every third"])
@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_gradients_of_every_kind_in_turn(declaration: Declaration, scaled: str) -> None:
    """With and without records, the same bits and versions; a scaled step writes the gradients."""
    results, versions = [], []
    for known in (True, False):
        params = parameters((3, 4))
        optimizer = declaration.ours(params, **declaration.kwargs)
        seen, moved = [], []
        with records(known):
            for step, grad in enumerate(kinds_of_gradients(params[0])):
                third = step % 3 == 2
                writes = {"never": False, "always": True, "every third": third}
                params[0].grad = grad
                if grad is None or not writes.get(scaled, not third):
                    optimizer.step()
                    continue
                version = grad._version
                scaler = faststep.amp.GradScaler("cpu", init_scale=1000.0)
                scaler.scale(torch.zeros(()))
                if 0 in grad.stride():  # torch does not write what shares memory
                    with pytest.raises(RuntimeError, match="single memory location"):
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
                seen.append(grad.detach().clone())
                moved.append(grad._version - version)
        results.append([*params, *seen, *(v for v in optimizer.state[params[0]].values())])
        versions.append(moved)
    assert_same_bits(*results)
    assert versions[0] == versions[1]


@pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)
def test_a_tensor_without_memory_gets_some(declaration: Declaration) -> None:
    """Parameters without elements are recognized too, until they have elements."""
    params = parameters((0, 3), (5,))
    optimizer = declaration.ours(params, **declaration.kwargs)
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    grown, fresh = params[0], Parameter(torch.ones(2, 3))
    grown.data, grown.grad = torch.ones(2, 3), None
    grown.grad = fresh.grad = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"of parameter 0 .* parameter's shape"):
        optimizer.step()
    optimizer.state[grown].clear()
    optimizer.step()
    declaration.ours([fresh], **declaration.kwargs).step()
    assert_same_bits([grown], [fresh])


def test_a_gradient_that_cannot_be_used_is_noticed_late() -> None:
    params = parameters((3, 4))
    optimizer = faststep.optim.AdamW(params)
    for _ in range(3):
        params[0].grad = torch.ones(3, 4)
        optimizer.step()
    before = params[0].detach().clone()
    params[0].grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(params[0], before)
    params[0].grad = torch.ones(3, 4)
    optimizer.step()
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize("size", [12, 5000], ids=["pinned", "not pinned"])
def test_an_object_with_the_record_of_another_is_noticed(size: int) -> None:
    """swap_tensors() gives an object another record, and refuses where C++ holds the one it has."""
    params, twins = parameters((size,)), parameters((size,))
    optimizers = [faststep.optim.AdamW(ps) for ps in (params, twins)]
    for step in range(6):
        for (p,), optimizer in zip((params, twins), optimizers, strict=True):
            p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
        if step == 3:
            moment = optimizers[0].state[params[0]]["exp_avg"]
            try:
                torch.utils.swap_tensors(moment, torch.full_like(moment, 2.0))
            except RuntimeError:
                assert size == 12
                moment.fill_(2.0)
            optimizers[1].state[twins[0]]["exp_avg"] = torch.full((size,), 2.0)
    assert_same_bits(params, twins)


@records(move_version=0)
def test_python_that_ran_elsewhere_does_not_change_how_a_traced_step_runs() -> None:
    """A step that releases the GIL holds its tensors; a traced one holds none, so it keeps it.

    Where Python moves the version counters, a step returns what it wrote.
    """
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    spec = (_C.rules()["sgd"][0], (), False, (0.0,) * 5, False, None)
    plan = _C.Plan()

    def written() -> list[Tensor]:
        arguments = ([[param]], [spec], {}, None, {-1: (None, None, None)}, False, float("nan"))
        what, value = plan.step(*arguments, False, 0)
        assert what == "done"
        return value[2]

    for _ in range(3):
        written()
    kept = written()  # the list of a step that holds nothing is used again
    assert written() is kept

    class Unknown(torch.Tensor):
        pass

    assert _C.fusable([torch.ones(3).as_subclass(Unknown)])
    for _ in range(3):
        assert written() is kept


def test_a_step_after_one_that_failed_at_once_is_a_step() -> None:
    """What the failed one dropped must not pass for what was bound before it."""
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    spec = (_C.rules()["sgd"][0], (), False, (0.5, 0.0, 0.0, 0.0, 0.0), False, None)
    plan = _C.Plan()

    def step(params: object) -> list[float]:
        arguments = ([spec], {}, None, {-1: (None, None, None)}, False, float("nan"), False, 0)
        plan.step([params], *arguments)
        return param.tolist()

    seen = [step([param]) for _ in range(3)]
    with pytest.raises(TypeError, match="not a list"):
        step((param,))
    seen.append(step([param]))
    assert seen == [[0.5] * 3, [0.0] * 3, [-0.5] * 3, [-1.0] * 3]


@pytest.mark.parametrize("container", [tuple, list, dict.fromkeys])
def test_parameters_in_another_container(container: Callable[[list[Parameter]], object]) -> None:
    params, twins = parameters((3, 4), (5,)), parameters((3, 4), (5,))
    optimizers = [faststep.optim.AdamW(ps) for ps in (params, twins)]
    for i in range(6):
        for ps, optimizer in zip((params, twins), optimizers, strict=True):
            for p in ps:
                p.grad = torch.full_like(p, 1.0 + i)
            optimizer.step()
        listed = list(optimizers[0].param_groups[0]["params"])
        optimizers[0].param_groups[0]["params"] = listed if i % 2 else container(listed)
    assert_same_bits(params, twins)


@pytest.mark.parametrize("move", [True, False], ids=["libtorch's function", "Python's"])
@pytest.mark.parametrize("inference", [False, True], ids=["counted", "with inference tensors"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_version_counters_move_by_one_per_step(move: bool, inference: bool, scaled: bool) -> None:
    """Those of gradients in a step that unscales them."""
    assert faststep._layout is not None
    assert faststep._layout.move_version != 0
    with records() if move else records(move_version=0):
        params = parameters((3, 4), (5,))
        optimizer = faststep.optim.AdamW(params)
        scaler = faststep.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        scaler.scale(torch.zeros(()))
        for step in range(5):
            for p in params:
                p.grad = torch.ones_like(p)
            if inference and step == 2:  # such a state has no counter, and the others' still move
                with torch.inference_mode():
                    optimizer.state[params[0]]["exp_avg"] = torch.ones(3, 4)
            moments = [optimizer.state[params[1]].get(key) for key in ("exp_avg", "exp_avg_sq")]
            written = [p for p in (*params, *moments) if p is not None]
            grads = [p.grad for p in params if p.grad is not None]
            before = [t._version for t in (*written, *grads)]
            with torch.inference_mode(inference and step >= 2):
                scaler.step(optimizer)
                scaler.update()
            after = [t._version for t in (*written, *grads)]
            by = [1] * len(written) + [int(scaled)] * len(grads)
            assert after == [v + n for v, n in zip(before, by, strict=True)]


@pytest.mark.parametrize("write_grads", [False, True])
def test_a_measuring_phase_moves_no_version_counter(write_grads: bool) -> None:
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    spec = (_C.rules()["sgd"][0], (), False, (0.5, 0.0, 0.0, 0.0, 0.0), False, None)
    scalars = {-1: (torch.tensor(2.0), torch.zeros(()), torch.zeros((), dtype=torch.float64))}
    plan = _C.Plan()
    versions = []
    for phase in (1, 2) * 3:
        plan.step([[param]], [spec], {}, None, scalars, phase == 1, 1.0, write_grads, phase)
        versions.append((param._version, param.grad._version))
    assert [param for param, _ in versions] == [0, 1, 1, 2, 2, 3]
    of_gradients = [version for _, version in versions]  # the first bind leaves them to Python
    assert of_gradients[1::2] == [*of_gradients[2::2], of_gradients[-1]]


def clip(param: Parameter) -> float:
    return float(faststep.clip_grad_norm_([param], 1.0))


def unscale(param: Parameter) -> float:
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = faststep.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    return float(sum(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()))


def infinite_and_sparse_too(p: Parameter) -> Iterator[Tensor | None]:
    yield from kinds_of_gradients(p)
    yield torch.full((3, 4), torch.inf)
    yield torch.ones(3, 4).to_sparse()
    yield torch.ones(3, 4)


@pytest.mark.parametrize("change", [clip, unscale])
def test_gradients_of_every_kind_are_changed_alike(change: Callable[[Parameter], float]) -> None:
    """With and without records: the results, the gradients and their version counters."""
    results: list[list[object]] = []
    for known in (True, False):
        (param,) = parameters((3, 4))
        seen: list[object] = []
        with records(known):
            for grad in infinite_and_sparse_too(param):
                param.grad = None if grad is None else grad.detach().clone()
                if grad is not None and grad._is_view():
                    param.grad = grad.detach()  # some views share their counter with others
                before = -1 if param.grad is None else param.grad._version
                try:
                    seen.append(change(param))
                except RuntimeError as error:  # torch's, of a gradient that cannot be written
                    seen.append(str(error))
                if param.grad is not None:
                    seen += [
                        param.grad._version - before,
                        *param.grad.to_dense().flatten().tolist(),
                    ]
        results.append(seen)
    assert repr(results[0]) == repr(results[1])
    assert any(isinstance(value, int) and value == 1 for value in results[0])
