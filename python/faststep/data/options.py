"""The options of a DataLoader beside torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, overload

import torch

from .. import _C
from .resume.progress import Progress
from .stats import StageTimes
from .types import State, Transform
from .workers.arena import Workers


@dataclasses.dataclass
class Extras:
    """The options of a DataLoader of faststep beside torch's, in one attribute.

    A subclass in a script may use any other attribute name.

    Args:
        device, prefetch_to_device, transforms, worker_method, snapshot_every_n_steps, skip_errors:
            of the constructor.
        slots: memory for batches that are made in this process.
        workers: what is kept for workers from epoch to epoch.
        epoch: of the iterator, where persistent workers share one.
        progress: of the newest epoch.
        stranger: the type of the newest iterator, if a subclass has made one of its own.
        meter: of the newest epoch.
        left_out: what the newest epoch has skipped; None if nothing is to be.
        resume: a state that was loaded, for the next iteration.
        keeps_position: whether `state_dict` may be called, and `set_epoch` of the dataset reaches
            persistent workers; if not, no code of the script runs that torch would not run.

    Raises:
        TypeError, ValueError: an option cannot be used; names it.
    """

    device: torch.device | None = None
    prefetch_to_device: int = 2
    transforms: Transform | None = None
    worker_method: str = "process"
    snapshot_every_n_steps: int | None = None
    skip_errors: bool = False
    slots: _C.Slots | None = None
    workers: Workers | None = None
    epoch: int = 0
    progress: Progress | None = None
    stranger: str | None = None
    meter: StageTimes | None = None
    left_out: State | None = None
    resume: State | None = None
    keeps_position: bool = True

    def __post_init__(self) -> None:
        if self.transforms is not None and not callable(self.transforms):
            raise TypeError(f"transforms must be a function of a batch, not {self.transforms!r}")
        if self.worker_method not in ("process", "thread"):
            method = self.worker_method
            raise ValueError(f"worker_method must be 'process' or 'thread', not {method!r}")
        every, ahead, given = self.snapshot_every_n_steps, self.prefetch_to_device, self.device
        if every is not None and (type(every) is not int or every < 0):
            raise ValueError(
                f"snapshot_every_n_steps must be an int from 0 on or None, not {every!r}"
            )
        self.device = None if given is None else torch.device(given)
        if self.device is not None and self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CUDA device or the CPU, not {given!r}")
        if type(ahead) is not int or ahead < 0:
            raise ValueError(f"prefetch_to_device must be an int from 0 on, not {ahead!r}")
        self.skip_errors = bool(self.skip_errors)

    def explain_device(self) -> str:
        if self.device is None:
            return ""
        return f"; up to {self.prefetch_to_device} more are on {self.device}, or on their way"

    def __getstate__(self) -> State:
        """For pickle and copy: without what belongs to this process."""
        of_process = dict.fromkeys(
            ("slots", "workers", "progress", "stranger", "meter", "left_out")
        )
        return vars(self) | of_process


# arguments of the constructor that torch's has not, and their defaults
OPTIONS = {field.name: field.default for field in dataclasses.fields(Extras)[:6]}


class Path:
    """The path that the batches take.

    "arrays": C threads gather them. "workers": worker processes write them into shared memory.
    "threads": Python threads of this process load them. "torch": torch's own iterator does.

    A subclass may set an attribute of this name, which a property would refuse.
    """

    def __init__(self, find: Callable[[Any], str]) -> None:
        self._find = find

    @overload
    def __get__(self, loader: None, owner: type) -> Path: ...
    @overload
    def __get__(self, loader: object, owner: type) -> str: ...
    def __get__(self, loader: object | None, owner: type) -> Path | str:
        return self if loader is None else self._find(loader)


class Unprepared:
    """Refuses `accelerator.prepare(loader)` for a loader with transforms or a device.

    accelerate would make another DataLoader, which has neither. A loader without them can be
    prepared. So can one on which a script has set `_is_accelerate_prepared`.
    """

    def __get__(self, loader: Any, owner: type) -> object:
        lost = []
        if loader is not None:
            own: Extras = loader._faststep
            lost = [name for name in ("transforms", "device") if getattr(own, name) is not None]
        if lost:
            raise ValueError(
                f"accelerate would make another DataLoader of this one, without its "
                f"{' and '.join(lost)}: instead of accelerator.prepare(loader) call "
                "faststep.data.prepare_loader(accelerator, loader)"
            )
        raise AttributeError("_is_accelerate_prepared")
