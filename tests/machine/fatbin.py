"""Makes a fatbin as setup.py does, of what nvcc.py has compiled: python -m machine.fatbin FILE."""

import re
import shutil
import sys
from pathlib import Path

from machine.listing import sections
from nvcc import MADE_OF, PLACES, cubin, ptx, run

LINES = re.compile(r"debug_(line|str|ptx_txt)")
PTX_LINES = re.compile(rb"(?ms)^\s*\.(?:loc|file)\b.*?\n|^\s*\.section\s+\.debug_str.*?^\s*}\n")


def without_lines(made: Path) -> bytes:
    """Zeros instead of what -lineinfo adds to machine code: compressed they take no space."""
    if made.suffix == ".ptx":
        return PTX_LINES.sub(b"", made.read_bytes())
    code = bytearray(made.read_bytes())
    for name, header in sections(made.read_bytes())[0].items():
        if LINES.search(name):
            code[header[4] : sum(header[4:6])] = bytes(header[5])
    return bytes(code)


def bind(fatbin: Path) -> None:
    images = []
    for code in (code for codes in MADE_OF.values() for code in codes):
        made = cubin(code) if code[:3] == "sm_" else ptx(code)
        image = fatbin.with_name(made.name)
        image.write_bytes(without_lines(made))
        kind = {".cubin": "elf", ".ptx": "ptx"}[made.suffix]
        images.append(f"--image3=kind={kind},sm={code.split('_')[1]},file={image}")
    tool = shutil.which("fatbinary", path=":".join(PLACES)) or "fatbinary"
    run(tool, f"--create={fatbin}", "-64", "--compress-all", "--compress-mode=size", *images)


if __name__ == "__main__":
    bind(Path(sys.argv[1]).absolute())
