"""The layers of the tree: what a folder may include, import, call or name; and its sizes.

python/faststep -> csrc/py -> csrc/core -> csrc/cpu, csrc/gpu, csrc/io -> csrc/rules -> csrc/base
csrc/py -> csrc/memory -> csrc/base

MAY_IMPORT has the rooms of python/faststep.
Within csrc/py: module.c -> step, grads, load, loss, memory, which know nothing of each other ->
module.h, functions.def -> torch
"""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CORE = {"core", "cpu", "gpu", "io", "rules", "base"}
OF_PY = {"py", "py/torch", "memory", *CORE}
PY_ROOMS = ("step", "grads", "load", "loss", "memory")
MAY_INCLUDE = {
    "base": {"base"},
    "rules": {"rules", "base"},
    "cpu": {"cpu", "rules", "base"},
    "gpu": {"gpu", "rules", "base"},
    "io": {"io", "rules", "base"},
    "memory": {"memory", "base"},
    "core": CORE,
    "py/torch": OF_PY - {"py"},
    "py": OF_PY,
    **{f"py/{room}": {f"py/{room}", *OF_PY} for room in PY_ROOMS},
    "py/module.c": {*(f"py/{room}" for room in PY_ROOMS), *OF_PY},
    "cuda": {"cuda", "rules", "base"},
}
# Which room of the package may import which. A room is a folder or a file.
TORCH = {"_C", "_torch"}
# Those in data/, from the bottom up: each imports only rooms above its own line.
LOADER = {
    "at_exit": "",
    "types": "",
    "stats": "types",
    "order": "types",
    "resume": "types order",
    "arrays": "at_exit types stats order resume",
    "transforms": "types arrays",
    "deliver": "types stats resume transforms",
    "formats": "types arrays deliver",
    "plain": "types stats order resume deliver",
    "workers": "at_exit types stats resume deliver plain",
    "options": "types stats resume workers",
    "loader": "types stats order resume arrays transforms deliver plain workers options",
}
MAY_IMPORT = {
    "_C": set(),
    "_torch": {"_C"},
    "_devices": {"_C"},
    "grads": {*TORCH, "_devices"},
    "nn": {*TORCH, "_devices"},
    "optim": {*TORCH, "_devices", "grads"},
    "clip": {*TORCH, "_devices", "grads"},
    "amp": {*TORCH, "_devices", "clip", "grads", "optim"},
    "accumulation": {*TORCH, "_devices", "amp", "clip", "grads", "optim"},
    "release": {*TORCH, "_devices", "amp", "grads", "optim"},
    "offloading": {*TORCH, "_devices", "amp", "grads", "optim", "release"},
    "zero": {*TORCH, "_devices", "amp", "clip", "grads", "offloading", "optim"},
    "memory": {*TORCH, "zero"},
    **{
        f"data.{room}": {*TORCH, *(f"data.{name}" for name in below.split())}
        for room, below in LOADER.items()
    },
    "data": {f"data.{room}" for room in LOADER},
    "faststep": {
        *TORCH,
        *(
            "accumulation",
            "amp",
            "clip",
            "data",
            "doctor",
            "memory",
            "nn",
            "offloading",
            "optim",
            "release",
            "zero",
        ),
    },
    "run": {
        *(*TORCH, "_devices", "accumulation", "amp", "clip", "data.options", "data.stats", "data"),
        *("memory", "nn", "optim", "zero"),
    },
    "doctor": {*TORCH, "memory", "run"},
    "sizing": {*TORCH, "optim", "zero"},
    "cli": {*TORCH, "faststep", "data", "doctor", "memory", "run", "sizing", "zero"},
    "__main__": {"cli"},
}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
FOREIGN = re.compile(r"(torch|ATen|c10|cuda\w*|nv\w+)(/|\.h$|_\w+\.h$)|[^.]+$|.*\.(hpp|cuh|hh)$")
ENDS_OR_PRINTS = re.compile(
    r"\b(v?f?printf|f?puts|f?putc|putchar|perror|exit|_exit|abort|assert)\s*\("
)


def c_layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a file: ("csrc", "py", "step", "plan.c") lies in "py/step"."""
    if parts[0] == "cuda":
        return "cuda"
    if parts[1] == "py" and (len(parts) > 3 or parts[2] == "module.c"):
        return f"py/{parts[2]}"
    return parts[1]


def c_violations(root: Path) -> list[str]:
    found = []
    for path in sorted([*root.glob("csrc/**/*.*"), *root.glob("cuda/**/*.*")]):
        if path.suffix not in (".c", ".h", ".def", ".cu", ".cuh"):
            continue
        name = path.relative_to(root).as_posix()
        layer = c_layer_of(path.relative_to(root).parts)
        code = COMMENT.sub(" ", path.read_text())
        for quote, header in INCLUDE.findall(code):
            if header == "Python.h":
                if not layer.startswith("py"):
                    found.append(f"{name}: only csrc/py may include Python.h")
            elif quote == "<":
                if layer != "cuda" and FOREIGN.match(header):
                    found.append(f"{name}: a foreign header, <{header}>")
            else:
                places = [path.parent / header, root / "csrc" / header, root / "cuda" / header]
                target = next((p.resolve() for p in places if p.is_file()), None)
                to = c_layer_of(target.relative_to(root.resolve()).parts) if target else "?"
                if layer.startswith("py") and places[0].is_file():
                    found.append(f'{name}: not from csrc/: "{header}"')
                elif to not in MAY_INCLUDE[layer]:
                    found.append(f'{name}: {layer} may not include "{header}"')
        if not layer.startswith(("py", "cuda")):
            calls = ENDS_OR_PRINTS.findall(re.sub(r'"(\\.|[^"\\])*"', '""', code))
            found += [f"{name}: the core neither prints nor ends a program: {c}()" for c in calls]
        if "libcuda" in code and name != "csrc/gpu/driver.c":
            found.append(f"{name}: only csrc/gpu/driver.c knows libcuda")
    return found


def dotted(node: ast.AST) -> list[str]:
    """["torch", "optim", "Adam"] for the expression torch.optim.Adam; [] for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def python_violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.glob("python/faststep/**/*.py")):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text())
        reached: list[tuple[int, list[str]]] = []
        from_torch = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    reached.append((node.lineno, alias.name.split(".")))
                    if alias.name.split(".")[0] == "torch":
                        from_torch.add(alias.asname or "torch")
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    reached.append((node.lineno, [*node.module.split("."), alias.name]))
                    if node.module.split(".")[0] == "torch":
                        from_torch.add(alias.asname or alias.name)
        for node in ast.walk(tree):
            parts = dotted(node) if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.Call) and dotted(node.func) == ["getattr"]:
                key = node.args[1]
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    parts = [*dotted(node.args[0]), key.value]
            if parts and parts[0] in from_torch:
                reached.append((node.lineno, ["torch", *parts[parts[0] == "torch" :]]))
        for line, parts in reached:
            if parts[0] in ("tests", "benchmarks", "examples"):
                found.append(f"{name}:{line}: the package may not import {parts[0]}")
            if "_torch" not in path.parts and parts[0] == "torch" and any(map(is_private, parts)):
                found.append(f"{name}:{line}: private to torch: {'.'.join(parts)}")
    return sorted(set(found))


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module of the package: ("data", "order", "draws") lies in "data.order"."""
    return ".".join(parts[:2] if parts[:1] == ("data",) else parts[:1]) or "faststep"


def imported_modules(path: Path, package: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Lines and modules of the package that a file imports, in functions and for types, too."""
    here = path.relative_to(package).with_suffix("").parts[:-1]
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ("faststep", *here)[: len(here) + 2 - node.level] if node.level else ()
            base = (*above, *(node.module.split(".") if node.module else ()))
            names = [(*base, alias.name) for alias in node.names]
        for name in names:
            if name[0] == "faststep":
                module = name[1:]
                while module and not is_module(package.joinpath(*module)):
                    module = module[:-1]  # a class, say
                found.append((node.lineno, module))
    return found


def is_module(path: Path) -> bool:
    suffixes = (".py", ".pyi")
    return path.is_dir() or any(path.with_name(path.name + suffix).is_file() for suffix in suffixes)


def room_violations(root: Path) -> list[str]:
    package = root / "python" / "faststep"
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        room = room_of(parts[:-1] if parts[-1] == "__init__" else parts)
        name = path.relative_to(root).as_posix()
        if room not in MAY_IMPORT:
            found.append(f"{name}: {room} is no room in MAY_IMPORT")
            continue
        for line, module in imported_modules(path, package):
            to = room_of(module)
            if to != room and to not in MAY_IMPORT[room]:
                found.append(f"{name}:{line}: {room} may not import {to}")
    return found


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def found_when_planted(
    violations: Callable[[Path], list[str]],
    root: Path,
    right: dict[str, str],
    place: str,
    text: str,
) -> list[str]:
    """What is found in a tree that was right until one more file was written."""
    write(root, right)
    assert violations(root) == []
    write(root, {place: text})
    return violations(root)


def test_rooms_of_the_package_keep_to_their_order() -> None:
    assert room_violations(ROOT) == []


def test_no_name_of_a_module_or_class_stands_twice() -> None:
    """But what takes the place of a class of torch has its name, and so has faststep's own."""
    files = [path for end in ("py", "pyi") for path in ROOT.glob(f"python/faststep/**/*.{end}")]
    modules = Counter(one.stem for one in files if one.stem not in ("__init__", "__main__"))
    swapped = ROOT / "python/faststep/run/loaders.py"
    texts = [one.read_text() for one in files if one != swapped]
    classes = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, re.M))
    assert len(classes) > 100
    assert [name for name, count in (modules + classes).items() if count > 1] == []


def test_the_rooms_of_the_loader_have_no_circles() -> None:
    seen: set[str] = set()
    for room, below in LOADER.items():
        assert set(below.split()) <= seen, f"{room} imports a room that is not listed above it"
        seen.add(room)


def test_sources_keep_to_their_layer() -> None:
    assert len(list(ROOT.glob("csrc/**/*.h"))) > 5
    assert c_violations(ROOT) == []


def test_only_one_folder_reaches_torchs_private_names() -> None:
    assert len(list(ROOT.glob("python/faststep/**/*.py"))) > 5
    assert python_violations(ROOT) == []


@pytest.mark.parametrize(
    ("place", "text", "complaint"),
    [
        ("csrc/base/x.h", '#include "rules/rules.h"', "base may not include"),
        ("csrc/cpu/x.h", '#include "../core/plan.h"', "cpu may not include"),
        ("csrc/cpu/x.c", '#include "gpu/driver.h"', "cpu may not include"),
        ("csrc/core/x.c", '#include "py/module.h"', "core may not include"),
        ("csrc/core/x.c", '#include "nowhere.h"', "core may not include"),
        ("csrc/core/x.c", "# include <Python.h>", "only csrc/py"),
        ("csrc/py/x.c", "#include <ATen/dlpack.h>", "foreign header"),
        ("csrc/gpu/x.c", "#include <cuda_runtime.h>", "foreign header"),
        ("csrc/gpu/x.c", "#include <cuda.h>", "foreign header"),
        ("csrc/base/x.c", "#include <vector>", "foreign header"),
        ("cuda/x.cu", '#include "core/plan.h"', "cuda may not include"),
        ("csrc/core/x.c", "void f(void) { abort(); }", "abort()"),
        ("csrc/cpu/x.c", 'void f(void) { fprintf(stderr, "%d", 1); }', "fprintf()"),
        ("csrc/gpu/other.c", 'dlopen("libcuda.so.1", 1);', "libcuda"),
        ("csrc/py/torch/x.c", '#include "py/module.h"', "py/torch may not include"),
        ("csrc/py/torch/x.h", '#include "py/step/plan.h"', "py/torch may not include"),
        ("csrc/py/module.h", '#include "py/step/plan.h"', "py may not include"),
        ("csrc/py/step/x.c", '#include "py/grads/lists.h"', "py/step may not include"),
        ("csrc/py/load/x.c", '#include "py/grads/lists.h"', "py/load may not include"),
        ("csrc/py/grads/x.c", '#include "lists.h"', "not from csrc/"),
    ],
)
def test_a_wrong_arrow_in_c_is_caught(
    tmp_path: Path, place: str, text: str, complaint: str
) -> None:
    right = {
        "csrc/base/portable.h": "#include <stdint.h>",
        "csrc/rules/rules.h": '#include "base/portable.h"',
        "csrc/gpu/driver.h": '#include "rules/rules.h"',
        "csrc/gpu/driver.c": '#include "driver.h"\nconst char *name = "libcuda.so.1";',
        "csrc/core/plan.h": '#include "rules/rules.h" /* never printf(), never exit() */',
        "csrc/py/torch/tensor.h": "#include <Python.h>",
        "csrc/py/module.h": '#include "py/torch/tensor.h"\n#include "core/plan.h"',
        "csrc/py/step/plan.h": '#include "py/module.h"\n#include "core/plan.h"',
        "csrc/py/grads/lists.h": '#include "py/torch/tensor.h"',
        "csrc/py/load/x.c": '#include "py/module.h" /* not "py/grads/lists.h" */',
        "csrc/py/module.c": '#include "py/module.h"\n#include "py/grads/lists.h"\n'
        'void f(void) { printf("abort()"); }',
    }
    found = found_when_planted(c_violations, tmp_path, right, place, text)
    assert len(found) == 1
    assert found[0].startswith(place)
    assert complaint in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nn = torch._C._get_tracing_state()",
        "import torch.optim as o\nprint(o.optimizer._params_doc)",
        "from torch.amp.grad_scaler import _refresh_per_optimizer_state",
        "from torch._utils import is_compiling",
        "import torch._dynamo",
        "from torch import nn\nx = getattr(nn, '_reduction')",
        "from tests.optim import references",
    ],
)
def test_a_wrong_arrow_in_python_is_caught(tmp_path: Path, text: str) -> None:
    right = {
        "python/faststep/fine.py": "import torch\nfrom faststep import _C\nx = torch.__version__",
        "python/faststep/_torch/optim.py": "import torch\nx = torch._C",
    }
    place = "python/faststep/planted.py"
    found = found_when_planted(python_violations, tmp_path, right, place, text)
    assert found
    assert all(line.startswith(f"{place}:") for line in found)


@pytest.mark.parametrize(
    ("place", "text", "complaint"),
    [
        ("data/order/x.py", "from ..resume import states", "data.order may not import data.resume"),
        ("data/order/x.py", "from ... import optim", "data.order may not import optim"),
        ("data/order/x.py", "import faststep.data.loader", "data.order may not import data.loader"),
        ("data/order/x.py", "from .. import loader", "data.order may not import data.loader"),
        (
            "data/stats.py",
            "from .order.draws import noting",
            "data.stats may not import data.order",
        ),
        (
            "data/order/x.py",
            "def f():\n    from ..resume.states import check",
            "data.order may not import data.resume",
        ),
        (
            "data/order/x.py",
            "import typing as t\nif t.TYPE_CHECKING:\n    from ..loader import DataLoader",
            "data.order may not import data.loader",
        ),
        ("_torch/x.py", "from ..optim import Adam", "_torch may not import optim"),
        ("optim/x.py", "from faststep import Adam", "optim may not import faststep"),
        ("optim/x.py", "from ..data import DataLoader", "optim may not import data"),
        ("grads/x.py", "from ..optim.adam import Adam", "grads may not import optim"),
        ("elsewhere.py", "import torch", "elsewhere is no room"),
    ],
)
def test_a_wrong_arrow_between_rooms_is_caught(
    tmp_path: Path, place: str, text: str, complaint: str
) -> None:
    right = {
        "_C.pyi": "",
        "__init__.py": "from .optim import Adam",
        "_torch/held.py": "from .. import _C",
        "grads/__init__.py": "",
        "optim/__init__.py": "from .adam import Adam",
        "optim/adam.py": "import torch.optim\nfrom .. import _C\nfrom .._torch import held",
        "data/__init__.py": "from .loader import DataLoader",
        "data/stats.py": "import faststep._torch.held",
        "data/loader.py": "from .resume import states\nfrom .order.draws import noting",
        "data/order/draws.py": "from __future__ import annotations\nfrom ... import _C",
        "data/resume/states.py": "from ..order import draws\nfrom ..order.draws import noting",
    }
    right = {f"python/faststep/{name}": code for name, code in right.items()}
    place = f"python/faststep/{place}"
    found = found_when_planted(room_violations, tmp_path, right, place, text)
    assert len(found) == 1
    assert found[0].startswith(f"{place}:")
    assert complaint in found[0]


DEFINED = re.compile(
    r"^(?!static\b|typedef\b|extern\b)[A-Za-z_][\w *]*?\b(\w+)\s*(?:\([^;{}]*\)\s*\n\{|= \{$)",
    re.MULTILINE,
)


def circles_of_calls(room: Path) -> list[list[str]]:
    """Files of a room in C that use each other's functions, directly or by way of others."""
    sources = {path: COMMENT.sub(" ", path.read_text()) for path in room.rglob("*.c")}
    owner = {name: path for path, code in sources.items() for name in DEFINED.findall(code)}
    return circles_in(
        {
            path: {
                owner[word] for word in re.findall(r"\w+", code) if owner.get(word, path) != path
            }
            for path, code in sources.items()
        }
    )


def circles_in(uses: dict[Any, set[Any]]) -> list[list[str]]:
    """What uses itself by way of others, each with what it uses of these."""
    uses = dict(uses)
    while free := [one for one, used in uses.items() if not used & uses.keys()]:
        for one in free:
            del uses[one]
    return [sorted(map(str, {one, *(used & uses.keys())})) for one, used in uses.items()]


def circles_of_modules(root: Path) -> list[list[str]]:
    """Modules of the package that import each other, for types or in functions, too.

    A module may import from the package around it what stands before it there, as `_C`.
    """
    package = root / "python" / "faststep"
    uses = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        own = parts[:-1] if parts[-1] == "__init__" else parts
        uses[own] = {
            module for _, module in imported_modules(path, package) if module != own[: len(module)]
        }
    return circles_in(uses)


def test_no_module_of_the_package_imports_itself_by_way_of_others(tmp_path: Path) -> None:
    assert circles_of_modules(ROOT) == []
    inside = tmp_path / "python" / "faststep" / "optim"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("from .a import A")
    (inside / "a.py").write_text("from . import b")
    (inside / "b.py").write_text("x = 1")
    assert circles_of_modules(tmp_path) == []
    (inside / "b.py").write_text("def late():\n    from .a import A")
    assert len(circles_of_modules(tmp_path)) >= 2


@pytest.mark.parametrize("room", sorted({*CORE, "memory", "py"}))
def test_no_circle_of_calls_in_a_room(room: str) -> None:
    assert circles_of_calls(ROOT / "csrc" / room) == []


def test_functions_are_found() -> None:
    sources = [path.read_text() for path in ROOT.glob("csrc/py/**/*.c")]
    assert sum(len(DEFINED.findall(code)) for code in sources) > 100


def test_a_circle_of_calls_is_caught(tmp_path: Path) -> None:
    inside = tmp_path / "csrc" / "py" / "step"
    inside.mkdir(parents=True)
    (inside / "a.c").write_text("int fst_a(void)\n{\n    return fst_b();\n}\n")
    (inside / "b.c").write_text(
        "static int c(void)\n{\n    return 0;\n}\n\nint fst_b(void)\n{\n}\n"
    )
    (inside / "d.c").write_text("int fst_d(void)\n{\n    return fst_a();\n}\n")
    assert circles_of_calls(inside) == []
    (inside / "b.c").write_text("int fst_b(int x,\n          int y)\n{\n    return fst_d();\n}\n")
    assert len(circles_of_calls(inside)) == 3


# As CONTRIBUTING.md has them under "Sizes".
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60
MAY_BE_LONGER = {
    "python/faststep/_C.pyi": "an extension module has one stub",
    "python/faststep/release/__init__.py: release_gradients": "55 lines are its docstring",
    "python/faststep/zero/__init__.py: shard": "most lines are its docstring",
}


def c_functions(code: str) -> list[tuple[str, int]]:
    """The first line of each function, and how many lines it has."""
    found = []
    lines = code.split("\n")
    for brace in (i for i, line in enumerate(lines) if line == "{"):
        first = brace - 1
        while lines[first].startswith((" ", "\t")):
            first -= 1
        found.append((lines[first], lines.index("}", brace) - first + 1))
    return found


def too_long(root: Path) -> set[str]:
    """The modules and functions that are longer than they may be."""
    found = set()
    tops = ("python/faststep/**/*.py*", "csrc/**/*.*", "cuda/**/*.*")
    for path in sorted(path for top in tops for path in root.glob(top)):
        if path.suffix not in (".py", ".pyi", ".c", ".h", ".cu", ".def"):
            continue
        text, name = path.read_text(), path.relative_to(root).as_posix()
        if text.count("\n") > MOST_LINES:
            found.add(name)
        if path.suffix not in (".py", ".pyi"):
            functions = c_functions(text)
        else:
            functions = [
                (node.name, (node.end_lineno or 0) - node.lineno + 1)
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        found |= {f"{name}: {f}" for f, lines in functions if lines > MOST_LINES_OF_A_FUNCTION}
    return found


def test_modules_and_functions_are_short() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Sizes\n")[1].split("\n## ")[0]
    assert f"at most {MOST_LINES} lines" in page
    assert f"at most {MOST_LINES_OF_A_FUNCTION}" in page
    assert all(f"`{name.split(': ')[-1]}`" in page for name in MAY_BE_LONGER)
    code = "\n".join(path.read_text() for path in ROOT.glob("csrc/**/*.c"))
    assert len(c_functions(code)) > 500
    assert too_long(ROOT) == MAY_BE_LONGER.keys()


@pytest.mark.parametrize(
    ("place", "text", "complaint"),
    [
        ("csrc/cpu/x.c", "/* a */\n" * 401, "csrc/cpu/x.c"),
        ("python/faststep/_C.pyi", "x: int\n" * 401, "python/faststep/_C.pyi"),
        ("python/faststep/x.py", "class A:\n    def f(self):\n" + "        pass\n" * 59, None),
        (
            "python/faststep/x.py",
            "class A:\n    def f(self):\n" + "        pass\n" * 60,
            "python/faststep/x.py: f",
        ),
        (
            "cuda/x.cu",
            "int f(int a,\n      int b)\n{\n" + "    a++;\n" * 57 + "}\n",
            "cuda/x.cu: int f(int a,",
        ),
        ("cuda/x.cu", "int f(int a,\n      int b)\n{\n" + "    a++;\n" * 56 + "}\n", None),
    ],
)
def test_what_is_too_long_is_caught(
    tmp_path: Path, place: str, text: str, complaint: str | None
) -> None:
    write(tmp_path, {place: text})
    assert too_long(tmp_path) == ({complaint} if complaint else set())
