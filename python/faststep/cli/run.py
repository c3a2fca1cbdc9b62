"""``faststep run``: runs an unmodified script with faststep's classes in place of torch's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..run import PARTS, start
from ..run.program import Program, ProgramError

__all__ = ["HELP", "add_arguments", "run_program"]

HELP = "run a script with faststep's classes in place of torch's"
PYTHONS = tuple(f"-{letter}" for letter in "bBdEiIOPqRsStuvVWxX")  # its options beside -c and -m
NOT_FOUND = 2  # the status of Python itself


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(PARTS)}")
    return parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand before the script."""
    parser.usage = (
        "%(prog)s [--only PARTS] [--verbose] (SCRIPT | - | -c CODE | -m MODULE) [ARGUMENT ...]"
    )
    parser.add_argument(
        "--only",
        type=_parts,
        default=list(PARTS),
        metavar="PARTS",
        help=f"use these parts alone, separated by commas: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="say at the end what stayed torch's, and why"
    )


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Program | None]:
    """The options, and the program with its arguments, which may look like options."""
    place = 0
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "-":
        if argv[place] in ("-m", "-c", "--"):
            rest = argv[place + 1 :]
            flag = argv[place].removeprefix("--")
            return argv[:place], Program(rest[0], rest[1:], flag) if rest else None
        place += 2 if argv[place] == "--only" else 1
    rest = argv[place:]
    return argv[:place], Program(rest[0], rest[1:]) if rest else None


def run_program(argv: Sequence[str]) -> int:
    """Run what the arguments after `run` say, in this process; its exceptions pass through.

    Returns:
        0, or Python's status where there is no such file or module.
    """
    parser = argparse.ArgumentParser(prog="python -m faststep run", description=HELP)
    add_arguments(parser)
    options, program = _split(argv)
    for option in options:
        if option.startswith(PYTHONS):
            parser.error(f"{option} is an option of Python: python {option} -m faststep run ...")
    arguments = parser.parse_args(options)
    if program is None:
        parser.error("there is no script, no -c CODE and no -m MODULE")
    try:
        start(program, arguments.only, arguments.verbose)
    except ProgramError as error:
        print(f"{os.path.basename(sys.executable)}: {error}", file=sys.stderr)
        return NOT_FOUND
    return 0
