"""Figures of all ranks of a script, which each rank tells and one of them reads."""

from __future__ import annotations

import datetime
import json
import os
from collections import deque
from collections.abc import Callable, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .watching import Display, Figures

RECENT = 10  # lines whose phases are averaged
TIMEOUT = datetime.timedelta(seconds=30)


class Peers(Display):
    """Takes a rank's lines to where others find them; the newest one stays there.

    Args:
        host: of the store.
        port: of it.
        is_host: make the store here.
        ranks: all of the script.
        say: is told why no more is told.
    """

    def __init__(
        self,
        host: str,
        port: int,
        is_host: bool,
        ranks: int,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._ranks = ranks
        self._store: TCPStore | None = TCPStore(
            host, port, None, is_host, TIMEOUT, wait_for_workers=False
        )
        self._say = say
        self._recent: deque[Figures] = deque(maxlen=RECENT)
        self._known: dict[int, str] = {}  # ranks that have told something, and their keys

    def show(self, figures: Figures) -> None:
        self._recent.append(figures)
        phases = mean([one["phases"] for one in self._recent])
        if self._store is not None:
            try:
                self._store.set(_key(figures["rank"]), json.dumps({**figures, "phases": phases}))
            except RuntimeError as error:  # of a store that has ended with its process
                self._lose(error)

    def told(self) -> list[Figures]:
        """The newest line of each rank but 0 that has told one, with phases averaged."""
        if self._store is None:
            return []
        try:
            for rank in range(1, self._ranks):
                if rank not in self._known and self._store.check([_key(rank)]):
                    self._known[rank] = _key(rank)
            keys = [self._known[rank] for rank in sorted(self._known)]
            return [json.loads(text) for text in self._store.multi_get(keys)] if keys else []
        except RuntimeError as error:
            self._lose(error)
            return []

    def _lose(self, error: RuntimeError) -> None:
        self._store = None
        self._say(f"no more figures of other ranks: {error}")


def of_torchrun(say: Callable[[str], object]) -> Peers | None:
    """Those of the ranks that torchrun has started, if there are more than one."""
    environment = os.environ
    ranks = int(environment.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if environment.get("RANK", "0") == "0":
            say("only the figures of rank 0 are shown: torchrun has not started the ranks")
        return None
    port = int(environment["MASTER_PORT"])
    try:
        return Peers(environment["MASTER_ADDR"], port, False, ranks, say)
    except RuntimeError as error:
        say(f"no figures of other ranks: {error}")
        return None


def _key(rank: int) -> str:
    return f"faststep/{rank}"


def mean(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean share of each phase."""
    names = {name for phases in several for name in phases}
    return {name: sum(one.get(name, 0.0) for one in several) / len(several) for name in names}
