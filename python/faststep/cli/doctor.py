"""``faststep doctor``: says what bounds a script, and tries each remedy on it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from ..doctor import KINDS, MINUTES, SURE, Answer, DoctorError, examine, scratch
from ..doctor.nodes import Nodes
from ..doctor.runs import GRACE, Runs
from ..doctor.sandbox import Kind, is_available
from ..run.cores import counted
from .console import CommandError, positive, some_of, table, writable
from .doctor_page import page
from .run import parsed

HELP = "say what bounds a script, and which remedies help, tried on it"
WIDTH = 60  # characters of the bar that shows a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand before the script."""
    parser.usage = "%(prog)s [OPTION ...] (SCRIPT | -c CODE | -m MODULE) [ARGUMENT ...]"
    parser.add_argument(
        "--minutes",
        type=positive,
        metavar="N",
        help="take at most these (default: 3, and 1.5 where a step takes less than 0.2 s)",
    )
    for name, text in (
        ("json", "write the answer to this file"),
        ("html", "write it as one page"),
        ("save", "write what is proven to help, for `run --with FILE`"),
    ):
        parser.add_argument(f"--{name}", type=writable, metavar="FILE", help=text)
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="REMEDY",
        help="let the best combination have this remedy, though it changes training",
    )
    parser.add_argument(
        "--only",
        type=some_of(KINDS),
        default=[],
        metavar="KINDS",
        help=f"try these alone, separated by commas: {', '.join(KINDS)}; the last "
        "three need to be named",
    )
    parser.add_argument(
        "--network", action="store_true", help="let the script use the network in the runs"
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="run the script without a sandbox: each run writes its files",
    )


def run_doctor(argv: Sequence[str]) -> int:
    """Examine what the arguments after `doctor` say."""
    parser = argparse.ArgumentParser(prog="python -m faststep doctor", description=HELP)
    add_arguments(parser)
    arguments, program = parsed(argv, parser)
    if not (program.flag or os.path.exists(program.name)):
        parser.error(f"there is no file {program.name!r}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the first one runs the script on as many ranks, again and again
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    nodes = _nodes(arguments, ranks)
    sandbox = "none" if arguments.in_place else _sandbox(arguments.network, ranks)
    until = time.monotonic() + 60.0 * (arguments.minutes or MINUTES)
    runs = Runs(program, until, arguments.network, sandbox, ranks, nodes)
    try:
        if os.environ.get("RANK", "0") != "0":
            runs.follow()
            return 0
        answer = examine(
            runs,
            arguments.minutes is not None,
            arguments.accept,
            arguments.only,
            say=lambda text: print(f"faststep doctor: {text}", file=sys.stderr, flush=True),
        )
    except DoctorError as error:
        raise CommandError(str(error)) from None
    finally:
        if nodes is not None and os.environ["RANK"] == "0":
            nodes.dismiss()
    if arguments.json:
        arguments.json.write_text(json.dumps(answer.as_json(), indent=1) + "\n")
    if arguments.save:
        best = answer.best
        saved = {"remedy": best and best.remedy, "changes": best.change if best else {}}
        arguments.save.write_text(json.dumps(saved, indent=1) + "\n")
    if arguments.html:
        arguments.html.write_text(page(answer))
    print(report(answer))
    return 0


def _end(number: int, _: object) -> NoReturn:
    """End as after Ctrl-C, with all that runs, for a signal that would end this process alone."""
    raise SystemExit(128 + number)


def _nodes(arguments: argparse.Namespace, ranks: int) -> Nodes | None:
    """The machines of the ranks, if there are several.

    Raises:
        CommandError: their ranks could not reach each other.
    """
    if ranks == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return None
    if not (arguments.network or arguments.in_place):
        raise CommandError("ranks of several machines need the network: pass --network")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise CommandError("takes several machines from torchrun alone, whose store it uses")
    return Nodes(60.0 * (arguments.minutes or MINUTES) + GRACE)


def _sandbox(network: bool, ranks: int) -> Kind:
    """The kind that this system lets this user make.

    Raises:
        CommandError: there is none.
    """
    if is_available():
        return "namespaces"
    if scratch.is_available(network=network or ranks > 1):
        if ranks > 1 and not network:
            raise CommandError(
                "this system lets this user make no namespaces (`unshare --user --mount`), and "
                "without them ranks need the network to reach each other: pass --network"
            )
        return "scratch"
    raise CommandError(
        "this system lets this user make no sandbox (neither `unshare --user --mount` nor "
        "Landlock), so each run of the script would write its files: pass --in-place where that "
        "does no harm"
    )


def report(answer: Answer) -> str:
    """A page of text."""
    said = answer.as_json()
    step = said["step"]
    parts = [
        answer.verdict,
        f"A step takes {1e3 * step['mean']:.3g} ms (median {1e3 * step['median']:.3g} ms of "
        f"{step['count']}), in {counted(said['threads'])} on {said['cores']} cores; peak memory "
        f"{said['peak'] / 2**20:.0f} MiB.",
    ]
    bars = [
        f"{name:16} {share:>6.1%}  {'#' * round(WIDTH * share)}"
        for name, share in answer.phases.items()
    ]
    parts.append("\n".join(bars))
    parts.append("\n".join(answer.of_the_machine()))
    if answer.findings:
        lines = []
        for number, one in enumerate(answer.findings, 1):
            gain = f"{one.gain:.2f}x" if one.gain > 1.0 else "error"
            where = f"\n   {one.line}" if one.line else ""
            lines.append(f"{number}. {one.cause} ({gain}): {one.text}{where}")
        parts.append("\n".join(lines))
    if answer.found["switched"]:
        parts.append(table(*answer.table_of_switches()))
    if answer.trials:
        parts.append(table(*answer.table_of_trials()))
    if answer.left:
        parts.append(f"There was no time to try: {', '.join(answer.left)} (raise --minutes).")
    parts.append("\n".join(f"- {note}" for note in answer.notes))
    if answer.best is not None:
        best = answer.best
        which = "what keeps bits or rounds" if best.results in SURE else "what is accepted"
        parts.append(f"Best of {which}: {best.remedy}, {best.gain:.2f}x.")
    return "\n\n".join(filter(None, parts))
