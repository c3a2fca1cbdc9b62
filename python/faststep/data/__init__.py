"""torch's DataLoader with faster paths, datasets in files, and transforms of batches."""

from . import transforms
from .arrays.array_dataset import ArrayDataset
from .arrays.converted import converted
from .formats import FormatError, convert, open
from .formats.tokens import TokenDataset, TokenWindow, cu_seqlens
from .loader import DataLoader, prepare_loader
from .order.keyed import KeyedSampler
from .workers.frozen import freeze

__all__ = [
    "ArrayDataset",
    "DataLoader",
    "FormatError",
    "KeyedSampler",
    "TokenDataset",
    "TokenWindow",
    "convert",
    "converted",
    "cu_seqlens",
    "freeze",
    "open",
    "prepare_loader",
    "transforms",
]
