"""The only module that touches torch's private names.

Everything here is a small typed function or a name found by a feature test (does the attribute
exist, does the file exist), never by comparing version numbers. A private name that is missing
from some torch is replaced by the public way to the same result, so the rest of the package
imports from here and knows nothing about torch's inside.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import operator
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.amp.grad_scaler import OptState
from torch.autograd.graph import increment_version
from torch.optim import optimizer as _step_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data._utils import worker as _worker
from torch.utils.data._utils.collate import (
    collate,
    collate_tensor_fn,
    default_collate,
    default_collate_fn_map,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory as _pin_memory
from torch.utils.data._utils.worker import _IterableDatasetStopIteration as IterableEnded
from torch.utils.data._utils.worker import _ResumeIteration as ResumeIteration
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter,
)
from torch.utils.data.dataloader import (
    _SingleProcessDataLoaderIter as SingleProcessDataLoaderIter,
)

__all__ = [
    "BaseDataLoaderIter",
    "ExceptionWrapper",
    "IterableEnded",
    "MultiProcessingDataLoaderIter",
    "OptState",
    "ResumeIteration",
    "SingleProcessDataLoaderIter",
    "address_of_bump_version",
    "address_of_has_callbacks",
    "address_of_has_modes",
    "address_of_mode_depth",
    "after_backward",
    "collate_stacking_by",
    "collate_tensors",
    "collates_as_default",
    "cuda_amp_is_unavailable",
    "dataset_fetcher",
    "dataset_kind_fetcher",
    "dataset_of_worker",
    "disable_dynamo",
    "dtypes_of",
    "get_grad_dtype",
    "has_global_step_hooks",
    "has_no_memory",
    "increment_version",
    "is_capturing",
    "is_compiling",
    "is_fsdp_shard",
    "is_watched",
    "lazy_clone",
    "let_fetch",
    "libtorch_cpu_path",
    "nbytes_of",
    "neg_view",
    "new_subclass",
    "new_worker_info",
    "new_wrapper",
    "pin_memory",
    "rebuild_buckets",
    "record_of",
    "set_grad_dtype",
    "set_worker_dataset",
    "stacking_tensors_by",
    "step_dtype",
    "storage_record_of",
    "uncompiled",
    "update_scale_as_torch",
    "uses_of",
    "worker_info_of_thread",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_dynamo(function: _Function) -> _Function:
    """Keep torch.compile out of `function`: a compiled caller breaks its graph and calls it.

    Uses torch's own lazy decorator where there is one, because `torch.compiler.disable` imports
    the compiler at once, which costs seconds at `import faststep`.
    """
    lazy = getattr(torch, "_disable_dynamo", None)
    disabled: _Function = (lazy or torch.compiler.disable)(function)
    return disabled


_mode_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", None) or (
    lambda: int(_get_current_dispatch_mode() is not None)
)


def is_watched() -> bool:
    """True inside a TorchDispatchMode, which sees torch's operators and nothing that C does."""
    return _mode_depth() != 0


def has_no_memory(tensor: torch.Tensor) -> bool:
    """True for a tensor that only torch's operators can work on: meta, fake or mkldnn."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # slow to import, and often not needed
    is_fake = fake is not None and isinstance(tensor, fake.FakeTensor)
    return tensor.is_meta or tensor.is_mkldnn or is_fake


def is_compiling() -> bool:
    """True while torch.compile traces or exports the caller."""
    return torch.compiler.is_compiling()


def has_global_step_hooks() -> bool:
    """True if a hook on the steps of all optimizers is set."""
    return bool(_step_hooks._global_optimizer_pre_hooks or _step_hooks._global_optimizer_post_hooks)


def is_capturing() -> bool:
    """True while torch's current CUDA stream is captured into a graph."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialized and torch.cuda.is_current_stream_capturing())


def is_fsdp_shard(tensor: torch.Tensor) -> bool:
    """Whether FullyShardedDataParallel leaves only a part of this parameter on each rank.

    FSDP2 has tensors of a class of its own (DTensor) instead.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False))


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile wrapped, or `module` itself."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, torch.nn.Module) else module


def get_grad_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that `tensor.grad` must have; None if it may have any.

    Raises:
        RuntimeError: this torch has no such setting (before 2.10).
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise RuntimeError(
            f"torch {torch.__version__} does not let .grad have another dtype than its parameter; "
            "gradients in float32 need torch 2.10 or later"
        )
    dtype: torch.dtype | None = tensor.grad_dtype
    return dtype


def set_grad_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Set what `get_grad_dtype` returns."""
    tensor.grad_dtype = dtype


def after_backward(callback: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that runs; from within it only.

    Calls are made in the order in which they were asked for. Raises AttributeError where torch has
    no such list.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def rebuild_buckets(model: torch.nn.Module) -> bool:
    """Let DistributedDataParallel order its buckets now, after its first synchronized backward.

    Else it does so in the next forward: a broadcast, under no_sync() too, that waits for ranks
    which have no more data. Gradients that lie in the buckets are then elsewhere; True if so.
    """
    rebuild = getattr(getattr(model, "reducer", None), "_rebuild_buckets", None)
    return rebuild is not None and bool(rebuild())


def dtypes_of(tensors: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """The element types that occur in `tensors`."""
    return set(map(operator.attrgetter("dtype"), tensors))


def step_dtype(fused: bool | None) -> torch.dtype:
    """The dtype of the `step` entry that torch's optimizers create.

    float32 with `fused=True`; without it float64 where that is the default dtype, else float32
    (`_get_scalar_dtype` in torch/optim/optimizer.py).
    """
    if not fused and torch.get_default_dtype() == torch.float64:
        return torch.float64
    return torch.float32


def record_of(tensor: torch.Tensor) -> int:
    """The address of torch's record of a tensor."""
    return int(tensor._cdata)


def address_of_bump_version() -> int:
    """Where libtorch's function is that moves a tensor's version counter; 0 if it has none.

    `void torch::autograd::impl::bump_version(const at::Tensor&)`: what it takes is the address of a
    pointer to a tensor's record.
    """
    return _address_in_libtorch("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE")


def address_of_has_callbacks() -> int:
    """Where libtorch's function is that tells whether anybody listens to what runs; or 0.

    `bool at::hasCallbacks()`, which every operator asks.
    """
    return _address_in_libtorch("_ZN2at12hasCallbacksEv")


def address_of_has_modes() -> int:
    """Where libtorch's function is that tells whether a TorchFunctionMode is active; or 0.

    `bool at::impl::torch_function_mode_enabled()`, which every attribute of a tensor asks.
    """
    return _address_in_libtorch("_ZN2at4impl27torch_function_mode_enabledEv")


def address_of_mode_depth() -> int:
    """Where libtorch's function is that tells how many TorchDispatchModes this thread is in; or 0.

    `int64_t c10::impl::TorchDispatchModeTLS::stack_len()`
    """
    return _address_in_libtorch("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv")


def _address_in_libtorch(symbol: str) -> int:
    try:
        function = ctypes.CDLL(libtorch_cpu_path())[symbol]
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def storage_record_of(tensor: torch.Tensor) -> int:
    """The address of torch's record of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a dense tensor's elements, else 0; without code of a subclass."""
    if type(tensor) is torch.Tensor:
        return tensor.nbytes if tensor.layout == torch.strided else 0
    with torch._C.DisableTorchFunctionSubclass():
        of: Any = torch.Tensor
        is_dense = of.layout.__get__(tensor) == torch.strided
        return int(of.nbytes.__get__(tensor)) if is_dense else 0


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A clone that shares the memory until one of the two is written."""
    return torch._lazy_clone(tensor)


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, to be read with the other sign."""
    return torch._neg_view(tensor)


def new_subclass(kind: type[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass, with the memory of `tensor`."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor)
    return made


def new_wrapper(
    kind: type[torch.Tensor], size: tuple[int, ...], *, device: str, **policy: Any
) -> torch.Tensor:
    """A tensor of a subclass with its own `__torch_dispatch__`, without memory.

    Args:
        policy: which questions the subclass answers itself, as torch names them:
            `dispatch_sizes_strides_policy`, `dispatch_device`, `dispatch_layout`.
    """
    place = torch.device(device)
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(kind, size, device=place, **policy)
    return made


def libtorch_cpu_path() -> str:
    """The file that holds torch's CPU operators and its thread pool.

    A full path for a torch from a wheel; the bare file name, for the loader to find, where torch
    keeps its libraries elsewhere.
    """
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(
        sys.platform, "libtorch_cpu.so"
    )
    path = Path(torch.__file__).parent / "lib" / name
    return str(path) if path.is_file() else name


def cuda_amp_is_unavailable() -> bool:
    """True where torch.amp.GradScaler("cuda") warns and disables itself."""
    common = getattr(torch.cuda.amp, "common", None)
    test = getattr(common, "amp_definitely_not_available", None)
    return bool(test()) if test is not None else not torch.cuda.is_available()


def update_scale_as_torch(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """torch's own scale update, in place and without a synchronisation, on any device.

    `scale` is 0-d float32, `growth_tracker` 0-d int32, `found_inf` 0-d float32 on one device.
    """
    torch._amp_update_scale_(
        scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
    )


def collates_as_default(function: Any, containers: Iterable[type]) -> bool:
    """Whether `function` is torch's default_collate and treats tensors and these types as usual.

    Users may register functions for further types in `default_collate_fn_map`.
    """
    if function is not default_collate:
        return False
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return False
    return not any(issubclass(kind, key) for kind in containers for key in default_collate_fn_map)


def collate_stacking_by(function: Callable[..., torch.Tensor]) -> Callable[[Any], Any]:
    """torch's default_collate, with `function(batch, *, collate_fn_map)` for lists of tensors.

    A function for tensors that the user registered stays.
    """

    def collated(samples: Any) -> Any:
        functions = default_collate_fn_map
        if functions.get(torch.Tensor) is collate_tensor_fn:
            functions = {**functions, torch.Tensor: function}
        return collate(samples, collate_fn_map=functions)

    return collated


def collate_tensors(batch: list[torch.Tensor]) -> torch.Tensor:
    """What torch's default_collate makes of tensors, with its errors."""
    collated: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=default_collate_fn_map)
    return collated


@contextlib.contextmanager
def stacking_tensors_by(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Lets default_collate stack tensors by `function(batch, *, collate_fn_map)` for a while.

    A function for tensors that the user registered stays.
    """
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        yield
        return
    default_collate_fn_map[torch.Tensor] = function
    try:
        yield
    finally:
        if default_collate_fn_map.get(torch.Tensor) is function:
            default_collate_fn_map[torch.Tensor] = collate_tensor_fn


def uses_of(tensor: torch.Tensor) -> tuple[object, object]:
    """How often torch itself refers to a tensor, and to its storage.

    To be compared with what a new tensor has. Where this torch does not tell, no two are equal.
    """
    of_tensor = getattr(tensor, "_use_count", object)
    of_storage = getattr(torch._C, "_storage_Use_Count", lambda storage: object())
    return of_tensor(), of_storage(storage_record_of(tensor))


def let_fetch(kind: type) -> None:
    """Lets collate functions of a class fetch the samples of map-style datasets too.

    For the rest of this process: `fetch(dataset, indices)` of the collate function returns what
    torch's fetcher would, or NotImplemented if that is to do it.
    """
    fetch: Any = _MapDatasetFetcher.fetch

    def fetch_or_let(self: Any, indices: Any) -> Any:
        if self.auto_collation and isinstance(self.collate_fn, kind):
            batch = self.collate_fn.fetch(self.dataset, indices)  # type: ignore[attr-defined]
            if batch is not NotImplemented:
                return batch
        return fetch(self, indices)

    _MapDatasetFetcher.fetch = fetch_or_let  # type: ignore[method-assign]


def let_errors_travel() -> None:
    """In a worker process: sends an exception of a class that cannot be pickled as one of its base.

    For the rest of this process. Torch's queue would print that it cannot send it, and drop it: the
    main process then waits without end, or takes the end of an iterable dataset for its last batch.
    """
    vars(_worker)["ExceptionWrapper"] = _wrapped


def _wrapped(exc_info: Any = None, where: str = "in background") -> Any:
    wrapper: Any = ExceptionWrapper(exc_info, where)  # type: ignore[no-untyped-call]
    wrapper.exc_type = next(filter(_can_be_pickled, wrapper.exc_type.__mro__))
    return wrapper


def _can_be_pickled(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


def dataset_fetcher(dataset: Any, collate_fn: Any) -> Any:
    """What fetches a batch of a map-style dataset: an object with `fetch(indices)`."""
    return _MapDatasetFetcher(dataset, True, collate_fn, False)


def dataset_kind_fetcher(
    kind: int, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool
) -> Any:
    """What fetches the batches of a worker."""
    create: Any = _DatasetKind.create_fetcher
    return create(kind, dataset, auto_collation, collate_fn, drop_last)


def new_worker_info(worker: int, workers: int, seed: int, dataset: Any) -> Any:
    """The info of a worker that is a thread.

    Where torch's has the field `rng`, it has generators of its own there, seeded with `seed`.
    """
    info = _worker.WorkerInfo
    arguments = {"id": worker, "num_workers": workers, "seed": seed, "dataset": dataset}
    declared = dataclasses.fields(info) if dataclasses.is_dataclass(info) else ()
    fields = {field.name for field in declared}
    if "worker_method" in fields:
        arguments["worker_method"] = "thread"
    if "rng" in fields:
        numpy = sys.modules.get("numpy")
        arguments["rng"] = _worker._RNG(
            random.Random(seed),
            torch.Generator().manual_seed(seed),
            None if numpy is None else numpy.random.default_rng(seed),
        )
    return info(**arguments)


def dataset_of_worker(arguments: dict[str, Any]) -> Any:
    """The dataset among the arguments, by name, of torch's function for a worker process.

    From 2.14 on it comes in a list that the worker empties.
    """
    holder = arguments.get("dataset_holder")
    return arguments["dataset"] if holder is None else holder.pop()


def set_worker_dataset(dataset: Any) -> None:
    """In a worker process: lets get_worker_info() have this dataset."""
    info: Any = _worker._worker_info
    if info is not None:
        info = copy.copy(info)
        object.__setattr__(info, "dataset", dataset)  # its own lets nobody assign to it
        _worker._worker_info = info


_infos = threading.local()
_unpublished = object()


@contextlib.contextmanager
def worker_info_of_thread(info: Any) -> Iterator[None]:
    """What get_worker_info() returns in this thread meanwhile.

    torch keeps one info per process, and its function is imported under many names: its code is
    replaced, once, by one that looks for the thread's info first.
    """
    function = _worker.get_worker_info
    names = vars(_worker)
    if "_faststep_infos" not in names:
        names["_faststep_original"] = types.FunctionType(function.__code__, names)
        names["_faststep_infos"] = _infos
        function.__code__ = _get_worker_info.__code__
    before = getattr(_infos, "info", _unpublished)
    _infos.info = info
    try:
        yield
    finally:
        if before is _unpublished:
            del _infos.info
        else:
            _infos.info = before


def _get_worker_info() -> Any:
    try:
        return _faststep_infos.info  # type: ignore[name-defined]  # noqa: F821
    except AttributeError:
        return _faststep_original()  # type: ignore[name-defined]  # noqa: F821


def pin_memory(data: Any, device: str | None) -> Any:
    """The same batch in page-locked memory, with torch's rules for containers."""
    function: Any = _pin_memory
    return function(data, device)
