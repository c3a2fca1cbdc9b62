"""Optimizers with torch's classes, arguments and state, whose step is one C call.

What :mod:`torch.optim` has beside them is here too, as it is there, so that
`import faststep.optim as optim` takes the place of `import torch.optim as optim`.
"""

from typing import Any

import torch.optim
from torch.optim import LBFGS as LBFGS
from torch.optim import Optimizer as Optimizer
from torch.optim import SparseAdam as SparseAdam
from torch.optim import lr_scheduler as lr_scheduler
from torch.optim import swa_utils as swa_utils

from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .lion import Lion
from .others import ASGD, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop
from .sgd import SGD

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]


def __getattr__(name: str) -> Any:
    """Muon, which this torch has and others may lack."""
    if name.startswith("_") or not hasattr(torch.optim, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.optim, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for name in dir(torch.optim) if name[0] != "_")})
