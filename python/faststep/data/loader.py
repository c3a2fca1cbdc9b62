"""DataLoader: chooses the path of the batches, and keeps the position in an epoch."""

from __future__ import annotations

import copy
import os
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, IterDataPipe
from typing_extensions import Unpack  # torch depends on it

from .. import _C
from .._torch.data_loader import BaseDataLoaderIter, call_as_loader, collates_as_default
from .arrays.array_iterator import ArraysAlone, ArraysByWorkers
from .arrays.columns import NotArrays
from .arrays.gather_plan import GatherPlan
from .deliver.copies import copier_of
from .deliver.stages import BatchStage, DeviceIterator, LeavingOut, Transformed
from .options import OPTIONS, Extras, Path, Unprepared
from .order.of_sampler import order_of
from .plain import MultiIterator, OwnWorkers, SingleIterator
from .resume import states
from .resume.loader_stand_in import keeps_seed
from .stats import Metered, StageTimes
from .transforms import Compose
from .types import State, TorchOptions, Transform
from .workers.arena import Workers
from .workers.processes import ProcessIterator
from .workers.threads import ThreadIterator

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
    torch's, but hand over their batches in shared memory that is used again. `path` names the
    path that the batches take, and `explain()` gives the reason.

    `state_dict()` and `load_state_dict()` save and restore the position in an epoch.

    Args:
        dataset, *arguments, **options: torch's.
        device: where the batches are delivered, a CUDA device or the CPU. They are copied ahead,
            from page-locked memory and on a stream of their own, and the current stream waits for
            them. Default: on the host, and nothing is copied.
        prefetch_to_device: with `device`, how many batches are on it, or on their way, besides the
            one that is delivered. Random numbers are drawn and the dataset's code runs when a batch
            is fetched, up to `prefetch_to_device` batches before it is delivered. Default: 2.
        transforms: what every batch goes through when it is delivered, with `device` on the device:
            a faststep.data.transforms.Compose, whose random numbers follow from the epoch's base
            seed and the batch's number, or any other function of a batch. Default: nothing.
        worker_method: what the `num_workers` workers of other datasets are, "process" or "thread".
            Threads share the dataset and everything else, the global random generators too. Their
            samples are fetched side by side as far as they let go of the GIL. Default: "process".
        snapshot_every_n_steps: how often an iterable dataset or sampler that keeps a state of its
            own is asked for it where batches are loaded ahead: by each worker once in so many
            batches. To go on, those since are read again and dropped. With 0 it is asked after the
            first batch only. Default: None, for each batch, but for states that would take more
            than a twentieth of the time.
        skip_errors: a sample whose reading raises is left out of its batch, which is shorter then,
            or is left out itself where it has no sample. `stats()` counts and names them, and the
            first of an epoch is a warning. MemoryError, and what is no Exception, are raised as
            ever, and so are errors of `collate_fn`. Default: False, all are raised.

    Raises:
        TypeError: `transforms` is not a function.
        ValueError: `device` is of another type, `prefetch_to_device` is not an int from 0 on,
            `snapshot_every_n_steps` none from 0 on, `skip_errors` comes with an IterDataPipe, or
            `worker_method` is none of the two, or comes with a `multiprocessing_context`.
    """

    _faststep: Extras
    path = Path(lambda loader: _path_of(loader))
    _is_accelerate_prepared = Unprepared()

    def __init__(
        self,
        dataset: Dataset[_T_co],
        *arguments: Any,
        device: torch.device | str | int | None = None,
        prefetch_to_device: int = 2,
        transforms: Transform | None = None,
        worker_method: str = "process",
        snapshot_every_n_steps: int | None = None,
        skip_errors: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        own = Extras(
            device,  # type: ignore[arg-type]
            prefetch_to_device,
            transforms,
            worker_method,
            snapshot_every_n_steps,
            skip_errors,
        )
        super().__init__(dataset, *arguments, **options)
        if worker_method == "thread" and self.multiprocessing_context is not None:
            raise ValueError("worker_method='thread' starts no process: no multiprocessing_context")
        if skip_errors and isinstance(dataset, IterDataPipe):
            raise ValueError("skip_errors: an IterDataPipe ends at an error: none can be skipped")
        for name in OPTIONS:  # for the user to read; a subclass may use the name
            if name not in vars(self) and not hasattr(type(self), name):
                setattr(self, name, getattr(own, name))
        self._faststep = own

    def __setattr__(self, name: str, value: object) -> None:
        own = vars(self).get("_faststep")
        if own is not None and name in OPTIONS and getattr(own, name) != OPTIONS[name]:
            raise ValueError(f"{name} of a DataLoader cannot be changed: make another one")
        super().__setattr__(name, value)

    def explain(self) -> str:
        """Which path the batches take, and why not a faster one, in a sentence or two."""
        plan = _plan_of(self)
        more = states.explain(self) + self._faststep.explain_device()
        if isinstance(plan, str):
            if self.num_workers:
                if self.pin_memory and self._faststep.device is None:
                    more += PINNED_BY_TORCH
                return f"{_workers_of(self).explain()}; not gathered from arrays, as {plan}{more}"
            return f"torch's own iterator loads the batches: {plan}{more}"
        order = order_of(self.batch_sampler)
        fields = ", ".join(
            f"{name} ({form.prototype.dtype}, {tuple(form.prototype.shape[1:])})"
            for name, form in zip(plan.names, plan.forms, strict=True)
        )
        asked = "known ahead" if order else "asked of the sampler batch by batch, as torch does"
        if plan.in_place is not None:
            name = plan.names[plan.in_place.field]
            more = f"; of {name} only what transforms show is read, and where it lies{more}"
        return f"threads gather the batches from {fields}; their order is {asked}{more}"

    def _get_iterator(self) -> Any:
        own = self._faststep
        copier = (
            None if own.device is None else copier_of(own.device)
        )  # may raise: before any random number is drawn
        iterator = _host_iterator(self)
        if own.skip_errors:
            own.left_out = {}
            iterator = LeavingOut(iterator, own.left_out)
        if copier is not None:
            iterator = DeviceIterator(iterator, copier, own.prefetch_to_device)
        if own.transforms is not None:
            return Transformed(iterator, own.transforms, own)
        return iterator

    def __iter__(self) -> BaseDataLoaderIter:
        own = self._faststep
        if _is_of_parent(self._iterator):
            self._iterator = None  # a persistent one, which a forked child cannot take over
        iterator = super().__iter__()
        if not isinstance(iterator, Metered):  # of a subclass, which has its own _get_iterator
            own.progress, own.meter, own.stranger = None, None, type(iterator).__name__
            return iterator
        layer: Any = iterator
        own.progress, own.stranger = layer.progress, None  # of this epoch
        own.meter = StageTimes(iterator)
        while hasattr(layer, "meter"):
            layer.meter = own.meter
            layer = getattr(layer, "_batches", None)
        return iterator

    def stats(self) -> State | None:
        """How the batches of the newest epoch came; None before the first.

        Returns:
            A dict.

            - "batches", "bytes": delivered; the bytes of dense tensors in lists, tuples and dicts,
              as many per batch as the first 8 and every 64th had on average. They are None if one
              of those had more than 64 objects in these.
            - "seconds": since the epoch began.
            - "wait": how long `next` took, in seconds: the "total", the percentiles "p50", "p95"
              and "p99" of the newest 4096 batches, and the "max".
            - "stages": the total by what took it, in seconds: "load", "device", "transforms".
            - "queued": batches that are loaded, or being loaded, for later.
            - "page_faults": minor faults of this process since the epoch began, by whatever caused
              them.
            - "slots": pieces of memory for batches on the array path, with worker processes, and
              of image folders: how many were "made" since the loader was, and how many are "free",
              and "held" by tensors, now; those of worker processes may also be "taken" by one.
            - "skipped", with `skip_errors`: how many "samples" were left out, how many "batches"
              lost all of theirs, and of the first 100 samples "named" the "index" (with an iterable
              dataset its number in its worker), "worker" and "error".
        """
        own = self._faststep
        if own.meter is None:
            return None
        stats = own.meter.stats()
        slots = None if own.workers is None else own.workers.slots()
        if own.slots is not None:
            slots = dict(zip(("made", "free", "held"), own.slots.counts(), strict=True))
        if own.left_out is not None:
            stats["skipped"] = copy.deepcopy(own.left_out)
        return stats if slots is None else stats | {"slots": slots}

    def state_dict(self) -> State:
        """The position after the last delivered batch.

        A few numbers where the order of a map-style dataset is known ahead. Besides, random states
        that a sampler or dataset began its epoch with, and the states of those that have the
        methods state_dict and load_state_dict.

        Raises:
            NotImplementedError: the dataset is an IterDataPipe, or a subclass of the loader has
                made an iterator of its own.
        """
        own = self._faststep
        if own.resume is not None:
            return copy.deepcopy(own.resume)
        if own.stranger is not None:
            raise NotImplementedError(
                f"the place of a {own.stranger} cannot be kept: {type(self).__name__} has made an "
                "iterator of its own"
            )
        if own.progress is None:
            return states.new_state(self)
        states.refuse_pipes(self.dataset)
        state = own.progress.state_dict()
        return state if own.transforms is None else state | {"_transforms_epoch": own.epoch}

    def load_state_dict(self, state_dict: State) -> None:
        """Let the next iteration go on after the last batch that was delivered before `state_dict`.

        That iteration draws no random numbers for what it skips. If the state is of an epoch that
        came to its end, the next iteration is a new epoch; if only its last batch had been
        delivered, the next iteration has no batch.

        Raises:
            ValueError: the state is of another loader, or of torchdata's; says what differs.
            NotImplementedError: as `state_dict`.
        """
        states.check(self, state_dict)
        state = copy.deepcopy(state_dict)
        states.restore_parts(self, state)
        own = self._faststep
        own.progress = own.stranger = None
        self._iterator = None  # a persistent iterator is at another position
        own.resume = state

    def __getstate__(self) -> State:
        """For pickle and copy: without what belongs to this process."""
        return {**vars(self), "_faststep": copy.copy(self._faststep), "_iterator": None}


def _plan_of(loader: DataLoader[Any]) -> GatherPlan | str:
    """The plan by which threads gather the batches, or why there is none."""
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is iterable"
    if loader.batch_sampler is None:
        return "batch_size is None"
    if loader._index_sampler is not loader.batch_sampler:
        return "a subclass asks for other indices than batch_sampler's"
    if loader.num_workers and loader.worker_init_fn is not None:
        return "worker_init_fn has to run in worker processes"
    try:
        plan = GatherPlan(loader.dataset)
    except NotArrays as reason:
        return str(reason)
    if not collates_as_default(loader.collate_fn, plan.structure.container_types()):
        return "collate_fn is not torch's default, or types were added to what that knows"
    own = loader._faststep
    if own.device is None and type(own.transforms) is Compose:
        field = own.transforms.leaf_of_images(plan.structure)
        if field is not None:
            plan.leave_in_place(field)
    return plan


def _workers_of(loader: DataLoader[Any]) -> Workers:
    own = loader._faststep
    if own.workers is None:
        own.workers = Workers(own.worker_method)
    return own.workers


def _path_of(loader: DataLoader[Any]) -> str:
    if not isinstance(_plan_of(loader), str):
        return "arrays"
    return _workers_of(loader).path if loader.num_workers else "torch"


def _host_iterator(loader: DataLoader[Any]) -> Any:
    own, plan = loader._faststep, _plan_of(loader)
    state = own.resume
    own.epoch = 0
    iterator = _iterator_from(loader, plan, state)
    own.resume = None
    if state is not None and keeps_seed(loader, state):
        own.epoch = state.get("_transforms_epoch", 0) + state["_iterator_finished"]
    return iterator


def _iterator_from(loader: DataLoader[Any], plan: GatherPlan | str, state: State | None) -> Any:
    own = loader._faststep
    if loader.num_workers:
        call_as_loader(loader.check_worker_number_rationality)
    if not isinstance(plan, str):
        if own.slots is None:
            own.slots = _C.Slots()
        kind = ArraysByWorkers if loader.num_workers else ArraysAlone
        return kind(loader, plan, own.slots, state)
    if not loader.num_workers:
        return SingleIterator(loader, state)
    if own.worker_method == "thread":
        return ThreadIterator(loader, state)
    workers = _workers_of(loader)
    if not workers.prepare():
        return MultiIterator(loader, state)
    return ProcessIterator(loader, workers, state)


def _is_of_parent(iterator: Any) -> bool:
    """True if the workers of an iterator stayed with the process that was forked."""
    while isinstance(iterator, BatchStage):
        iterator = iterator._batches
    return isinstance(iterator, OwnWorkers) and iterator._process != os.getpid()


def prepare_loader(accelerator: Any, loader: DataLoader[object]) -> Any:
    """`accelerator.prepare(loader)`, with a loader of faststep inside instead of torch's.

    Args:
        accelerator: an `accelerate.Accelerator`.
        loader: a faststep.data.DataLoader, with any of its arguments.

    Returns:
        accelerate's loader. Its batches are those of `loader`, transformed and on their device; on
        several processes each has its part. To go on in an epoch use its `load_state_dict`:
        `accelerator.skip_first_batches` makes a loader of torch's.

    Raises:
        TypeError: `loader` is no DataLoader of faststep, or accelerate gives a loader that none can
            be put into, as for XLA.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare_loader takes a faststep.data.DataLoader, not {loader!r}")
    plain: object = copy.copy(loader)
    vars(plain)["_faststep"] = Extras()
    prepared = accelerator.prepare_data_loader(plain)
    if "base_dataloader" not in vars(prepared):
        raise TypeError(f"accelerate made a {type(prepared).__name__}, which takes no other loader")
    ours = copy.copy(loader)
    vars(ours).update(vars(prepared.base_dataloader))  # its samplers, split among processes
    prepared.base_dataloader = ours
    prepared.dl_state_dict = ours.state_dict()
    prepared._is_accelerate_prepared = True
    return prepared
