"""The command line ``python -m faststep``: one module per sub-command, and what they share."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence

import faststep

from .console import CommandError

__all__ = ["main"]

INTERRUPTED = 130  # the status that shells give a program that SIGINT ended
PIPE_CLOSED = 141  # and one that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: the arguments after the program's name; default: ``sys.argv[1:]``.

    Returns:
        The exit status: 0 for success, 1 for an error that was reported on stderr, 2 for wrong
        arguments, 130 after Ctrl-C, 141 if the reader of the output has gone (``| head``).
    """
    from . import run

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:  # what ends the program that it runs is not reported here
        return run.run_program(argv[1:])
    from . import consolidate, convert, demo, doctor, info, plan  # which import more

    parser = argparse.ArgumentParser(
        prog="python -m faststep",
        description="faststep makes PyTorch training scripts faster without changing what they "
        "compute: optimizers, gradient scaling, clipping, accumulation and data loading.",
    )
    parser.add_argument("--version", action="version", version=f"faststep {faststep.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help=run.HELP)
    commands.add_parser("doctor", help=doctor.HELP)
    for module in (info, demo, convert, consolidate, plan):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    if argv[:1] == ["doctor"]:  # whose options end where the script begins
        name, work = "doctor", functools.partial(doctor.run_doctor, argv[1:])
    else:
        arguments = parser.parse_args(argv)
        name, work = arguments.command, functools.partial(arguments.run, arguments)
    try:
        work()
        sys.stdout.flush()  # a write error is reported here, not when Python ends
    except CommandError as error:
        print(f"faststep {name}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"\nfaststep {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    return 0


def _drop_output() -> None:
    """Discard what is left in stdout's buffer, which Python would write when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
