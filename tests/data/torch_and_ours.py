"""The same loader twice, torch's and ours, and what comes of them."""

import io
import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data

import faststep.data

# A sanitizer's allocator has its own mind about memory.
without_sanitizer = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="memory is counted"
)

Outcome = tuple[list[Any], list[Any]]  # batches, or errors; random states


def plain(value: Any) -> Any:
    """Something that == compares: containers with their types, tensors with form and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        bits = flat.view(torch.uint8).tolist() if flat.numel() else []
        return ("tensor", value.dtype, tuple(value.shape), value.stride(), type(value), bits)
    if isinstance(value, dict):
        return (type(value), [(key, plain(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [plain(item) for item in value])
    return value


def outcomes(
    batches: Any, after: Callable[[], object] = list, stop: int | None = None
) -> list[Any]:
    """Batches, or what was raised in the place of some; `after` is called after each."""
    iterator, found = iter(batches), list[Any]()
    while len(found) != stop:
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            found.append((type(error), str(error)))
        after()
    return found


def is_error(outcome: Any) -> bool:
    return isinstance(outcome[0], type) and issubclass(outcome[0], Exception)


def without_texts(found: list[Any]) -> list[Any]:
    """Outcomes whose errors are only of the same type: the texts of workers' have a traceback."""
    return [one[0] if is_error(one) else one for one in found]


def saved(state: Any) -> Any:
    """As a checkpoint keeps it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def seeded(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def side_by_side(count: int, work: Callable[[], object]) -> None:
    """Runs `work` in so many threads."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def child(work: Callable[[], object]) -> None:
    """Runs `work` in a forked child; fails if it raises, or hangs."""
    number = os.fork()
    if number == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for _ in range(30_000):
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(number, 9)
    os.waitpid(number, 0)
    pytest.fail("the child hangs")


def run(loader: Any, generators: list[torch.Generator], epochs: int, stop: int | None) -> Outcome:
    """All batches of some epochs, each perhaps broken off, and the generators' states between."""
    batches: list[Any] = []
    states: list[Any] = []

    def note() -> None:
        states.append([g.get_state().tolist() for g in generators])

    for _ in range(epochs):
        iterator = iter(loader)
        note()
        batches += outcomes(iterator, note, stop)
        note()
        del iterator
    return batches, states


def assert_same(
    make: Callable[[], tuple[Any, dict[str, Any]]],
    epochs: int = 2,
    stop: int | None = None,
    path: str = "arrays",
    workers: int = 0,
) -> list[Any]:
    """Both loaders give the same batches and leave the same random states after each of them.

    `make` returns a dataset and a DataLoader's arguments, new ones at each call.  With `workers`
    ours gets them; torch's, whose batches do not depend on them, gets none, and then the states
    between batches are not compared.
    """
    outcomes = []
    for library in (torch.utils.data, faststep.data):
        torch.default_generator.manual_seed(11)
        random.seed(11)
        dataset, options = make()
        ours = library is faststep.data
        if ours and workers:
            options["num_workers"] = workers
        loader = library.DataLoader(dataset, **options)
        if ours:
            assert loader.path == path, loader.explain()
        generators = [torch.default_generator]
        if options.get("generator") is not None:
            generators.append(options["generator"])
        outcomes.append(run(loader, generators, epochs, stop))
    (want, want_states), (got, got_states) = outcomes
    assert got == want
    if not workers:
        assert got_states == want_states
    else:
        assert got_states[-1] == want_states[-1]
    return got
