"""The part of a training step that a thread is in, as its stack tells."""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import CodeType

import torch

from .. import _C
from .source_lines import source

PHASES = (
    *("data", "forward", "backward", "clipping", "scaler", "optimizer", "communication"),
    *("evaluation", "checkpoint", "printing", "everything else"),
)
Place = tuple[str, int]  # a file of the script, and a line

# By the end of a file's path: its phase, and the functions that count; all for an empty tuple.
_FILES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("torch/utils/data/", "data", ()),
    ("faststep/data/", "data", ()),
    ("torch/optim/lr_scheduler.py", "everything else", ()),
    ("torch/optim/", "optimizer", ()),
    ("faststep/optim/", "optimizer", ()),
    ("torch/nn/utils/clip_grad.py", "clipping", ()),
    ("faststep/clip.py", "clipping", ()),
    ("torch/amp/grad_scaler.py", "scaler", ()),
    ("faststep/amp/", "scaler", ()),
    ("torch/_tensor.py", "backward", ("backward",)),
    ("torch/autograd/__init__.py", "backward", ("backward", "grad")),
    ("torch/nn/modules/module.py", "forward", ("_call_impl", "_wrapped_call_impl")),
    ("torch/nn/functional.py", "forward", ()),
    ("faststep/nn/", "forward", ()),
    ("torch/serialization.py", "checkpoint", ("save", "load")),
    ("torch/distributed/checkpoint/", "checkpoint", ()),
    ("safetensors/", "checkpoint", ()),
    ("torch/distributed/distributed_c10d.py", "communication", ()),
    ("torch/_tensor_str.py", "printing", ()),
    ("core/arrayprint.py", "printing", ()),  # of numpy
    ("logging/__init__.py", "printing", ()),
    ("/tqdm/", "printing", ()),
)
_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values()}
    | {os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep}
)
_EVALUATES = re.compile(r"eval|valid|infer|predict")  # functions that only look at a model
_EVALUATION = re.compile(r"_?evaluat")  # those of libraries, at the beginning of their names
_OPTIMIZERS = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, _C.__file__))
_WITHOUT_GRAD = re.compile(r"no_grad|inference_mode")  # what they are decorated with, or blocks
_JUDGES = re.compile(r"eval|valid|test|held|metric|accura|infer|\bval(_|\b)|_val\b|\bdev(_|\b)")
_BEFORE = 3  # lines before a block that belong to it, as model.eval() may


@functools.lru_cache(2**14)
def _phase_of(code: CodeType) -> str | None:
    path = code.co_filename
    for part, phase, names in _FILES:
        place = path.rfind(part)
        if place >= 0 and (part.endswith("/") or path.endswith(part)):
            return phase if not names or code.co_name in names else None
    return None


@functools.lru_cache(2**14)
def _is_scripts(code: CodeType) -> bool:
    """True if a file is the user's own."""
    path = code.co_filename
    if path.startswith("<"):
        return path in ("<string>", "<stdin>")
    return not os.path.realpath(path).startswith(_LIBRARIES)


def _is_closure(step: CodeType, called: CodeType | None) -> bool:
    """True if an optimizer's step calls what is no part of it, below the wrapper of all steps."""
    is_wrapper = step.co_filename.endswith("torch/optim/optimizer.py")
    return called is not None and not (is_wrapper or called.co_filename.startswith(_OPTIMIZERS))


@functools.cache
def _without_grad(path: str) -> list[range]:
    """The lines of a file in which a script judges a model, and asks for no gradients.

    Not those of a teacher, of the other player of a GAN, or of an agent that acts.
    """
    text, tree = source(path)
    lines, found = text.splitlines(keepends=True), []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            asks = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef):
            asks = node.decorator_list
        else:
            continue
        if any(_WITHOUT_GRAD.search(ast.dump(one)) for one in asks):
            end = node.end_lineno or node.lineno
            if _JUDGES.search("".join(lines[max(0, node.lineno - 1 - _BEFORE) : end])):
                found.append(range(node.lineno, end + 1))
    return found


def _stack(thread: int) -> list[tuple[CodeType, int]]:
    """The code and the line of each call of a thread, innermost first.

    Nothing is done that could let the thread leave a call which is being looked at: variables are
    not read, and no garbage is collected, whose destructors may release the GIL. CPython 3.11
    crashes by both.
    """
    collects = gc.isenabled()
    gc.disable()
    frame = sys._current_frames().get(thread)
    stack = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    if collects:
        gc.enable()
    return stack


def look(thread: int) -> tuple[str, Place | None, Place | None]:
    """The phase of a thread, and the lines of the script that are to blame.

    The innermost call that has a phase says which, but what a loader calls is a part of it.

    Returns:
        The phase; the innermost line of the script; and the innermost one that is not called by
        torch, as a line of the training loop is and one of a dataset is not.
    """
    phase: str | None = None
    inner: Place | None = None
    outer: Place | None = None
    is_training, is_hook = True, False
    called: CodeType | None = None
    for code, line in _stack(thread):
        found = _phase_of(code)
        if found is not None:
            outer = None
            if found == "optimizer" and phase is None and _is_closure(code, called):
                phase = "everything else"
            if phase is None and found == "backward" and is_hook:
                phase = "communication"
            if phase is None or found == "data" or (found, phase) == ("backward", "forward"):
                phase = found
        elif _is_scripts(code):
            place = code.co_filename, line
            is_hook = is_hook or "bucket" in code.co_varnames[: code.co_argcount]  # of DDP
            if _EVALUATES.search(code.co_name) or any(
                line in one for one in _without_grad(place[0])
            ):
                is_training = False
            inner = inner or place
            outer = outer or place
        elif _EVALUATION.match(code.co_name):
            is_training = False
        called = code
    if phase == "forward" and not is_training:
        phase = "evaluation"
    return phase or "everything else", inner, outer
