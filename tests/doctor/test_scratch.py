"""Scripts in a sandbox without namespaces see what they would see without one."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from faststep.doctor import scratch
from programs import Programs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not scratch.is_available(network=False), reason="no Landlock"
)

# Runs a program in a folder, in a sandbox if argv[2] names an empty folder for it.
START = """
import json, os, sys
os.chdir(sys.argv[1])
if sys.argv[2]:
    from faststep.doctor import scratch
    scratch.enter(sys.argv[2], network=False)
"""

# Does one operation after another, and says what came of each.
OPERATIONS = """
import glob, pathlib, shutil

def write(path, mode):
    with open(path, mode) as file:
        file.write(mode)

def by_flags(path, flags):
    at = os.open(path, flags)
    os.write(at, b"flags")
    os.close(at)

def look(path):
    return [os.path.exists(path), os.path.isdir(path), os.path.islink(path),
            os.stat(path).st_size if os.path.isfile(path) else None]

DONE = {
    "write": write,
    "read": lambda path: open(path).read(),
    "update": lambda path: write(path, "r+"),
    "by_flags": by_flags,
    "look": look,
    "list": lambda path: sorted(os.listdir(path)),
    "scan": lambda path: sorted((e.name, e.is_dir()) for e in os.scandir(path)),
    "glob": lambda path: sorted(glob.glob(path + "/**", recursive=True)),
    "mkdir": os.mkdir,
    "makedirs": lambda path: os.makedirs(path, exist_ok=True),
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "rmtree": shutil.rmtree,
    "rename": os.rename,
    "replace": os.replace,
    "symlink": os.symlink,
    "link": os.link,
    "copy": lambda a, b: (shutil.copy(a, b), None)[1],
    "touch": lambda path: pathlib.Path(path).touch(),
    "truncate": lambda path: os.truncate(path, 1),
    "chmod": lambda path: os.chmod(path, 0o640),
    "mode": lambda path: os.stat(path).st_mode,
}
said = []
for name, *arguments in json.loads(sys.argv[3]):
    try:
        said.append(DONE[name](*arguments))
    except OSError as error:
        said.append(type(error).__name__)
print(json.dumps(said))
"""

PATHS = ["a", "b", "new", "folder", "folder/a", "folder/new", "other", "other/new", "link"]
ONE = ["read", "update", "look", "list", "scan", "glob", "mkdir", "makedirs", "unlink", "rmdir"]
ONE += ["rmtree", "touch", "truncate", "chmod", "mode"]
TWO = ["rename", "replace", "copy", "symlink", "link"]


def filled(folder: Path) -> Path:
    (folder / "folder/inner").mkdir(parents=True)
    for name in ("a", "b", "folder/a", "folder/inner/deep"):
        (folder / name).write_text(f"{name} was here\n")
    (folder / "link").symlink_to("folder/a")
    return folder


def tree(folder: Path) -> list[tuple[str, int, Any]]:
    """All that is in a folder."""
    return sorted(
        (
            str(path.relative_to(folder)),
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    )


def operations(source: random.Random, count: int) -> list[list[Any]]:
    made: list[list[Any]] = []
    for _ in range(count):
        path, other = source.choice(PATHS), source.choice(PATHS)
        made.append(
            source.choice(
                [
                    ["write", path, source.choice(["w", "a", "x", "w+"])],
                    ["by_flags", path, source.choice([1, 0o101, 0o301, 0o1001, 0o2001])],
                    [source.choice(ONE), path],
                    [source.choice(ONE), path],
                    [source.choice(TWO), path, other],
                ]
            )
        )
        made.append(["look", path])
    return [*made, ["glob", "."], *(["read", path] for path in PATHS)]


@pytest.mark.parametrize("seed", range(12))
def test_files_are_as_without_it_and_none_is_changed(
    tmp_path: Path, programs: Programs, seed: int
) -> None:
    plain, guarded, empty = (tmp_path / name for name in ("plain", "guarded", "empty"))
    empty.mkdir()
    before = tree(filled(guarded))
    ordered = operations(random.Random(seed), 60)
    said = []
    for folder, sandbox in ((filled(plain), ""), (guarded, str(empty))):
        done = programs.run(START + OPERATIONS, str(folder), sandbox, json.dumps(ordered))
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(json.loads(done.stdout))
    pairs = zip(ordered, *said, strict=True)
    assert [one for one in pairs if one[1] != one[2]] == []
    assert tree(guarded) == before
