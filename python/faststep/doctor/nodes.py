"""Lets the machines of a script run its ranks at the same times, as the first of them orders."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]


class Nodes:
    """The machines on which torchrun has started ranks, as one of them sees the others.

    Args:
        seconds: the most that one waits for another.

    Attributes:
        local: ranks of this machine.
        address: of the machine of rank 0.
    """

    def __init__(self, seconds: float) -> None:
        self.local = int(os.environ["LOCAL_WORLD_SIZE"])
        self.address = os.environ["MASTER_ADDR"]
        timeout = datetime.timedelta(seconds=seconds)
        port = int(os.environ["MASTER_PORT"])  # of torchrun's own store
        self._store = TCPStore(self.address, port, None, False, timeout, wait_for_workers=False)
        self._number = 0

    @contextlib.contextmanager
    def running(self, order: dict[str, Any]) -> Iterator[None]:
        """Let the others run their ranks meanwhile, as they are ordered."""
        self._store.set(f"faststep/order/{self._number}", json.dumps(order))
        try:
            yield
        finally:
            self._store.set(f"faststep/end/{self._number}", "")
            self._number += 1

    def dismiss(self) -> None:
        """Let the others end."""
        self._store.set(f"faststep/order/{self._number}", json.dumps(None))

    def follow(self, run: Callable[[dict[str, Any], Callable[[], bool]], object]) -> None:
        """Run what the first machine orders, until it dismisses this one.

        Args:
            run: called with an order, and a function that says when to end.
        """
        for number in itertools.count():
            order = json.loads(self._store.get(f"faststep/order/{number}"))
            if order is None:
                return
            end = f"faststep/end/{number}"
            run(order, functools.partial(self._store.check, [end]))
            self._store.wait([end])
