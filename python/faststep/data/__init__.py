"""Loading: torch's DataLoader, with a faster way for data that lies in arrays."""

from . import transforms
from .arrays import ArrayDataset
from .keyed import KeyedSampler
from .loader import DataLoader
from .tokens import TokenDataset

__all__ = ["ArrayDataset", "DataLoader", "KeyedSampler", "TokenDataset", "transforms"]
