"""Tests the built wheel beside several versions of torch and CPython; `make matrix` runs it.

Each pair gets an environment of its own in build/matrix, which is removed before the next one is
made: torch's wheels are a gigabyte each, two gigabytes when unpacked. Logs stay in build/matrix.
Exits with 1 where a test failed, and where what could be had could not be tested.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import interpreters
import stand_ins
from table import Row, update

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/matrix"
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
GIGABYTES = 5
TOOLS = ("pytest>=8", "numpy", "hypothesis")
# Named as dependencies by builds for CUDA, and not needed on the CPU.
NOT_NEEDED = ("nvidia-", "cuda-", "triton", "pytorch-triton")
# What depends on torch's inside.
LOADER_TESTS = (
    *("batches", "datasets", "lifetime", "resume", "resume_streams", "rows"),
    *("worker_threads", "workers"),
)
TESTS = (
    "tests/optim",
    "tests/amp",
    "tests/clip",
    "tests/accumulate/test_pass.py",
    "tests/accumulate/test_sums.py",
    "tests/accumulate/test_release.py",
    "tests/test_abi.py",
    "tests/test_missing_symbols.py",
    *(f"tests/data/test_{name}.py" for name in LOADER_TESTS),
)
ABOUT = (
    "import json, torch, faststep; print(json.dumps([torch.__version__, "
    "faststep.__file__, faststep._why_no_layout]))"
)
REQUIRED = "import importlib.metadata as m, json; print(json.dumps(m.requires('torch')))"


class CannotBeHadError(Exception):
    """A version that the package index does not have for this Python."""


class Pair(NamedTuple):
    """What is tested together."""

    torch: str
    python: str  # version
    program: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--torch", default=" ".join(TORCHES), help="versions, separated by spaces")
    parser.add_argument("--pythons", default="", help="versions, names or paths; all that are here")
    parser.add_argument("--page", type=Path, help="the page whose table gets the results")
    parser.add_argument("--tests", default=" ".join(TESTS), help="files, and options of pytest")
    return parser.parse_args()


def environment() -> dict[str, str]:
    """This process's, without what would lead to the sources, and with scratch space in build."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "TMPDIR": str(WORK / "tmp"), "PYTHONPYCACHEPREFIX": str(WORK / "env/pycache")}


def run(log: Path, *command: str) -> None:
    """Runs a command, whose output goes into the log; CalledProcessError where it fails."""
    start = time.monotonic()
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=file, check=False
        )
        file.write(f"-- {time.monotonic() - start:.0f} s\n")
    done.check_returncode()


def answer(python: str, code: str) -> Any:
    """What a program prints as JSON."""
    done = subprocess.run(
        [python, "-c", code], cwd=ROOT, env=environment(), capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    return json.loads(done.stdout)


def install_torch(pair: Pair, log: Path, python: str) -> None:
    options = ("--no-cache-dir", "--no-compile", "--no-deps", "--only-binary=:all:")
    try:
        run(log, *pip(python), *options, f"torch=={pair.torch}.*")
    except subprocess.CalledProcessError:
        said = log.read_text()  # an index that does not answer is none without a wheel
        if "No matching distribution" in said and "Retrying" not in said:
            raise CannotBeHadError("no wheel for this Python") from None
        raise


def pip(python: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")


def prepare(pair: Pair, wheel: Path, log: Path) -> tuple[str, str, str]:
    """Makes the environment: its Python, torch's version and remarks."""
    python = str(WORK / "env/bin/python")
    run(log, pair.program, "-m", "venv", "--without-pip", str(WORK / "env"))
    install_torch(pair, log, python)
    required = [
        requirement
        for requirement in answer(python, REQUIRED)
        if "extra ==" not in requirement and not requirement.startswith(NOT_NEEDED)
    ]
    run(log, *pip(python), "--no-compile", *required, *TOOLS)
    run(log, *pip(python), "--no-deps", str(wheel))
    (torch,) = (WORK / "env/lib").glob("python3.*/site-packages/torch")
    libraries = stand_ins.build(torch)
    version, file, no_records = answer(python, ABOUT)
    if WORK not in Path(file).parents:
        raise RuntimeError(f"faststep comes from {file}, not from the wheel")
    if no_records:
        raise RuntimeError(f"torch's records are not found: {no_records}")
    every = environment().get("FASTSTEP_EVERY", "1")
    remarks = [f"one case in {every}"] * (every != "1")
    remarks += ["stand-ins for CUDA's libraries"] * bool(libraries)
    return python, version, "; ".join(remarks)


def counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped."""
    total = failed = skipped = 0
    for suite in xml.etree.ElementTree.parse(report).getroot().iter("testsuite"):
        total += int(suite.attrib["tests"])
        failed += int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        skipped += int(suite.attrib["skipped"])
    return total - failed - skipped, failed, skipped


def tested(pair: Pair, wheel: Path, tests: list[str]) -> tuple[Row, bool]:
    """The pair's row of the table, and whether all is well."""
    log, report = WORK / f"torch{pair.torch}-python{pair.python}.log", WORK / "report.xml"
    date = datetime.date.today().isoformat()
    log.unlink(missing_ok=True)
    report.unlink(missing_ok=True)
    try:
        python, version, remarks = prepare(pair, wheel, log)
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
        try:
            run(log, python, "-m", "pytest", *options, *tests)
        except subprocess.CalledProcessError:
            if not report.is_file():
                raise
        passed, failed, skipped = counts(report)
        row = Row(version, pair.python, date, str(passed), str(failed), str(skipped), remarks)
        return row, passed > 0 and failed == 0
    except CannotBeHadError as error:
        return Row(pair.torch, pair.python, date, "", "", "", str(error)), True
    except (subprocess.CalledProcessError, OSError, ValueError, RuntimeError) as error:
        with log.open("a") as file:
            file.write(f"{error}\n")
        remark = f"could not be tested: {type(error).__name__}"
        return Row(pair.torch, pair.python, date, "", "", "", remark), False
    finally:
        shutil.rmtree(WORK / "env", ignore_errors=True)
        shutil.rmtree(WORK / "tmp", ignore_errors=True)


def main() -> int:
    given = arguments()
    pythons = interpreters.find(given.pythons.split())
    missing = [name for name, found in pythons.items() if found is None]
    if missing or not pythons:
        print(f"no CPython: {', '.join(missing) or 'none is in PATH or of pyenv'}", file=sys.stderr)
        return 1
    pairs = [
        Pair(torch, *found) for found in pythons.values() for torch in given.torch.split() if found
    ]
    all_well = True
    for pair in pairs:
        shutil.rmtree(WORK / "env", ignore_errors=True)
        (WORK / "tmp").mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(WORK).free < GIGABYTES << 30:
            print(f"{WORK} has less than {GIGABYTES} GB of disk left", file=sys.stderr)
            return 1
        start = time.monotonic()
        row, well = tested(pair, given.wheel.resolve(), given.tests.split())
        all_well = all_well and well
        seconds = time.monotonic() - start
        print(
            f"torch {row.torch}, CPython {row.python}: {row.told()} ({seconds:.0f} s)", flush=True
        )
        if given.page:
            update(given.page, [row])
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
