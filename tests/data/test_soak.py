"""Fifty epochs on every path leave a process with what it had after the first of them.

In a process of its own: one with free memory on its heap would hide what is lost.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from . import soak

for module in ("h5py", "PIL.Image", "simplejpeg"):
    pytest.importorskip(module)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from tests.data import soak
{}
sys.exit(soak.main(sys.argv[1:]))
"""
LEAK = """
kept = []
class Keeping(soak.DataLoader):
    def __iter__(self):
        kept.append((open("/dev/null"), bytearray(b"x" * soak.BATCH * soak.ROW)))
        return super().__iter__()
soak.DataLoader = Keeping
"""


def run(before: str, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", SCRIPT.format(before), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_fifty_epochs() -> None:
    code, lines = run("")
    assert [line.split(":")[0] for line in lines[1:]] == [*soak.PATHS]
    assert code == 0, "\n".join(lines)


def test_what_would_be_found() -> None:
    """A leak of each kind, of the least size that matters."""
    code, lines = run(LEAK, "arrays")
    assert code == 1
    assert all(f"{what}: " in lines[-1] for what in ("descriptors", "objects", "kilobytes"))
