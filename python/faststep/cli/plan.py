"""``python -m faststep plan``: what each way to shard a training takes, and which one to choose."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from .._torch.fake import NoMemory, ReadsValuesError
from ..memory.fitting import bytes_of
from ..memory.recompute import Recomputed
from ..sizing.dry_run import DryRun, dry_run
from ..sizing.formats import KINDS, MASTERS, STATES, Format, formats_of
from ..sizing.machine import Machine
from ..sizing.ways import bucket_mb_for, ways_of
from ..zero.deepspeed import lines_for
from ..zero.stage3.blocks import blocks_of
from .console import CommandError, UsageError, at_least, positive
from .plan_page import Planned, plot, report
from .plots import can_be_drawn

HELP = "show what sharding, offload and checkpointing would take on each GPU, and choose"
_FACTORY = "FILE.py:FUNCTION or MODULE:FUNCTION"

Made = tuple[nn.Module, "Callable[[], Tensor] | None"]


def _bytes(text: str) -> int:
    try:
        size = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} has no unit, such as GiB")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``plan``."""
    parser.add_argument(
        "factory",
        nargs="?",
        metavar="FACTORY",
        help=f"{_FACTORY}: a function without arguments that returns the model, or the model and "
        "a function loss() of one micro-batch; both run on tensors without memory",
    )
    for name, kind, default, unit, what in (
        ("gpus", at_least(1), 8, "N", "GPUs of a node"),
        ("nodes", at_least(1), 1, "N", "nodes"),
        ("memory", _bytes, "80GiB", "SIZE", "of a GPU"),
        ("link", positive, 50, "GB/s", "from a node to the others"),
        ("inside", positive, 300, "GB/s", "from a GPU to the others of its node"),
        ("host", positive, 25, "GB/s", "between a GPU and host memory"),
        ("dram", positive, 200, "GB/s", "of a node's host memory"),
        (
            "tflops",
            positive,
            300,
            "N",
            "10^12 operations per second that a GPU reaches",
        ),
    ):
        text = f"{what}; default: %(default)s"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=unit, help=text)
    parser.add_argument(
        "--optimizer",
        choices=KINDS,
        default="AdamW",
        metavar="NAME",
        help="a class of faststep.optim; default: %(default)s",
    )
    parser.add_argument("--states", choices=STATES, default="fp32", help="default: %(default)s")
    parser.add_argument(
        "--masters",
        choices=MASTERS[1:],
        default="fp32",
        help="of bf16 and fp16 parameters; default: %(default)s",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: ranks of gloo, whose messages need more memory; default: %(default)s",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the memory as bars")
    parser.add_argument(
        "--from",
        dest="config",
        type=Path,
        metavar="DS_CONFIG",
        help="print what to write in place of a configuration of DeepSpeed",
    )


def run(arguments: argparse.Namespace) -> None:
    """Plan, and print the table and the choice."""
    if arguments.config is None and arguments.factory is None:
        raise UsageError(f"there is neither a FACTORY ({_FACTORY}) nor --from DS_CONFIG")
    if arguments.plot is not None:
        arguments.plot = can_be_drawn(arguments.plot, "leave --plot away")
    if arguments.config is not None:
        try:
            print("\n".join(lines_for(arguments.config)))
        except (OSError, ValueError, TypeError) as error:
            raise CommandError(str(error)) from None
    if arguments.factory is not None:
        planned = _planned(arguments)
        print(report(planned))
        if arguments.plot is not None:
            plot(arguments.plot, planned)
            print(f"\nPlot: {arguments.plot}")


def _planned(arguments: argparse.Namespace) -> Planned:
    giga = 1e9
    machine = Machine(
        arguments.gpus,
        arguments.nodes,
        arguments.memory,
        arguments.inside * giga,
        arguments.link * giga,
        arguments.host * giga,
        arguments.dram * giga,
        arguments.tflops * 1e12,
    )
    function = _function_of(arguments.factory)
    with NoMemory():
        model, loss = _made(function, arguments.factory)
        runs = [_run(model, loss)] if loss is not None else []
        if loss is not None and blocks_of(model):
            runs.append(_run_with_checkpoints(function, arguments.factory, model))
    dtypes = list({param.dtype: 0 for param in model.parameters() if param.requires_grad})
    formats = formats_of(arguments.optimizer, dtypes)
    wanted = [one for one in formats if one.states == arguments.states]
    kept = next((one for one in wanted if one.masters in ("none", arguments.masters)), None)
    if kept is None:
        raise CommandError(_no_format(arguments, formats))
    bucket_mb = bucket_mb_for(model, machine.ranks)
    ways = ways_of(model, kept, machine, bucket_mb, runs, arguments.device == "cuda")
    name = f"{arguments.optimizer}, {kept}"
    return Planned(model, name, machine, bucket_mb, kept, formats, runs, ways)


def _no_format(arguments: argparse.Namespace, formats: list[Format]) -> str:
    given = f"--states {arguments.states} --masters {arguments.masters}"
    known = "; ".join(map(str, formats)) or "none"
    return f"{arguments.optimizer} does not take {given} with these parameters. It takes: {known}"


def _run(model: nn.Module, loss: Callable[[], Tensor]) -> DryRun:
    try:
        return dry_run(model, loss)
    except ReadsValuesError as error:
        raise CommandError(
            f"loss() reads values ({error}), which tensors without memory do not have: let the "
            "factory return the model alone, to plan without activations"
        ) from None
    except Exception as error:
        raise CommandError(
            f"loss() failed on tensors without memory: {type(error).__name__}: {error}"
        ) from error


def _run_with_checkpoints(function: Callable[[], Any], name: str, model: nn.Module) -> DryRun:
    """The dry run of another model, of which the parameters take the place of this one's."""
    other, loss = _made(function, name)
    assert loss is not None
    for block in blocks_of(other):
        Recomputed(block).put()
    found = _run(other, loss)
    pairs = zip(other.parameters(), model.parameters(), strict=True)
    of = {id(theirs): id(ours) for theirs, ours in pairs}
    found.live = {of[key]: size for key, size in found.live.items()}
    return found


def _function_of(text: str) -> Callable[[], Any]:
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(f"{text!r} is not {_FACTORY}")
    try:
        module = _module_at(place)
    except Exception as error:
        raise CommandError(
            f"{place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise CommandError(f"{place} has no function {name}")
    made: Callable[[], Any] = function
    return made


def _module_at(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location(f"_factory_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _made(function: Callable[[], Any], name: str) -> Made:
    """The factory's model and loss."""
    try:
        made = function()
    except Exception as error:
        raise CommandError(
            f"{name} failed on tensors without memory: {type(error).__name__}: {error}"
        ) from error
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise CommandError(
            f"{name} must return a torch.nn.Module, or one and a function loss(), not {made!r:.80}"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise CommandError(f"{name} returned a model without parameters to train")
    return model, loss
