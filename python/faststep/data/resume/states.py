"""The state of a DataLoader: before the first epoch, and checked before it is loaded."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, IterDataPipe

from ..order.asked import asked_by, length_of, state_between_epochs
from ..order.indices import batches_of
from ..order.of_sampler import epoch_of, order_of, restore
from ..order.orders import Order
from ..order.stateful import is_stateful, snapshot, states_of
from ..types import Loader, State
from .loader_stand_in import is_stream
from .progress import Progress, Worker
from .state_form import check_form

KEYS = {
    "_num_yielded",
    "_sampler_iter_yielded",
    "_sampler_iter_state",
    "_base_seed",
    "_iterator_finished",
}
OF_TORCHDATA = {"_snapshot", "fetcher_state"}  # with workers, without


class _Between:
    """The indices of a loader between two epochs."""

    def __init__(self, index_sampler: object) -> None:
        self._sampler = index_sampler

    def finished_state(self) -> State:
        order = order_of(batches_of(self._sampler))
        return (
            state_between_epochs(asked_by(self._sampler))
            if order is None
            else order.finished_state()
        )


def new_state(loader: Loader) -> State:
    """The state of a loader before its first epoch."""
    refuse_pipes(loader.dataset)
    stream = is_stream(loader.dataset)
    progress = Progress(None if stream else _Between(loader._index_sampler), None, 0)
    progress.finished = True  # the next iteration is a new epoch
    progress.num_workers = loader.num_workers
    if is_stateful(loader.dataset) and not loader.num_workers:
        states = snapshot(lambda: states_of(loader.dataset, None, True))
        progress.workers = [Worker(states)]
    return progress.state_dict()


def refuse_pipes(dataset: object) -> None:
    """
    Raises:
        NotImplementedError: the dataset is an IterDataPipe.
    """
    if isinstance(dataset, IterDataPipe):
        raise NotImplementedError(
            f"the place in a {type(dataset).__name__} cannot be kept, as in any IterDataPipe: "
            "make it an IterableDataset"
        )


def check(loader: Loader, state: Any) -> None:
    """
    Raises:
        ValueError: the state does not fit the loader; says what differs.
        NotImplementedError: the loader's dataset is an IterDataPipe.
    """
    refuse_pipes(loader.dataset)
    if isinstance(state, dict) and (found := OF_TORCHDATA & set(state)):
        raise ValueError(
            f"this state, which has {min(found)!r}, is of torchdata's StatefulDataLoader, and "
            f"{type(loader).__name__} loads its own only: come to the epoch's end with "
            "StatefulDataLoader, and begin the next one here"
        )
    missing = sorted(KEYS - set(state)) if isinstance(state, dict) else "keys"
    if missing:
        raise ValueError(f"not a state of this DataLoader: it has no {missing}")
    check_form(state)
    of_stream, stream = state["_sampler_iter_state"] is None, is_stream(loader.dataset)
    if of_stream != stream:
        kinds = ("a map-style dataset", "an iterable dataset")
        raise ValueError(f"this state is of {kinds[of_stream]}, the loader has {kinds[stream]}")
    if not stream:
        _check_sampler(loader, state)
    elif not state["_iterator_finished"] and not state.get("_workers"):
        raise ValueError("not a state of this DataLoader: it does not say where its workers were")
    if "_dataset_epoch" in state and epoch_of(loader.dataset) is None:
        raise ValueError(
            f"this state is of a dataset with an epoch; a {type(loader.dataset).__name__} has none"
        )
    _check_workers(loader, state)


def _check_sampler(loader: Loader, state: State) -> None:
    saved, asked = state["_sampler_iter_state"], asked_by(loader._index_sampler)
    ours = type(asked).__name__
    if saved.get("sampler") != ours:
        raise ValueError(f"this state is of a {saved.get('sampler')}, the loader has a {ours}")
    batches = batches_of(loader._index_sampler)
    order = order_of(batches)
    if not state["_iterator_finished"]:
        known = "samples_yielded" in saved
        if known != (order is not None):
            raise ValueError(
                f"this state is of a {ours} whose order was {'' if known else 'not '}known ahead, "
                "which differs here: its arguments or torch's version do"
            )
        try:
            order_of(batches, saved)  # checks it
            place, length = saved["samples_yielded" if known else "items_yielded"], length_of(asked)
            if not known:
                saved["states" if "states" in saved else "draws"]
        except KeyError as missing:
            raise ValueError(f"not a state of this DataLoader: it has no {missing}") from None
        if known and "position" not in saved and place > (length or 0):
            raise ValueError(
                f"this state is of a place after {place} samples, and there are {length}"
            )
    if order is None:
        _check_asked(asked, saved)
    size = _size_of(loader._index_sampler, order)
    if state.get("_beyond") and (state["_batch_size"] != size or loader.path == "arrays"):
        raise ValueError(
            "this state was saved with in_order=False while batches were missing: it fits the same "
            f"dataset and batch_size, {state['_batch_size']}, not {size}"
        )


def _size_of(sampler: Any, order: Order | None) -> int:
    """The batch size that an index sampler's batches are counted in."""
    known = sampler if order is None else order
    return known.batch_size if order is not None or type(sampler) is BatchSampler else 0


def _check_asked(asked: object, saved: State) -> None:
    name = type(asked).__name__
    if "length" not in saved:
        raise ValueError("not a state of this DataLoader: it has no 'length'")
    if epoch_of(asked) is None and saved["length"] != length_of(asked):  # which epochs may change
        raise ValueError(
            f"this state is of a {name} of length {saved['length']}, the loader's has "
            f"{length_of(asked)}"
        )
    if (saved.get("states") or {}).get("object") is not None and not is_stateful(asked):
        raise ValueError(f"this state has one of a {name}, which has no load_state_dict here")


def _check_workers(loader: Loader, state: State) -> None:
    finished, saved_workers = state["_iterator_finished"], state.get("_workers")
    if finished and saved_workers is None:
        return
    workers = state.get("_num_workers", loader.num_workers)
    if workers != loader.num_workers:
        raise ValueError(
            f"this state is of a loader with num_workers={workers}, each of which was at a place "
            f"of its own in the dataset; this loader has num_workers={loader.num_workers}"
        )
    name = type(loader.dataset).__name__
    if any(
        ((saved.get("states") or {}).get("object")) is not None for saved in saved_workers or []
    ):
        if not is_stateful(loader.dataset):
            raise ValueError(f"this state has one of the dataset; a {name} has no load_state_dict")
        if (
            loader.num_workers
            and loader._faststep.worker_method == "thread"
            and not is_stream(loader.dataset)
        ):
            raise ValueError(
                f"this state has one of the {name} in each worker process; with "
                "worker_method='thread' all share one"
            )


def restore_parts(loader: Loader, state: State) -> None:
    """Sets what belongs to the sampler or the dataset itself, once the state was checked."""
    if state["_sampler_iter_state"] is not None:
        asked = asked_by(loader._index_sampler)
        restore(asked, state["_sampler_iter_state"], state["_iterator_finished"])
    if "_dataset_epoch" in state:
        loader.dataset.set_epoch(state["_dataset_epoch"])


def explain(loader: Loader) -> str:
    """How the position in an epoch is saved."""
    if isinstance(loader.dataset, IterDataPipe):
        return "; its place cannot be kept"
    if is_stream(loader.dataset):
        if is_stateful(loader.dataset):
            return "; state_dict() has the dataset's own, of each worker"
        return (
            "; after load_state_dict() samples are read again and dropped, unless the dataset's "
            "iterator keeps a state"
        )
    return _explain_sampler(loader._index_sampler) + _explain_map(loader)


def _explain_sampler(sampler: object) -> str:
    sized = length_of(asked_by(sampler)) is not None
    if sized and order_of(batches_of(sampler)) is not None:
        return "; state_dict() has the place in an order that can be known"
    name = type(asked_by(sampler)).__name__
    if is_stateful(asked_by(sampler)):
        return f"; state_dict() has the {name}'s own"
    return (
        f"; after load_state_dict() the {name} is asked again for the indices before, unless its "
        "iterator keeps a state"
    )


def _explain_map(loader: Loader) -> str:
    if not is_stateful(loader.dataset):
        return ""
    if loader.num_workers and loader._faststep.worker_method == "thread":
        return ", and not the dataset's own, which threads share"
    return ", and the dataset's own, of each worker"
