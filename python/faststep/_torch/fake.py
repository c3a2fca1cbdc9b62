"""Tensors without memory, on which a model can run."""

from __future__ import annotations

from typing import Any

from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

ReadsValuesError = DataDependentOutputException


class NoMemory(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Inside of it all operators make tensors that have shapes and no values.

    torch's mode keeps weak references to parameters, with which `model.bfloat16()` fails.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # constants may be from before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return made
