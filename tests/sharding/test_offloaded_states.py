"""`faststep.offload` of parameters that are DTensors: what holds without it, once more."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import faststep
from faststep._torch.dtensor import any_dtensor
from faststep.grads.params import params_of
from ranks import on_cases

from .test_optimizers import CLASSES

AGAIN = {
 "test_optimizers": ["fsdp2","mixed_precision","offloaded","hybrid","tensor_parallel","sequence_parallel","other_placements","states_with_other_placements","several_meshes","changed_between_steps","gradients_that_go_in_a_step","parameters_that_go_in_a_step","torchs_scale_protocol","refused"],
 "test_scaler": ["overflow_on_one_rank","flags_that_differ","unscaled"],
 "test_clipping": ["in_the_step","hybrid","two_dimensional","several_meshes","on_one_rank_only","sums_that_wait","watched"],
 "test_different_ranks": ["scaled","scaled_without_any","step_that_fails_on_one_rank"],
 "test_accumulation": ["windows","windows_by_model","windows_that_fail","in_float32","installed","refused"],
 "test_states": ["optimizer_state_dicts","of_one_process","remainders","what_counts_elements_refuses_columns","saved_to_files","own_state_dicts"],
 "test_fsdp2_models": ["frozen_inside","frozen_across","repeated_forward","unused","containers","clipped","tensor_parallel","mixed_precision","accumulated","kept_state_dict"],
 "test_more_models": ["compiled","compiled_loop","one_of_two_meshes","some_ranks_only","several_dtypes"],
 "test_freed": ["freed"],
}


@contextlib.contextmanager
def all_offloaded() -> Iterator[None]:
    """Inside, optimizers of DTensors are offloaded at once."""

    def offloading(made: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            made(self, *args, **options)
            if any_dtensor(params_of(self)):
                faststep.offload(self)

        return init

    with pytest.MonkeyPatch.context() as patch:
        for name in dict.fromkeys(name for name, _ in CLASSES.values()):
            kind = getattr(faststep.optim, name)
            patch.setattr(kind, "__init__", offloading(kind.__init__))
        yield


def _cases() -> Iterator[tuple[int, str, str]]:
    for module, names in AGAIN.items():
        tests = importlib.import_module(f"{__package__}.{module}")
        for name in names:
            worlds = {job.world for job in getattr(tests, f"test_{name}").JOBS}
            yield min(worlds), module, name


@on_cases(_cases())
def test_again(rank: int, world: int, module: str, name: str) -> None:
    tests = importlib.import_module(f"{__package__}.{module}")
    with all_offloaded():
        getattr(tests, f"test_{name}").body(rank, world)
