"""Every vector loop really is one: the compiler's output is read back, for each instruction set.

A loop is what lies between the target of a backward jump and the jump. In each function called
fst_loop_* one of the innermost loops must work on whole registers of the instruction set, without
scalar arithmetic, and must hold a packed form of every kind of arithmetic that the function does.
The scalar instructions of the last few elements lie outside of that loop.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from device import fake

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("csrc/cpu/*.isa.c"))
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
REGISTER = {"base": "xmm", "avx2": "ymm", "avx512": "zmm"}
pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="knows x86-64 instructions only"
    ),
    pytest.mark.skipif(not shutil.which("objdump"), reason="objdump is not installed"),
    pytest.mark.skipif(not shutil.which(COMPILER[0]), reason="no C compiler is installed"),
]

LINE = re.compile(r"^ *([0-9a-f]+):\t(\S+) *(.*)$")
JUMP_TARGET = re.compile(r"^([0-9a-f]+) <")
# The group is the kind of arithmetic: the part between AVX's prefix and the type of the elements.
SCALAR = re.compile(r"v?(add|sub|mul|div|sqrt|min|max)s[sd]$|v?(cvt)(?:ss2sd|sd2ss|si2ss[lq]?)$")
PACKED = re.compile(r"v?(add|sub|mul|div|sqrt|min|max)p[sd]$|v?(cvt)(?:ps2pd|pd2ps|dq2ps)[xyz]?$")
PACKED_BITS = re.compile(
    r"v?(?:p?(?:andn?|x?or|blendv?|cmp)|p(?:s[lr]l|sra|add|sub|max|unpck|mov[sz]x))[a-z]*"
)
STORE = re.compile(r"v?mov(?:[au]p[sd]|dq[au]\d*|[dq])$|vpmov[qd][dwb]$|vextract\w+$")
CHOICES = {"min", "max"}  # also written as a comparison and a blend

Code = list[tuple[int, str, str]]  # address, instruction, operands


def built(level: str) -> list[Path]:
    """The objects of the loops in the extension, or in the C tests if none was compiled here."""
    folder = ROOT / f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / level
    found = [folder / source.relative_to(ROOT).with_suffix(".o") for source in SOURCES]
    if all(map(Path.exists, found)):
        return found
    names = [f"build/c/csrc/cpu/{source.name.partition('.')[0]}.{level}.o" for source in SOURCES]
    fake.build(*names)
    return [ROOT / name for name in names]


def compiled(source: Path, level: str) -> Path:
    made = source.with_suffix(f".{level}.o")
    flags = ["@csrc/compile.flags", f"@csrc/cpu/{level}.flags", "-fPIC"]
    command = [*COMPILER, *flags, "-c", str(source), "-o", str(made)]
    subprocess.run(command, cwd=ROOT, check=True)
    return made


def loops(made: Path) -> dict[str, Code]:
    """The instructions of each function called fst_loop_* in an object."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(made)]
    disassembly = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for block in disassembly.split("\n\n"):
        lines = block.strip().split("\n")
        if name := re.match(r"^[0-9a-f]+ <(fst_loop_\w+)(?:\.\w+)*>:$", lines[0]):
            matches = filter(None, map(LINE.match, lines[1:]))
            found[name[1]] = [(int(m[1], 16), m[2], m[3]) for m in matches]
    return found


def jumps(code: Code) -> list[tuple[int, int]]:
    """From and to, for the jumps that stay in the function."""
    targets = [(at, JUMP_TARGET.match(to)) for at, name, to in code if name.startswith("j")]
    pairs = [(at, int(to[1], 16)) for at, to in targets if to]
    return [(at, to) for at, to in pairs if code[0][0] <= to <= code[-1][0]]


def innermost(code: Code) -> list[Code]:
    """The bodies of the loops that hold no other loop."""
    spans = [(to, at) for at, to in jumps(code) if to <= at]
    spans = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[line for line in code if first <= line[0] <= last] for first, last in spans]


def blocks(code: Code) -> list[Code]:
    """The runs of instructions without a jump in or out: what is left of a loop with few turns."""
    starts, parts = {to for _, to in jumps(code)}, [[]]
    for line in code:
        if line[0] in starts or (parts[-1] and parts[-1][-1][1].startswith("j")):
            parts.append([])
        parts[-1].append(line)
    return parts


def kinds(code: Code, pattern: re.Pattern[str]) -> set[str]:
    """The kinds of arithmetic that occur."""
    matches = filter(None, (pattern.match(name) for _, name, _ in code))
    return {next(filter(None, m.groups()), "bits") for m in matches}


def is_packed(body: Code, register: str) -> bool:
    """It computes on whole registers, stores several results at once, and does nothing by ones."""
    whole = [line for line in body if register in line[2] or "pd2ps" in line[1]]
    stores = [
        to for _, name, to in body if STORE.match(name) and re.search(r"%[xyz]mm.*\)({%k\d})?$", to)
    ]
    return bool(
        stores and kinds(whole, re.compile(f"{PACKED.pattern}|{PACKED_BITS.pattern}"))
    ) and (not kinds(body, SCALAR))


def complaint(code: Code, level: str) -> str:
    """What is wrong with a loop function; empty if it is vectorised."""
    packed = [body for body in innermost(code) if is_packed(body, REGISTER[level])]
    packed = packed or [body for body in blocks(code) if is_packed(body, REGISTER[level])]
    if not packed:
        return f"no loop computes on {REGISTER[level]} registers only"
    done = set().union(*(kinds(body, PACKED) for body in packed))
    missing = kinds(code, SCALAR) - CHOICES - done
    return f"scalar only: {sorted(missing)}" if missing else ""


@pytest.mark.parametrize("level", REGISTER)
def test_every_loop_is_packed(level: str) -> None:
    found = {}
    for made in built(level):
        found |= loops(made)
    rules = re.findall(r"^RULE\((\w+)", (ROOT / "csrc/rules/rules.def").read_text(), re.MULTILINE)
    assert len(rules) >= 4
    for rule in rules:
        assert {f"fst_loop_{rule}_f32", f"fst_loop_{rule}_f64"} <= found.keys()
    assert {name: text for name, code in found.items() if (text := complaint(code, level))} == {}


GOOD = "y[i] = a / (x[i] + a);"
NO_LOOP = "no loop computes"
PLANTED = {
    "y[i] = __builtin_fabsf(y[(int)x[i]]);": NO_LOOP,  # one element, with a packed instruction
    "y[i] = y[i - 1] * a + x[i];": NO_LOOP,  # each element needs the one before
    "y[i] = x[i] > 0 ? __builtin_sqrtf(x[i]) : y[(int)x[i]];": NO_LOOP,
    "y[i] = x[i] * a; n -= y[i] > a;": NO_LOOP,  # the end depends on the data
}


def planted(statement: str) -> str:
    return (
        "#include <stddef.h>\n"
        "void fst_loop_planted(size_t n, float *restrict y, const float *restrict x, float a)\n"
        f"{{ for (size_t i = 1; i < n; i++) {{ {statement} }} }}\n"
    )


@pytest.mark.parametrize("level", REGISTER)
def test_a_scalar_loop_is_caught(level: str, tmp_path: Path) -> None:
    source = tmp_path / "planted.c"
    source.write_text(planted(GOOD))
    assert complaint(loops(compiled(source, level))["fst_loop_planted"], level) == ""
    for statement, text in PLANTED.items():
        source.write_text(planted(statement))
        code = loops(compiled(source, level))["fst_loop_planted"]
        assert text in complaint(code, level), statement


def test_a_loop_for_narrower_registers_is_caught(tmp_path: Path) -> None:
    source = tmp_path / "planted.c"
    source.write_text(planted(GOOD))
    code = loops(compiled(source, "base"))["fst_loop_planted"]
    assert "ymm" in complaint(code, "avx2")


def test_a_half_packed_function_is_caught(tmp_path: Path) -> None:
    source = tmp_path / "planted.c"
    recurrence = "for (size_t i = 1; i < n; i++) y[i] = y[i - 1] / (x[i] - a);"
    source.write_text(planted("y[i] = x[i] * a;")[:-2] + recurrence + "}\n")
    code = loops(compiled(source, "base"))["fst_loop_planted"]
    assert complaint(code, "base") == "scalar only: ['div', 'sub']"
