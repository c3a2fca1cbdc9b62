"""The rules are written in the common subset of C11 and CUDA C: nvcc compiles them, unfused.

nvcc --fmad=false is to CUDA what -ffp-contract=off is to gcc. In PTX a correctly rounded division
or square root is one instruction, div.rn or sqrt.rn; what the assembler makes of it rounds alike.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NVCC = shutil.which("nvcc")
RULES = re.findall(r"^RULE\((\w+),", (ROOT / "csrc/rules/rules.def").read_text(), re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.]*)\s.*;$", re.MULTILINE)
ENTRY = re.compile(r"\.entry (\w+)\(")
pytestmark = pytest.mark.skipif(not NVCC, reason="nvcc is not installed")


def ptx(folder: Path, fmad: bool) -> str:
    out = folder / f"{fmad}.ptx"
    options = ["-ptx", "-arch=sm_80", f"--fmad={str(fmad).lower()}", "-Werror", "all-warnings"]
    command = [str(NVCC), *options, "-Icsrc", "-o", str(out), "cuda/rules_check.cu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_text()


def fused(code: str) -> list[str]:
    """Multiply-adds of floating point numbers; those of integers, mad.lo and so on, are exact."""
    return [i for i in INSTRUCTION.findall(code) if re.match(r"(fma\.|mad\..*f(32|64))", i)]


@pytest.fixture(scope="module")
def unfused(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ptx(tmp_path_factory.mktemp("ptx"), fmad=False)


def test_every_rule_compiles_for_both_types(unfused: str) -> None:
    assert len(RULES) >= 5
    rules = {f"check_{name}_{real}" for name in RULES for real in ("f32", "f64")}
    others = {"check_conversions", "check_loss_scale", "check_tree"}
    assert set(ENTRY.findall(unfused)) == rules | others


def test_nothing_is_fused(unfused: str) -> None:
    assert fused(unfused) == []


def test_the_search_finds_what_is_fused(tmp_path: Path) -> None:
    """Where fusing is allowed nvcc does it, in fp32 and in fp64."""
    found = set(fused(ptx(tmp_path, fmad=True)))
    assert {"fma.rn.f32", "fma.rn.f64"} <= found


def test_every_operation_rounds_to_nearest_and_keeps_subnormals(unfused: str) -> None:
    real = [i for i in INSTRUCTION.findall(unfused) if re.search(r"\.f(32|64)$", i)]
    arithmetic = [i for i in real if re.match(r"(add|sub|mul|div|sqrt|rcp|rsqrt|ex2|lg2)\.", i)]
    assert {"div.rn.f32", "div.rn.f64", "sqrt.rn.f32", "sqrt.rn.f64"} <= set(arithmetic)
    unlike_c = re.compile(r"\.(approx|full|ftz|sat|r[zmp])\b|^(rcp|rsqrt|ex2|lg2)\.")
    assert [i for i in real if unlike_c.search(i)] == []
