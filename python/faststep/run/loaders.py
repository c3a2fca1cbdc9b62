"""The loader and the scalers under `run`: faststep's work, and torch's arguments and pickles.

Where a script has replaced what torch's classes call, its code runs.
"""

from __future__ import annotations

import itertools
import types
import weakref
from typing import Any, ClassVar, TypeVar

import torch
import torch.utils.data
from torch.cpu.amp import grad_scaler as of_cpu
from torch.cuda.amp import grad_scaler as of_cuda

from .. import amp, data
from .._torch.data_loader import READING, called_by_name
from .._torch.optim import is_torchs
from ..data.options import Extras
from .shown import Current, hidden, reduced

_T_co = TypeVar("_T_co", covariant=True)

TorchsLoader: Any = torch.utils.data.DataLoader
SCALING = {name: getattr(torch.amp.GradScaler, name) for name in ("step", "update")}


def _parts() -> list[Any]:
    """All functions and classes that make the batches of torch's loader."""
    of_classes = (value for kind in READING for value in vars(kind).values())
    functions = [f for f in of_classes if isinstance(f, types.FunctionType)]
    return [TorchsLoader._get_iterator, *functions, *called_by_name()]


_KNOWN = _parts()
_extras: weakref.WeakKeyDictionary[Any, Extras] = weakref.WeakKeyDictionary()  # not in vars()


def _extras_of(loader: Any) -> Extras:
    own = _extras.get(loader)
    if own is None:
        own = _extras[loader] = Extras(keeps_position=False)
    return own


class DataLoader(data.DataLoader[_T_co]):
    """faststep's loader, of which a script sees what torch's has."""

    __init__: Any = Current(TorchsLoader)

    _faststep: Any = property(lambda loader: _extras_of(loader))

    def _get_iterator(self) -> Any:
        pairs = itertools.zip_longest(_parts(), _KNOWN)
        if any(now is not known and not is_torchs(now) for now, known in pairs):
            return TorchsLoader._get_iterator(self)
        return super()._get_iterator()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not DataLoader:
            return super().__reduce_ex__(protocol)
        return reduced(TorchsLoader, dict(vars(self)))


for _name, _free in hidden(TorchsLoader, data.DataLoader).items():
    setattr(DataLoader, _name, _free)


class GradScaler(amp.GradScaler):
    """faststep's scaler, of which a script sees what torch's has."""

    _torchs: ClassVar[Any] = torch.amp.GradScaler

    __init__: Any = Current(torch.amp.GradScaler)

    def scale(self, outputs: Any) -> Any:
        return self._torchs.scale(self, outputs)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._torchs.step is not SCALING["step"]:
            return self._torchs.step(self, optimizer, *args, **kwargs)
        return self._step(optimizer, None, args, kwargs)

    def update(self, new_scale: Any = None) -> None:
        if self._torchs.update is not SCALING["update"]:
            self._torchs.update(self, new_scale)
        else:
            super().update(new_scale)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_torchs" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return reduced(self._torchs, torch.amp.GradScaler.__getstate__(self))


class CudaGradScaler(GradScaler, of_cuda.GradScaler):
    """With the arguments and the warning of the class that torch deprecates."""

    _torchs = of_cuda.GradScaler
    __init__: Any = Current(of_cuda.GradScaler)


class HostGradScaler(GradScaler, of_cpu.GradScaler):
    """As :class:`CudaGradScaler`, for the CPU."""

    _torchs = of_cpu.GradScaler
    __init__: Any = Current(of_cpu.GradScaler)
