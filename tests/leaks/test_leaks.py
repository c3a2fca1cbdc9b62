"""No public function of faststep._C, and no optimizer step, keeps memory or references.

Each case is called many times after a warm-up.  C memory is what glibc says is in use, Python's
own is its count of allocated blocks, and every argument must end with the references it had.
A public function without a case fails the suite.
"""

import collections
import ctypes
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import faststep
from faststep import _C

CALLS = 64
ROUNDS = 10
SLACK_BYTES = 16 * CALLS  # malloc hands out no less than 24 bytes
SLACK_BLOCKS = CALLS // 2


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """Bytes that malloc has handed out; 0 under a sanitizer or a libc that does not say."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def assert_no_growth(*calls: Callable[[], Any]) -> None:
    """One round without growth is enough: caches fill up for a while, a leak grows each time."""
    gc.collect()
    gc.freeze()  # what is there now need not be looked at again, nor by the tests that follow
    grown = []
    for _ in range(ROUNDS):
        before = bytes_in_use(), sys.getallocatedblocks()
        for call in calls:
            for _ in range(CALLS):
                call()
        gc.collect()
        grown.append((bytes_in_use() - before[0], sys.getallocatedblocks() - before[1]))
        if grown[-1][0] < SLACK_BYTES and grown[-1][1] < SLACK_BLOCKS:
            return
    raise AssertionError(f"grew by (bytes, blocks) in each round of {CALLS} calls: {grown}")


def assert_references_stay(call: Callable[[], Any], arguments: Iterable[Any]) -> None:
    arguments = list(arguments)
    for _ in range(3):  # what is remembered of the tensors is there then
        call()
    before = [sys.getrefcount(argument) for argument in arguments]
    for _ in range(20):
        call()
    assert [sys.getrefcount(argument) for argument in arguments] == before


def tensors() -> list[torch.Tensor]:
    """Packed, transposed, with holes, empty, 0-d, and in every dtype."""
    return [
        torch.ones(100),
        torch.ones(5, 7).t(),
        torch.ones(10, 10)[::2, 1:7],
        torch.ones(0),
        torch.ones(()),
        torch.ones(33, dtype=torch.float64),
        torch.ones(33, dtype=torch.bfloat16),
        torch.ones(33, dtype=torch.float16),
    ]


def parameters() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(t) for t in tensors()]
    for p in params[:-1]:
        p.grad = torch.ones_like(p)
    return params


def unusable() -> list[list[Any]]:
    """Lists that the functions refuse, each with a good tensor before the bad one."""
    good = torch.ones(3)
    return [
        [good, torch.ones(3, dtype=torch.complex64)],
        [good, torch.ones(3, dtype=torch.int32)],
        [good, torch.eye(3).to_sparse()],
        [good, torch.ones(3, device="meta")],
        [good, 1.0],
        [good, None],
    ]


def failing(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """A call that must raise, without the bookkeeping of pytest.raises."""

    def call() -> None:
        try:
            function(*arguments)
        except Exception:
            return
        pytest.fail(f"{function} took {arguments}")

    return call


Case = tuple[Callable[[], Any], list[Any]]


def on_tensors(function: Callable[..., Any], *extra: Any) -> Iterator[Case]:
    some = tensors()
    yield lambda: function(some, *extra), [*some, some]
    yield lambda: function(tuple(some), *extra), some
    yield lambda: function([], *extra), []
    for bad in unusable():
        yield failing(function, bad, *extra), [*bad, bad]
    yield failing(function, 5, *extra), []
    yield failing(function), []


def retain_memory() -> Iterator[Case]:
    def both() -> None:
        _C.retain_memory(1 << 20, "/sys/fs/cgroup", 2)
        torch.ones(1 << 18)
        _C.end_retaining()

    if _C.foreign_allocator() is None:
        yield both, []
    yield failing(_C.retain_memory, -1, "a" * 600, 2), []
    yield failing(_C.retain_memory, -1, None, 3), []
    yield failing(_C.retain_memory, None, None, 2), []


def norms() -> Iterator[Case]:
    yield from on_tensors(_C.norm, 2.0)
    some = tensors()[:3]
    for order in (1.0, 0.0, 3.0, float("inf"), -float("inf")):
        yield lambda order=order: _C.norm(some, order), some


def chunk_squares() -> Iterator[Case]:
    some = tensors()
    sums = torch.empty(sum(-(-t.numel() // 16384) for t in some), dtype=torch.float64)
    yield lambda: _C.chunk_squares(some, 0.5, sums), [*some, some, sums]
    for bad in (sums[1:], sums.float(), sums.expand(2, -1), 5):
        yield failing(_C.chunk_squares, some, 0.5, bad), [*some, bad]
    for unfit in unusable():
        yield failing(_C.chunk_squares, unfit, 0.5, sums), [*unfit, sums]
    yield failing(_C.chunk_squares, 5, 0.5, sums), [sums]


def cross_entropy() -> Iterator[Case]:
    logits, target, weight = torch.randn(4, 9), torch.arange(4), torch.ones(9)
    losses, likelihoods, slope = torch.empty(4), torch.empty(4), torch.empty(4, 9)
    results = [torch.empty(()), torch.empty(2)]
    mine = [logits, target, weight, losses, likelihoods, slope, *results]
    for last in (target, target.float(), target + 6):  # the latter two are torch's
        for out in (None, slope, slope.T):  # and the last one
            given = (logits, last, weight, losses, likelihoods, out, *results, -100, 0.0, True)
            yield lambda given=given: _C.cross_entropy(*given), [*mine, last]
    yield failing(_C.cross_entropy, *mine, "none", 0.0, True), mine


def _last_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same with another order in memory."""
    return tensor if tensor.dim() < 2 else tensor.mT.contiguous().mT


def fold_squares() -> Iterator[Case]:
    sums = torch.ones(700, dtype=torch.float64)
    yield lambda: _C.fold_squares(sums), [sums]
    for bad in (sums[::2], sums.float(), 5):
        yield failing(_C.fold_squares, bad), [bad]


def fusable() -> Iterator[Case]:
    some = tensors()
    yield lambda: _C.fusable(some), [*some, some]
    for bad in unusable():
        yield lambda bad=bad: _C.fusable(bad), [*bad, bad]


def any_dtensor() -> Iterator[Case]:
    tensors = parameters()
    yield lambda: _C.any_dtensor(tensors), tensors
    yield failing(_C.any_dtensor, 1), []


def collect_grads() -> Iterator[Case]:
    params = parameters()
    yield lambda: _C.collect_grads(params), [*params, *(p.grad for p in params)]


def on_grads(function: Callable[..., Any], *extra: Any) -> Iterator[Case]:
    params = parameters()
    yield lambda: function(params, *extra), [*params, *(p.grad for p in params)]
    without = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    yield lambda: function(without, *extra), without
    for bad in (torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.ones(3).to(int)):
        of_bad = torch.zeros_like(bad)
        of_bad.grad = bad
        yield failing(function, [params[0], of_bad], *extra), [params[0], of_bad, bad]
    yield failing(function, [params[0], 1.0], *extra), [params[0]]
    yield failing(function, 5, *extra), []
    yield failing(function), []


def clip_grads() -> Iterator[Case]:
    yield from on_grads(_C.clip_grads, 2.0, 1.0)
    param = torch.nn.Parameter(torch.zeros((1 << 20) + 1))  # from where sums are kept
    param.grad = torch.ones_like(param)

    def after_unscaling(times: int) -> None:
        for _ in range(times):
            _, _, written = _C.unscale_grads([param], 1024.0, False)
            torch.autograd.graph.increment_version(written)
        _C.clip_grads([param], 2.0, 1.0)

    yield lambda: after_unscaling(1), [param, param.grad]
    yield lambda: after_unscaling(2), [param, param.grad]


def accumulate() -> Iterator[Case]:
    sums = [torch.zeros_like(t) for t in tensors()]
    terms = [t.to(torch.bfloat16) for t in tensors()]
    for start in (False, True):
        yield lambda start=start: _C.accumulate(sums, terms, 0.5, start), [*sums, *terms]
        two = functools.partial(_C.accumulate, sums, terms, 0.5, start, sums[::-1])
        yield failing(two), [*sums, *terms]
        more = [t.clone() for t in terms]
        yield functools.partial(_C.accumulate, sums, terms, 0.5, start, more), [*sums, *more]
    for bad in unusable():
        yield failing(_C.accumulate, [torch.ones(3)] * 2, bad, 1.0), [*bad, bad]
        yield failing(_C.accumulate, bad, [torch.ones(3)] * 2, 1.0), [*bad, bad]
        ones = [torch.ones(3)] * 2
        yield failing(_C.accumulate, ones, [t.clone() for t in ones], 1.0, False, bad), [*bad, bad]
    for short in ([], sums[:2], 5):
        yield failing(_C.accumulate, sums, short, 1.0), sums


def update_scale() -> Iterator[Case]:
    scale, found_inf = torch.tensor(4.0), torch.tensor(0.0)
    trackers = torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    numbers = (2.0, 0.5, 1000, 2, 1.0, 1e6)
    for hysteresis in (trackers[1], None):
        arguments = (scale, trackers[0], hysteresis, found_inf, *numbers)
        yield lambda a=arguments: _C.update_scale(*a), list(arguments[:4])
    for bad in ((torch.ones(2), *arguments[1:]), (1.0, *arguments[1:]), (scale,)):
        yield failing(_C.update_scale, *bad), list(bad[:1])


def plan() -> Iterator[Case]:
    """Plans that are made and dropped, and bad calls of their one method."""
    yield _C.Plan, []
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    number = _C.rules()["sgd"][0]
    spec = (number, (), False, (0.0, 0.0, 0.0, 0.0, 0.0), False, None)
    state: dict[Any, Any] = {}
    scalars = {-1: (None, torch.zeros(()), torch.zeros((), dtype=torch.float64))}
    options = (scalars, False, float("nan"), False, 0)
    kept = _C.Plan()
    yield lambda: kept.step([[p]], [spec], state, None, *options), [p, p.grad, state, spec]
    yield lambda: _C.Plan().step([[p]], [spec], state, None, *options), [p, p.grad, state, spec]
    measure, apply = (scalars, True, 1.0, False, 1), (scalars, True, 1.0, False, 2)
    for several in (measure, apply, ({}, *measure[1:])):
        call = functools.partial(kept.step, [[p]], [spec], state, None, *several)
        yield call, [p, p.grad, state, spec, *scalars[-1]]
    for arguments in (
        ([[p]], [], state, None, *options),
        ([[p]], [(number,)], state, None, *options),
        ([[p]], [(99, *spec[1:])], state, None, *options),
        ([[1.0]], [spec], state, None, *options),
        ([[p]], [spec], state, None, {-1: (1.0, None, None)}, *options[1:]),
        ([[p]], [spec], state, None, {-1: None}, *options[1:]),
    ):
        yield failing(kept.step, *arguments), [p, p.grad, state, spec]
    yield from factored_steps()


def factored_steps() -> Iterator[Case]:
    """Steps, and calls that are refused, that lack a state, or that leave a parameter to torch."""
    number = _C.rules()["adafactor"][0]
    keys = ("step", "row_var", "col_var", "variance")
    spec = (number, keys, True, (0.01, -0.8, 1e-7, 1e-3, 1.0, 0.1), False, None)
    options = (None, {-1: (None, None, None)}, False, float("nan"), False, 0)
    for shape in ((64,), (3, 5), (70, 80), (2, 3, 3), (270, 260), (5, 0)):
        for dtype in (torch.float32, torch.bfloat16):
            param = torch.nn.Parameter(_last_first(torch.ones(shape, dtype=dtype)))
            param.grad = torch.ones(shape, dtype=dtype)
            factors = ("row_var", "col_var") if len(shape) > 1 else ("variance",)
            sizes = ((*shape[:-1], 1), (*shape[:-2], 1, *shape[-1:]))
            own = {"step": torch.tensor(1.0)}
            for key, size in zip(factors, sizes if len(shape) > 1 else (shape,), strict=True):
                own[key] = torch.zeros(size, dtype=dtype)
            kept, state = _C.Plan(), {param: own}
            arguments = [spec, state, param, param.grad, *own.values()]
            if 0 in shape:
                yield failing(kept.step, [[param]], [spec], state, *options), arguments
                continue
            odd = {param: {**own, "step": torch.tensor(1)}}
            for some in (state, {}, {param: {}}, odd):
                call = functools.partial(kept.step, [[param]], [spec], some, *options)
                yield call, arguments
            lacking = {param: {"step": own["step"]}}
            yield failing(kept.step, [[param]], [spec], lacking, *options), arguments
            yield failing(kept.step, [[param]], [spec], state, *options[:-1], 1), arguments
            yield functools.partial(_C.Plan().step, [[param]], [spec], state, *options), arguments


def dtensors() -> Iterator[Case]:
    """The class and what is wrong with it; gradients that fit, and those that Python looks at."""
    slots = [vars(DTensor)[name] for name in ("_local_tensor", "_spec")]
    yield lambda: _C.use_dtensors(DTensor, *slots), [DTensor, *slots]
    for wrong in ((int, *slots), (DTensor, slots[0], None), (DTensor, torch.Tensor.grad, slots[0])):
        yield failing(_C.use_dtensors, *wrong), list(wrong)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    p: Any = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    moment: Any = torch.zeros_like(p)
    dist.destroy_process_group()
    spec = (_C.rules()["sgd"][0], (), False, (0.0,) * 5, False, None)
    options = ({-1: (None, None, None)}, False, float("nan"), False, 0)
    settled, unsettled = _C.Plan(), _C.Plan()
    held = [p, p.grad, p._local_tensor, p.grad._local_tensor, p._spec, p.grad._spec, spec]

    def settle(plan: Any) -> None:
        plan.settle(0, p._spec, p.grad._spec, (moment._spec,))

    def step(plan: Any) -> str:
        return str(plan.step([[p]], [spec], {}, None, *options)[0])

    def new() -> None:
        plan = _C.Plan()
        assert step(plan) == "layouts"
        settle(plan)
        assert step(plan) == "done"
        plan.forget()
        assert step(plan) == "layouts"

    number = _C.rules()["momentum"][0]
    momentum = (number, ("momentum_buffer",), False, (0.0,) * 5, False, None)
    stated, other = _C.Plan(), p.grad.clone()
    state = {p: {"momentum_buffer": moment}}
    settle(stated)

    def follow() -> None:
        """Like the step before, but for the gradient's memory or its spec."""
        for grad, words in ((first, ("done", "done")), (other, ("layouts", "layouts"))):
            p.grad = grad
            for word in words:
                answer = stated.step([[p]], [momentum], state, None, *options)
                assert answer[0] == word
        p.grad = first

    def divided() -> None:
        options = ({-1: (None, torch.zeros(()), None)}, True, float("nan"), False, 0)
        assert settled.step([[p]], [spec], {}, None, *options) == ("divided", None)

    first = p.grad
    settle(settled)
    yield follow, [*held, other, state, momentum]
    yield divided, held
    yield functools.partial(settle, settled), held
    yield functools.partial(step, settled), held
    yield functools.partial(step, unsettled), held
    yield new, held
    yield failing(settled.settle, -1, p._spec, p._spec), held
    yield failing(settled.settle, 0, p._spec, p._spec, (p._spec,) * 99), held


def release_hook() -> Iterator[Case]:
    """Steps like the one before, what is left to Python, and what cannot be made."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = faststep.optim.SGD([p], lr=0.0)
    grad, seen = torch.ones(3), weakref.ref(optimizer)
    spec = (_C.rules()["sgd"][0], (), False, (0.0,) * 5, False, None)
    rules = {0: spec}
    options = ({-1: (None, None, None)}, False, float("nan"), False, 0)

    def otherwise(param: torch.Tensor) -> None:
        if param.grad is not None:
            hook.plan.step([[param]], [spec], optimizer.state, None, *options)

    def call() -> None:
        hook.updated, p.grad = False, grad
        hook(p)
        assert hook.updated
        hook(p)  # once more, without a gradient

    hook = _C.ReleaseHook(otherwise, seen, rules)
    hook.group, hook.plain = 0, True
    p.grad = grad
    for _ in range(3):
        hook(p)
    yield call, [p, grad, spec, rules, seen, otherwise]
    hook.clips, optimizer.max_grad_norm = True, 0.5
    yield call, [p, grad, spec, rules, seen, otherwise]
    yield lambda: _C.ReleaseHook(otherwise, seen, rules), [seen, rules, otherwise]
    yield lambda: _C.ReleaseHook(otherwise, seen, rules, 1), [seen, rules, otherwise]
    yield failing(_C.ReleaseHook, otherwise, seen, []), [seen, otherwise]
    yield failing(hook), []
    yield from waiting_hook()


def waiting_hook() -> Iterator[Case]:
    """A parameter that waits, others that are left to Python, and what cannot be asked."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = faststep.optim.SGD([p], lr=0.0)
    seen, rules = weakref.ref(optimizer), {0: ()}
    waiting: collections.deque[torch.Tensor] = collections.deque(maxlen=1)
    for limit, start in ((100, 1), (100, 99), (1, 0), (1, "odd")):
        hook = _C.ReleaseHook(id, seen, rules)
        hook.group, hook.plain, hook.bytes = 0, True, 12
        hook.together = (waiting.append, [start], limit)

        def wait(hook: Any = hook, start: Any = start) -> None:
            hook.together[1][0], hook.updated = start, False
            hook(p)

        yield wait, [p, rules, seen, optimizer]
    hook = _C.ReleaseHook(id, seen, rules)
    hook.group, hook.plain, hook.together = 0, True, (5, 5, 5)
    yield failing(hook, p), [p, rules, seen, optimizer]


def offload() -> Iterator[Case]:
    """Threads that are made and dropped, gradients that arrive, and steps on the host."""
    p, values, grad, room = (torch.ones(100) for _ in range(4))
    tensors = (p, values, room, torch.zeros(1, dtype=torch.float64))
    pipe = _C.OffloadPipe(1, 1)
    pipe.set([tensors])
    spec = (_C.rules()["sgd"][0], (), False, (0.0, 0.0, 0.0, 0.0, 0.0), False, None)
    plan, nan = _C.Plan(), float("nan")
    plan.offload(pipe)
    values.grad = room

    def step() -> None:
        pipe.begin()
        pipe.arrive(0, grad, 1.0)
        plan.step([[values]], [spec], {}, None, {-1: (None, None, None)}, 0, nan, False, 0)
        pipe.wait()
        pipe.settle()

    yield step, [p, values, grad, room, spec]
    yield lambda: _C.OffloadPipe(1, 1), []
    yield lambda: (pipe.set([tensors]), pipe.pace(0, 0), pipe.busy(), pipe.wait(0)), [*tensors]
    yield lambda: _C.Plan().offload(pipe), [pipe]
    yield failing(_C.OffloadPipe, 0, 1), []
    yield failing(pipe.set, [(p, values)]), [p, values]
    yield failing(pipe.set, [tensors], 999), [*tensors]
    yield failing(pipe.set, [(p, values, room, p)]), [p, values, room]
    yield failing(pipe.arrive, 0, torch.ones(3), 1.0), []
    yield failing(pipe.arrive, 5, grad, 1.0), [grad]
    yield failing(pipe.wait, 7), []
    yield failing(pipe.pace, 0.0, 1.0), []
    yield failing(plan.offload, plan), [plan]


def tensor_error() -> Iterator[Case]:
    yield lambda: _C.TensorError(0, 0, "gradient", "type", "is odd"), []


def kernels() -> Iterator[Case]:
    """Of a path that is there and of none; the one that was in use stays."""
    path = str(faststep._KERNELS)
    if _C.has_kernels():
        yield lambda: _C.use_kernels_of(path), [path]
    yield failing(_C.use_kernels_of, 1), []


def records() -> Iterator[Case]:
    """What was in use stays."""
    if faststep._layout is not None:
        yield functools.partial(_C.use_records, *faststep._layout), []
    yield failing(_C.use_records, *[10**6] * 13), []
    yield failing(_C.use_records, 1), []


def hyper() -> Iterator[Case]:
    group = {"eps": 0.25, "betas": [0.5, torch.tensor(0.75)], "odd": (1, 2, 3)}
    places = ("eps", ("betas", 0), ("betas", 1))

    def run() -> None:
        assert _C.hyper(group, places) == (0.25, 0.5, 0.75)

    yield run, [group, places]
    for bad in (("none",), ("betas",), (("betas",),), (("eps", 0),), (("odd", 0),), ("eps",) * 99):
        yield failing(_C.hyper, group, bad), [group, bad]


def hold() -> Iterator[Case]:
    """By several, with and without a move of the memory; and what has none."""
    assert faststep._torch.held._places_if_known()
    kept, record = torch.ones(9, 4), faststep._torch.tensors.storage_record_of

    def run() -> None:
        moved = torch.ones(1000)
        first, second = (_C.hold(moved, record(moved)) for _ in range(2))
        moved.untyped_storage().resize_(8000)
        assert torch.equal(first, second)

    yield run, []
    yield lambda: _C.hold(kept, record(kept)), [kept]
    empty = torch.empty(0)
    for bad in ((empty, record(empty)), (kept, 0), (5, record(kept)), (kept,)):
        yield failing(_C.hold, *bad), [bad[0]]


def owners() -> Iterator[Case]:
    """What was in use stays."""
    places = faststep._torch.held._places()
    assert places is not None
    yield functools.partial(_C.use_owners, *places), []
    for bad in ((1,), (1, 2, 10**6), (-1, 0, 0)):
        yield failing(_C.use_owners, *bad), []


def callbacks() -> Iterator[Case]:
    """What was in use stays."""
    address = faststep._torch.library.address_of("has_callbacks")
    yield lambda: _C.use_callbacks(address), [address]
    yield failing(_C.use_callbacks, -1), []


def modes() -> Iterator[Case]:
    """What was in use stays."""
    address = faststep._torch.library.address_of("has_modes")
    yield lambda: _C.use_modes(address), [address]
    yield failing(_C.use_modes, -1), []


def streams() -> Iterator[Case]:
    """A function that is not called here, none, and what is no function; then what was in use."""

    def function(device: int, handle: int) -> bool:
        return False

    def forget_it() -> None:
        _C.use_streams(function)
        _C.use_streams(faststep._torch.streams.lasts)

    yield forget_it, [function, faststep._torch.streams.lasts]
    yield lambda: _C.use_streams(None), []
    yield failing(_C.use_streams, 5), []
    yield lambda: _C.use_streams(faststep._torch.streams.lasts), []


def device_info() -> Iterator[Case]:
    yield failing(_C.device_info, 10**6), []
    yield failing(_C.device_info, "0"), []


def prototype(*row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty((0, *row), dtype=dtype)


def gather() -> Iterator[Case]:
    """Batches that are taken, that are left in the queue, and arguments of every wrong kind."""
    data, labels, chosen = torch.ones(9, 4), torch.ones(9), torch.tensor([3, 8, 0])
    fields = ((prototype(4), 0), (prototype(), 0))
    rows = (0, 9, ((data.data_ptr(), 16, data), (labels.data_ptr(), 4)))
    nodes = (rows, (1, 0, 3, chosen.data_ptr(), 0, 0), (2, (0, 1)))
    slots, owner = _C.Slots(), (data, labels, chosen)
    outputs = (torch.empty(2, 4), torch.empty(2))
    slots.keep(4)

    def run(take: int, close: bool) -> None:
        gather = _C.Gather(slots, fields, nodes, 2, True, owner)
        batches = [gather.submit(indices) for indices in ([11, 0, -1], (2,), chosen)]
        batches.append(gather.submit(chosen, 1, 2))
        batches.append(gather.submit(chosen, 1, 2, outputs))
        assert not gather.submit([12, 0], 0, -1, outputs)
        for wrong in ([12], ["a"], [], [1 << 70]):
            assert not gather.submit(wrong)
        if close:
            gather.close()
        for batch in batches[:take]:
            assert batch
            tensors = batch.take()
            assert tensors is not None
            tensors[0].view(-1).detach()
            assert batch.take() is None

    normal = (0, 0.5, (1.0, 2.0, 3.0, 4.0), (5.0,) * 4)
    floats = ((prototype(4), 14, 0, False, normal), (prototype(), 14, 0, False, (6, 1.0, (), ())))

    numbers = ((prototype(dtype=torch.int64), 15), (prototype(), 0))

    def run_others() -> None:
        assert _C.Gather(slots, floats, (rows,), 0, False, owner).submit([1])
        assert _C.Gather(slots, numbers, (rows,), 0, False, owner).submit([1])

    yield run_others, [slots, owner, floats, normal, numbers]
    for take, close in ((0, True), (2, False), (5, True)):
        call = functools.partial(run, take, close)
        yield call, [slots, owner, data, chosen, *fields, nodes, outputs, *outputs]
    kept = _C.Gather(slots, fields, nodes, 0, False, owner)
    for arguments in ((), (None,), (chosen, 2, 2), (chosen, -1), (data,), (torch.ones(3),)):
        yield failing(kept.submit, *arguments), list(arguments[:1])
    for wrong_outputs in (
        5,
        outputs[:1],
        (outputs[0], None),
        (outputs[0], outputs[1].int()),
        (outputs[0], torch.empty(3)),
        (torch.empty(4, 2).t(), outputs[1]),
    ):
        yield failing(kept.submit, chosen, 1, 2, wrong_outputs), [chosen, wrong_outputs]
    for wrong in (
        (None, fields, nodes, 1, False, owner),
        (slots, (), nodes, 1, False, owner),
        (slots, ((data.int, 0),), nodes, 1, False, owner),
        (slots, ((prototype(4), 9),), nodes, 1, False, owner),
        (slots, ((prototype(4), 14),), nodes, 1, False, owner),
        *(
            (slots, ((prototype(4, dtype=dtype), 14, 0, False, spec),), nodes, 1, False, owner)
            for dtype, spec in (
                (torch.float32, (9, *normal[1:])),
                (torch.int32, normal),
                (torch.float32, (0, 0.5, (1.0, 2.0), (3.0, 4.0))),
                (torch.float32, (0, 0.5, normal[2], (1.0,))),
                (torch.float32, (0, 0.5, normal[2], ("1", 2.0, 3.0, 4.0))),
                (torch.float32, (0, 0.5, 1.0, 2.0)),
            )
        ),
        (slots, fields, (), 1, False, owner),
        (slots, fields, (rows, (0, 9, ((1, 1),))), 1, False, owner),
        (slots, fields, ((1, 0, 3, 0, 0, 1),), 1, False, owner),
        (slots, fields, (rows, (2, (0, 1))), 1, False, owner),
        (slots, fields, (rows, (3, 1)), 1, False, owner),
        (slots, fields, (rows, ()), 1, False, owner),
        (slots, fields, nodes, "1", False, owner),
    ):
        yield failing(_C.Gather, *wrong), [slots, fields, nodes, owner]


def slots() -> Iterator[Case]:
    some = _C.Slots()
    yield _C.Slots, []
    yield failing(_C.Slots, 1), []
    yield some.counts, []
    yield lambda: some.keep(3), [some]
    yield failing(some.keep, -1), [some]
    like = torch.empty(0, 3, 4, 5).to(memory_format=torch.channels_last)
    some.keep(1)
    yield lambda: some.empty(like, 7), [some, like]
    for bad in ((like,), (like, -1), (None, 2), (torch.ones(()), 2), (like, 1 << 62)):
        yield failing(some.empty, *bad), [some, like]


def transform_images() -> Iterator[Case]:
    images, out = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, 3, 2, 2)
    words = [0, 0, 4, 4, 2, 2] + [0] * 11
    samples, factors = torch.tensor([words, words], dtype=torch.int32), (1.0, 2.0, 3.0)
    right = (images, out, samples, factors, factors)
    more = (torch.zeros(5, 3, 4, 4), *right[1:])
    yield lambda: _C.transform_images(*right), [*right]
    yield lambda: _C.transform_images(*more), [*more]
    for place, bad in (
        *((0, None), (0, images[0]), (0, images.long()), (0, images[:, :2])),
        *((1, None), (1, out[0]), (1, out.double()), (1, out[:1])),
        *((2, None), (2, samples[:1]), (2, samples.long()), (2, samples + 3)),
        *((3, None), (3, (1.0,)), (3, ("a", "b", "c")), (4, [1.0, 2.0, 3.0]), (4, ())),
    ):
        wrong = [*right[:place], bad, *right[place + 1 :]]
        yield failing(_C.transform_images, *wrong), wrong


def split_channels() -> Iterator[Case]:
    pixels, out = torch.zeros(4, 5, 3, dtype=torch.uint8), torch.zeros(3, 4, 5, dtype=torch.uint8)
    yield lambda: _C.split_channels(pixels, out), [pixels, out]
    for bad in (None, out[:2], out.long(), out.mT, out[:, :3].contiguous(), pixels.view(3, 4, 5)):
        yield failing(_C.split_channels, pixels, bad), [pixels, out]
    for bad in (None, pixels[:, :, :2], pixels.double(), pixels.transpose(0, 1), pixels[0]):
        yield failing(_C.split_channels, bad, out), [pixels, out]


def arena() -> Iterator[Case]:
    """Blocks that go from a worker to the main process, and back, as one process sees it."""
    kept, data = _C.Arena(), torch.ones(100)

    def run() -> None:
        put = kept.put(data.data_ptr(), 400)
        kept.hold(put, 400).view(torch.float32).add_(1)
        block, taken = kept.take(5000)
        kept.send(block)
        assert not kept.sent(block)
        kept.send(block)
        del taken
        assert kept.sent(block)
        tensor = kept.hold(block, 5000)
        pinned = kept.pin()
        del tensor
        for number in pinned:
            kept.unpin(number)
        kept.give_back(kept.put(data.data_ptr(), 1))
        kept.put(data.data_ptr(), 400)
        assert kept.sweep() == 1

    yield _C.Arena, []
    yield lambda: _C.Arena(os.dup(kept.fileno()), kept.reserve()).counts(), [kept]
    yield run, [kept, data]
    yield kept.counts, [kept]
    for method in (kept.send, kept.sent, kept.give_back, kept.unpin, kept.take):
        for bad in (-1, 10**6 if method != kept.take else -2, "0"):
            yield failing(method, bad), [kept]
    for arguments in ((0, -1), (10**6, 1), (-1, 1), (0,), (0, 10)):
        yield failing(kept.hold, *arguments), [kept]
    yield lambda: kept.locked(data.data_ptr(), 400), [kept, data]
    for arguments in ((0, -1), (0,), (data, 1)):
        yield failing(kept.locked, *arguments), [kept]
    for arguments in ((-1,), (64,), ("0",)):
        yield failing(kept.prepare_locks, *arguments), [kept]
    yield failing(lambda: _C.Arena(os.dup(1), 1 << 26)), []
    for arguments in ((0, 1), (data.data_ptr(), -1), (data,)):
        yield failing(kept.put, *arguments), [kept, data]
    for arguments in ((-1, 5), (1,), ("a", 1), (0, 0)):
        yield failing(_C.Arena, *arguments), []


def permute() -> Iterator[Case]:
    out = torch.empty(30, dtype=torch.int64)
    yield lambda: _C.permute(out, 30, 1, 2, 0, 1), [out]
    for bad in ((out, 0, 1, 2, 0, 1), (out, 30), (torch.empty(3), 30, 1, 2, 0, 1)):
        yield failing(_C.permute, *bad), [bad[0]]


def crc32c() -> Iterator[Case]:
    data = bytes(1000)
    yield lambda: _C.crc32c(data), [data]
    for bad in ("text", None):
        yield failing(_C.crc32c, bad), [bad]


def scan_tfrecords() -> Iterator[Case]:
    data, places = torch.zeros(100, dtype=torch.uint8), torch.empty(6, dtype=torch.int64)
    address = data.data_ptr()
    yield lambda: _C.scan_tfrecords(address, 100, 0, True, places), [places, data]
    for bad in (torch.empty(4), None):
        yield failing(_C.scan_tfrecords, address, 100, 0, True, bad), [bad]


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "Arena": arena,
    "Batch": lambda: iter([(failing(_C.Batch), [])]),  # gather() makes some
    "Gather": gather,
    "OffloadPipe": offload,
    "Plan": plan,
    "ReleaseHook": release_hook,
    "Slots": slots,
    "TensorError": tensor_error,
    "accumulate": accumulate,
    "any_dtensor": any_dtensor,
    "check_driver": lambda: iter([(_C.check_driver, [])]),
    "chunk_squares": chunk_squares,
    "clamp": lambda: on_tensors(_C.clamp, 0.5),
    "collect_grads": collect_grads,
    "cpu_info": lambda: iter([(_C.cpu_info, [])]),
    "crc32c": crc32c,
    "cross_entropy": cross_entropy,
    "device_counts": lambda: iter([(_C.device_counts, [])]),
    "device_info": device_info,
    "end_retaining": lambda: iter([(_C.end_retaining, [])]),
    "fold_squares": fold_squares,
    "foreign_allocator": lambda: iter([(_C.foreign_allocator, [])]),
    "fusable": fusable,
    "has_kernels": lambda: iter([(_C.has_kernels, [])]),
    "hold": hold,
    "holds": lambda: iter([(_C.holds, [])]),
    "hyper": hyper,
    "is_recorded": lambda: iter([(_C.is_recorded, [])]),
    "keep_freed_memory": lambda: iter([(_C.keep_freed_memory, [])]),
    "keep_locked_memory": lambda: iter([(functools.partial(_C.keep_locked_memory, False), [])]),
    "measure": lambda: on_tensors(_C.measure, 0.5),
    "clip_grads": clip_grads,
    "unscale_grads": lambda: on_grads(_C.unscale_grads, 1.0, False),
    "norm": norms,
    "permute": permute,
    "release_memory": lambda: iter([(_C.release_memory, [])]),
    "retain_memory": retain_memory,
    "retained_memory": lambda: iter([(_C.retained_memory, [])]),
    "rules": lambda: iter([(_C.rules, [])]),
    "scale": lambda: on_tensors(_C.scale, 1.0),
    "scan_tfrecords": scan_tfrecords,
    "split_channels": split_channels,
    "transform_images": transform_images,
    "update_scale": update_scale,
    "use_callbacks": callbacks,
    "use_dtensors": dtensors,
    "use_modes": modes,
    "use_streams": streams,
    "use_kernels_of": kernels,
    "use_owners": owners,
    "use_records": records,
    "use_threads_of": lambda: iter(
        [(lambda: _C.use_threads_of(faststep._torch.library.libtorch_cpu_path()), [])]
    ),
}


ON_DEVICE = (  # tests/device
    *("device_accumulate", "device_clamp", "device_clip", "device_norm", "device_unscale"),
    *("device_chunk_squares", "device_fold_squares"),
)


def test_every_public_function_has_a_case() -> None:
    public = {name for name in dir(_C) if not name.startswith("_") and callable(getattr(_C, name))}
    assert public == set(CASES) | set(ON_DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_function(name: str) -> None:
    cases = list(CASES[name]())
    for call, arguments in cases:
        assert_references_stay(call, arguments)
    assert_no_growth(*(call for call, _ in cases))


def test_the_measure_notices_a_leak() -> None:
    """The check itself: a call that keeps 64 bytes of C memory, or one object, fails it."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    kept: list[Any] = []
    if bytes_in_use():
        with pytest.raises(AssertionError, match="grew by"):
            assert_no_growth(lambda: malloc(64))
    with pytest.raises(AssertionError, match="grew by"):
        assert_no_growth(lambda: kept.append(object()))
    with pytest.raises(AssertionError):
        assert_references_stay(lambda: kept.append(malloc), [malloc])
