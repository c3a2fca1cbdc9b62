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
"""


def test_the_walk_through_works(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = page.split("\n## Add an optimizer\n")[1].split("\n## ")[0]
    rule, python = (
        textwrap.dedent(code)
        for code in re.findall(r" ```(?:c|python)\n(.*?) ```", text, re.DOTALL)
    )
    row = re.search(r"`(RULE\(signsgd,.*?\))`", text)
    assert row
    for name in ("csrc", "python", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            of_others = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=of_others)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    rules = tmp_path / "csrc" / "rules"
    (rules / "signsgd.h").write_text(rule)
    include = '#include "rules/sgd.h"\n'
    all_rules = (rules / "rules.h").read_text()
    assert all_rules.count(include) == 2, "once for float and once for double"
    (rules / "rules.h").write_text(
        all_rules.replace(include, include + '#include "rules/signsgd.h"\n')
    )
    with (rules / "rules.def").open("a") as table:
        table.write(row[1] + "\n")
    (tmp_path / "python" / "faststep" / "optim" / "signsgd.py").write_text(python)
    flags = tmp_path / "csrc" / "compile.flags"
    assert "-O3" in flags.read_text()
    flags.write_text(flags.read_text().replace("-O3", "-O0"))  # to optimize takes most of the time
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    cpu_only = {**os.environ, "FASTSTEP_CUDA": "0"}
    subprocess.run(build, cwd=tmp_path, check=True, timeout=300, env=cpu_only)
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path / "python", check=True, timeout=120)
