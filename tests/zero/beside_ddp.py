"""Runs a script by torch's optimizer inside DistributedDataParallel, and sharded in each way.

`FASTSTEP_RANKS="2 3 4"` runs every script on as many ranks; on 2 alone without it."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from faststep import zero
from faststep._torch.dtensor import full_tensor

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "wrapped": {"stage": 2},
    "in forward": {"gather": "forward"},
    "fully_shard": {},
    "stage 3": {"stage": 3},
}
RANKS = [int(number) for number in os.environ.get("FASTSTEP_RANKS", "2").split()]

UNEVEN = "ranks call modules that others do not: any model under fully_shard waits forever"


def _fully_shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torch's own way to what stage 3 does."""
    names = {id(param): name for name, param in model.named_parameters()}
    for blocks in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for block in blocks:
            fully_shard(block)
    fully_shard(model)
    params = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [params[names[id(param)]] for param in group["params"]]


class Run:
    """One kind of a run on one rank; `kept` is compared beside the parameters of `nets`."""

    def __init__(self, kind: str, rank: int, world: int) -> None:
        self.kind, self.rank, self.world = kind, rank, world
        self.has_ddp = kind in ("ddp", "wrapped")
        self.nets: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self.kept: list[Tensor] = []

    def wrap(self, net: nn.Module, unused: bool = True) -> Any:
        """The model that the loop calls."""
        self.nets.append(net)
        return DistributedDataParallel(net, find_unused_parameters=unused) if self.has_ddp else net

    def shard(self, model: Any, optimizer: Any, **options: Any) -> Any:
        if self.kind == "fully_shard":
            _fully_shard(model, optimizer)
        if self.kind in ("ddp", "fully_shard"):
            return optimizer
        size: dict[str, Any] = {} if self.kind == "stage 3" else {"bucket_mb": 0.001}
        self.optimizers.append(zero.shard(model, optimizer, **KINDS[self.kind], **size, **options))
        return self.optimizers[-1]

    def no_sync(self, model: Any, optimizer: Any, is_on: bool = True) -> Any:
        if not is_on:
            return contextlib.nullcontext()
        if self.kind == "fully_shard":
            return self._collecting(model)
        return (model if self.has_ddp else optimizer).no_sync()

    @contextlib.contextmanager
    def _collecting(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def values(self) -> list[Tensor]:
        for optimizer in self.optimizers:
            optimizer.wait()
        values = [param.detach() for net in self.nets for param in net.parameters()]
        values += self.kept
        if self.has_ddp:  # the buffers of a plain model are the rank's own
            values += [buffer for net in self.nets for buffer in net.buffers()]
        return [full_tensor(value).clone() for value in values]


Script = Callable[[Run], None]


def _compared(
    rank: int, world: int, script: Script, kinds: Sequence[str], dtype: torch.dtype
) -> dict[str, Any]:
    """By kind the largest difference from DistributedDataParallel, or the error."""
    found: dict[str, Any] = {}
    expected: list[Tensor] = []
    for kind in kinds:
        run = Run(kind, rank, world)
        torch.set_default_dtype(dtype)
        try:
            script(run)
            values = run.values()
        except (RuntimeError, ValueError, TypeError) as error:
            if kind == "ddp":
                raise
            found[kind] = str(error)
            continue
        finally:
            torch.set_default_dtype(torch.float32)
        expected = expected or values
        count = len(expected if run.has_ddp else values)
        pairs = zip(values, expected[:count], strict=True)
        found[kind] = max(float((a - b).abs().max()) for a, b in pairs if a.numel())
    return found


class Table(NamedTuple):
    """Scripts by name, and those that are not trained as DistributedDataParallel does.

    Stage 3 refuses some: `refused` has a part of the text; stages 1 and 2 those `refused_below`.
    Others are `left_out` at stage 3, for a reason. And in those of `as_torch` fully_shard differs
    in the same way. Scripts `on_three` ranks are not run on two."""

    scripts: Mapping[str, Script]
    refused: Mapping[str, str] = {}
    refused_below: Mapping[str, str] = {}
    left_out: Mapping[str, str] = {}
    as_torch: Sequence[str] = ()
    on_three: Sequence[str] = ()

    def cases(self) -> list[tuple[int, str]]:
        """On how many ranks each script is run, and its name."""
        usual = [(world, name) for name in self.scripts for world in RANKS]
        return list(dict.fromkeys((3 if w == 2 and n in self.on_three else w, n) for w, n in usual))

    def _kinds(self, name: str) -> list[str]:
        gone = [] if name in self.as_torch else ["fully_shard"]
        gone += ["stage 3"] if name in self.left_out else []
        return [kind for kind in KINDS if kind not in gone]

    def check(self, rank: int, world: int, name: str) -> None:
        # More than two ranks add up in another order than DistributedDataParallel's, which Adam
        # makes visible in fp32 where a gradient is almost zero.
        is_wide = world > 2 and name not in self.on_three
        dtype = torch.float64 if is_wide else torch.float32
        said = _compared(rank, world, self.scripts[name], self._kinds(name), dtype)
        torchs, third = said.pop("fully_shard", None), said.pop("stage 3", None)
        if name in self.refused:
            assert self.refused[name] in str(third), third
        elif name in self.as_torch:
            assert third == torchs or abs(third - torchs) < 1e-5, (third, torchs)
        elif third is not None:
            said["stage 3"] = third
        if name in self.refused_below:
            del said["ddp"]
            texts = [said.pop(kind) for kind in [*said] if kind != "stage 3"]
            assert all(self.refused_below[name] in str(text) for text in texts), texts
        wrong = {k: what for k, what in said.items() if isinstance(what, str) or not what < 1e-5}
        assert not wrong, wrong
