"""The CPythons of this machine that a wheel of the stable ABI runs on."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

OLDEST, NEWEST = 10, 20
PROBE = (
    "import json, platform, sys, sysconfig, venv; print(json.dumps(["
    "platform.python_implementation(), platform.python_version(), sys.executable, "
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED'))]))"
)


def _probed(program: str) -> tuple[str, str] | None:
    """Version and full path of a CPython with a GIL that runs; None for anything else."""
    try:
        done = subprocess.run([program, "-c", PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # a shim of pyenv, for one, whose version is not in use
    kind, version, path, free_threaded = json.loads(done.stdout)
    return (version, path) if kind == "CPython" and not free_threaded else None


def _of_pyenv() -> Path:
    if root := os.environ.get("PYENV_ROOT"):
        return Path(root)
    return Path.home() / ".pyenv"


def _programs(minor: int) -> Iterator[str]:
    name = f"python3.{minor}"
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if found := shutil.which(name, path=folder):
            yield found
    yield from map(str, sorted(_of_pyenv().glob(f"versions/3.{minor}.*/bin/{name}"), reverse=True))
    if sys.version_info[:2] == (3, minor):
        yield sys.executable


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def find(wanted: Iterable[str] = ()) -> dict[str, tuple[str, str] | None]:
    """Version and path of each interpreter, by what it was asked for; None where there is none.

    Args:
        wanted: versions such as "3.12", names or paths; none for one of each version there is.
    """
    asked = {}
    for name in wanted:
        is_version = name.startswith("3.") and name[2:].isdigit()
        programs = _programs(_minor(name)) if is_version else iter([name])
        asked[name] = next(filter(None, map(_probed, programs)), None)
    if asked:
        return asked
    for minor in range(OLDEST, NEWEST):
        if found := next(filter(None, map(_probed, _programs(minor))), None):
            asked[f"3.{minor}"] = found
    return asked
