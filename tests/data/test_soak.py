"""Fifty epochs on every path leave a process with what it had after the first of them.

In a process of its own: one with free memory on its heap would hide what is lost.
"""

import sys
from pathlib import Path

import pytest

from programs import Programs

from . import soak

for module in ("h5py", "PIL.Image", "simplejpeg"):
    pytest.importorskip(module)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.data import soak
{{}}
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


def run(programs: Programs, before: str, *arguments: str) -> tuple[int, list[str]]:
    done = programs.run(SCRIPT.format(before), *arguments)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_fifty_epochs(programs: Programs) -> None:
    code, lines = run(programs, "")
    assert [line.split(":")[0] for line in lines[1:]] == [*soak.PATHS]
    assert code == 0, "\n".join(lines)


def test_what_would_be_found(programs: Programs) -> None:
    """A leak of each kind, of the least size that matters."""
    code, lines = run(programs, LEAK, "arrays")
    assert code == 1
    assert all(f"{what}: " in lines[-1] for what in ("descriptors", "objects", "kilobytes"))
