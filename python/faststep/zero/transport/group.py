"""The ranks that share a model: what they send each other."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch.optim import is_capturing
from ..._torch.ranks import backend_for, end_group, failed_at, is_distributed, meet, same_ranks
from ..layout.pages import BufferPool

PATIENCE = 10.0  # seconds in which ranks that have failed say so to each other


@dataclass(eq=False)
class Pending:
    """Messages under way, and the tensors that they read and write."""

    group: Group
    what: str
    works: list[Any]
    kept: list[Tensor]

    def is_done(self) -> bool:
        """True if `wait` would not wait."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Return when all have arrived; raises if a rank has gone, or did not send in time."""
        with self.group.saying(self.what):
            for work in self.works:
                work.wait()
        self.works, self.kept = [], []


class Exchange(NamedTuple):
    """The values of all ranks for this rank's slice, on their way: read them after waiting."""

    parts: list[Tensor]  # by rank; the own one may lie in what was sent
    block: Tensor | None  # of the pool, where those of the others arrive
    pending: Pending


class Group:
    """A process group, with the collectives that sharding needs.

    `replicas` are the ranks of other such groups that own the same slices, if there are any.
    """

    def __init__(self, group: Any, timeout: float, replicas: Group | None = None) -> None:
        self.process_group = group
        self.timeout = timeout  # seconds for `meet`
        self.device = torch.device("cpu")  # where messages are
        if not backend_for(group, "cpu"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        self.replicas = replicas
        self.total = self.world * (1 if replicas is None else replicas.world)  # ranks
        self.place = self.rank + self.world * (0 if replicas is None else replicas.rank)

    def meet(self, what: str) -> None:
        """Return when all ranks have come here, replicas too, before anything is sent.

        For what some ranks may leave out by mistake, and what is not a part of training, where a
        slow rank may take as long as the group allows. Raises RuntimeError on all that came if a
        rank did not come in time, or came for another thing.
        """
        try:
            said = meet(self.process_group, what, self.timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: {what} failed, as the store of torch.distributed does not "
                f"answer: {error}"
            ) from error
        absence = f"{{}} did not within {self.timeout:g} s (timeout= of shard())"
        hints = _elsewhere(dict(enumerate(said)), what, "called", absence)
        if hints:
            raise RuntimeError(
                f"rank {self.rank}: all ranks must call {what} together, and {'; '.join(hints)}; "
                "nothing was sent, and training can go on"
            )
        if self.replicas is not None:
            self.replicas.meet(what)

    @contextlib.contextmanager
    def saying(self, what: str) -> Iterator[None]:
        """Have an error of a message say what it was, and which other ranks have failed."""
        try:
            yield
        except RuntimeError as error:
            # One of the others died, raised or waits elsewhere, or waits for its own timeout.
            found = failed_at(self.process_group, what, PATIENCE)
            absence = f"not reported by {{}} within {PATIENCE:.0f} s"
            hints = _elsewhere(found, what, "failed at", absence)
            hint = f" ({'; '.join(hints)})" if hints else ""
            raise RuntimeError(f"rank {self.rank}: {what} failed{hint}: {error}") from error

    def alone(self) -> Group:
        """The same ranks with connections of their own, closed when nobody has them; a collective.

        Messages of one process group must be sent in one order on all ranks. What the script sends
        in another thread, as torch.distributed.checkpoint does, or for another model, then cannot
        come between those of a sharded model. A group of some of the ranks is used as it is, and so
        is one with NCCL, whose further connections take memory of the device.
        """
        if self.world < dist.get_world_size() or self.device.type == "cuda":
            return self
        with self.saying("connecting the ranks"):
            group = same_ranks(self.process_group)
        made = Group(group, self.timeout)
        weakref.finalize(made, end_group, group).atexit = False
        return made

    def _global(self, rank: int) -> int:
        return int(dist.get_global_rank(self.process_group, rank))

    def exchange(self, sent: Tensor, pool: BufferPool, what: str) -> Exchange:
        """Send each rank its slice of a flat tensor, and receive what all have of the own one."""
        size = sent.numel() // self.world
        counts, others = [size] * self.world, sent
        if self.leaves_out_own:  # what is left lies in one piece
            counts[self.rank] = 0
            others = sent[size:] if self.rank == 0 else sent[:size]
        block = pool.take()
        received = block.view(sent.dtype)[: sum(counts)]
        parts = list(torch.split(received, counts))
        if self.leaves_out_own:
            parts[self.rank] = sent[size * self.rank :][:size]
        work = dist.all_to_all_single(
            received, others, counts, counts, self.process_group, async_op=True
        )
        return Exchange(parts, block, Pending(self, what, [work], [sent, received]))

    @property
    def leaves_out_own(self) -> bool:
        """True if `exchange` leaves this rank's own slice where it is.

        It does where the slice lies at an end of the tensor and is one of the first two to add.
        """
        return self.rank == 0 or self.world == 2

    def use_device(self, device: torch.device) -> None:
        """Send everything from a device, replicas too; a CUDA device needs NCCL."""
        for group in filter(None, (self, self.replicas)):
            backend = backend_for(group.process_group, device.type)
            if device.type == "cpu" and not backend:
                raise TypeError(
                    "shard(): parameters in CPU memory need a process group with gloo: call "
                    "init_process_group('cpu:gloo,cuda:nccl'); nothing was changed"
                )
            if device.type != "cpu" and backend != "nccl":
                raise TypeError(
                    f"shard(): parameters on {device} need a process group with NCCL, and this one "
                    f"has {backend or 'no backend'} for CUDA: call init_process_group('nccl'), or "
                    "'cpu:gloo,cuda:nccl'; nothing was changed"
                )
            group.device = device

    def reduce_scatter(self, own: Tensor, sent: Tensor, what: str) -> Pending:
        """Add up a flat tensor over the ranks; each receives a slice, all of one size."""
        work = dist.reduce_scatter_tensor(own, sent, group=self.process_group, async_op=True)
        return Pending(self, what, [work], [own, sent])

    def gather(self, flat: Tensor, tag: int, what: str) -> Pending:
        """Send the own slice of a flat tensor to all other ranks, and receive theirs in place.

        With gloo by tagged messages, which ranks may begin in any order.
        """
        if not flat.numel():
            return Pending(self, what, [], [])
        parts, group = flat.view(self.world, -1), self.process_group
        mine = parts[self.rank]
        if self.device.type == "cuda":
            work = dist.all_gather_into_tensor(flat, mine, group=group, async_op=True)
            return Pending(self, what, [work], [flat])
        works: list[Any] = []
        for step in range(1, self.world):
            target, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            works.append(dist.irecv(parts[source], self._global(source), group, tag))
            works.append(dist.isend(mine, self._global(target), group, tag))
        return Pending(self, what, works, [flat])

    def collect(self, flat: Tensor, what: str) -> Pending:
        """Send rank 0 the slices of a flat tensor, which it receives in place."""
        parts, group = flat.view(self.world, -1), self.process_group
        if self.rank:
            works = [dist.isend(parts[self.rank], self._global(0), group)]
        else:
            others = range(1, self.world)
            works = [dist.irecv(parts[rank], self._global(rank), group) for rank in others]
        return Pending(self, what, works, [flat])

    def add_up(self, numbers: Tensor, what: str) -> None:
        """Replace numbers by their sums over all ranks, replicas too; waits."""
        there = numbers.to(self.device)
        self.add_up_inside(there, what)
        if self.replicas is not None:
            self.replicas.add_up(there, f"{what} over the replicas")
        if there is not numbers:
            numbers.copy_(there)

    def add_up_inside(self, numbers: Tensor, what: str) -> None:
        """Replace numbers by their sums over the ranks that share the slices; waits."""
        self.start_adding(numbers, what).wait()

    def start_adding(self, numbers: Tensor, what: str, **how: Any) -> Pending:
        """Replace numbers by their sums inside the group, until the answer is waited for."""
        work = dist.all_reduce(numbers, group=self.process_group, async_op=True, **how)
        return Pending(self, what, [work], [numbers])

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the values of rank 0 of the first replica."""
        tensors = list(tensors)
        if self.replicas is not None:
            self.replicas.broadcast(tensors)
        source = self._global(0)
        for tensor in tensors:
            if tensor.numel():
                values = tensor.contiguous().to(self.device)
                with self.saying("giving all ranks the values of rank 0"):
                    dist.broadcast(values, source, group=self.process_group)
                if values.data_ptr() != tensor.data_ptr():
                    tensor.copy_(values)

    def share(self, value: object) -> list[Any]:
        """The objects of all ranks, by rank."""
        found: list[Any] = [None] * self.world
        with self.saying("telling all ranks what each has"):
            dist.all_gather_object(found, value, group=self.process_group)
        return found

    def check_alike(self, lines: Sequence[str], caller: str = "shard()") -> None:
        """Raise on every rank if they describe their parameters differently; a collective."""
        digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
        mine = int.from_bytes(digest, "big", signed=True) >> 1
        both = torch.tensor([mine, -mine, len(lines), -len(lines)], device=self.device)
        for group in filter(None, (self, self.replicas)):
            what = f"{caller}: comparing the ranks"
            group.start_adding(both, what, op=dist.ReduceOp.MAX).wait()
        both = both.cpu()
        if both[0] == -both[1] and both[2] == -both[3]:
            return
        described = self.share(list(lines))
        if self.replicas is not None:  # each of them has described its own group
            described = [one for some in self.replicas.share(described) for one in some]
        lines_of_all = itertools.zip_longest(*described, fillvalue="nothing")
        number, here = next(one for one in enumerate(lines_of_all) if len(set(one[1])) > 1)
        who = "; ".join(f"rank {rank} has {line}" for rank, line in enumerate(here))
        raise RuntimeError(f"{caller}: the ranks differ, first in number {number}: {who}")


def listed(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, in errors."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _elsewhere(said: Mapping[int, str | None], what: str, did: str, absence: str) -> list[str]:
    """The ranks that said another thing than `what`, for errors; `absence` is of those silent."""
    absent = [rank for rank, other in said.items() if other is None]
    others = {rank: other for rank, other in said.items() if other not in (None, what)}
    hints = [f"rank {rank} {did} {other}" for rank, other in others.items()]
    return [absence.format(listed(absent)), *hints] if absent else hints


def group_of(process_group: Any, replicate_group: Any, timeout: float) -> Group | None:
    """The ranks to share with; None for a single one. Raises for groups that do not fit."""
    if replicate_group is not None and process_group is None:
        raise ValueError(
            "shard(): replicate_group needs process_group, the ranks among which slices are cut"
        )
    if process_group is None:
        if not is_distributed():
            return None
        process_group = dist.group.WORLD
    for name, one in (("process_group", process_group), ("replicate_group", replicate_group)):
        if one is not None and dist.get_rank(one) < 0:
            raise ValueError(f"shard(): this process does not belong to {name}")
    if replicate_group is not None and dist.get_world_size(replicate_group) > 1:
        return _replicated(process_group, replicate_group, timeout)
    return Group(process_group, timeout) if dist.get_world_size(process_group) > 1 else None


def _replicated(process_group: Any, replicate_group: Any, timeout: float) -> Group:
    """The ranks that share slices, and those that own the same ones; a collective."""
    inside = dist.get_process_group_ranks(process_group)
    across = dist.get_process_group_ranks(replicate_group)
    if set(inside) & set(across) != {dist.get_rank()}:
        raise ValueError(
            f"shard(): process_group {inside} and replicate_group {across} must have this rank "
            "alone in common: replicate_group has one rank of each process_group"
        )
    replicas = Group(replicate_group, timeout)
    replicas.meet("shard()")
    seat = f"rank {dist.get_rank(process_group)} of {len(inside)} in process_group"
    replicas.check_alike([seat])
    if len(inside) == 1:
        raise ValueError(
            "shard(): with replicate_group, process_group needs several ranks: without, pass all "
            "ranks as process_group"
        )
    return Group(process_group, timeout, replicas)


class Late:
    """Values of a tensor on a CUDA device, copied behind what its stream has been given."""

    def __init__(self, values: Tensor) -> None:
        self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._copy.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream())

    def read(self) -> Tensor:
        """The values in CPU memory, as they were; waits for the device until it has come there."""
        self._event.synchronize()
        return self._copy


def refuse_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: the host decides what each pass sends."""
    if is_capturing():
        raise RuntimeError(
            "faststep.zero: backward and step of a sharded model cannot be captured into a CUDA "
            "graph; capture forward and loss only, or use the optimizer without shard()"
        )
