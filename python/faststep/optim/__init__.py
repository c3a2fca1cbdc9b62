"""Optimizers with torch's classes, arguments and state, whose step is one C call."""

from .adam import Adam, AdamW
from .lion import Lion
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
