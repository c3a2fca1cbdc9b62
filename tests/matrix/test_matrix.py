"""What `make matrix` is made of, without a download."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import interpreters
import pairs
import pytest
import stand_ins
import table
from table import Row

needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "objdump", "nm"))), reason="no C compiler or no binutils"
)


def row(torch: str, python: str, passed: str = "5", remarks: str = "") -> Row:
    return Row(torch, python, "2026-01-02", passed, "0", "1", remarks)


def test_rows_are_replaced_and_sorted_by_version(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\n{table.HEAD}\n{table.END}\nafter\n")
    table.update(page, [row("2.10.0+cu128", "3.11.7"), row("2.9.1", "3.9.2")])
    table.update(page, [row("2.10.3", "3.11.9", "", "no wheel"), row("2.10.3", "3.9.0")])
    lines = page.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-2:] == [table.END, "after"]
    assert lines[4:-2] == [
        "| 2.9.1 | 3.9.2 | 2026-01-02 | 5 | 0 | 1 |  |",
        "| 2.10.3 | 3.9.0 | 2026-01-02 | 5 | 0 | 1 |  |",
        "| 2.10.3 | 3.11.9 | 2026-01-02 |  | 0 | 1 | no wheel |",
    ]


def test_the_page_has_a_table() -> None:
    page = (pairs.ROOT / "docs/compatibility.md").read_text()
    assert table.HEAD in page
    assert all(len(row) == len(Row._fields) for row in table._rows(page))


def test_tests_that_are_run_exist() -> None:
    assert [name for name in pairs.TESTS if not (pairs.ROOT / name).exists()] == []


def test_this_interpreter_is_found() -> None:
    version = platform.python_version()
    minor = version.rsplit(".", 1)[0]
    assert interpreters.find([sys.executable])[sys.executable] == (version, sys.executable)
    assert minor in interpreters.find()
    assert interpreters.find(["3.99", "/nowhere/python"]) == {"3.99": None, "/nowhere/python": None}


def compile_library(folder: Path, name: str, source: str, *options: str) -> None:
    (folder / "source.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", str(folder / "source.c")]
    subprocess.run([*command, *options, "-o", str(folder / name)], check=True)


@needs_tools
def test_stand_ins_have_the_symbols_that_are_wanted(tmp_path: Path) -> None:
    """With a version and without; what other libraries have is left to them."""
    lib, build = tmp_path / "torch/lib", tmp_path / "build"
    lib.mkdir(parents=True)
    build.mkdir()
    (build / "map").write_text("V_1 { global: versioned; };")
    script = f"-Wl,--version-script={build / 'map'}"
    compile_library(build, "libabsent_v.so.1", "int versioned(void) { return 1; }", script)
    compile_library(build, "libabsent.so.2", "int plain(void) { return 2; }")
    calls = "int versioned(void), plain(void), getpid(void);"
    wants = f"{calls} int sum(void) {{ return versioned() + plain() + (getpid() > 0); }}"
    found = [f"-L{build}", "-l:libabsent_v.so.1", "-l:libabsent.so.2", "-Wl,-rpath,$ORIGIN"]
    compile_library(lib, "libtorch_global_deps.so", wants, *found)
    assert stand_ins.build(tmp_path / "torch") == ["libabsent.so.2", "libabsent_v.so.1"]
    assert sorted(path.name for path in lib.iterdir() if "absent" in path.name) == [
        "libabsent.so.2",
        "libabsent_v.so.1",
    ]
    code = f"import ctypes; print(ctypes.CDLL({str(lib / 'libtorch_global_deps.so')!r}).sum())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "201\n"
    assert done.stderr == ""
