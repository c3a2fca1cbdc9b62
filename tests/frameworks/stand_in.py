"""Stands in for torchvision, which has no CPU build here, when timm is imported."""

import importlib.machinery
import sys
import types
from typing import Any


class Named(type):
    """The class of classes whose attributes are their own names, as those of enums in keys."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, whatever is imported from it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (), {})


class Finder:
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def stand_in_for_torchvision() -> None:
    """Behind the finders that there are: a torchvision that can be imported comes first."""
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
