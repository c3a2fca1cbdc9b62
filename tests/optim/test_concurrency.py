"""Threads, processes and instruction sets: none of them may change a bit."""

import functools
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from faststep import _C
from programs import Programs

from . import digest
from .common import assert_same_bits, parameters, set_gradients, train
from .declarations import ADAMW, ALL, SGD, Declaration

over_all = pytest.mark.parametrize("declaration", ALL, ids=lambda d: d.name)


@pytest.fixture(scope="module")
def here() -> list[str]:
    """This process's hashes, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = list(digest.lines())
    torch.set_num_threads(threads)
    return found


def test_thread_count_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a parameter that is split among the threads of a step."""
    monkeypatch.setattr(digest, "SIZES", (300_001, *digest.SIZES))
    monkeypatch.setattr(digest, "values", functools.cache(digest.values.__wrapped__))
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(list(digest.lines()))
    assert found[0] == found[1]


OTHERS = [isa for isa in _C.cpu_info()["supported"] if isa != _C.cpu_info()["isa"]]


def test_no_instruction_set_changes_anything(here: list[str], programs: Programs) -> None:
    """Every other supported level, forced by FASTSTEP_CPU in a process of its own."""
    small = [*digest.small_lines()]
    for isa in OTHERS:
        done = programs.run(Path(digest.__file__).read_text(), "2", FASTSTEP_CPU=isa)
        assert done.returncode == 0, done.stderr
        used, *found = done.stdout.splitlines()
        assert used == isa
        assert found == [*here, *small], isa


def test_unknown_instruction_set_is_an_import_error(programs: Programs) -> None:
    done = programs.run("import faststep", FASTSTEP_CPU="z80")
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "z80" in done.stderr
    assert all(isa in done.stderr for isa in _C.cpu_info()["supported"])


def step_all(declaration: Declaration, steps: int, seed: int) -> list[torch.Tensor]:
    params = parameters((40_000,), (100, 30), *[(7,)] * 20, seed=seed)
    optimizer = declaration.ours(params, **declaration.kwargs, max_grad_norm=1.0)
    train(optimizer, params, steps=steps, seed=seed)
    return [p.detach() for p in params]


@over_all
def test_two_threads_with_an_optimizer_each(declaration: Declaration) -> None:
    """The steps release the GIL and share torch's pool; each thread gets its own results."""
    seeds, results, barrier = range(2), {}, threading.Barrier(2)

    def work(seed: int) -> None:
        barrier.wait()
        results[seed] = step_all(declaration, 10, seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert_same_bits(results[seed], step_all(declaration, 10, seed), f"thread {seed}")


def test_one_optimizer_from_two_threads() -> None:
    """Every call either steps or raises RuntimeError; none crashes and no step is half a step."""
    params = parameters((200_000,), (10,))
    optimizer = ADAMW.ours(params)
    set_gradients(params, 0)
    optimizer.step()
    barrier, stepped, refused = threading.Barrier(2), [], []

    def work() -> None:
        barrier.wait()
        for _ in range(40):
            try:
                optimizer.step()
                stepped.append(1)
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another thread" in text for text in refused)
    assert len(stepped) + len(refused) == 80
    for p in params:
        assert optimizer.state[p]["step"].item() == 1 + len(stepped)
    expected = parameters((200_000,), (10,))
    alone = ADAMW.ours(expected)
    set_gradients(expected, 0)
    for _ in range(1 + len(stepped)):
        alone.step()
    assert_same_bits(params, expected, "after all steps")


def child_step(connection: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    connection.send([p.detach().numpy().tobytes() for p in params])


@pytest.mark.parametrize("declaration", [ADAMW, SGD], ids=lambda d: d.name)
def test_step_in_a_forked_child(declaration: Declaration) -> None:
    """The pool's threads are gone after fork: torch's fused step hangs there, ours must not.

    Tensors are below the size from which torch itself would go parallel to make them.
    """
    torch.set_num_threads(2)
    params = parameters(*[(30_000,)] * 20)
    optimizer = declaration.ours(params, **declaration.kwargs, max_grad_norm=1.0)
    set_gradients(params, 0)
    optimizer.step()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=child_step, args=(sender, optimizer))
    child.start()
    sender.close()
    try:
        assert receiver.poll(300), "the child hangs in step()"
        found = receiver.recv()
        child.join(300)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    before = [p.detach().clone() for p in params]
    assert _C.cpu_info()["threads"] == "torch_parallel_for", "the parent keeps its threads"
    optimizer.step()
    assert found == [p.detach().numpy().tobytes() for p in params]
    assert not torch.equal(params[0], before[0]), "the child works on its own copy"
