"""What is built and shipped: the extension's symbols and libraries, the flags, the metadata."""

import re
import runpy
import shutil
import subprocess
import sysconfig
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import setuptools

import faststep
from faststep import _C

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
FLAGS = sorted(ROOT.glob("csrc/**/*.flags"))


def output_of(tool: str, *arguments: str) -> str:
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    command = [tool, *arguments, _C.__file__]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_extension_exports_its_init_function_only() -> None:
    lines = output_of("nm", "-D", "--defined-only").splitlines()
    assert [line.split()[-1] for line in lines] == ["PyInit__C"]


def test_extension_links_the_c_library_only() -> None:
    needed = re.findall(r"NEEDED.*\[(.+)\]", output_of("readelf", "-d"))
    allowed = re.compile(r"(libc|libm|libdl|libpthread|ld-linux.*|lib[aut]b?san)\.so\.\d+$")
    assert needed
    assert [name for name in needed if not allowed.match(name)] == []


def test_extension_keeps_to_the_stable_abi() -> None:
    suffix = ".".join(Path(_C.__file__).name.split(".")[1:])
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert suffix == sysconfig.get_config_var("EXT_SUFFIX").lstrip(".")
    else:
        assert suffix == "abi3.so"


def test_extension_never_fuses_a_multiplication_and_an_addition() -> None:
    """A fused one rounds once where base and other devices round twice: other bits."""
    code = output_of("objdump", "-d", "--no-show-raw-insn")
    assert len(code) > 100_000
    assert re.findall(r"\tv?fn?m(?:add|sub)\S*", code) == []


def test_flags_leave_results_alone() -> None:
    options = {path.name: path.read_text().split() for path in FLAGS}
    assert {"compile.flags", "base.flags"} <= options.keys()
    needed = {"-ffp-contract=off", "-fno-fast-math", "-fno-lto", "-fvisibility=hidden"}
    assert needed <= set(options["compile.flags"])
    every = [option for flags in options.values() for option in flags]
    unwanted = re.compile(r"-(Ofast|ffast-math|funsafe.*|fassociative.*|flto.*|march=.*|mfma.*)$")
    assert [option for option in every if unwanted.match(option)] == []


def test_what_pip_compiles_for_development_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its objects lie where `setup.py build_ext --inplace` looks for them."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    kind: Any = runpy.run_path("setup.py")["BuildExt"]
    by_make, by_pip = (kind(setuptools.Distribution()) for _ in range(2))
    by_pip.editable_mode = True
    by_pip.get_finalized_command("build").build_temp = "/tmp/of-pip"
    for command in (by_make, by_pip):
        command.finalize_options()
    assert by_make.build_temp == by_pip.build_temp


@pytest.mark.parametrize("name", ["py.typed", "_C.pyi"])
def test_types_are_shipped(name: str) -> None:
    assert files("faststep").joinpath(name).is_file()


def test_version_is_the_same_everywhere() -> None:
    assert f'\nversion = "{faststep.__version__}"\n' in PYPROJECT
    assert f"\n## {faststep.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_the_only_requirement() -> None:
    assert '\ndependencies = ["torch>=2.10"]\n' in PYPROJECT
    assert '\nrequires = ["setuptools>=77"]\n' in PYPROJECT


def test_what_the_extras_install_is_pinned() -> None:
    extras = PYPROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
    wanted = set(re.findall(r'"([A-Za-z0-9-]+)', extras)) | {"torch"}
    pins = re.findall(
        r"^([A-Za-z0-9-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert len(wanted) > 10
    assert wanted <= set(pins)


def test_make_explains_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    assert "test" in targets
    for target in targets:
        assert re.search(rf"^{target}:.*## \S", makefile, re.MULTILINE), target


def test_pre_commit_runs_the_linters_of_make_in_their_pinned_versions() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.findall(r"^lint: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[0]
    linters = {Path(line.split()[0]).name for line in recipe.splitlines()}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"entry: (?:\.venv/bin/)?([\w-]+)", hooks)
    assert set(entries) == linters
    assert re.findall(r"repo: (.*)", hooks) == ["local"]
    pins = re.findall(r'"([\w-]+==[^"]+)"', hooks)
    assert {pin.split("==")[0] for pin in pins} == linters - {"mypy"}
    assert set(pins) <= set((ROOT / "constraints.txt").read_text().splitlines())


def test_pre_commit_formats_the_files_that_make_formats() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    chosen = re.compile(re.findall(r"entry: clang-format.*\n.*\n *files: (.*)", hooks)[0])
    wildcards = re.findall(
        r"^C_FILES = \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    formatted = {path for wildcard in wildcards[0].split() for path in ROOT.glob(wildcard)}
    sources = (p for top in ("csrc", "cuda", "tests") for p in ROOT.glob(f"{top}/**/*.*"))
    assert len(formatted) > 100
    assert formatted == {p for p in sources if chosen.search(p.relative_to(ROOT).as_posix())}
