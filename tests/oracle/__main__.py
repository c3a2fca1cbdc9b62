"""Runs scripts, and writes what they saw as JSON: python -m oracle (torch | swapped) FILE.

With torch's names the same program is run under `python -m faststep run`.
"""

import json
import random
import sys
from pathlib import Path

import torch

from oracle import of_frameworks, of_loops, of_optimizers, of_scaler
from oracle.watch import Library, Watch

SCRIPTS = {
    name: script
    for module in (of_scaler, of_optimizers, of_loops, of_frameworks)
    for name, script in vars(module).items()
    if getattr(script, "__module__", "") == module.__name__ and not name.startswith("_")
    if callable(script) and not isinstance(script, type)
}


def library_of(way: str) -> Library:
    if way == "torch":
        clip = torch.nn.utils
        return Library(torch.optim, torch.amp.GradScaler, clip, torch.utils.data.DataLoader)
    import faststep.data
    import faststep.optim

    return Library(faststep.optim, faststep.amp.GradScaler, faststep, faststep.data.DataLoader)


def main(way: str, file: str) -> None:
    library = library_of(way)
    seen = {}
    for name, script in SCRIPTS.items():
        torch.manual_seed(0)
        random.seed(0)
        watch = Watch()
        with watch.warnings():
            watch.error("end", lambda script=script, watch=watch: script(library, watch))
        seen[name] = watch.events
    Path(file).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
