"""The machine code of the kernels against tests/cuda/budgets.json, and the counting itself.

`python tests/sass.py --record` writes the budgets; machine/figures.py says what is counted.
"""

import re
from pathlib import Path

import pytest

from machine.budgets import ARCHITECTURES, Table, complaints, load, measure
from machine.figures import LEFT_OUT, Loop, Way, loops_of, ways_through
from machine.graph import blocks, loops
from machine.listing import disassemble, nvdisasm, parse
from nvcc import NVCC, run, version

BUDGETS = load()
needs_tools = pytest.mark.skipif(
    not (NVCC and nvdisasm()),
    reason="nvcc or nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)",
)

# A loop as nvdisasm prints it. Of the second half of an instruction's code bits 46 to 48 are the
# scoreboard that it sets, and bits 52 to 57 are those that it waits for.
LISTING = """
\t.section\t.text.counted,"ax",@progbits
        /*0000*/                   MOV R1, c[0x0][0x28] ;     /* 0x00000a0000017a02 */
                                                              /* 0x000fe20000000f00 */
.L_x_1:
\t//## File "/a/rules/adam.h", line 53 inlined at "/a/rules/rules.def", line 3
\t//## File "/a/rules/rules.def", line 3
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x0000000402047981 */
                                                              /* 0x000ea2000c1e1d00 */
        /*0020*/               @P1 BRA `(.L_x_2) ;            /* 0x0000000000001947 */
                                                              /* 0x000fea0003800000 */
        /*0030*/                   FADD R4, R4, R5 ;          /* 0x0000000504047221 */
                                                              /* 0x004fe20000000000 */
        /*0040*/                   CALL.REL.NOINC `(slow) ;   /* 0x0000000000007944 */
                                                              /* 0x000fea0003c00000 */
.L_x_2:
        /*0050*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ; /* 0x0000100402087981 */
                                                              /* 0x000ee2000c1e1d00 */
        /*0060*/                   DADD R4, R4, R8 ;          /* 0x0000000804047229 */
                                                              /* 0x00cfe20000000000 */
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R4 ; /* 0x0000000402007986 */
                                                              /* 0x000fe2000c101d04 */
        /*0080*/                   STL [R1], R4 ;             /* 0x0000000401007387 */
                                                              /* 0x000fe20000100800 */
        /*0090*/              @!P0 BRA `(.L_x_1) ;            /* 0xfffffff000008947 */
                                                              /* 0x000fea000383ffff */
        /*00a0*/                   EXIT ;                     /* 0x000000000000794d */
                                                              /* 0x000fea0003800000 */
"""


def only_way(listing: str) -> Way:
    kernel = parse(listing)["counted"]
    code = blocks(kernel)
    ((head, body),) = loops(code).items()
    (way,) = ways_through(code, head, body).values()
    return way


def test_an_iteration_is_counted_without_its_slow_way() -> None:
    kernel = parse(LISTING)["counted"]
    assert (len(kernel.code), kernel.spills) == (11, 1)
    assert kernel.code[1].places == (("adam.h", 53), ("rules.def", 3))
    way = only_way(LISTING)
    assert [one.at for one in way.code] == [0x10, 0x20, 0x50, 0x60, 0x70, 0x80, 0x90]
    assert (way.shortest, way.loads, way.stores, way.fp64) == (7, 2, 1, 1)
    (loop,) = loops_of(kernel, "sm_90")
    assert loop.rule == "adam"


def test_loads_are_counted_up_to_the_first_wait() -> None:
    assert only_way(LISTING).before_wait == 2
    waits = LISTING.replace("0x000ee2000c1e1d00", "0x004ee2000c1e1d00")  # the second for the first
    assert only_way(waits).before_wait == 1
    other = LISTING.replace("0x000ee2000c1e1d00", "0x008ee2000c1e1d00")  # for what nothing set
    assert only_way(other).before_wait == 2


def test_an_indirect_branch_and_a_call_do_not_end_a_loop() -> None:
    text = LISTING.replace("@P1 BRA `(.L_x_2)", '    BRX R6 -0x60 (*"BRANCH_TARGETS .L_x_2"*)')
    assert [one.at for one in only_way(text).code][:3] == [0x10, 0x20, 0x50]
    always = LISTING.replace("@P1 BRA `(.L_x_2)", "    BRA.U UP0, `(.L_x_2)")
    assert len(only_way(always).code) == 7


def test_a_call_of_a_place_in_the_kernel_is_a_branch() -> None:
    """For sm_80 a loop may be left so."""
    leave = LISTING.replace("CALL.REL.NOINC `(slow)", "@P2 CALL.REL.NOINC `(.L_x_3)")
    leave = leave.replace("@P1 BRA", "@P1 NOP")
    leave = leave.replace("        /*00a0*/", ".L_x_3:\n        /*00a0*/")
    assert [one.at for one in only_way(leave).code] == [*range(0x10, 0xA0, 0x10)]


def test_what_adds_weight_decay_is_left_out() -> None:
    """A block with three instructions of a line that figures.py names; two may be strays."""
    (place,) = (place for place in LEFT_OUT if place[0] == "quick_math.h")
    line = '\t//## File "/a/{}", line {}\n'
    add = "        /*00{}*/ FADD R4, R4, R5 ; /* 0x0000000504047221 */\n"
    before = LISTING.replace("CALL.REL.NOINC `(slow)", "NOP").replace(
        ".L_x_2:\n", ".L_x_2:\n" + line.format("adam.h", 53)
    )
    at = before.index("        /*0030*/")
    stray, whole = (
        before[:at] + line.format(*place) + more + before[at:]
        for more in ("", add.format("2c") + add.format("2e"))
    )
    assert len(only_way(before).code) == len(only_way(stray).code) == 9
    assert [one.at for one in only_way(whole).code][:3] == [0x10, 0x20, 0x50]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loop]:
    """The loops of tests/cuda/planted.cu, by kernel."""
    cubin = tmp_path_factory.mktemp("planted") / "planted.cubin"
    options = ["-O3", "--fmad=false", "-lineinfo", "-cubin", "-arch=sm_90"]
    run(NVCC, *options, "-o", str(cubin), "tests/cuda/planted.cu")
    kernels = disassemble(cubin)
    return {name: loop for name, kernel in kernels.items() for loop in loops_of(kernel, "sm_90")}


@needs_tools
def test_a_loop_whose_counts_are_known(planted: dict[str, Loop]) -> None:
    way = planted["plain"].way
    assert (way.loads, way.before_wait, way.stores, way.fp64) == (4, 4, 2, 0)
    assert way.count("FADD") == 8
    assert way.count("BRA") == 1
    assert 8 + 6 + 1 < len(way.code) <= 40
    assert len(way.code) == way.shortest
    figures = planted["plain"].figures()
    assert (figures["stack"], figures["spills"]) == (0, 0)
    assert 16 <= figures["registers"] <= 40


@needs_tools
def test_planted_faults_are_seen(planted: dict[str, Loop]) -> None:
    assert planted["waits"].way.before_wait < planted["waits"].way.loads == 4
    assert planted["asks"].way.count("BRA") >= 8
    assert len(planted["asks"].way.code) > 2 * len(planted["plain"].way.code)
    figures = planted["spills"].figures()
    assert figures["spills"] > 0
    assert figures["stack"] > 0
    squares = planted["squares"]
    assert squares.name == "squares fp32"
    assert squares.figures()["fp64"] == 2  # the conversion is one of them


def test_what_breaks_a_budget_is_named() -> None:
    good = {"instructions": 50.0, "fp64": 1.0, "registers": 80, "stack": 0, "spills": 0}
    good |= {"before_wait": 8, "in_flight": 65536, "elements": 8, "loads": 8, "stores": 6}
    budgets: Table = {"fst_update adam fp32": {"sm_90": good}}

    def said(**changed: float) -> list[str]:
        return complaints({"fst_update adam fp32": {"sm_90": good | changed}}, budgets)

    assert said() == said(instructions=40, registers=60, before_wait=9) == []
    assert said(spills=3) == ["fst_update adam fp32, sm_90: spills 3, budget 0"]
    assert said(instructions=50.1) == ["fst_update adam fp32, sm_90: instructions 50.1, budget 50"]
    assert said(before_wait=6) == ["fst_update adam fp32, sm_90: before_wait 6, budget 8"]
    assert said(stores=5) == ["fst_update adam fp32, sm_90: stores 5, budget 6"]
    assert complaints({}, budgets) == ["fst_update adam fp32, sm_90: no such loop"]
    assert complaints(budgets | {"fst_new fp32": {}}, budgets) == ["fst_new fp32: no budget"]


@pytest.fixture(scope="module")
def measured() -> Table:
    return measure(BUDGETS["watched"], ARCHITECTURES)


@needs_tools
def test_loops_keep_their_budgets(measured: Table) -> None:
    """If a change is worth its cost, `python tests/sass.py --record` writes the budgets anew."""
    slack = 1.0 if version() == BUDGETS["nvcc"] else 1.1
    said = complaints(measured, BUDGETS["loops"], slack)
    assert not said, "\n".join(said)


@needs_tools
def test_every_loop_over_words_keeps_the_registers_free_of_spills(measured: Table) -> None:
    for name, architectures in measured.items():
        for arch, figures in architectures.items():
            assert (figures["stack"], figures["spills"]) == (0, 0), f"{name}, {arch}"


def test_budgets_are_within_the_limits_but_for_those_that_are_named() -> None:
    """What a kernel may cost so that memory is its bound, on sm_90."""
    said = complaints(BUDGETS["loops"], BUDGETS["limits"])
    found = [re.sub(r" [\d.]+, budget .*", "", text) for text in said if "no budget" not in text]
    assert found == BUDGETS["missed"]


def test_a_limit_that_is_not_kept_is_seen() -> None:
    above = {"fst_begin fp32": {"sm_90": {"instructions": 10, "fp64": 1, "in_flight": 50000}}}
    said = complaints(above, BUDGETS["limits"])
    assert "fst_begin fp32, sm_90: instructions 10, budget 9" in said
    assert "fst_update adam fp32, sm_90: no such loop" in said


def test_all_loads_are_issued_before_the_first_wait_but_for_loops_that_are_named() -> None:
    late = [
        f"{name}, {arch}"
        for name, architectures in BUDGETS["loops"].items()
        for arch, figures in architectures.items()
        if re.match(r"fst_(update|begin).*\w$", name)  # with types
        and figures["before_wait"] != figures["loads"]
    ]
    assert sorted(late) == BUDGETS["late"]


@needs_tools
def test_what_is_counted_is_what_is_built(tmp_path: Path) -> None:
    source = ["--options-file=cuda/nvcc.flags", "-cubin", "-arch=sm_90", "tests/cuda/planted.cu"]
    codes = []
    for options in ([], ["-lineinfo"]):
        cubin = tmp_path / f"{len(options)}.cubin"
        run(NVCC, *options, *source, "-o", str(cubin))
        kernels = disassemble(cubin)
        codes.append({n: [(i.opcode, i.operands) for i in k.code] for n, k in kernels.items()})
    assert codes[0] == codes[1]
