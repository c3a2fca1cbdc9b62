"""A configuration of DeepSpeed for stage 3, beside plain torch with the same settings."""

import pytest

from ranks import on_ranks
from zero.test_deepspeed_config import RATES, by_torch, trained, usual


@pytest.mark.filterwarnings("ignore:shard\\(stage=3\\)")
@on_ranks(2)
def test_stage_3(rank: int, world: int) -> None:
    whole = by_torch(rank, world, 12, RATES)
    for changes, error in (({"fp16": None}, 1e-5), ({}, 0.01)):
        found = trained(usual(zero_optimization={"stage": 3}, **changes), rank, 12)
        assert found == pytest.approx(whole, rel=error)
