"""Datasets in files: one module per format, and `open`, which tells the format by the content."""

from .arrow import ArrowDataset
from .common import FormatError
from .conversion import convert
from .detect import open
from .hdf5 import HDF5Dataset
from .images import ImageFolder, decode_image
from .json_lines import JsonLinesDataset, JsonLinesStream
from .lmdb_files import LMDBDataset
from .parquet import ParquetDataset
from .tars import TarDataset
from .tfrecord import TFRecordDataset, TFRecordStream
from .zips import ZipDataset

__all__ = [
    "ArrowDataset",
    "FormatError",
    "HDF5Dataset",
    "ImageFolder",
    "JsonLinesDataset",
    "JsonLinesStream",
    "LMDBDataset",
    "ParquetDataset",
    "TFRecordDataset",
    "TFRecordStream",
    "TarDataset",
    "ZipDataset",
    "convert",
    "decode_image",
    "open",
]
