"""Stand-ins for the CUDA libraries that a torch wheel needs to be imported.

Torch's wheels on the package index are built for CUDA and name gigabytes of libraries as
dependencies. On the CPU none of their functions is called but those that register kernels at import
and the one that counts devices. A stand-in has the name of such a library and every symbol that
torch takes from it: each function returns 100, which is CUDA's "no device" and an error to the
other libraries. Needs a C compiler and binutils. Libraries that this machine has are left alone.
"""

import ctypes
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# What the runtime library answers while torch is imported: a handle, no error so far, a text.
ANSWERS = {
    "__cudaRegisterFatBinary": "static void *handle; return &handle;",
    "cudaGetErrorName": 'return "cudaErrorNoDevice";',
    "cudaGetErrorString": 'return "no CUDA device: this is a stand-in for the library";',
    "cudaGetLastError": "return 0;",
    "cudaPeekAtLastError": "return 0;",
}


class Library(NamedTuple):
    """What the dynamic linker reads in a library of torch's."""

    needed: set[str]
    versions: dict[str, str]  # version of a symbol: the library that has it
    defined: set[str]
    undefined: set[tuple[str, str]]  # symbol and version; "" for none


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read(path: Path) -> Library:
    needed, versions, library = set(), {}, ""
    for line in _output("objdump", "-p", str(path)).splitlines():
        if match := re.match(r"\s*NEEDED\s+(\S+)", line):
            needed.add(match[1])
        elif match := re.match(r"\s*required from (\S+):", line):
            library = match[1]
        elif match := re.match(r"\s+0x[0-9a-f]+ 0x[0-9a-f]+ \d+ (\S+)", line):
            versions[match[1]] = library
    defined, undefined = set(), set()
    for line in _output("nm", "-D", "--with-symbol-versions", str(path)).splitlines():
        kind, symbol = line[17:].split(" ", 1)
        name, _, version = symbol.replace("@@", "@").partition("@")
        if kind == "U":
            undefined.add((name, version))
        elif kind not in "wv":
            defined.add(name)
    return Library(needed, versions, defined, undefined)


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_LAZY)
    except OSError:
        return None


def _libraries(torch: Path) -> list[Library]:
    """Torch's extension module and all of torch's libraries that it needs."""
    paths = {path.name: path for path in (torch / "lib").glob("lib*.so*")}
    waiting, read = [*torch.glob("_C.*.so"), paths["libtorch_global_deps.so"]], {}
    while waiting:
        path = waiting.pop()
        if path not in read:
            read[path] = _read(path)
            waiting += [paths[name] for name in read[path].needed if name in paths]
    return list(read.values())


def _missing(libraries: list[Library], own: Iterable[str]) -> dict[str, set[tuple[str, str]]]:
    """The symbols that torch takes from each library that is neither torch's nor here."""
    needed = set().union(*(library.needed for library in libraries)) - set(own)
    opened = {name: _open(name) for name in sorted(needed)}
    here = [library for library in opened.values() if library is not None]
    missing = {name: set() for name, library in opened.items() if library is None}
    versioned = set().union(*(library.versions.values() for library in libraries))
    defined = set().union(*(library.defined for library in libraries))
    # a symbol without a version does not say which library has it: any that is loaded will do
    any_of_them = next((name for name in missing if name not in versioned), next(iter(missing), ""))
    for library in libraries:
        for name, version in library.undefined:
            if name in defined or name.startswith(("Py", "_Py")):
                continue
            owner = library.versions.get(version, any_of_them)
            if owner in missing and (version or not any(hasattr(lib, name) for lib in here)):
                missing[owner].add((name, version))
    return missing


def _compile(name: str, symbols: set[tuple[str, str]], folder: Path) -> None:
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    lines = []
    for symbol, _ in sorted(symbols):
        answer = ANSWERS.get(symbol, "return 100;")
        kind = "int" if re.search(r"return \d", answer) else "const void *"
        lines.append(f"{kind} {symbol}(void) {{ {answer} }}\n")
    source.write_text("".join(lines))
    blocks = []
    for version in sorted({version for _, version in symbols if version}):
        names = " ".join(f"{symbol};" for symbol, its in sorted(symbols) if its == version)
        blocks.append(f"{version} {{ global: {names} }};\n")
    script.write_text("".join(blocks))
    options = [f"-Wl,--version-script={script}"] if blocks else []
    compiler = shlex.split(os.environ.get("CC", "cc"))
    target = str(folder / name)
    command = [*compiler, "-shared", "-fPIC", "-O0", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
    subprocess.run([*command, *options, str(source), "-o", target], check=True)
    source.unlink()
    script.unlink()


def build(torch: Path) -> list[str]:
    """Put stand-ins for all libraries that are missing beside torch's, where it looks for them.

    Args:
        torch: the folder of the installed package.

    Returns:
        The names of the libraries.
    """
    folder = torch / "lib"
    own = {path.name for path in folder.iterdir()}
    missing = _missing(_libraries(torch), own)
    for name, symbols in missing.items():
        _compile(name, symbols, folder)
    return list(missing)
