"""Runs cases: the part of the fuzzer that may crash."""

import argparse
import faulthandler
import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from . import hostile
from .backward import BACKWARD
from .batches import BATCHES
from .data_functions import DATA_FUNCTIONS
from .functions import FUNCTIONS, gradients_of
from .offloads import OFFLOADS
from .steps import STEPS
from .world import FaultError, World

TARGETS: dict[str, Callable[[World], None]] = {
    **FUNCTIONS,
    **DATA_FUNCTIONS,
    **STEPS,
    **BACKWARD,
    **OFFLOADS,
    **BATCHES,
}
MOST_SECONDS = 60  # of a case, after which it hangs
FAULT = 3  # exit code

# Of many cases one looks at steps, gatherers and so on for long; others at one function.
STORIES: tuple[tuple[str, ...], ...] = (
    (*FUNCTIONS, *DATA_FUNCTIONS),
    ("Plan.step",) * 6 + ("Plan.forget", "unscale_grads"),
    ("ReleaseHook.__call__",) * 6 + tuple(n for n in BACKWARD if n.startswith("ReleaseHook")),
    ("Gather.submit", "Gather.submit", "Batch.take", "Batch.take", "Slots.keep", "Gather.close"),
    tuple(n for n in BATCHES if n.startswith(("Slots", "Arena"))),
    (*STEPS, *BACKWARD, *OFFLOADS),
    tuple(TARGETS),
)


def fuzzed() -> set[str]:
    return set(TARGETS)


def any_call(world: World) -> None:
    TARGETS[world.rng.choice(list(TARGETS))](world)


def _tell(world: World, story: tuple[str, ...], calls: int) -> None:
    for _ in range(calls):
        TARGETS[world.rng.choice(story)](world)


def _in_thread(world: World, story: tuple[str, ...], calls: int, faults: list[Any]) -> None:
    for _ in range(calls):
        try:
            TARGETS[world.rng.choice(story)](world)
        except FaultError as fault:
            faults.append(fault)
            return
        except Exception:
            continue  # the other thread has changed what the call was being made of


def _beside(world: World, story: tuple[str, ...], calls: int) -> None:
    """Two threads call the same objects."""
    faults: list[Any] = []
    for each in range(2):
        _tell(world, story, 1 + each)  # there are objects then
    twin = World(Random(world.rng.random()), world.log)
    for name in ("containers", "objects", "params", "tracked", "again", "counts"):
        setattr(twin, name, getattr(world, name))
    alive = [param for ref in world.params if (param := ref()) is not None]
    world.held = twin.held = gradients_of(alive)
    del alive
    world.threaded = twin.threaded = True
    threads = [
        threading.Thread(target=_in_thread, args=(one, story, calls, faults), daemon=True)
        for one in (world, twin)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.held.clear()
    gc.disable()
    if faults:
        raise faults[0]


def run_case(seed: int, case: int, log: Callable[[str], None]) -> Counter[tuple[str, bool]]:
    rng = Random(f"{seed}/{case}")
    torch.manual_seed(case)
    world = World(rng, log)
    world.again = any_call
    story = rng.choice(STORIES)
    try:
        if case % 8 == 7:
            _beside(world, story, 4)
        else:
            _tell(world, story, rng.choice((1, 4, 12)))
    finally:
        hostile.use(None)
        gc.disable()
    world.close()
    return world.counts


def plant(kind: str) -> None:
    """A fault on purpose, so that the fuzzer can be tested."""
    if kind == "crash":
        os.kill(os.getpid(), 11)
    if kind == "hang":
        time.sleep(1e6)
    if kind == "fault":
        raise FaultError("planted")


class Log:
    """The calls of the case at hand, in a file that outlives a crash."""

    def __init__(self, path: str, loud: bool) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self.loud = loud

    def begin(self, case: int) -> None:
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 0, os.SEEK_SET)
        self(f"case {case}")

    def __call__(self, line: str) -> None:
        os.write(self.file, f"{line}\n".encode(errors="backslashreplace"))
        if self.loud:
            print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True, help="number of the first case")
    parser.add_argument("--cases", type=int, default=1 << 60, help="at most so many")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after these")
    parser.add_argument("--log", default=os.path.join(tempfile.gettempdir(), "faststep-fuzz.log"))
    parser.add_argument("--strict", action="store_true", help="also faults of the fuzzer itself")
    parser.add_argument("--plant", default="")
    parser.add_argument("--hang", type=float, default=MOST_SECONDS)
    options = parser.parse_args()
    faulthandler.enable()
    sys.unraisablehook = lambda _: None  # hostile finalizers raise
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(2)
    log = Log(options.log, loud=options.cases == 1)
    gc.disable()
    gc.collect()
    gc.freeze()
    counts: Counter[tuple[str, bool]] = Counter()
    end, case = time.monotonic() + options.seconds, options.first
    while time.monotonic() < end and case < options.first + options.cases:
        faulthandler.dump_traceback_later(options.hang, exit=True)
        log.begin(case)
        try:
            if options.plant and case == options.first + 3:
                plant(options.plant)
            counts += run_case(options.seed, case, log)
        except FaultError:
            log(f"FAULT\n{traceback.format_exc()}")
            return FAULT
        except Exception:  # what a call was to be made of cannot be made
            counts["not made", False] += 1
            log(f"NOT MADE\n{traceback.format_exc()}")
            if options.cases == 1 or options.strict:
                return FAULT
        case += 1
    faulthandler.cancel_dump_traceback_later()
    log.begin(case)
    log(json.dumps([[name, good, n] for (name, good), n in counts.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
