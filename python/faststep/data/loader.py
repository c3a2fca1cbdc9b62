"""torch's DataLoader, with a faster way for data that lies in arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

from faststep import _C
from faststep._torch import collates_as_default

from . import states
from .columns import NotArrays
from .copies import copier_of
from .iterator import ArrayIterator
from .orders import order_of
from .placed import MultiIterator, SingleIterator
from .plan import Plan
from .prefetch import DeviceIterator
from .progress import Progress
from .stats import Meter
from .transformed import Transformed
from .view import keeps_seed
from .workers.route import Workers, is_of_parent

__all__ = ["DataLoader"]

_T_co = TypeVar("_T_co", covariant=True)

PINNED_BY_TORCH = (
    "; torch's thread copies them into page-locked memory of its own, as only of that it knows "
    "when a script's copies have passed; device= needs none"
)


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """torch.utils.data.DataLoader: the same arguments, batches, order and random draws.

    A dataset that lies in arrays (torch's TensorDataset, ArrayDataset, TokenDataset, and Subset and
    ConcatDataset of these) with torch's default collate function is read by threads without the
    GIL, ahead of the consumer, into memory that is used again; `num_workers` is then the number of
    threads, as far as there are cores, and no process is started. Workers of any other dataset are
    torch's, but hand over their batches in shared memory that is used again. `path` says which way
    it is, and `explain()` why.

    `state_dict()` and `load_state_dict()` save and restore the place in an epoch.

    Args:
        dataset, *arguments, **options: torch's.
        device: where the batches are delivered, a CUDA device or the CPU. They are copied ahead,
            from page-locked memory and on a stream of their own, and the current stream waits for
            them. Default: on the host, and nothing is copied.
        prefetch_to_device: with `device`, how many batches are on it, or on their way, besides the
            one that is delivered. The sampler is asked for them, and the dataset's code runs, so
            much earlier. Default: 2.
        transforms: what every batch goes through when it is delivered, with `device` on the device:
            a faststep.data.transforms.Compose, whose random numbers follow from the epoch's base
            seed and the batch's number, or any other function of a batch. Default: nothing.
        worker_method: what the `num_workers` workers of other datasets are, "process" or "thread".
            Threads share the dataset and everything else, the global random generators too. Their
            samples are fetched side by side as far as they let go of the GIL. Default: "process".
        snapshot_every_n_steps: how often an iterable dataset or sampler that keeps a state of its
            own is asked for it where batches are loaded ahead: by each worker once in so many
            batches. To go on, those since are read again and dropped. Default: None, for each
            batch, but for states that would take more than a twentieth of the time.

    Raises:
        TypeError: `transforms` is not a function.
        ValueError: `device` is of another type, `prefetch_to_device` is not an int from 0 on,
            `snapshot_every_n_steps` none from 1 on, or `worker_method` is none of the two, or comes
            with a `multiprocessing_context`.
    """

    _slots: _C.Slots | None = None
    _workers: Workers | None = None
    _epoch = 0  # of the iterator, where persistent workers share one
    _progress: Progress | None = None
    _meter: Meter | None = None
    _resume: dict[str, Any] | None = None
    _device: torch.device | None = None
    _prefetch_to_device = 0
    snapshot_every_n_steps: int | None = None

    def __init__(
        self,
        dataset: Dataset[_T_co],
        *arguments: Any,
        device: torch.device | str | int | None = None,
        prefetch_to_device: int = 2,
        transforms: Callable[[Any], Any] | None = None,
        worker_method: str = "process",
        snapshot_every_n_steps: int | None = None,
        **options: Any,
    ) -> None:
        if transforms is not None and not callable(transforms):
            raise TypeError(f"transforms must be a function of a batch, not {transforms!r}")
        super().__init__(dataset, *arguments, **options)
        self.transforms = transforms
        if worker_method not in ("process", "thread"):
            raise ValueError(f"worker_method must be 'process' or 'thread', not {worker_method!r}")
        if worker_method == "thread" and self.multiprocessing_context is not None:
            raise ValueError("worker_method='thread' starts no process: no multiprocessing_context")
        self.worker_method = worker_method
        every = snapshot_every_n_steps
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(
                f"snapshot_every_n_steps must be an int from 1 on or None, not {every!r}"
            )
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._device = None if device is None else torch.device(device)
        self._prefetch_to_device = prefetch_to_device
        if self._device is not None and self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CUDA device or the CPU, not {device!r}")
        if type(prefetch_to_device) is not int or prefetch_to_device < 0:
            raise ValueError(
                f"prefetch_to_device must be an int from 0 on, not {prefetch_to_device!r}"
            )

    @property
    def path(self) -> str:
        """How the batches come.

        "arrays" if threads gather them, "workers" if processes fetch them into shared memory,
        "threads" if Python threads do so, "torch" if torch's own iterator loads them.
        """
        if not isinstance(self._plan(), str):
            return "arrays"
        return self._route().path if self.num_workers else "torch"

    def explain(self) -> str:
        """A sentence or two: which way the data takes, and why not a faster one."""
        plan = self._plan()
        if isinstance(plan, str):
            more = states.explain(self) + self._explain_device()
            if self.num_workers:
                if self.pin_memory and self._device is None:
                    more += PINNED_BY_TORCH
                return f"{self._route().explain()}; not gathered from arrays, as {plan}{more}"
            return f"torch's own iterator loads the batches: {plan}{more}"
        order = order_of(self.batch_sampler)
        fields = ", ".join(
            f"{name} ({form.prototype.dtype}, {tuple(form.prototype.shape[1:])})"
            for name, form in zip(plan.names, plan.forms, strict=True)
        )
        asked = "known ahead" if order else "asked of the sampler batch by batch, as torch does"
        more = states.explain(self) + self._explain_device()
        return f"threads gather the batches from {fields}; their order is {asked}{more}"

    def _explain_device(self) -> str:
        if self._device is None:
            return ""
        return f"; up to {self._prefetch_to_device} more are on {self._device}, or on their way"

    def _plan(self) -> Plan | str:
        """The arrays to gather from, or why there are none."""
        if isinstance(self.dataset, IterableDataset):
            return "the dataset is iterable"
        if self.batch_sampler is None:
            return "batch_size is None"
        if self.num_workers and self.worker_init_fn is not None:
            return "worker_init_fn has to run in worker processes"
        try:
            plan = Plan(self.dataset)
        except NotArrays as reason:
            return str(reason)
        if not collates_as_default(self.collate_fn, plan.structure.container_types()):
            return "collate_fn is not torch's default, or types were added to what that knows"
        return plan

    def _route(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(self.worker_method)
        return self._workers

    def _get_iterator(self) -> Any:
        if self._device is None:
            return self._host_iterator()
        copier = copier_of(self._device)  # before anything is drawn
        return DeviceIterator(self._host_iterator(), copier, self._prefetch_to_device)

    def _host_iterator(self) -> Any:
        plan = self._plan()
        state = self._resume
        self._epoch = 0
        iterator = self._iterator_from(plan, state)
        self._resume = None
        if state is not None and keeps_seed(self, state):
            self._epoch = state.get("_transforms_epoch", 0) + state["_iterator_finished"]
        return iterator

    def _iterator_from(self, plan: Plan | str, state: dict[str, Any] | None) -> Any:
        if not isinstance(plan, str):
            if self._slots is None:
                self._slots = _C.Slots()
            return ArrayIterator(self, plan, self._slots, state)
        if not self.num_workers:
            return SingleIterator(self, state)
        iterator = self._route().iterator(self, state)
        return MultiIterator(self, state) if iterator is None else iterator

    def __iter__(self) -> Any:
        if is_of_parent(self._iterator):
            self._iterator = None  # a persistent one, which a forked child cannot take over
        again = self._iterator is not None
        iterator: Any = super().__iter__()
        self._progress = iterator.progress  # the epoch's, if the iterator is a persistent one
        self._epoch += again
        if self.transforms is not None:
            iterator = Transformed(iterator, self.transforms, self._epoch)
        self._meter = Meter(iterator)
        layer = iterator
        while hasattr(layer, "meter"):
            layer.meter = self._meter
            layer = getattr(layer, "_batches", None)
        return iterator

    def stats(self) -> dict[str, Any] | None:
        """How the batches of the newest epoch came; None before the first.

        Returns:
            "batches", "bytes": delivered; the bytes of dense tensors.
            "seconds": since the epoch began.
            "wait": how long `next` took, in seconds: the "total", the percentiles "p50", "p95" and
                "p99" of the newest 4096 batches, and the "max".
            "stages": the total by what took it, in seconds: "load", "device", "transforms".
            "queued": batches that are loaded, or being loaded, for later.
            "page_faults": minor faults of this process since the epoch began, by whatever caused
                them; None where the system does not tell.
            "slots": memory for batches on the array path, and of image folders without worker
                processes: how many pieces were "made" since the loader was, and how many are
                "free" and "held" now.
        """
        if self._meter is None:
            return None
        stats = self._meter.stats()
        if self._slots is not None:
            stats["slots"] = dict(zip(("made", "free", "held"), self._slots.counts(), strict=True))
        return stats

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was delivered, under torchdata's names.

        A few numbers where the order of a map-style dataset is known ahead. Besides, random states
        that a sampler or dataset began its epoch with, and the states of those that have the
        methods state_dict and load_state_dict.

        Raises:
            NotImplementedError: the dataset is an IterDataPipe.
        """
        if self._resume is not None:
            return copy.deepcopy(self._resume)
        if self._progress is None:
            return states.new_state(self)
        states.refuse_pipes(self.dataset)
        state = self._progress.state_dict()
        return state if self.transforms is None else state | {"_transforms_epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on after the last batch that was delivered before `state_dict`.

        That iteration draws no random numbers for what it skips. If the state is of an epoch that
        came to its end, the next iteration is a new epoch; if only its last batch had been
        delivered, the next iteration has no batch.

        Raises:
            ValueError: the state is of another loader; says what differs.
            NotImplementedError: as `state_dict`.
        """
        states.check(self, state_dict)
        state = copy.deepcopy(state_dict)
        states.restore_parts(self, state)
        self._progress = None
        self._iterator = None  # a persistent one is in the middle of something else
        self._resume = state

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: without what belongs to this process."""
        own = ("_slots", "_workers", "_progress", "_meter", "_iterator")
        return {**{k: v for k, v in vars(self).items() if k not in own}, "_iterator": None}
