"""Datasets in files: one module per format, and `open`, which picks it by the content."""

from .common import FormatError
from .convert import convert
from .detect import open

__all__ = ["FormatError", "convert", "open"]
