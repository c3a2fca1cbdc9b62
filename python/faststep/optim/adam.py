"""Adam and AdamW."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .arguments import composed
from .counted import CountedOptimizer
from .request import Formula, formula


class _AdamStep(CountedOptimizer):
    _code_dtypes: ClassVar[Mapping[str, torch.dtype]] = {
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
        "max_exp_avg_sq": torch.uint8,
    }
    _formula = formula("adam", "step", "exp_avg", "exp_avg_sq")
    _amsgrad = formula("amsgrad", *_formula.state_keys, "max_exp_avg_sq")

    def _formula_of(self, group: dict[str, Any]) -> Formula:
        return self._amsgrad if group["amsgrad"] else self._formula


@composed
class Adam(_AdamStep, torch.optim.Adam):
    """:class:`torch.optim.Adam` (Kingma & Ba 2015, arXiv:1412.6980) with a step that is one C call.

    A CUDA step is two kernel launches for any number of tensors.
    """


@composed
class AdamW(_AdamStep, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` (Loshchilov & Hutter 2019, arXiv:1711.05101) with a step that is
    one C call.

    A CUDA step is two kernel launches for any number of tensors.

    Args:
        weight_decay (float): decoupled.
    """
