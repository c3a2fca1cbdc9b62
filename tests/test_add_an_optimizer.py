"""Follows "Add an optimizer" and "Add a state format" of CONTRIBUTING.md in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

OWN_TESTS = """
import io
import torch
from faststep.optim import AdamW
from faststep.optim.signsgd import SignSGD


def test_walk_of_an_optimizer():
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    param.grad = torch.tensor([-5.0, 0.0, 7.0])
    SignSGD([param], lr=0.5).step()
    assert param.tolist() == [1.5, 2.0, 2.5], param
    meta = torch.nn.Parameter(torch.ones(3, device="meta"))
    meta.grad = torch.ones(3, device="meta")
    SignSGD([meta], lr=0.5).step()


def made():
    param = torch.nn.Parameter(torch.ones(3, 5))
    return param, AdamW([param], betas=(0.9, 0.9), state_dtype="fp8", max_grad_norm=1.0)


def step(param, optimizer):
    param.grad = torch.linspace(-1, 1, 15).view(3, 5)
    optimizer.step()


def test_walk_of_a_format():
    both = made()
    step(*both)
    torch.save([both[0].detach(), both[1].state_dict()], file := io.BytesIO())
    file.seek(0)
    loaded, (values, states) = made(), torch.load(file)
    loaded[0].data = values
    loaded[1].load_state_dict(states)
    for param, optimizer in (both, loaded):
        step(param, optimizer)
        assert optimizer.state[param]["exp_avg"].dtype is torch.float8_e5m2
    assert torch.equal(both[0], loaded[0])
    state = loaded[1].state[loaded[0]]
    state["step"] = state["step"].to(torch.float8_e5m2)
    try:
        step(*loaded)
    except RuntimeError as error:
        assert "is not a one-element tensor of type" in str(error)
    else:
        raise AssertionError("it has counted in fp8")
"""
# Of the tests over optimizers; all would take a minute.
OF_SIGNSGD = "SignSGD and (test_step and float32-contiguous or test_amp or inference)"
OF_FP8 = "test_state_dtype and fp8"
FILES = [f"tests/optim/test_{n}.py" for n in ("runner", "amp", "inference", "state_dtype", "walk")]


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


def change(root: Path, text: str) -> None:
    """Make the changes of a diff, whose old lines are in their file once."""
    for part in text.split("--- ")[1:]:
        name, *hunks = part.split("\n@@\n")
        path = root / name
        for hunk in hunks:
            lines = hunk.rstrip("\n").split("\n")
            old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
            new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
            source = path.read_text()
            assert source.count(old) == 1, f"{name} has not once:\n{old}"
            path.write_text(source.replace(old, new))


def section(title: str) -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def add_an_optimizer(root: Path) -> None:
    text = section("Add an optimizer")
    rule, python, reference, declaration = (
        textwrap.dedent(code)
        for code in re.findall(r" ```(?:c|python)\n(.*?) ```", text, re.DOTALL)
    )
    row = re.search(r"`(RULE\(signsgd,.*?\))`", text)
    assert row
    rules, optim = root / "csrc" / "rules", root / "python" / "faststep" / "optim"
    (rules / "signsgd.h").write_text(rule)
    append(rules / "each.h", '#include "rules/signsgd.h"\n')
    append(rules / "rules.def", row[1] + "\n")
    (optim / "signsgd.py").write_text(python)
    append(optim / "__init__.py", "from .signsgd import SignSGD\n\n__all__ += ['SignSGD']\n")
    tests = root / "tests" / "optim"
    append(tests / "references.py", "\n\n" + reference)
    all_of_them = r"^ALL = \((.*)\)$"
    replace(tests / "declarations.py", all_of_them, rf"{declaration}\nALL = (\1, SIGNSGD)", 1)


def add_a_state_format(root: Path) -> None:
    text = section("Add a state format")
    [diff] = re.findall(r" ```diff\n(.*?) ```", text, re.DOTALL)
    change(root, textwrap.dedent(diff))
    row = re.search(r"`(\"fp8\": torch\.\w+)`", text)
    assert row
    tests = root / "tests" / "optim" / "test_state_dtype.py"
    replace(tests, r'^NARROW = \{("bf16": BF16)\}', rf"NARROW = {{\1, {row[1]}}}", 1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tree with both, compiled."""
    root = tmp_path / "tree"
    copy_tree(root)
    add_an_optimizer(root)
    add_a_state_format(root)
    (root / "tests" / "optim" / "test_walk.py").write_text(OWN_TESTS)
    # To optimize takes most of the time, and each instruction set as much again.
    replace(root / "csrc" / "compile.flags", "-O3", "-O0", 1)
    replace(root / "setup.py", r"^LEVELS = .*$", 'LEVELS = ["base"]', 1)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    cpu_only = {**os.environ, "FASTSTEP_CUDA": "0", "FASTSTEP_WERROR": "1"}
    subprocess.run(build, cwd=root, check=True, timeout=900, env=cpu_only)
    return root


def test_what_was_added_passes_its_tests(tree: Path) -> None:
    """The optimizer steps as its reference, and the state format rounds as torch."""
    some = f"{OF_SIGNSGD} or {OF_FP8} or test_walk"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", "-k", some, *FILES],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "python"), "FASTSTEP_EVERY": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^PASSED .*?(SignSGD|fp8|test_walk_of)", done.stdout, re.MULTILINE)
    assert passed.count("SignSGD") > 20
    assert passed.count("fp8") == 60
    assert passed.count("test_walk_of") == 2
