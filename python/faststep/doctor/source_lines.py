"""What a line of a script does, by its text and that of the loops and functions around it."""

from __future__ import annotations

import ast
import functools
import linecache
import re

PRINTS = re.compile(r"\bprint\(|\blogg\w+\.|\.write\(")
READS = re.compile(r"\.item\(\)|\.tolist\(\)")
WAITS = re.compile(r"\.wait\(|all_reduce|all_gather|reduce_scatter|broadcast|barrier\(")
UPDATES = re.compile(r"-=|\+=|sub_\(|add_\(|addc\w+_\(|copy_\(")
CLIPS = re.compile(r"norm|clip|clamp|max_")


@functools.cache
def source(file: str) -> tuple[str, ast.Module]:
    """The text of a file, and its tree; both empty if it is gone, or has changed into no Python."""
    try:
        text = "".join(linecache.getlines(file))
        return text, ast.parse(text)
    except SyntaxError:
        return "", ast.Module([], [])


def _text_of(file: str, line: int) -> str:
    lines = source(file)[0].splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def prints(place: tuple[str, int] | None) -> bool:
    """True if a line writes text."""
    return place is not None and bool(PRINTS.search(_text_of(*place)))


def reads(place: tuple[str, int] | None) -> bool:
    """True if a line, or a loop around it that does not train, reads numbers of tensors."""
    if place is None or clips(place):
        return False
    loops = (ast.For, ast.ListComp, ast.GeneratorExp)
    around = [text for node, text in _around(place) if isinstance(node, loops)][:2]
    around = [text for text in around if "backward(" not in text and ".step(" not in text]
    return any(READS.search(text) for text in [_text_of(*place), *around])


def waits(place: tuple[str, int] | None) -> bool:
    """True if a line, or the function around it, waits for other ranks."""
    if place is None:
        return False
    functions = [text for node, text in _around(place) if isinstance(node, ast.FunctionDef)]
    return any(WAITS.search(text) for text in [_text_of(*place), *functions[:1]])


def clips(place: tuple[str, int] | None) -> bool:
    """True if a loop or a function around a line changes gradients by their size."""
    return any(CLIPS.search(said) for said in _on_gradients(place))


def updates(place: tuple[str, int] | None) -> bool:
    """True if a loop or a function around a line changes parameters by their gradients."""
    around = _on_gradients(place)
    updates = [said for said in around if UPDATES.search(said) and "_foreach_" not in said]
    return bool(updates) and not clips(place)


def _on_gradients(place: tuple[str, int] | None) -> list[str]:
    """The texts of the two innermost loops or functions around a line, if they use gradients."""
    said = [text for _, text in _around(place)[:2]] if place is not None else []
    return [one for one in said if ".grad" in one and "backward(" not in one]


def _around(place: tuple[str, int]) -> list[tuple[ast.AST, str]]:
    """The loops, functions and assignments around a line with their texts, innermost first."""
    text, tree = source(place[0])
    kinds = (ast.For, ast.FunctionDef, ast.ListComp, ast.GeneratorExp, ast.Assign)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.lineno <= place[1] <= (node.end_lineno or node.lineno)
    ]
    around.sort(key=lambda one: (one.end_lineno or one.lineno) - one.lineno)
    return [(node, ast.get_source_segment(text, node) or "") for node in around]


def line_of(file: str, name: str) -> int | None:
    """Where a variable grows."""
    grows = re.compile(rf"\b{re.escape(name)}\s*(\+=|\.append\(|=.*\b{re.escape(name)}\b)")
    for number, line in enumerate(source(file)[0].splitlines(), 1):
        if grows.search(line):
            return number
    return None
