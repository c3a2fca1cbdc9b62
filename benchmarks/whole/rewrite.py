"""Changes that a user makes to a script: other imports, other arguments, a line more or less.

A script is parsed, changed and written again, so that there is one copy of it. What cannot be
changed as asked raises NotThisScriptError, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

# What faststep has in the place of torch's names.
OURS = {
    **{f"torch.optim.{name}": f"faststep.optim.{name}" for name in ("Adam", "AdamW", "SGD")},
    "torch.amp.GradScaler": "faststep.amp.GradScaler",
    "torch.nn.utils.clip_grad_norm_": "faststep.clip_grad_norm_",
    "torch.utils.data.DataLoader": "faststep.data.DataLoader",
}
CLIP = ("clip_grad_norm_", "unscale_")


class NotThisScriptError(Exception):
    """Why a change does not fit a script."""


class Names(ast.NodeTransformer):
    """Puts other names in the place of imported ones, however they were imported."""

    def __init__(self, tree: ast.Module, others: Mapping[str, str]) -> None:
        self._others = others
        self._imported: dict[str, str] = {}
        self.replaced: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    self._imported[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _full(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, "")
        if isinstance(node, ast.Attribute) and (before := self._full(node.value)):
            return f"{before}.{node.attr}"
        return ""

    def _visit(self, node: ast.expr) -> ast.AST:
        name = self._full(node)
        if name in self._others:
            self.replaced.add(name)
            return ast.parse(self._others[name], mode="eval").body
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._visit(node)


def _import(tree: ast.Module, text: str) -> None:
    """Add lines before the first statement after the docstring."""
    tree.body[1:1] = ast.parse(text).body


def _optimizer(tree: ast.Module) -> tuple[int, ast.Call]:
    """Where the script makes its optimizer, and the call."""
    for place, node in enumerate(tree.body):
        is_it = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "optimizer"
        if is_it and isinstance(node.value, ast.Call):
            return place, node.value
    raise NotThisScriptError("it has no line `optimizer = ...` at its top level")


def swapped(source: str, others: Mapping[str, str] = OURS) -> str:
    """The script with other names for the imported ones."""
    tree = ast.parse(source)
    names = Names(tree, others)
    names.visit(tree)
    if not any(name.startswith("torch.optim.") for name in names.replaced):
        raise NotThisScriptError("there is no such optimizer")
    modules = {others[name].rpartition(".")[0] for name in names.replaced}
    _import(tree, "\n".join(f"import {module}" for module in sorted(modules)))
    return ast.unparse(tree)


def with_arguments(source: str, **arguments: object) -> str:
    """The script whose optimizer has these arguments too, where it does not have them."""
    tree = ast.parse(source)
    _, call = _optimizer(tree)
    given = {keyword.arg for keyword in call.keywords}
    for name, value in arguments.items():
        if name not in given:
            call.keywords.append(ast.keyword(name, ast.Constant(value)))
    return ast.unparse(tree)


class _Clips(ast.NodeTransformer):
    """Takes out the lines that unscale and clip, and gives the limit to the scaler's step."""

    def __init__(self) -> None:
        self.limits: list[ast.expr] = []
        self.scaled = False

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        if isinstance(node.value, ast.Call) and called.endswith(CLIP):
            if called.endswith("clip_grad_norm_"):
                self.limits.append(node.value.args[1])
            return None
        if isinstance(node.value, ast.Call) and called == "scaler.step":
            self.scaled = True
            node.value.keywords.append(ast.keyword("max_norm", self.limits[0]))
        return node


def clipping_inside(source: str) -> str:
    """The script with `max_grad_norm=`, or `scaler.step(max_norm=)`, in the place of clipping."""
    tree = ast.parse(swapped(source))
    clips = _Clips()
    clips.visit(tree)
    if len(clips.limits) != 1:
        raise NotThisScriptError(f"it clips in {len(clips.limits)} places")
    if not clips.scaled:
        _, call = _optimizer(tree)
        call.keywords.append(ast.keyword("max_grad_norm", clips.limits[0]))
    return ast.unparse(ast.fix_missing_locations(tree))


def retaining(source: str) -> str:
    """The script that calls faststep.memory.retain() first."""
    tree = ast.parse(source)
    _import(tree, "import faststep\nfaststep.memory.retain()")
    return ast.unparse(tree)


def compiled(source: str) -> str:
    """The script that compiles its model before it makes the optimizer."""
    tree = ast.parse(source)
    place, _ = _optimizer(tree)
    tree.body[place:place] = ast.parse("model = torch.compile(model)").body
    return ast.unparse(tree)
