"""One run of a script that is measured and thrown away: `python -m faststep.doctor.probe ORDER`."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import traceback
from typing import Any

from . import sandbox

__all__ = ["main"]

SEED = 20170


def main(order: dict[str, Any]) -> None:
    """Run a script as it was ordered, and write what was found to a file descriptor.

    Args:
        order: `empty`, a folder for `sandbox.enter`, or None; `answer`, the file descriptor;
            `program`, the arguments of `Program`; `seconds`, `least_steps` and `most_seconds` for
            `Recorder`; `change`, what `_change` does.
    """
    if order["empty"] is not None:
        sandbox.enter(order["empty"])
    import torch

    from ..run.program import Program
    from .recorder import Recorder

    def done(found: dict[str, Any]) -> None:
        with os.fdopen(order["answer"], "w") as answer:
            json.dump(found, answer)
        os._exit(0)

    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    _change(**order["change"])
    recorder = Recorder(order["seconds"], order["least_steps"], order["most_seconds"], done)
    recorder.start()
    try:
        Program(*order["program"]).run()
    except SystemExit as error:
        if error.code not in (None, 0):
            done({"error": f"the script ended with status {error.code}"})
    except BaseException:
        done({"error": traceback.format_exc()})
    recorder.end()


def _change(
    parts: list[str] | None = None,
    threads: int = 0,
    flush: bool = False,
    autocast: str = "",
    loader: dict[str, Any] | None = None,
    keep_samples: bool = False,
) -> None:
    """Change what a script that runs from now on does.

    Args:
        parts: of `run`, to be swapped.
        threads: of torch, whatever the script sets; 0 for what it sets.
        flush: denormal numbers become zero.
        autocast: "off": contexts of autocast do nothing.
        loader: arguments that every DataLoader gets.
        keep_samples: datasets remember what they have given.
    """
    import torch
    from torch.utils.data import DataLoader

    if threads:
        torch.set_num_threads(threads)
        torch.set_num_threads = lambda count: None  # type: ignore[assignment]
    if flush:
        torch.set_flush_denormal(True)
    if autocast == "off":
        make = torch.autocast.__init__

        def made(context: Any, *args: Any, **kwargs: Any) -> None:
            make(context, *args, **{**kwargs, "enabled": False})

        torch.autocast.__init__ = made  # type: ignore[method-assign,assignment]
    if loader or keep_samples:
        begin = DataLoader.__init__

        @functools.wraps(begin)
        def begun(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            if keep_samples and hasattr(dataset, "__len__"):
                dataset = _Kept(dataset)
            begin(self, dataset, *args, **{**kwargs, **(loader or {})})

        DataLoader.__init__ = begun  # type: ignore[method-assign]
    if parts is not None:
        from ..run import swap_silently

        swap_silently(parts)


class _Kept:
    """A dataset that reads each sample once."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._samples: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._samples:
            self._samples[index] = self._dataset[index]
        return self._samples[index]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
