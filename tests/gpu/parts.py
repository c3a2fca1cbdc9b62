"""What a machine with a GPU runs, in the order of what is most likely to fail: see run_parts.py.

A part is one process with a time limit, a log and files of its own, so that a crash or a hang
costs no other part anything.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BENCH", "PARTS", "SKIPPED", "TESTS", "Part", "chosen"]

TESTS, BENCH = "tests", "bench"
SKIPPED = 77  # exit status of a part that cannot run on this machine; its last line says why


@dataclass(frozen=True)
class Part:
    """One process.

    Args:
        name: of its files.
        kind: `TESTS` or `BENCH`; others belong to both.
        limit: seconds after which it is stopped.
        command: its arguments. `{python}` stands for the interpreter, `{wheel}` for the wheel to
            unpack or nothing, and `{files}` for the beginning of the names of the part's files.
        needs: the parts that must have passed before.
    """

    name: str
    kind: str
    limit: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = ("build",)


def _script(module: str, *arguments: str) -> tuple[str, ...]:
    return ("{python}", "-m", module, *arguments)


def _pytest(*arguments: str) -> tuple[str, ...]:
    # Each test's name before it runs: the log of a part that hangs ends with the one to blame.
    options = ("-v", "-rs", "-p", "no:cacheprovider", "--junitxml={files}.xml")
    return _script("pytest", *options, *arguments)


def _tests(name: str, limit: int, *files: str) -> Part:
    named = [f"tests/gpu/test_{file}.py" for file in files or (name,)]
    return Part(name, TESTS, limit, _pytest(*named))


def _sanitizer(tool: str, limit: int) -> Part:
    command = _pytest("tests/gpu/test_sanitizer.py", "-k", f"under and {tool}")
    return Part(tool, TESTS, limit, command)


def _bench(name: str, limit: int, file: str, which: str = "") -> Part:
    # The limit has room for what comes before and after the measuring.
    options = ("--files={files}", f"--seconds={limit - 40}", *(("-k", which) if which else ()))
    return Part(name, BENCH, limit, _pytest(f"benchmarks/gpu/test_cuda_{file}.py", *options))


GPT2, SMALL = "GPT-2", "1024"

PARTS = (
    Part("build", "", 300, ("make", "build-gpu", "PYTHON={python}", "WHEEL={wheel}"), ()),
    Part("info", "", 90, _script("gpu.machine_info")),
    _tests("bits", 120),
    _tests("lists", 60),
    _tests("values", 120),
    _tests("amp", 60),
    _tests("streams", 60),
    _tests("graphs", 60),
    _tests("kernels", 30),
    _tests("memory", 90),
    _tests("state", 90, "state_dict", "loader", "transforms"),
    _tests("sharded", 120),
    _tests("race", 180),
    Part("all-kernels", TESTS, 90, _pytest("tests/gpu/test_sanitizer.py", "-k", "script")),
    _sanitizer("memcheck", 200),
    _sanitizer("synccheck", 120),
    _sanitizer("racecheck", 200),
    Part("counters", TESTS, 150, _script("gpu.counters", "{files}")),
    _bench("bench-gpt2", 200, "works", GPT2),
    _bench("bench-small", 150, "works", SMALL),
    _bench("bench-images", 90, "images"),
    _bench("bench-others", 240, "works", f"not {GPT2} and not {SMALL}"),
)


def chosen(names: list[str], only: str, parts: tuple[Part, ...] = PARTS) -> list[Part]:
    """The parts that are asked for, in their order.

    Args:
        names: of parts; empty for all.
        only: `TESTS` or `BENCH` for the parts of that kind, and what comes before; empty for both.

    Raises:
        ValueError: there is no part of such a name.
    """
    known = [part.name for part in parts]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    return [
        part
        for part in parts
        if (part.name in names if names else not only or part.kind in ("", only))
    ]
