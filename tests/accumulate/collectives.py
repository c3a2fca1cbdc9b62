"""What a process group sends."""

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Collectives:
    """Counts what the process group sends, from torch's functions and from the reducer in C++."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.reducer = self.direct = 0
        model.register_comm_hook(None, self._of_reducer)
        self._all_reduce = dist.all_reduce
        dist.all_reduce = self._counted

    def stop(self) -> None:
        dist.all_reduce = self._all_reduce

    def _of_reducer(self, _, bucket):  # torch looks at annotations, which must not be strings
        self.reducer += 1
        values = bucket.buffer().div_(dist.get_world_size())
        work = self._all_reduce(values, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.direct += 1
        return self._all_reduce(*args, **kwargs)

    def taken(self) -> tuple[int, int]:
        seen = self.reducer, self.direct
        self.reducer = self.direct = 0
        return seen
