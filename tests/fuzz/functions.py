"""Calls of the functions on tensors; results are compared with torch where they are clear."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import faststep
from faststep import _C

from .arguments import junk, maybe_bad
from .hostile import HostileList
from .odd_tensors import any_tensor, packed, shape_of, usable
from .world import FaultError, World

Target = Callable[[World], None]
FACTORS = (0.5, 0.5, 2.0, -1.0, 1.0)


def tensors_for(world: World, count: int | None = None) -> list[torch.Tensor]:
    """A list of tensors, mostly usable ones; sometimes one twice."""
    rng = world.rng
    make = usable if world.chance(0.6) else any_tensor
    made = [make(rng) for _ in range(rng.choice((0, 1, 2, 3, 6)) if count is None else count)]
    if made and world.chance(0.03):
        made.append(torch.ones((1 << 20) + 1))  # from where a call releases the GIL
    for tensor in made:
        world.track(tensor)
    if len(made) > 1 and world.chance(0.1):
        made[0] = made[-1]
    return world.contain(made)  # type: ignore[no-any-return]


def sequence(world: World, items: list[Any]) -> Any:
    """The same items in another sequence, now and then."""
    kind = world.rng.random()
    if kind < 0.7:
        return items
    if kind < 0.8:
        return tuple(items)
    if kind < 0.95:
        return world.contain(HostileList(items))
    return iter(items)


def plain_values(tensors: Sequence[Any]) -> list[torch.Tensor] | None:
    """Copies in double, where all are ordinary and none shares memory with another."""
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return None
    seen = set()
    for t in tensors:
        if t.device.type != "cpu" or t.layout != torch.strided or not t.is_floating_point():
            return None
        try:
            storage = t.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        key = storage.data_ptr()
        if (key in seen and key) or (t.numel() and not key):
            return None
        seen.add(key)
    return [t.detach().double().resolve_neg().clone() for t in tensors]


def must_agree(name: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    now = tensor.detach().resolve_neg().double()
    loose = 1e-6 if tensor.dtype in (torch.float32, torch.float64) else 0.02
    if not torch.allclose(now, expected, rtol=loose, atol=1e-4, equal_nan=True):
        raise FaultError(f"{name}: {now.flatten()[:4]} instead of {expected.flatten()[:4]}")


def _on_values(world: World, name: str, number: float, change: Any) -> None:
    """scale and clamp: `change` is what they do to a copy."""
    tensors = tensors_for(world)
    before = plain_values(tensors)
    args, good = maybe_bad(world, (sequence(world, tensors), number))

    def check(_: Any) -> None:
        for tensor, was in zip(tensors, before or (), strict=False):
            must_agree(name, tensor, change(was))

    world.call(
        name,
        getattr(_C, name),
        args,
        kept=list(tensors),
        check=check if good and before is not None else None,
    )


def scale(world: World) -> None:
    factor = world.rng.choice(FACTORS)
    _on_values(world, "scale", factor, lambda was: was * factor)


def clamp(world: World) -> None:
    limit = abs(world.rng.choice(FACTORS))
    _on_values(world, "clamp", limit, lambda was: was.clamp(-limit, limit))


def _norm_of(values: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float((v * v).sum()) for v in values))


def norm(world: World) -> None:
    tensors = tensors_for(world)
    before = plain_values(tensors)
    order = world.rng.choice((2.0, 2.0, 1.0, 0.0, 3.0, math.inf, -math.inf, math.nan))
    args, good = maybe_bad(world, (sequence(world, tensors), order))

    def check(result: Any) -> None:
        expected = _norm_of(before or [])
        if order == 2.0 and math.isfinite(expected) and abs(result[0] - expected) > 1e-5 * expected:
            raise FaultError(f"norm: {result[0]} instead of {expected}")

    world.call(
        "norm",
        _C.norm,
        args,
        kept=list(tensors),
        check=check if good and before is not None else None,
    )


def measure(world: World) -> None:
    tensors = tensors_for(world)
    args, _ = maybe_bad(world, (sequence(world, tensors), world.rng.choice(FACTORS)))
    world.call("measure", _C.measure, args, kept=list(tensors))


def chunk_squares(world: World) -> None:
    tensors = tensors_for(world)
    count = sum(-(-t.numel() // 16384) for t in tensors) + world.rng.choice((0, 0, 0, 1))
    sums = world.track(torch.zeros(count, dtype=torch.float64))
    args, _ = maybe_bad(world, (sequence(world, tensors), world.rng.choice(FACTORS), sums))
    world.call("chunk_squares", _C.chunk_squares, args, kept=list(tensors))


def fold_squares(world: World) -> None:
    sums = world.track(torch.ones(world.rng.choice((0, 1, 255, 600)), dtype=torch.float64))
    args, good = maybe_bad(world, (sums,))

    def check(result: Any) -> None:
        if result != sums.numel():
            raise FaultError(f"fold_squares: {result} instead of {sums.numel()}")

    world.call("fold_squares", _C.fold_squares, args, kept=[sums], check=check if good else None)


def fusable(world: World) -> None:
    tensors = tensors_for(world)
    device = world.rng.choice((-1, -1, -1, 0, -2, 63, 64, 2**31 - 1))
    args, _ = maybe_bad(world, (sequence(world, tensors), device))
    world.call("fusable", _C.fusable, args, kept=list(tensors))


def accumulate(world: World, name: str = "accumulate") -> None:
    rng = world.rng
    shapes = [shape_of(rng) for _ in range(rng.choice((0, 1, 2, 4)))]
    lists = []
    for _ in range(rng.choice((2, 2, 3))):
        make = usable if world.chance(0.9) else any_tensor
        lists.append(world.contain([world.track(make(rng, shape)) for shape in shapes]))
    before = [plain_values(some) for some in lists]
    factor, start = rng.choice(FACTORS), world.chance(0.3)
    sums, terms, *more = lists
    args, good = maybe_bad(
        world, (sequence(world, sums), sequence(world, terms), factor, start, *(more or (None,)))
    )

    def check(_: Any) -> None:
        for i, tensor in enumerate(sums):
            total = torch.zeros_like(before[0][i]) if start else before[0][i]  # type: ignore[index]
            for some in before[1:]:
                total = total + some[i] * factor  # type: ignore[index]
            must_agree(name, tensor, total)

    distinct = (
        {t.untyped_storage().data_ptr() for some in lists for t in some}
        if good and all(some is not None for some in before)
        else set()
    )
    world.call(
        name,
        getattr(_C, name),
        args,
        kept=[t for some in lists for t in some],
        check=check if len(distinct) == sum(map(len, lists)) else None,
    )


def params_for(world: World, shapes: Sequence[tuple[int, ...]] | None = None) -> list[torch.Tensor]:
    """Parameters with gradients of all kinds; of many nobody but torch's C++ holds the gradient."""
    rng = world.rng
    shapes = (
        [shape_of(rng) for _ in range(rng.choice((0, 1, 2, 4, 9)))] if shapes is None else shapes
    )
    made = []
    for shape in shapes:
        param = usable(rng, shape).detach() if world.chance(0.3) else packed(rng, shape)
        if type(param) is torch.Tensor and not param.is_inference() and world.chance(0.8):
            param = torch.nn.Parameter(param)
        _give_gradient(world, param)
        made.append(world.track(param))
        world.params.append(world.tracked[-1])
    return world.contain(made)  # type: ignore[no-any-return]


def _give_gradient(world: World, param: torch.Tensor) -> None:
    rng = world.rng
    kind = rng.random()
    try:
        if kind < 0.1:
            return
        if kind < 0.5 and param.requires_grad and param.is_leaf and not world.threaded:
            (param * 1.0).backward(torch.randn(param.shape, dtype=param.dtype))
        else:
            grad = usable(rng, tuple(param.shape)) if world.chance(0.9) else any_tensor(rng)
            grad = grad.detach()
            if world.chance(0.8) and grad.untyped_storage().nbytes():
                grad = grad.to(param.dtype)
            world.set_grad(param, world.track(grad))
    except (RuntimeError, TypeError, NotImplementedError, ValueError, AttributeError):
        return  # torch does not allow it


def gradients_of(params: Sequence[Any]) -> list[torch.Tensor]:
    """Those that can be copied; their Python objects may be made for it."""
    return [p.grad for p in params if isinstance(p, torch.Tensor) and p.grad is not None]


def any_dtensor(world: World) -> None:
    args, _ = maybe_bad(world, (sequence(world, params_for(world)),))
    world.call("any_dtensor", _C.any_dtensor, args)


def collect_grads(world: World) -> None:
    params = params_for(world)
    args, _ = maybe_bad(world, (sequence(world, params),))
    world.call("collect_grads", _C.collect_grads, args)


def unscale_grads(world: World) -> None:
    params = params_for(world)
    factor, allow = world.rng.choice(FACTORS), world.chance(0.8)
    args, good = maybe_bad(world, (sequence(world, params), factor, allow))
    look = world.chance(0.5)
    grads = gradients_of(params) if look else []
    before = plain_values(grads) if good and look else None

    def check(_: Any) -> None:
        for param, was in zip(
            (p for p in params if p.grad is not None), before or (), strict=False
        ):
            must_agree("unscale_grads", param.grad, was * factor)

    world.call(
        "unscale_grads",
        _C.unscale_grads,
        args,
        kept=grads,
        check=check if before is not None else None,
    )


def clip_grads(world: World) -> None:
    params = params_for(world)
    order = world.rng.choice((2.0, 2.0, 2.0, 1.0, math.inf, 0.0, math.nan))
    limit = world.rng.choice((1.0, 0.1, 1e9, math.nan, 0.0))
    args, good = maybe_bad(world, (sequence(world, params), order, limit))
    look = world.chance(0.5)
    grads = gradients_of(params) if look else []
    before = plain_values(grads) if good and look else None

    def check(result: Any) -> None:
        expected = _norm_of(before or [])
        if order == 2.0 and math.isfinite(expected) and abs(result[0] - expected) > 1e-5 * expected:
            raise FaultError(f"clip_grads: norm {result[0]} instead of {expected}")

    world.call(
        "clip_grads", _C.clip_grads, args, kept=grads, check=check if before is not None else None
    )


def update_scale(world: World) -> None:
    rng = world.rng
    ints = [torch.zeros((), dtype=torch.int32) for _ in range(2)]
    floats = [torch.tensor(4.0), torch.tensor(rng.choice((0.0, 1.0, math.nan)))]
    for tensor in (*ints, *floats):
        world.track(tensor)
    tensors = (floats[0], ints[0], rng.choice((ints[1], None)), floats[1])
    numbers = (2.0, 0.5, rng.choice((1, 1000, 0, -1)), rng.choice((1, 2, 0)), 1.0, 1e6)
    args, _ = maybe_bad(world, (*tensors, *numbers))
    world.call("update_scale", _C.update_scale, args, kept=[*ints, *floats])


def _of_loss(world: World) -> tuple[Any, ...]:
    """Logits, targets, weights, and memory for losses and a gradient; now and then wrong ones."""
    rng = world.rng
    count, classes = rng.choice((0, 1, 3, 40)), rng.choice((0, 1, 2, 17, 1000))
    logits = packed(rng, (count, classes)) if world.chance(0.9) else any_tensor(rng)
    below = max(1, classes) + (1 if world.chance(0.1) else 0)
    target = torch.tensor([rng.randrange(below) for _ in range(count)], dtype=torch.int64)
    weight = rng.choice((None, torch.ones(classes), torch.ones(classes + 1)))
    dtype = logits.dtype if logits.dtype.is_floating_point else torch.float32
    slope = rng.choice((None, torch.empty(count, classes, dtype=dtype)))
    made = (logits, target, weight, torch.zeros(count), torch.zeros(count), slope)
    made = (*made, torch.zeros(()), torch.zeros(2))
    return tuple(one if one is None else world.track(one) for one in made)


def cross_entropy(world: World) -> None:
    given = _of_loss(world)
    rng = world.rng
    numbers = rng.choice((-100, 0, 1, -(2**63))), rng.choice((0.0, 0.1, 1.0, math.nan))
    args, _ = maybe_bad(world, (*given, *numbers, rng.choice((False, True))))
    kept = [one for one in given[:3] if one is not None]
    world.call("cross_entropy", _C.cross_entropy, args, kept=kept)


def on_device(name: str, *extra: Callable[[World], Any]) -> Target:
    """Functions for CUDA tensors: there are none, so all must be refused."""

    def target(world: World) -> None:
        tensors = tensors_for(world)
        right = (sequence(world, tensors), *(make(world) for make in extra))
        args, _ = maybe_bad(world, right)
        world.call(name, getattr(_C, name), args, kept=list(tensors))

    return target


def _number(world: World) -> float:
    return world.rng.choice(FACTORS)


def _scalar(world: World) -> torch.Tensor:
    return world.track(torch.ones(()))


def _sums(world: World) -> torch.Tensor:
    return world.track(torch.zeros(world.rng.choice((0, 1, 4)), dtype=torch.float64))


def device_fold_squares(world: World) -> None:
    args, _ = maybe_bad(world, (_sums(world), _scalar(world)))
    world.call("device_fold_squares", _C.device_fold_squares, args)


def device_info(world: World) -> None:
    args, _ = maybe_bad(world, (world.rng.choice((0, 63, 64, -1)),))
    world.call("device_info", _C.device_info, args)


def hold(world: World) -> None:
    """The record is that of the tensor's own storage: any other address would be believed."""
    tensor = usable(world.rng) if world.chance(0.6) else any_tensor(world.rng)
    try:
        record = 0 if tensor.is_shared() else faststep._torch.tensors.storage_record_of(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        record = 0
    args: tuple[Any, int] = (tensor, record)
    if world.chance(0.1):
        other = junk(world)
        args = (other, 0 if isinstance(other, torch.Tensor) else record)

    def check(held: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor or tensor.is_neg():
            return
        if held.shape != tensor.shape or held.data_ptr() != tensor.data_ptr():
            raise FaultError("what is held is not the tensor's memory")

    world.call("hold", _C.hold, args, check=check)


def no_arguments(name: str) -> Target:
    def target(world: World) -> None:
        args = () if world.chance(0.7) else (junk(world),)
        world.call(name, getattr(_C, name), args)

    return target


def of_settings(name: str, *good: Any) -> Target:
    """A function that changes how the extension works: good arguments, or such as are refused."""

    def target(world: World) -> None:
        bad = world.rng.choice((None, "", [], b"\0", 1.5, object(), torch.ones(2)))
        is_good = world.chance(0.3)
        args = good if is_good else (bad,) * max(1, len(good))
        if name == "use_threads_of" and not is_good:
            args = (world.rng.choice((5, [], 1.5, object(), "/nowhere/at/all", "\0", "\ud800")),)
        if name == "use_kernels_of" and not is_good:
            args = (world.rng.choice((5, [], 1.5, None, "\0", b"\0")),)
        world.call(name, getattr(_C, name), args)
        if not is_good:
            getattr(_C, name)(*good)

    return target


def hyper(world: World) -> None:
    pair = world.rng.choice(((0.9, 0.99), [0.9, torch.tensor(0.99)], (0.9,), None))
    places = ("eps", ("betas", 0), ("betas", 1))
    args, _ = maybe_bad(world, (world.contain({"eps": 1e-8, "betas": pair}), places))
    world.call("hyper", _C.hyper, args)


def retain_memory(world: World) -> None:
    limit = world.rng.choice((-1, 0, 1 << 20, 2**63 - 1, 2**63, 1.5, None, "1"))
    group = world.rng.choice((None, "/sys/fs/cgroup", "/nowhere", "a" * 600, "\0", b"/", 5))
    version = world.rng.choice((1, 2, 3, -1, None))
    world.call("retain_memory", _C.retain_memory, (limit, group, version))


_layout = faststep._layout
faststep._torch.held.hold(torch.ones(2))  # finds out where owners are
SETTINGS: dict[str, tuple[Any, ...]] = {
    "use_modes": (faststep._torch.library.address_of("has_modes"),),
    "use_owners": faststep._torch.held._places() or (),
    "use_callbacks": (faststep._torch.library.address_of("has_callbacks"),),
    "use_dtensors": (DTensor, vars(DTensor)["_local_tensor"], vars(DTensor)["_spec"]),
    "use_records": tuple(_layout) if _layout is not None else (),
    "use_streams": (faststep._torch.streams.lasts,),
    "use_threads_of": (faststep._torch.library.libtorch_cpu_path(),),
    "use_kernels_of": (str(faststep._KERNELS),),
    "keep_locked_memory": (False,),
}

FUNCTIONS: dict[str, Target] = {
    "accumulate": accumulate,
    "any_dtensor": any_dtensor,
    "clamp": clamp,
    "clip_grads": clip_grads,
    "collect_grads": collect_grads,
    "cpu_info": no_arguments("cpu_info"),
    "cross_entropy": cross_entropy,
    "device_accumulate": lambda world: accumulate(world, "device_accumulate"),
    "device_chunk_squares": on_device("device_chunk_squares", _scalar, _sums, _scalar),
    "device_clamp": on_device("device_clamp", _number),
    "device_clip": on_device("device_clip", _number, _scalar),
    "device_counts": no_arguments("device_counts"),
    "device_fold_squares": device_fold_squares,
    "device_info": device_info,
    "device_norm": on_device("device_norm", _number, _scalar),
    "device_unscale": on_device("device_unscale", _scalar, _scalar, lambda world: True),
    "check_driver": no_arguments("check_driver"),
    "chunk_squares": chunk_squares,
    "end_retaining": no_arguments("end_retaining"),
    "fold_squares": fold_squares,
    "foreign_allocator": no_arguments("foreign_allocator"),
    "fusable": fusable,
    "has_kernels": no_arguments("has_kernels"),
    "hold": hold,
    "holds": no_arguments("holds"),
    "hyper": hyper,
    "is_recorded": no_arguments("is_recorded"),
    "keep_freed_memory": no_arguments("keep_freed_memory"),
    "measure": measure,
    "norm": norm,
    "release_memory": no_arguments("release_memory"),
    "retain_memory": retain_memory,
    "retained_memory": no_arguments("retained_memory"),
    "rules": no_arguments("rules"),
    "scale": scale,
    "unscale_grads": unscale_grads,
    "update_scale": update_scale,
    **{name: of_settings(name, *good) for name, good in SETTINGS.items()},
}
