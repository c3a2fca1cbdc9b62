"""The kernels are written in the common subset of C11 and CUDA C: nvcc compiles them, unfused.

nvcc --fmad=false is to CUDA what -ffp-contract=off is to gcc. In PTX a correctly rounded division
or square root is one instruction, div.rn or sqrt.rn; what the assembler makes of it rounds alike.
"""

import re
from pathlib import Path

import pytest

from nvcc import KERNELS, NVCC, ROOT, needs_nvcc, ptx, run

FUSES = """extern "C" __global__ void fuses(float *a, double *b)
{
    *a += *a * *a;
    *b += *b * *b;
}
"""
INSTRUCTION = re.compile(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.]*)\s.*;$", re.MULTILINE)
pytestmark = needs_nvcc


def functions(code: str) -> dict[str, str]:
    """The code of each function in PTX."""
    parts = re.split(r"^(?=\.(?:visible|weak|func|entry))", code, flags=re.MULTILINE)
    named = {m[1]: part for part in parts if "\n{" in part and (m := re.search(r"(\w+)\(\n", part))}
    assert named.keys() >= KERNELS
    return named


def fused(code: str) -> list[str]:
    """Multiply-adds of floating point numbers; those of integers, mad.lo and so on, are exact."""
    return [i for i in INSTRUCTION.findall(code) if re.match(r"(fma\.|mad\..*f(32|64))", i)]


def lines_of(instruction: str, code: str) -> set[str]:
    """The lines of source, as text, that an instruction was made for."""
    files = {number: Path(name) for number, name in re.findall(r'\.file\s+(\d+) "(.*?)"', code)}
    found, place = set(), ("", 0)
    for line in code.splitlines():
        if loc := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            place = loc[1], int(loc[2])
        elif re.match(rf"\s+{re.escape(instruction)}\s", line):
            found.add(place)
    return {files[file].read_text().splitlines()[line - 1] for file, line in found}


@pytest.fixture(scope="module")
def unfused_code() -> str:
    return ptx().read_text()


@pytest.fixture(scope="module")
def unfused(unfused_code: str) -> dict[str, str]:
    return functions(unfused_code)


def of_the_power(name: str) -> bool:
    """The library's pow(), which only norms of an order that has no kind of its own call."""
    return "fst_power" in name or "accurate_pow" in name


def test_what_is_fused_says_so(unfused: dict[str, str], unfused_code: str) -> None:
    """Sums of squares of floats do: these squares are exact in double. So do the roots and
    quotients of quick_math.h in the update."""
    found = {name: set(fused(code)) for name, code in unfused.items() if not of_the_power(name)}
    squares = {name: found.pop(name) for name in ("fst_begin", "fst_unscale", "fst_norm")}
    assert all(used == {"fma.rn.f64"} for used in squares.values())
    assert found.pop("fst_update") == {"fma.rn.f32"}
    assert set().union(*found.values()) == set()
    lines = lines_of("fma.rn.f32", unfused_code)
    assert len(lines) > 5
    assert all("fmaf(" in line for line in lines)
    callers = {name for name, code in unfused.items() if re.search(r"call.*\n?.*fst_power", code)}
    assert callers <= {"fst_norm"}


def test_the_search_finds_what_is_fused(tmp_path: Path) -> None:
    """Where fusing is allowed nvcc does it, in fp32 and in fp64."""
    source, made = tmp_path / "fuses.cu", tmp_path / "fuses.ptx"
    source.write_text(FUSES)
    flags = (ROOT / "cuda/nvcc.flags").read_text().split()
    for fmad, found in (("false", set()), ("true", {"fma.rn.f32", "fma.rn.f64"})):
        options = [f"--fmad={fmad}" if flag == "--fmad=false" else flag for flag in flags]
        options += ["-lineinfo", "-ptx", "-arch=compute_80", "-o", str(made)]
        run(NVCC, *options, str(source))
        assert set(fused(made.read_text())) == found
    assert lines_of("fma.rn.f32", made.read_text()) == {"    *a += *a * *a;"}


def test_every_operation_rounds_to_nearest_and_keeps_subnormals(unfused: dict[str, str]) -> None:
    code = "\n".join(text for name, text in unfused.items() if not of_the_power(name))
    real = [i for i in INSTRUCTION.findall(code) if re.search(r"\.f(32|64)$", i)]
    arithmetic = [i for i in real if re.match(r"(add|sub|mul|div|sqrt|rcp|rsqrt|ex2|lg2)\.", i)]
    assert {"div.rn.f32", "div.rn.f64", "sqrt.rn.f32", "sqrt.rn.f64"} <= set(arithmetic)
    unlike_c = re.compile(r"\.(approx|full|ftz|sat|r[zmp])\b|^(rsqrt|ex2|lg2)\.|^rcp(?!\.rn\.)")
    first = {"rsqrt.approx.ftz.f32", "rcp.approx.ftz.f32"}  # quick_math.h goes on from these
    assert {i for i in real if unlike_c.search(i)} == first
    others = [code for name, code in unfused.items() if name != "fst_update"]
    assert not any(i in code for code in others for i in first)


def test_nothing_is_added_up_in_any_order(unfused: dict[str, str]) -> None:
    """Atomic operations are those of tickets and flags, in integers: no sum depends on chance."""
    found = {i for code in unfused.values() for i in INSTRUCTION.findall(code)}
    atomic = {i for i in found if re.match(r"(atom|red)\b", i)}
    assert any(".inc.u32" in i for i in atomic)
    assert [i for i in atomic if not re.search(r"\.(inc\.u32|or\.b32|exch\.b32)$", i)] == []


def wide(operation: str, code: str) -> int:
    return len(re.findall(rf"{operation}\.global\.v(?:4\.[bu]32|2\.[bfu]64)", code))


def test_elements_move_by_16_bytes(unfused: dict[str, str]) -> None:
    """Two words of each operand in an update, eight in a reduction; in fp32 and in fp64."""
    loads = {name: wide("ld", unfused[name]) for name in KERNELS}
    stores = {name: wide("st", unfused[name]) for name in KERNELS}
    assert loads["fst_update"] >= 2 * 2 * 5
    assert stores["fst_update"] >= 2 * 2 * 5
    assert min(loads["fst_begin"], loads["fst_unscale"], loads["fst_norm"]) >= 2 * 8
    changed = ("fst_unscale", "fst_scale", "fst_clamp", "fst_accumulate")
    assert min(stores[name] for name in changed) >= 2 * 2
    assert loads["fst_accumulate"] >= 2 * 2 * 3


def test_no_element_moves_through_a_generic_address(unfused: dict[str, str]) -> None:
    """Tables are read so, because they may lie in the parameters: their integers, and the
    hyper-parameters, which are doubles. Nothing is written so.
    """
    assert sum(len(INSTRUCTION.findall(code)) for code in unfused.values()) > 1000
    for name, code in unfused.items():
        found = INSTRUCTION.findall(code)
        generic = {i for i in found if re.match(r"(ld|st)\.(?!global|param|shared)", i)}
        of_tables = {"ld.u32", "ld.s32", "ld.u64", "ld.v2.u32"}
        if name == "fst_begin" or "fst_numbers_next" in name:
            of_tables.add("ld.f64")
        assert generic <= of_tables, name
