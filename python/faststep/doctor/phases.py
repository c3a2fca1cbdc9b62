"""The part of a training step that a thread is in, as its stack tells."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from types import CodeType, FrameType

__all__ = ["PHASES", "Place", "look"]

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
    ("torch/serialization.py", "checkpoint", ("save", "load")),
    ("torch/distributed/checkpoint/", "checkpoint", ()),
    ("safetensors/", "checkpoint", ()),
    ("torch/distributed/distributed_c10d.py", "communication", ()),
    ("torch/_tensor_str.py", "printing", ()),
    ("logging/__init__.py", "printing", ()),
    ("/tqdm/", "printing", ()),
)
_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values()}
    | {os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep}
)
_EVALUATES = re.compile(r"eval|valid|infer|predict")  # functions that only look at a model
_OPTIMIZERS = re.compile(r"/torch/|/faststep/")


@functools.cache
def _phase_of(code: CodeType) -> str | None:
    path = code.co_filename
    for part, phase, names in _FILES:
        place = path.rfind(part)
        if place >= 0 and (part.endswith("/") or path.endswith(part)):
            return phase if not names or code.co_name in names else None
    return None


@functools.cache
def _is_scripts(code: CodeType) -> bool:
    """True if a file is the user's own."""
    path = code.co_filename
    if path.startswith("<"):
        return path in ("<string>", "<stdin>")
    return not os.path.realpath(path).startswith(_LIBRARIES)


def _is_bucket(value: object) -> bool:
    return type(value).__name__ == "GradBucket"


def _is_closure(step: FrameType, called: CodeType | None) -> bool:
    """True if an optimizer's step calls what is no part of it, below the wrapper of all steps."""
    is_wrapper = step.f_code.co_filename.endswith("torch/optim/optimizer.py")
    return called is not None and not is_wrapper and not _OPTIMIZERS.search(called.co_filename)


def look(frame: FrameType | None) -> tuple[str, Place | None, Place | None]:
    """The phase of a stack, and the lines of the script that are to blame.

    The innermost call that has a phase says which, but what a loader calls is a part of it.

    Returns:
        The phase; the innermost line of the script; and the innermost one that is not called by
        torch, as a line of the training loop is and one of a dataset is not.
    """
    phase: str | None = None
    inner: Place | None = None
    outer: Place | None = None
    is_training = True
    called: CodeType | None = None
    while frame is not None:
        code = frame.f_code
        found = _phase_of(code)
        if found is not None:
            outer = None
            if found == "optimizer" and phase is None and _is_closure(frame, called):
                phase = "everything else"
            if phase is None or found == "data" or (found, phase) == ("backward", "forward"):
                phase = found
            if found == "forward" and code.co_name == "_call_impl":
                module = frame.f_locals.get("self")
                is_training = is_training and getattr(module, "training", True)
        elif _is_scripts(code):
            place = code.co_filename, frame.f_lineno
            if phase is None and any(map(_is_bucket, frame.f_locals.values())):
                phase = "communication"  # a hook of DistributedDataParallel
            is_training = is_training and not _EVALUATES.search(code.co_name)
            inner = inner or place
            outer = outer or place
        called, frame = code, frame.f_back
    if phase == "forward" and not is_training:
        phase = "evaluation"
    return phase or "everything else", inner, outer
