"""Lightning's DDP splits batches within a client; which strategies cannot work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.settings.module_checks import check_batch_statistics
from lightning_fed.strategies import WithinClientStrategy
from tests.helpers.ids import spelled
from tests.helpers.processes import in_processes
from tests.helpers.training import QUIET, fit, seeded


def test_lightnings_ddp_becomes_the_one_that_splits_batches() -> None:
    for strategy in ("ddp", "ddp_spawn", "ddp_find_unused_parameters_false", "auto", DDPStrategy()):
        made = FederatedTrainer(**{**QUIET, "local_epochs": 1, "devices": 2, "strategy": strategy})
        assert type(made.strategy) is WithinClientStrategy
        assert not made._accelerator_connector.use_distributed_sampler


class OwnDDP(DDPStrategy):
    pass


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fsdp", "The strategy fsdp is not supported: it shards the parameters.*strategy='clients'"),
        ("deepspeed_stage_2", "The strategy deepspeed_stage_2 is not supported: it keeps parameters"),
        ("xla", "The strategy xla is not supported: it records steps"),
        (FSDPStrategy(), "The strategy FSDPStrategy is not supported: it shards"),
        (ModelParallelStrategy(), "The strategy ModelParallelStrategy is not supported: it spreads the parameters"),
        (OwnDDP(), "The strategy OwnDDP is not supported: it changes how gradients are reduced"),
        (DDPStrategy(model_averaging_period=3), "model_averaging_period=3.* is not supported.*Leave model_averaging"),
        (DDPStrategy(ddp_comm_hook=print), "ddp_comm_hook=.* is not supported"),
    ],
    ids=spelled,
)
def test_strategies_that_cannot_work_are_refused_by_name(strategy: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        FederatedTrainer(**{**QUIET, "local_epochs": 1, "strategy": strategy})


def test_the_vectorized_engine_and_split_batches_exclude_each_other() -> None:
    with pytest.raises(FederatedError, match="engine='vectorized' does not go with strategy='ddp' on 2 devices"):
        fit(engine="vectorized", devices=2, strategy="ddp")


def test_batch_normalisation_in_evaluation_mode_is_no_obstacle() -> None:
    module = seeded()
    module.norm = nn.BatchNorm1d(3)
    with pytest.raises(FederatedError, match=r"norm \(BatchNorm1d\) normalises .* Use GroupNorm"):
        check_batch_statistics(module)
    module.norm.eval()
    check_batch_statistics(module)


def test_one_process_splits_nothing(tmp_path: Path) -> None:
    # apart from this one, whose process group those that other tests fork would take for theirs
    (outcome,) = in_processes(lambda: fit(strategy="ddp", devices=1), tmp_path, count=1)
    assert torch.equal(outcome.value, fit())
