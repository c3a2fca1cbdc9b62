"""Runs the parts of parts.py one after another, and writes one report: `make gpu`.

Every part has a log and a result of its own in build/gpu. All go on when one fails; the exit status
is 0 only if none did and none was left out. A run that was stopped, or whose time was over, goes on
with `--resume`: it keeps the results of the same sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .parts import BENCH, PARTS, SKIPPED, TESTS, Part, chosen
from .parts_report import keep, write_report

__all__ = ["Runner", "main"]

ROOT = Path(__file__).parents[2]
SOURCES = ("csrc", "cuda", "python", "tests", "benchmarks")
FINAL = ("passed", "failed", "timed out", "skipped")
GOOD = ("passed", "skipped")
GRACE = 5.0  # seconds between the signal that asks for stacks and the one that ends
LEAST = 5.0  # seconds that a part is started for
# The last line of pytest, and its lines about what was skipped.
COUNTS = re.compile(r"^=+ (.*\b(?:passed|failed|skipped|error|deselected)\b.*?) =+$", re.MULTILINE)
REASON = re.compile(r"^SKIPPED \[\d+\] [^ ]+: (.*)$", re.MULTILINE)


class StoppedError(Exception):
    """This process was asked to end."""


def sources_of(root: Path, folders: Sequence[str] = SOURCES) -> str:
    """A number of all sources, to tell results of others."""
    digest = hashlib.sha256()
    endings = {".c", ".cu", ".def", ".flags", ".h", ".py"}
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in endings and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def summary_of(log: str) -> tuple[str, bool]:
    """One line about a log, and whether it says that all tests were skipped."""
    counts = COUNTS.findall(log)
    if not counts:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return (lines[-1][:200] if lines else "no output"), False
    text = counts[-1]
    if re.search(r"\b(passed|failed|error)", text) or "skipped" not in text:
        return text, False
    reasons = list(dict.fromkeys(REASON.findall(log)))
    return "; ".join(reasons)[:200] or text, True


class Runner:
    """Runs parts, and keeps what comes of them in a folder.

    Args:
        folder: for logs and results.
        root: where the parts run.
        budget: seconds for all parts together.
        wheel: what `build` unpacks instead of compiling; empty: nothing.
        results: a folder that gets the report and an archive of all files; None: none.
        parts: the table of all parts, for the report.
    """

    def __init__(
        self,
        folder: Path,
        root: Path = ROOT,
        budget: float = 1200.0,
        wheel: str = "",
        results: Path | None = None,
        parts: Sequence[Part] = PARTS,
    ) -> None:
        self.folder, self.root, self.wheel = folder.absolute(), root, wheel
        self.results, self.parts = results, parts
        self.sources = sources_of(root)
        self._end = time.monotonic() + budget
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, parts: Sequence[Part], resume: bool = False) -> int:
        """Run the parts in turn; the exit status."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in parts:
            if not resume or not self._is_done(part):
                self._forget(part)
        try:
            with self._ends_by_signals():
                for part in parts:
                    if not self._is_done(part):
                        self._run_part(part)
                        self._report()
        except StoppedError as stopped:
            print(f"\n{stopped}", flush=True)
        self._report()
        ended = [self.result(part.name) for part in parts]
        print(f"\nReport: {(self.results or self.folder) / 'report.md'}", flush=True)
        return 0 if all(found and found["status"] in GOOD for found in ended) else 1

    def result(self, name: str) -> dict[str, Any] | None:
        """What came of a part; None where it never began."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        if found["status"] == "running":  # and whoever ran it is gone
            found["status"] = "interrupted"
        return found

    def _is_done(self, part: Part) -> bool:
        found = self.result(part.name)
        return bool(found and found["status"] in FINAL and found["sources"] == self.sources)

    def _forget(self, part: Part) -> None:
        for path in self.folder.glob(f"{part.name}.*"):
            path.unlink()

    def _save(self, part: Part, status: str, **more: Any) -> None:
        said = {"name": part.name, "status": status, "limit": part.limit, "sources": self.sources}
        new = self.folder / f"{part.name}.new"
        new.write_text(json.dumps({**said, **more}, indent=1) + "\n")
        new.replace(self.folder / f"{part.name}.json")

    def _run_part(self, part: Part) -> None:
        left = self._end - time.monotonic()
        began = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}"
        for needed in part.needs:
            found = self.result(needed)
            if found and found["status"] not in GOOD:
                summary = f"{needed} has not passed"
                return self._tell(part, "not run", began=began, seconds=0.0, summary=summary)
        if left < LEAST:
            summary = "the time is over"
            return self._tell(part, "not run", began=began, seconds=0.0, summary=summary)
        self._save(part, "running", began=began, seconds=0.0, summary="")
        start = time.monotonic()
        limit = min(part.limit, left)
        try:
            status = self._status_of(part, limit)
        except StoppedError:
            seconds = time.monotonic() - start
            self._tell(part, "interrupted", began=began, seconds=seconds, summary="stopped")
            raise
        seconds = time.monotonic() - start
        summary, skipped = summary_of(self._log(part))
        ended = {0: "skipped" if skipped else "passed", SKIPPED: "skipped", None: "timed out"}
        word = ended.get(status, "failed")
        if word == "timed out":
            summary = f"stopped after {limit:.0f} s; last line: {summary}"
        elif word == "failed":
            summary = f"exit status {status}; {summary}"
        return self._tell(part, word, began=began, seconds=seconds, summary=summary, exit=status)

    def _tell(self, part: Part, status: str, **more: Any) -> None:
        self._save(part, status, **more)
        print(f"{status:11}  {part.name:12}  {more['seconds']:5.0f} s  {more['summary']}")
        if status in ("failed", "timed out"):
            tail = self._log(part).splitlines()[-12:]
            print("\n".join(f"    | {line[:160]}" for line in tail))
        sys.stdout.flush()

    def _log(self, part: Part) -> str:
        path = self.folder / f"{part.name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def _status_of(self, part: Part, limit: float) -> int | None:
        """Run a part; its exit status, None where its time was over."""
        place = {"python": sys.executable, "wheel": self.wheel, "files": self.folder / part.name}
        command = [word.format(**place) for word in part.command]
        package = self.root / ("build/wheel" if self.wheel else "python")
        environment = {
            "FASTSTEP_FAKE_GPU": "0",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(package), str(self.root / "tests")]),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with open(self.folder / f"{part.name}.log", "wb") as log:
            self._child = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return self._wait(self._child, limit)
            finally:
                self._end_child()

    @staticmethod
    def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
        """The exit status of a process that stays a zombie, so that its group's number is its own;
        None where it goes on.
        """
        end = time.monotonic() + seconds
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (found := os.waitid(os.P_PID, child.pid, look)) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _end_child(self) -> None:
        """End what a part has left running, all of its processes; Python shows its stacks first."""
        child, self._child = self._child, None
        if child is None:
            return
        if self._wait(child, 0.0) is None:
            os.killpg(child.pid, signal.SIGABRT)
            self._wait(child, GRACE)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    @contextlib.contextmanager
    def _ends_by_signals(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            raise StoppedError(f"stopped by {signal.Signals(number).name}")

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _report(self) -> None:
        found = [(part, self.result(part.name)) for part in self.parts]
        write_report(self.folder, self.sources, found)
        if self.results is not None:
            keep(self.folder, self.results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--only", choices=(TESTS, BENCH), default="")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu")
    parser.add_argument("--results", type=Path, help="also put the report there, and an archive")
    parser.add_argument("--budget", type=float, default=1200.0, metavar="SECONDS")
    parser.add_argument("--resume", action="store_true", help="keep what is done")
    parser.add_argument("--wheel", default="")
    parser.add_argument("--list", action="store_true", help="show the parts and their limits")
    given = parser.parse_args(arguments)
    try:
        parts = chosen(given.names, given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        print("\n".join(f"{part.name:12}  {part.limit:4} s" for part in parts))
        return 0
    if not (given.resume or given.names or given.only):
        shutil.rmtree(given.folder, ignore_errors=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    runner = Runner(given.folder, ROOT, given.budget, given.wheel, given.results)
    return runner.run(parts, given.resume)


if __name__ == "__main__":
    sys.exit(main())
