"""States of torchdata's StatefulDataLoader, as states of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from ..order.asked import asked_by, length_of
from ..order.indices import batches_of
from ..order.keyed import KeyedSampler
from ..order.of_sampler import epoch_of, order_of
from ..types import Loader, State
from .loader_stand_in import is_stream

__all__ = ["is_of_torchdata", "translated"]

CHUNK = 32  # indices that RandomSampler draws at a time, with replacement


def is_of_torchdata(state: object) -> bool:
    """Whether a state is one of torchdata's, whose loaders with workers have another form."""
    return isinstance(state, dict) and ("_snapshot" in state or "fetcher_state" in state)


def translated(loader: Loader, state: State) -> State:
    """What `loader.state_dict()` would say at the place of a state of torchdata 0.8 to 0.11.

    Raises:
        ValueError: the state is damaged, or of a place that only torchdata's loader can find again;
            says what to do.
    """
    try:
        return _translated(loader, state)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"this state of torchdata is damaged: {type(error).__name__}: {error}"
        ) from error


def _translated(loader: Loader, state: State) -> State:
    finished, main, since, step = bool(state["_iterator_finished"]), state, 0, 0
    workers = [state]
    if "_snapshot" in state:
        snapshot, since = state["_snapshot"], _count(state["_steps_since_snapshot"])
        main, step = snapshot["_main_snapshot"], _count(snapshot["_snapshot_step"])
        kept = snapshot["_worker_snapshots"]
        workers = [kept[f"worker_{i}"] for i in range(main["_num_workers"])]
    else:
        step = _count(state["_num_yielded"])
    made: State = {
        "_num_yielded": step + since,
        "_sampler_iter_yielded": step + since,
        "_sampler_iter_state": None,
        "_base_seed": main.get("_base_seed"),
        "_iterator_finished": finished,
    }
    if not is_stream(loader.dataset):
        made["_sampler_iter_state"] = _sampler_state(loader, main, since, step, finished)
    saved_workers = [_record(worker) for worker in workers]
    has_states = any(saved is not None for saved in saved_workers)
    if finished or not (has_states or is_stream(loader.dataset)):
        return made
    if since:
        raise _only_there(f"it was saved {since} batches after its dataset's own")
    if not has_states:
        if "_snapshot" in state:
            raise _only_there("its dataset keeps no state, and has to be read by the same workers")
        saved_workers = [{"samples": step * (loader.batch_size or 1)}]
    made["_workers"] = [saved or {} for saved in saved_workers]
    made["_num_workers"] = main.get("_num_workers", 0)
    if "_snapshot" in state:
        made["_last_worker"] = state["_snapshot"]["_last_yielded_worker_id"]
    return made


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no number of batches")
    return value


def _only_there(reason: str) -> ValueError:
    return ValueError(
        f"this state of torchdata cannot be loaded: {reason}. Load it with StatefulDataLoader, and "
        "save another one with snapshot_every_n_steps=1, or come to the epoch's end there, and "
        "begin the next one here"
    )


def _record(worker: State) -> State | None:
    """The states of a worker's dataset, as ours has them; None if there are none."""
    fetcher = worker["fetcher_state"] or {"dataset_iter_state": None, "fetcher_ended": False}
    states = {
        "object": worker["dataset_state"],
        "iterator": fetcher["dataset_iter_state"],
        "ended": bool(fetcher["fetcher_ended"]),
    }
    return None if states["object"] is states["iterator"] is None else {"states": states}


def _sampler_state(loader: Loader, main: State, since: int, step: int, finished: bool) -> State:
    index_sampler = loader._index_sampler
    asked, order = asked_by(index_sampler), order_of(batches_of(index_sampler))
    if isinstance(asked, KeyedSampler):
        raise _only_there("torchdata does not know the place of a KeyedSampler")
    saved = main["_sampler_iter_state"] or {}
    # a state of torchdata's own batch sampler, with another sampler's in it
    is_nested = type(index_sampler) is BatchSampler and "samples_yielded" in saved
    since *= index_sampler.batch_size if type(index_sampler) is BatchSampler else 1
    made: State = {"sampler": type(asked).__name__, "length": length_of(asked)}
    if order is not None:
        made.update(order.state)
    if epoch_of(asked) is not None:
        made["epoch"] = epoch_of(asked)
    if not finished:
        items = _count(saved["samples_yielded"]) if is_nested else step
        items += since
        if order is None:
            made.update(items_yielded=items, since=items, draws={})
        else:
            made["samples_yielded"] = items = min(items, len(asked))
        if order is not None and isinstance(asked, DistributedSampler):
            made["position"] = min(made["length"], items * asked.num_replicas)
    own, of_iterator = main["_index_sampler_state"], saved or None
    if is_nested:
        own, of_iterator = saved.get("sampler_state"), saved.get("sampler_iter_state")
    if isinstance(asked, RandomSampler):
        drawn = None if of_iterator is None else of_iterator["generator"]
        _add_generator(made, asked, drawn, finished, order is not None)
    elif order is None and not own is of_iterator is None:
        made["states"] = {"object": own, "iterator": of_iterator, "ended": finished}
        if not finished:
            made["since"] = since
    return made


def _add_generator(
    made: State, sampler: RandomSampler, drawn: object, finished: bool, is_known: bool
) -> None:
    """What torchdata's RandomSampler began its epoch with, from which ours draws the same."""
    if drawn is None:
        return
    if finished:
        if sampler.generator is not None:
            made["generator"] = _after_an_epoch(sampler, drawn)
    elif is_known:
        made["generator"] = drawn
    elif sampler.generator is None:
        raise _only_there("give the RandomSampler a generator here")
    else:
        made["draws"] = {"first": {"own": drawn}}


def _after_an_epoch(sampler: RandomSampler, drawn: Any) -> torch.Tensor:
    generator, n = torch.Generator(), len(sampler.data_source)
    generator.set_state(drawn)
    at_once = CHUNK if sampler.replacement else n
    for _ in range(max(1, -(-sampler.num_samples // at_once))):
        if sampler.replacement:
            torch.randint(n, (CHUNK,), generator=generator)
        else:
            torch.randperm(n, generator=generator)
    return generator.get_state()
