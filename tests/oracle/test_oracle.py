"""The same scripts with torch, with the imports swapped, and under `run` see the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from programs import Programs

from . import __main__ as program
from .watch import differences

TESTS = Path(__file__).parents[1]
Seen = dict[str, list[list[Any]]]
# As `python -m`, in the folder of the tests.
MODULE = """
import os, runpy, sys
os.chdir(sys.argv.pop(1))
sys.path.insert(0, "")
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Callable[[str], Seen]:
    """What the scripts saw in one of three ways."""
    folder, known = tmp_path_factory.mktemp("oracle"), {}

    def of_way(way: str) -> Seen:
        if way not in known:
            run = ["faststep", "run", "-m"] if way == "run" else []
            library, file = "torch" if way == "run" else way, folder / way
            done = programs.run(
                MODULE, str(TESTS), *run, "oracle", library, str(file), CUDA_VISIBLE_DEVICES=""
            )
            assert done.returncode == 0, done.stderr
            known[way] = json.loads(file.read_text())
        return known[way]

    return of_way


@pytest.mark.parametrize("way", ["swapped", "run"])
@pytest.mark.parametrize("script", program.SCRIPTS)
def test_a_script_sees_what_torch_shows(script: str, way: str, seen: Callable[[str], Seen]) -> None:
    theirs, ours = seen("torch")[script], seen(way)[script]
    assert len(theirs) > 1, "the script notes nothing"
    assert theirs[-1] == ["end", None], "the script fails with torch"
    found = []
    for at, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        if their[0] != our[0]:
            found.append(f"event {at} is {their[0]!r} with torch, {our[0]!r} with faststep")
            break
        found += differences(their[1], our[1], f"event {at}, {their[0]}")
    if len(theirs) != len(ours):
        found.append(f"{len(theirs)} events with torch, {len(ours)} with faststep")
    assert not found, "\n".join(found[:12])


def test_the_oracle_can_tell() -> None:
    """A changed number, type, name and length are found; rounding is not."""
    value = {"tensor": ["float32", "strided", [2], [1.0, 2.0]]}
    near = {"tensor": ["float32", "strided", [2], [1.0, 2.00001]]}
    assert not list(differences(value, near))
    tiny = [{"tensor": ["float32", "strided", [2], [1e-9 * x, 1.0]]} for x in (1.0, 2.0)]
    assert not list(differences(*tiny))
    both = [{"tensor": ["float32", "strided", [2], [1e-9 * x, 1e-9]]} for x in (1.0, 2.0)]
    assert list(differences(*both))
    for other in (
        {"tensor": ["float32", "strided", [2], [1.0, 2.01]]},
        {"tensor": ["float64", "strided", [2], [1.0, 2.0]]},
        {"tensor": ["float32", "strided", [2], [1.0]]},
        [1.0],
        "text",
        None,
    ):
        assert list(differences(value, other))
