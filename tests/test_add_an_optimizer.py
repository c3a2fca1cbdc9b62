"""Follows "Add an optimizer" of CONTRIBUTING.md in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import torch
from faststep.optim.signsgd import SignSGD

param = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
param.grad = torch.tensor([-5.0, 0.0, 7.0])
SignSGD([param], lr=0.5).step()
assert param.tolist() == [1.5, 2.0, 2.5], param
meta = torch.nn.Parameter(torch.ones(3, device="meta"))
meta.grad = torch.ones(3, device="meta")
SignSGD([meta], lr=0.5).step()
"""
# Of the tests over optimizers; all would take a minute.
SOME = "SignSGD and (test_step and float32-contiguous or test_amp or inference)"


def copy_tree(to: Path) -> None:
    of_others = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("csrc", "python", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=of_others)
        else:
            shutil.copy(ROOT / name, to / name)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def replace(path: Path, pattern: str, new: str, times: int) -> None:
    text, count = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
    assert count == times
    path.write_text(text)


def test_the_walk_through_works(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = page.split("\n## Add an optimizer\n")[1].split("\n## ")[0]
    rule, python, reference, declaration = (
        textwrap.dedent(code)
        for code in re.findall(r" ```(?:c|python)\n(.*?) ```", text, re.DOTALL)
    )
    row = re.search(r"`(RULE\(signsgd,.*?\))`", text)
    assert row
    copy_tree(tmp_path)
    rules, optim = tmp_path / "csrc" / "rules", tmp_path / "python" / "faststep" / "optim"
    (rules / "signsgd.h").write_text(rule)
    append(rules / "each.h", '#include "rules/signsgd.h"\n')
    append(rules / "rules.def", row[1] + "\n")
    (optim / "signsgd.py").write_text(python)
    append(optim / "__init__.py", "from .signsgd import SignSGD\n\n__all__ += ['SignSGD']\n")
    tests = tmp_path / "tests" / "optim"
    append(tests / "references.py", "\n\n" + reference)
    all_of_them = r"^ALL = \((.*)\)$"
    replace(tests / "declarations.py", all_of_them, rf"{declaration}\nALL = (\1, SIGNSGD)", 1)
    flags = tmp_path / "csrc" / "compile.flags"
    replace(flags, "-O3", "-O0", 1)  # to optimize takes most of the time
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    cpu_only = {**os.environ, "FASTSTEP_CUDA": "0"}
    subprocess.run(build, cwd=tmp_path, check=True, timeout=300, env=cpu_only)
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path / "python", check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SOME, "tests/optim"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "python"), "FASTSTEP_EVERY": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20
