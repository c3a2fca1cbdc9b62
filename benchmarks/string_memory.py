"""Memory of a list of strings in workers: python benchmarks/string_memory.py KIND COUNT EPOCHS.

KIND is "list", with torch's loader, or "frozen", with faststep's. Prints, as JSON, the proportional
set size in bytes of all processes together after each epoch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

import faststep.data


class Lengths(Dataset[int]):
    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


def proportional_set_size(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"no Pss in the smaps_rollup of {pid}")


def main(kind: str, count: int, epochs: int) -> None:
    paths: Any = [f"/data/images/{i:080}.jpg" for i in range(count)]
    loader = DataLoader
    if kind == "frozen":
        paths, loader = faststep.data.freeze(paths), faststep.data.DataLoader
    batches = loader(Lengths(paths), 1000, num_workers=2, persistent_workers=True)
    sizes = []
    for _ in range(epochs):
        iterator: Any = iter(batches)
        for _ in iterator:
            pass
        workers = [worker.pid for worker in iterator._workers]
        sizes.append(sum(map(proportional_set_size, [os.getpid(), *workers])))
    print(json.dumps(sizes))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
