"""Functions of a network that take the place of torch's."""

from . import functional

__all__ = ["functional"]
