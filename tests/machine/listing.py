"""The machine code of kernels, as nvdisasm prints it.

An instruction has 16 bytes. Bits 105 to 125 are for the warp's scheduler: which of six scoreboards
the instruction sets until its result is there, and for which ones it waits.
"""

import os
import re
import shutil
import struct
import subprocess
import sysconfig
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nvcc import PLACES

NONE = 7  # no scoreboard
FRAME, REGISTERS = 0x11, 0x2F  # attributes of a function in a cubin
SECTION = re.compile(r"^\.section\s+\.text\.(\w+),")
LABEL = re.compile(r"^(\.L_x_\d+):")
PLACE = re.compile(r'//## File "([^"]+)", line (\d+)( inlined at)?')
INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x\w+ \*/"
)
SECOND_HALF = re.compile(r"^\s+/\* (0x[0-9a-f]{16}) \*/")


def nvdisasm() -> str:
    """The tool: of PATH, of the toolkit, or of the package nvidia-cuda-nvdisasm; "" if none."""
    site = Path(sysconfig.get_path("purelib")) / "nvidia"
    packages = sorted(str(folder) for folder in site.glob("cu*/bin"))
    return shutil.which("nvdisasm", path=os.pathsep.join([*PLACES, *packages])) or ""


@dataclass
class Instruction:
    at: int
    guard: str  # the predicate, "" if none
    opcode: str
    operands: str
    places: tuple[tuple[str, int], ...]  # file and line, then where those are inlined, outwards
    sets: int = NONE  # the scoreboard that shows its result
    waits: int = 0  # a bit for each scoreboard

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    def control(self, high: int) -> None:
        self.sets, self.waits = high >> 46 & 7, high >> 52 & 63
        if self.name == "DEPBAR" and (board := re.match(r"SB(\d)", self.operands)):
            self.waits |= 1 << int(board[1])

    def bytes_of(self, *names: str) -> int:
        """Bytes that it moves, if it has one of these names."""
        if self.name not in names:
            return 0
        found = re.search(r"\.[US]?(8|16|64|128)\b", self.opcode)
        return int(found[1]) // 8 if found else 4

    def loads(self, word: int = 16) -> bool:
        """Whether it loads a word of that many bytes from global memory."""
        return self.loaded == word

    def stores(self, word: int = 16) -> bool:
        return self._stored == word

    @cached_property
    def loaded(self) -> int:
        """Bytes that it loads from global memory."""
        return self.bytes_of("LDG", "LD")

    @cached_property
    def _stored(self) -> int:
        return self.bytes_of("STG", "ST")


@dataclass
class Kernel:
    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # addresses
    registers: int = 0
    stack: int = 0

    @cached_property
    def spills(self) -> int:
        """Instructions that read or write the stack."""
        return sum(one.name in {"LDL", "STL"} for one in self.code)


def disassemble(cubin: Path) -> dict[str, Kernel]:
    command = [nvdisasm(), "-c", "-gi", "-hex", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"nvdisasm: {cubin}: {done.stderr.strip()}")
    kernels = parse(done.stdout)
    for name, (registers, stack) in resources(cubin.read_bytes()).items():
        if name in kernels:
            kernels[name].registers, kernels[name].stack = registers, stack
    return kernels


def parse(text: str) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    kernel = Kernel("")
    pending: list[str] = []
    places: list[tuple[str, int]] = []
    inlined = complete = False
    for line in text.splitlines():
        bare = line.strip()
        if found := SECTION.match(bare):
            kernel = kernels[found[1]] = Kernel(found[1])
            places = []
        elif found := LABEL.match(line):
            pending.append(found[1])
        elif found := PLACE.match(bare):
            if complete or not inlined:
                places = []
            places.append((os.path.basename(found[1]), int(found[2])))
            inlined, complete = bool(found[3]), False
        elif found := INSTRUCTION.search(line):
            guard, opcode, operands, at = found[2] or "", found[3], found[4], int(found[1], 16)
            kernel.code.append(Instruction(at, guard, opcode, operands, tuple(places)))
            kernel.labels.update(dict.fromkeys(pending, at))
            pending, complete = [], True
        elif (found := SECOND_HALF.match(line)) and kernel.code:
            kernel.code[-1].control(int(found[1], 16))
    return kernels


def sections(elf: bytes) -> tuple[dict[str, tuple[int, ...]], list[tuple[int, ...]]]:
    """The headers of sections by name, and in their order."""
    start, each, count, names_at = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * each) for i in range(count)]
    return {text_of(elf, headers[names_at], header[0]): header for header in headers}, headers


def text_of(elf: bytes, table: tuple[int, ...], offset: int) -> str:
    begin = table[4] + offset
    return elf[begin : elf.index(b"\0", begin)].decode()


def resources(elf: bytes) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes of its stack, by kernel."""
    named, headers = sections(elf)
    symbols = named[".symtab"]
    registers, stacks = {}, {}
    at, end = named[".nv.info"][4], sum(named[".nv.info"][4:6])
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", elf, at)
        if form == 4 and attribute in {FRAME, REGISTERS}:
            symbol, value = struct.unpack_from("<II", elf, at + 4)
            (offset,) = struct.unpack_from("<I", elf, symbols[4] + 24 * symbol)
            held = stacks if attribute == FRAME else registers
            held[text_of(elf, headers[symbols[6]], offset)] = value
        at += 4 + (size if form == 4 else 0)
    return {name: (count, stacks.get(name, 0)) for name, count in registers.items()}
