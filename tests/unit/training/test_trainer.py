"""What the trainer keeps watch on by itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.training.arguments import parse_args
from megatron_grpo.training.trainer import Trainer, mean_of_scored
from megatron_grpo.utils.errors import GrpoError


def check(versions, gap, synced=4, bf16=False):
    trainer = SimpleNamespace(args=parse_args(["--bf16"] * bf16), synced_iteration=synced)
    row = {} if gap is None else {"mismatch/mean_abs": gap}
    Trainer.check_engine(trainer, SimpleNamespace(weight_version=np.array(versions)), row)


@pytest.mark.parametrize("gap, bf16", [(None, False), (1e-6, False), (0.01, True)])
def test_an_engine_with_the_trainers_weights_passes(gap, bf16):
    check([4, 4, 4], gap, bf16=bf16)


@pytest.mark.parametrize(
    "versions, gap, bf16", [([3, 3], None, False), ([4, 3], 1e-6, False), ([4, 4], 0.01, False), ([4, 4], 0.5, True)]
)
def test_an_engine_with_other_weights_stops_the_run(versions, gap, bf16):
    with pytest.raises(GrpoError, match="does not hold the trainer's weights"):
        check(versions, gap, bf16=bf16)


def test_mean_of_scored():
    assert mean_of_scored(np.array([1.0, np.nan, 0.0])) == 0.5
    assert np.isnan(mean_of_scored(np.array([np.nan])))
