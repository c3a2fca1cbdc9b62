"""What `help` says of the extension: a docstring for everything, with the arguments of _C.pyi."""

import ast
import inspect
import types
from pathlib import Path
from typing import Any

import pytest

from faststep import _C

STUB = Path(__file__).parents[1] / "python" / "faststep" / "_C.pyi"
SENTENCES = 3  # what needs more is told in _C.pyi


def public(owner: Any) -> dict[str, Any]:
    return {name: item for name, item in vars(owner).items() if not name.startswith("_")}


def described() -> dict[str, Any]:
    """Functions and types by name, methods and members as "Type.name"."""
    found = {name: item for name, item in public(_C).items() if callable(item)}
    kinds = {name: item for name, item in found.items() if isinstance(item, type)}
    for name, kind in kinds.items():
        found |= {f"{name}.{inner}": item for inner, item in public(kind).items()}
    return found


def stubs() -> dict[str, ast.FunctionDef]:
    """Functions and methods of _C.pyi; a type's name stands for what makes an object of it."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name in ("__new__", "__init__"):
                    found[node.name] = inner
                elif isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    found[f"{node.name}.{inner.name}"] = inner
    return found


def arguments_of(stub: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Names, and whether each may be left out."""
    names = [a.arg for a in (*stub.args.posonlyargs, *stub.args.args)]
    optional = [False] * (len(names) - len(stub.args.defaults)) + [True] * len(stub.args.defaults)
    pairs = zip(names, optional, strict=True)
    found = [pair for pair in pairs if pair[0] not in ("self", "cls")]
    return [*found, (stub.args.vararg.arg, False)] if stub.args.vararg else found


DESCRIBED = described()
FUNCTIONS = [
    name
    for name, item in DESCRIBED.items()
    if isinstance(item, (types.BuiltinFunctionType, types.MethodDescriptorType))
]


@pytest.mark.parametrize("name", DESCRIBED)
def test_everything_has_a_docstring(name: str) -> None:
    text = inspect.getdoc(DESCRIBED[name]) or ""
    assert text.endswith("."), f"{name}: {text!r}"
    assert "\n" not in text, f"{name}: one paragraph, the rest is in _C.pyi"
    assert text.count(". ") < SENTENCES, f"{name}: short, the rest is in _C.pyi"
    assert all(ord(letter) < 128 for letter in text), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_the_stub(name: str) -> None:
    shown = inspect.signature(DESCRIBED[name]).parameters.values()
    have = [(p.name, p.default is not p.empty) for p in shown if p.name != "self"]
    assert have == arguments_of(stubs()[name])
    assert {p.kind for p in shown} <= {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
    }


def test_the_stub_has_all_functions_and_no_other() -> None:
    with_arguments = {name for name in stubs() if not isinstance(DESCRIBED.get(name), type)}
    properties = {n for n, i in DESCRIBED.items() if isinstance(i, types.MemberDescriptorType)}
    assert with_arguments - properties == set(FUNCTIONS)
