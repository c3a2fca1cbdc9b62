"""``faststep run``: runs an unmodified script with faststep's classes in place of torch's."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..run import PARTS, start
from ..run.changes import Changes, preloading
from ..run.program import Program, ProgramError
from . import live
from .console import at_least, some_of

__all__ = ["HELP", "add_arguments", "parsed", "run_program"]

HELP = "run a script with faststep's classes in place of torch's"
PYTHONS = tuple(f"-{letter}" for letter in "bBdEiIOPqRsStuvVWxX")  # its options beside -c and -m
NOT_FOUND = 2  # the status of Python itself


def _proven(path: str) -> Changes:
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text())
        changes: Changes = found["changes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{path!r} is no file of `doctor --save`: {error!r}"
        ) from None
    return changes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand before the script."""
    parser.usage = "%(prog)s [OPTION ...] (SCRIPT | - | -c CODE | -m MODULE) [ARGUMENT ...]"
    parser.add_argument(
        "--only",
        type=some_of(PARTS),
        default=list(PARTS),
        metavar="PARTS",
        help=f"use these parts alone, separated by commas: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="torch's threads, whatever the script sets"
    )
    parser.add_argument(
        "--workers",
        type=at_least(0),
        metavar="N",
        help="workers of every DataLoader, kept over epochs",
    )
    parser.add_argument(
        "--autocast",
        choices=["bf16", "off"],
        help="run models under autocast, with their results in fp32; or leave the script's out",
    )
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="lay out the weights of two-dimensional convolutions in that way",
    )
    parser.add_argument("--compile", action="store_true", help="compile models with torch.compile")
    parser.add_argument(
        "--accumulate",
        type=at_least(1),
        metavar="N",
        help="step once for N steps of the script, with the mean of their gradients",
    )
    parser.add_argument(
        "--with",
        dest="proven",
        type=_proven,
        metavar="FILE",
        help="do what `doctor --save FILE` has found to help, and nothing else",
    )
    parser.add_argument(
        "--live", action="store_true", help="show on stderr what training does at present"
    )
    parser.add_argument(
        "--log",
        type=live.opened,
        metavar="FILE",
        help="write it to a file, a line of JSON per second",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="say at the end what stayed torch's, and why"
    )


def parsed(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[argparse.Namespace, Program]:
    """The parser's options, and the program with its arguments, which may look like options."""
    valued = {
        name for action in parser._actions if action.nargs != 0 for name in action.option_strings
    }
    place, flag = 0, ""
    while place < len(argv) and not flag and argv[place].startswith("-") and argv[place] != "-":
        option = argv[place]
        if option in ("-m", "-c", "--"):
            flag = option
        elif option.startswith(PYTHONS):
            whole = parser.prog.removeprefix("python")
            parser.error(f"{option} is an option of Python: python {option}{whole} ...")
        else:
            place += 2 if option in valued else 1
    arguments = parser.parse_args(argv[:place])
    rest = argv[place + bool(flag) :]
    if not rest:
        parser.error("there is no script, no -c CODE and no -m MODULE")
    return arguments, Program(rest[0], rest[1:], flag.removeprefix("--"))


def run_program(argv: Sequence[str]) -> int:
    """Run what the arguments after `run` say, in this process; its exceptions pass through.

    Returns:
        0, or Python's status where there is no such file or module.
    """
    parser = argparse.ArgumentParser(prog="python -m faststep run", description=HELP)
    add_arguments(parser)
    arguments, program = parsed(argv, parser)
    try:
        changes, parts = arguments.proven or Changes(), arguments.only
        if arguments.proven is not None:
            parts = changes.get("parts", [])
        if arguments.threads is not None:
            changes["threads"] = arguments.threads
        if arguments.workers is not None:
            kept = arguments.workers > 0
            changes["loader"] = {"num_workers": arguments.workers, "persistent_workers": kept}
        for name in ("autocast", "channels_last", "compile", "accumulate"):
            if value := getattr(arguments, name):
                changes[name] = value
        library = changes.get("preload", "")
        if library not in os.environ.get("LD_PRELOAD", ""):  # the process begins anew with it
            os.execve(sys.executable, sys.orig_argv, preloading(library, os.environ))
        with contextlib.ExitStack() as stack:
            if arguments.live or arguments.log is not None:
                stack.enter_context(live.watched(arguments.live, arguments.log))
            start(program, parts, arguments.verbose, changes)
    except ProgramError as error:
        print(f"{os.path.basename(sys.executable)}: {error}", file=sys.stderr)
        return NOT_FOUND
    return 0
