"""What a loop of a kernel costs per element, read from its machine code.

How a loop is recognised:

- A loop is a natural loop of the control flow with 16-byte loads from global memory, or with many
  of 4 or 2 bytes, and with no other such loop inside.
- Its optimizer rule is the row of rules/rules.def through which its instructions were inlined,
  which line information names (`nvcc -lineinfo`, which leaves the instructions as they are). A loop
  with several rules is `generic`: the way through it depends on data.
- Its types follow from how many 16-byte loads and stores an iteration has, for the number of
  states of the rule, and from the instructions that convert: F2FP packs a pair of 16-bit numbers,
  HADD2.F32 widens fp16, and a shift by 16 bits widens bf16.
- Of a loop for gradients that are not aligned (`unaligned`) a load of 4 or 2 bytes is an element
  of them.
- Stores under a predicate are left out of account where the others match some types.
- A way that adds weight decay to gradients (fst_decay; AdamW adds none), or that asks whether to
  leave elements to a slower one (fst_leave), is left out of account. In an update the second is
  also the way of gradients that are written.
- A loop with no rule that has branches, and widens from bf16 and from fp16, asks for types as it
  goes, and has none (`?`).

An iteration is counted along a way from the loop's first block back to it, without blocks that
call a function: those are the slow ways of a square root or a division. The branches to them are
counted. Of ways with the same accesses and types the longest counts; `shortest` is the other end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from machine.graph import Block, blocks, loops, order_of
from machine.listing import NONE, Instruction, Kernel
from nvcc import ROOT

# Name and number of states, by line of rules.def.
RULES = {
    line: (found[1], int(found[2]))
    for line, text in enumerate((ROOT / "csrc/rules/rules.def").read_text().splitlines(), 1)
    if (found := re.match(r"RULE\((\w+), (\d)", text))
}
# Where a thread leaves elements to a slower way, and where it adds weight decay to gradients.
LEFT_OUT = {
    (name, line)
    for name, text in (("tile.h", "*tiles |="), ("quick_math.h", "+ l2 * p[q]"))
    for line, code in enumerate((ROOT / "cuda" / name).read_text().splitlines(), 1)
    if text in code
}
FROM_FP16 = r"HADD2.*F32"
SUMS = r"fst_(begin|norm|unscale)|squares"
WORD = 16
# The fewest elements that a loop loads one by one, without a branch between, that knows their type
# and has all lanes of a sum: those of one lane load 16, and 8 where they store.
ITEMS = {"fst_begin": 32, "fst_norm": 32, "fst_unscale": 16}
BLOCK = 256  # threads
THREADS = {"sm_75": 1024, "sm_86": 1536, "sm_89": 1536, "sm_120": 1536}  # of a multiprocessor


@dataclass(frozen=True)
class Types:
    name: str
    loads: int  # bytes per element
    stores: int
    narrow_in: bool = False  # whether some operand is read, or written, in 16 bits
    narrow_out: bool = False
    wide: bool = False  # computed in double
    item: int = 0  # bytes of an element of what is loaded by elements

    def unaligned(self, item: int, stores: int) -> Types:
        """The same, where one operand is loaded by elements."""
        name = f"{self.name} unaligned"
        return replace(self, name=name, loads=self.loads - item, stores=stores, item=item)


def types_of(kernel: str, states: int) -> Iterator[Types]:
    """What a loop may be: the accesses alone do not tell all apart."""
    if kernel.startswith("fst_update"):
        own = 4 * states
        for types, gradient in (
            (Types("fp32", 8 + own, 4 + own), 4),
            (Types("16", (8 + own) // 2, (4 + own) // 2, True, True), 2),
            (Types("16, fp32 states", 4 + own, 2 + own, True, True), 2),
            (Types("16, fp32 master", 8 + own, 6 + own, True, True), 2),
            (Types("fp32, 16 states", 8 + own // 2, 4 + own // 2, True, True), 4),
        ):
            yield types
            yield types.unaligned(gradient, types.stores)
        yield Types("fp32 and 16", 8 + own, 6 + own, False, True)
        yield Types("fp64", 16 + 2 * own, 8 + 2 * own, wide=True)
    elif kernel.startswith("fst_accumulate"):
        for name, sums in (("", 4), (" first", 0)):
            for terms, times in ((1, ""), (2, " twice")):
                yield Types(f"fp32{name}{times}", sums + 4 * terms, 4)
                yield Types(f"16 to fp32{name}{times}", sums + 2 * terms, 4, True)
                yield Types(f"16{name}{times}", sums // 2 + 2 * terms, 2, True, True)
                yield Types(f"fp64{name}{times}", 2 * sums + 8 * terms, 8, wide=True)
    else:
        for stored in (0, 1):
            for types in (
                Types("fp32", 4, 4 * stored),
                Types("16", 2, 2 * stored, True, bool(stored)),
            ):
                yield types
                yield types.unaligned(types.loads, 0)
            yield Types("fp64", 8, 8 * stored, wide=True)


@dataclass
class Way:
    code: list[Instruction]
    shortest: int
    word: int = 16
    item: int = 0  # bytes of an element, of what is loaded by elements

    def count(self, *patterns: str) -> int:
        return sum(bool(re.match("|".join(patterns), one.opcode)) for one in self.code)

    @cached_property
    def loaded(self) -> Counter[int]:
        """Loads from global memory, by their bytes."""
        return Counter(one.loaded for one in self.code)

    @property
    def loads(self) -> int:
        return self.loaded[self.word]

    def items(self, size: int) -> int:
        """Loads of one element of so many bytes."""
        return self.loaded[size]

    def bytes_of(self, one: Instruction) -> int:
        """What an instruction loads, of words and elements."""
        return next((size for size in (self.word, self.item) if size and one.loads(size)), 0)

    @property
    def all_loads(self) -> int:
        """Loads of words and elements."""
        return sum(bool(self.bytes_of(one)) for one in self.code)

    @cached_property
    def stores(self) -> int:
        return sum(one.stores(self.word) for one in self.code)

    @cached_property
    def sure_stores(self) -> int:
        return sum(one.stores(self.word) and not one.guard for one in self.code)

    @property
    def fp64(self) -> int:
        """Operations of the pipe for fp64."""
        return self.count(r"D(ADD|MUL|FMA|SETP|MNMX)", r"(F2F|F2I|I2F|FRND)\b.*F64")

    @property
    def shifts(self) -> int:
        """Instructions that may widen bf16."""
        return sum(
            one.name in {"IMAD", "SHL", "SHF", "LOP3", "PRMT", "USHF"}
            and bool(re.search(r"\b0x(10000|ffff0000|5410|7632|1054|3276)\b|, 0x10,", one.operands))
            for one in self.code
        )

    @property
    def narrow(self) -> str:
        """The 16-bit type that is read: bf16, fp16, or none."""
        if self.count(FROM_FP16):
            return "fp16"
        return "bf16" if self.count(r"F2FP.*BF16") or self.shifts >= WORD // 2 else ""

    @property
    def asks(self) -> bool:
        """Whether it widens from bf16 and from fp16, as the type wants it."""
        return self.count(FROM_FP16) > 0 and self.shifts >= WORD // 2

    def wide(self, sums: bool) -> bool:
        """Whether it computes in double; a loop that sums may do so for operands in fp32."""
        computes = self.count(r"D(ADD|MUL|FMA|SETP|MNMX)") > 0
        return computes and not (sums and self.count(r"F(ADD|MUL|FMA|SETP)\b", r"F2F.*F64.F32"))

    @property
    def packs(self) -> bool:
        return bool(self.count(r"F2FP", r"F2F\.(BF)?16"))

    @property
    def before_wait(self) -> int:
        """How many loads of words and elements are issued before the first wait for one of them, at
        most."""
        return len(self.at_once)

    @property
    def at_once(self) -> list[int]:
        """The bytes of those loads."""
        pending: set[int] = set()
        best: list[int] = []
        run: list[int] = []
        most = self.all_loads
        for one in self.code * 2:
            if any(one.waits >> board & 1 for board in pending):
                pending, run = set(), []
            if size := self.bytes_of(one):
                run.append(size)
                if one.sets != NONE:
                    pending.add(one.sets)
            best = max(best, run[:most], key=len)
        return best


@dataclass
class Loop:
    kernel: Kernel
    arch: str
    at: int
    rule: str
    types: Types | None
    way: Way

    @property
    def name(self) -> str:
        kind = self.types.name if self.types else "?"
        if self.types and self.types.narrow_in:
            kind = kind.replace("16", self.way.narrow or "16", 1)
        return " ".join(part for part in (self.kernel.name, self.rule, kind) if part)

    @property
    def elements(self) -> int:
        return elements_of(self.types, self.way) if self.types else 0

    @property
    def in_flight(self) -> int:
        """Bytes that a multiprocessor has asked for when all of its warps wait."""
        registers = -(-max(self.kernel.registers, 1) // 8) * 8
        fit = min((64 << 10) // (registers * BLOCK), THREADS.get(self.arch, 2048) // BLOCK)
        return fit * BLOCK * sum(self.way.at_once)

    def figures(self) -> dict[str, float]:
        way, elements = self.way, self.elements or 1
        return {
            "instructions": round(len(way.code) / elements, 1),
            "shortest": round(way.shortest / elements, 1),
            "elements": self.elements,
            "loads": way.all_loads,
            "before_wait": way.before_wait,
            "stores": way.stores,
            "other_loads": way.count(r"LDG(?!.*128)", r"LD\b", r"LDC", r"ULDC", r"LDL")
            - (way.all_loads - way.loads),
            "branches": way.count("BRA", "BRX", "CALL", "BSSY", "BSYNC"),
            "fp64": round(way.fp64 / elements, 2),
            "registers": self.kernel.registers,
            "stack": self.kernel.stack,
            "spills": self.kernel.spills,
            "in_flight": self.in_flight,
        }


def loops_of(kernel: Kernel, arch: str) -> list[Loop]:
    """The loops over 16-byte words of a kernel, by what they compute."""
    code = blocks(kernel)
    wide = {
        head: body
        for head, body in loops(code).items()
        if loads_words(kernel.name, [code[n] for n in body])
    }
    found = []
    for head, body in sorted(wide.items()):
        if any(other in body for other in wide if other != head):
            continue
        rules = rules_in(code, body)
        rule, states = rules.pop() if len(rules) == 1 else ("generic" if rules else "", 0)
        ways = ways_through(code, head, body)
        at = code[head].code[0].at
        whole = Way([one for n in body for one in code[n].code], 0)
        branches = any(len(way.code) > way.shortest for way in ways.values())
        asks = not rule and branches and whole.asks
        named: list[Loop] = []
        for _, way in sorted(ways.items()):
            if not asks and (types := recognise(kernel.name, states, way)):
                way.item = types.item
                named.append(Loop(kernel, arch, at, rule, types, way))
        if rule == "generic" or not named:
            named = [Loop(kernel, arch, at, rule, None, ways[max(ways)])]
        found += named
    return found


def loads_words(kernel: str, body: list[Block]) -> bool:
    """Whether a loop loads words, or so many elements as one that knows their type."""
    if any(one.loads() for block in body for one in block.code):
        return True
    least = ITEMS.get(kernel)
    return least is not None and any(kind_of(block)[3] >= least for block in body)


def elements_of(types: Types, way: Way) -> int:
    """How many elements of such types a way is for, 0 if that cannot be."""
    items = way.items(types.item) if types.item else 0
    elements, rest = divmod(WORD * way.loads, types.loads) if types.loads else (items, way.loads)
    others = range(elements, elements + 4) if types.item else [0]  # arguments are read, too
    return 0 if rest or (types.item and items not in others) else elements


def rules_in(code: list[Block], body: set[int]) -> set[tuple[str, int]]:
    places = {place for n in body for one in code[n].code for place in one.places}
    return {RULES[line] for file, line in places if file == "rules.def" and line in RULES}


def recognise(kernel: str, states: int, way: Way) -> Types | None:
    """The types that fit a way."""
    for stores in (way.sure_stores, way.stores):
        for types in types_of(kernel, states):
            elements = elements_of(types, way)
            if elements not in {4, 8, 16, 32, 64}:
                continue
            if elements * types.stores != WORD * stores:
                continue
            if types.wide == way.wide(sums=bool(re.match(SUMS, kernel))) and fits(types, way):
                return types
    return None


def fits(types: Types, way: Way) -> bool:
    """Whether the conversions are those of the types. Where 16-bit numbers are read, rounding to
    them need not be one instruction."""
    if types.wide or types.narrow_in:
        return types.wide or bool(way.narrow)
    return not way.narrow and types.narrow_out == way.packs


def left_out(block: Block) -> bool:
    """Whether a block is one that LEFT_OUT names. An instruction without a line has that of the one
    before, so that one or two in the next block may seem to be of the same line."""
    return sum(not LEFT_OUT.isdisjoint(one.places) for one in block.code) > 2


# How many 16-byte loads, such stores, and conversions from fp16 there are, and loads of 4 or 2
# bytes where a thread's elements are loaded without a branch between.
Kind = tuple[int, int, int, int]


def plus(kind: Kind, other: Kind, times: int = 1) -> Kind:
    loads, stores, converted, items = (a + times * b for a, b in zip(kind, other, strict=True))
    return loads, stores, converted, items


def kind_of(block: Block) -> Kind:
    way = Way(block.code, 0)
    items = max(way.items(2), way.items(4))
    return way.loads, way.stores, way.count(FROM_FP16), items if items >= 8 else 0


def ways_through(
    code: list[Block], head: int, body: set[int], everywhere: bool = False
) -> dict[Kind, Way]:
    """The longest way of each kind through a loop, or through all of it if no other is left."""
    left = {n for n in body if left_out(code[n])}
    inside = {n for n in body - left if not code[n].calls} or body
    if everywhere or head not in inside or not any(head in code[n].next for n in inside):
        inside = body
    order = [n for n in order_of(code) if n in inside]
    rank = {n: i for i, n in enumerate(order)}
    kinds = {n: kind_of(code[n]) for n in order}
    # Of each block, by accesses from the head to its end: length, shortest length, block before.
    known: dict[int, dict[Kind, tuple[int, int, int]]] = {head: {(0, 0, 0, 0): (0, 0, -1)}}
    for n in order:
        here, own = len(code[n].code), kinds[n]
        known[n] = {
            plus(key, own): (longest + here, shortest + here, before)
            for key, (longest, shortest, before) in known.get(n, {}).items()
        }
        for child in code[n].next:
            if child not in rank or rank[child] <= rank[n]:
                continue
            there = known.setdefault(child, {})
            for key, (longest, shortest, _) in known[n].items():
                old = there.get(key, (-1, shortest, -1))
                best = (longest, n) if longest > old[0] else (old[0], old[2])
                there[key] = (best[0], min(shortest, old[1]), best[1])
    ways: dict[Kind, Way] = {}
    for n in order:
        if head not in code[n].next:
            continue
        for key, (longest, shortest, _) in known[n].items():
            old_way = ways.get(key)
            if old_way:
                old_way.shortest = shortest = min(shortest, old_way.shortest)
            if not old_way or longest > len(old_way.code):
                ways[key] = Way(trace(code, known, kinds, n, key), shortest)
    return ways or ways_through(code, head, body, everywhere=True)


def trace(
    code: list[Block],
    known: dict[int, dict[Kind, tuple[int, int, int]]],
    kinds: dict[int, Kind],
    node: int,
    key: Kind,
) -> list[Instruction]:
    way: list[list[Instruction]] = []
    while node >= 0:
        own = kinds[node]
        before = known[node][key][2]
        way.append(code[node].code)
        key = plus(key, own, -1)
        node = before
    return [one for part in reversed(way) for one in part]
