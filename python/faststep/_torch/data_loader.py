"""Private names of torch: the DataLoader, its workers and its collate functions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils import data
from torch.utils.data import dataloader as _dataloader
from torch.utils.data._utils import collate as _collate
from torch.utils.data._utils import fetch as _fetch
from torch.utils.data._utils import worker as _worker
from torch.utils.data._utils.collate import (
    collate,
    collate_tensor_fn,
    default_collate,
    default_collate_fn_map,
)
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory as _pin_memory
from torch.utils.data._utils.worker import _IterableDatasetStopIteration as IterableEnded
from torch.utils.data._utils.worker import _ResumeIteration as ResumeIteration
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as SingleProcessDataLoaderIter

__all__ = [
    "READING",
    "BaseDataLoaderIter",
    "ExceptionWrapper",
    "IterableEnded",
    "MultiProcessingDataLoaderIter",
    "ResumeIteration",
    "SingleProcessDataLoaderIter",
    "call_as_constructor",
    "call_as_loader",
    "called_by_name",
    "collate_stacking_by",
    "collate_tensors",
    "collated_stacking_by",
    "collates_as_default",
    "dataset_fetcher",
    "dataset_kind_fetcher",
    "dataset_of_worker",
    "let_errors_travel",
    "let_fetch",
    "new_worker_info",
    "next_as_torch",
    "pin_memory",
    "profile_name",
    "set_worker_dataset",
    "warn_script",
    "worker_info_of_thread",
]

# The classes whose functions read the samples of a DataLoader.
READING: tuple[type, ...] = (
    *(BaseDataLoaderIter, SingleProcessDataLoaderIter, MultiProcessingDataLoaderIter),
    *(_MapDatasetFetcher, _IterableDatasetFetcher),
    *(data.TensorDataset, data.Subset, data.ConcatDataset, data.BatchSampler),
    *(data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler),
    *(data.WeightedRandomSampler, data.DistributedSampler),
)


def called_by_name() -> list[Any]:
    """The classes and functions that torch's loader finds in its modules when it needs them."""
    return [
        *(_dataloader._SingleProcessDataLoaderIter, _dataloader._MultiProcessingDataLoaderIter),
        *(_fetch._MapDatasetFetcher, _fetch._IterableDatasetFetcher),
        *(_collate.collate, torch.stack, torch.randperm, torch.randint),
    ]


def profile_name(workers: int) -> str:
    """The name under which profilers know the iterator that torch has for so many workers."""
    kind = MultiProcessingDataLoaderIter if workers else SingleProcessDataLoaderIter
    return f"enumerate(DataLoader)#{kind.__name__}.__next__"


def called_in(torchs: Any, line: int) -> Callable[..., Any]:
    """A function that calls its first argument, from a line of torch's function for warnings."""
    code = torchs.__code__
    first = code.co_firstlineno + line - 1
    code = _call.__code__.replace(co_filename=code.co_filename, co_firstlineno=first)
    return types.FunctionType(code, torchs.__globals__)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


# by whether there are workers
call_as_constructor = {
    False: called_in(SingleProcessDataLoaderIter.__init__, 1),
    True: called_in(MultiProcessingDataLoaderIter.__init__, 1),
}
call_as_loader = called_in(data.DataLoader._get_iterator, 4)


def warn_script(message: str, stacklevel: int = 2) -> None:
    """Warns of the line that has called faststep, whatever of faststep lies between."""
    frame = sys._getframe(stacklevel - 1)
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("faststep."):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, stacklevel=stacklevel)


# torch's `__next__` of an iterator, whose warnings name the script's line
_next: Any = BaseDataLoaderIter.__next__
_ours = {"__name__": __name__, "warnings": types.SimpleNamespace(warn=warn_script)}
next_as_torch = types.FunctionType(
    _next.__code__, {**_next.__globals__, **_ours}, closure=_next.__closure__
)


def collates_as_default(function: Any, containers: Iterable[type]) -> bool:
    """True if `function` is torch's default_collate and treats tensors and these types as usual.

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
    """Collate tensors as torch's default_collate does, with its errors."""
    collated: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=default_collate_fn_map)
    return collated


def collated_stacking_by(
    function: Callable[..., torch.Tensor], collate_fn: Callable[[Any], Any], samples: Any
) -> Any:
    """`collate_fn(samples)`; default_collate stacks tensors by `function` meanwhile.

    `function(batch, *, collate_fn_map)`. One for tensors that the user registered stays.
    """
    if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return collate_fn(samples)
    default_collate_fn_map[torch.Tensor] = function
    try:
        return collate_fn(samples)
    finally:
        if default_collate_fn_map.get(torch.Tensor) is function:
            default_collate_fn_map[torch.Tensor] = collate_tensor_fn


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
    """The fetcher of a batch of a map-style dataset: an object with `fetch(indices)`."""
    return _MapDatasetFetcher(dataset, True, collate_fn, False)


def dataset_kind_fetcher(
    kind: int, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool
) -> Any:
    """The fetcher of the batches of a worker."""
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
    """The answer of get_worker_info() in this thread meanwhile.

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
