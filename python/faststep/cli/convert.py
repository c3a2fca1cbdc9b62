"""``python -m faststep convert``: a dataset of any format as memory-mapped arrays."""

from __future__ import annotations

import argparse
import time

from .console import CommandError, ProgressBar, at_least

HELP = "write a dataset of any format as memory-mapped arrays, for the loader's C threads"
BETWEEN = 0.1  # seconds between two updates of the progress bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``convert``."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="file, directory or pattern: .npy, .npz, safetensors, HDF5, Arrow, Parquet, LMDB, "
        "TFRecord, JSON lines, tar (WebDataset), zip or folders of images",
    )
    parser.add_argument("destination", metavar="DST", help="the directory to write")
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier result; other files stay"
    )
    parser.add_argument(
        "--columns",
        metavar="A,B",
        help="convert these fields only (HDF5, Parquet, Arrow, JSON lines, tar, zip, safetensors, "
        ".npz)",
    )
    parser.add_argument(
        "--image-size",
        type=at_least(1),
        metavar="N",
        help="resize images by their shorter side, and keep the middle N x N pixels",
    )


def run(arguments: argparse.Namespace) -> None:
    """Convert, with a progress bar."""
    from ..data import convert

    options = {"columns": arguments.columns.split(",")} if arguments.columns else {}
    bar: ProgressBar | None = None
    shown = 0.0

    def report(done: int, total: int | None) -> None:
        nonlocal bar, shown
        now = time.monotonic()
        bar = bar or ProgressBar(total or 1)
        if done != total and now - shown < BETWEEN:
            return
        if total is None:
            bar.count(done, "records")
        else:
            bar.show(done, "records")
        shown = now

    try:
        count = convert(
            arguments.source,
            arguments.destination,
            force=arguments.force,
            image_size=arguments.image_size,
            report=report,
            **options,
        )
    except FileExistsError as error:
        hint = "" if arguments.force else "; --force replaces an earlier result"
        raise CommandError(f"{error}{hint}") from None
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise CommandError(str(error)) from None
    finally:
        if bar is not None:
            bar.close()
    print(f"{arguments.destination}: {count} records")
