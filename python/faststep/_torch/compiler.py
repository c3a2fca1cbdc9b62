"""Private names of torch: torch.compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_dynamo(function: _Function) -> _Function:
    """Keep torch.compile out of `function`: a compiled caller breaks its graph and calls it.

    Uses torch's own lazy decorator where there is one, because `torch.compiler.disable` imports
    the compiler at once, which costs seconds at `import faststep`.
    """
    lazy = getattr(torch, "_disable_dynamo", None)
    disabled: _Function = (lazy or torch.compiler.disable)(function)
    return disabled


def import_compiler() -> None:
    """Import it now, which an optimizer's first step does otherwise."""
    importlib.import_module("torch._dynamo")


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile wrapped, or `module` itself."""
    inner = getattr(module, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, torch.nn.Module) else module
