"""The command line ``python -m faststep``: one module per sub-command, and what they share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from faststep.cli.console import CommandError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: the arguments after the program's name; default: ``sys.argv[1:]``.

    Returns:
        The exit status: 0 for success, 1 for an error that was reported on stderr,
        130 after Ctrl-C. Wrong arguments exit with argparse's status 2.
    """
    from faststep.cli import bench, convert, demo, info

    parser = argparse.ArgumentParser(
        prog="python -m faststep",
        description="faststep makes PyTorch training scripts faster without changing what they "
        "compute: optimizers, gradient scaling, clipping, accumulation and data loading.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {"info": info, "demo": demo, "bench": bench, "convert": convert}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except CommandError as error:
        print(f"faststep {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nfaststep {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return 0
