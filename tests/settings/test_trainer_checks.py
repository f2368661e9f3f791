"""Settings, strategies and callbacks of a trainer that rounds do not support."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor
from pytorch_lightning.loggers import CSVLogger

from lightning_fed.algorithms import FedAvg, FedSAM, PFedMe, ServerOnly
from lightning_fed.callbacks import (
    ClientAccuracy,
    GradientDissimilarity,
    LocalDrift,
    Measure,
    PersonalizedAccuracy,
    TrainingLoss,
    UpdateCosine,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.server import BernoulliSampler, DifferentialPrivacy
from lightning_fed.settings.trainer_checks import check_local_options, check_strategy, check_trainer, warn_of_rare_logs
from lightning_fed.strategies import ClientsStrategy
from tests.helpers.optional import needs_opacus
from tests.helpers.training import trainer


def test_strategies_that_cannot_run_clients_are_rejected() -> None:
    ddp = pl.strategies.DDPStrategy()
    for known in ("auto", "clients", "ddp", "ddp_spawn", "single_device", "my_own", ddp, ClientsStrategy()):
        check_strategy(known)
    for strategy, message in (
        ("fsdp", "The strategy fsdp is not supported: it shards the parameters"),
        ("deepspeed_stage_2", "it keeps parameters, gradients and optimizer to itself"),
        ("xla", "it records steps to run them later"),
        (
            type("MyDDP", (pl.strategies.DDPStrategy,), {})(),
            "MyDDP is not supported: it changes how gradients are reduced",
        ),
        (
            type(
                "Strange",
                (pl.strategies.ParallelStrategy,),
                {"__init__": lambda self: None, "__abstractmethods__": frozenset()},
            ),
            "how it trains is not known",
        ),
    ):
        with pytest.raises(FederatedError, match=message):
            check_strategy(strategy)


def test_local_options_are_rejected_for_methods_without_local_work() -> None:
    options: dict[str, Any] = {
        "gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "max_steps": 3, "limit_train_batches": 0.5,
        "overfit_batches": 2,
    }  # fmt: skip
    for name, value in options.items():
        with pytest.raises(FederatedError, match=f"{name}={value} does not apply to ServerOnly, whose clients take no"):
            check_local_options(trainer(algorithm=ServerOnly(), local_epochs=None, **{name: value}))
        check_local_options(trainer(algorithm=FedAvg(), **{name: value}))
    check_local_options(trainer(algorithm=ServerOnly(), local_epochs=None))
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 1, 2: 2})
    with pytest.raises(FederatedError, match="The callback GradientAccumulationScheduler does not apply to ServerOnly"):
        check_local_options(trainer(algorithm=ServerOnly(), local_epochs=None, callbacks=[schedule]))


class MyWeights(pl.callbacks.StochasticWeightAveraging):
    """A subclass, rejected like its base class."""


def test_settings_and_callbacks_unsupported_in_rounds_are_rejected() -> None:
    check_trainer(trainer())
    for options, message in (
        ({"val_check_interval": 2}, "val_check_interval=2 with check_val_every_n_epoch=1 asks for validation inside"),
        ({"callbacks": [MyWeights(0.1)]}, "MyWeights is not supported: it averages weights .* average the server's"),
        ({"callbacks": [pl.callbacks.SpikeDetection()]}, "SpikeDetection is not supported: it compares a batch's loss"),
        (
            {"callbacks": [pl.callbacks.BatchSizeFinder()]},
            "BatchSizeFinder .*Instead, set batch_size on the data module, .*new trainer if Tuner.scale_batch_size has",
        ),
        (
            {"algorithm": FedSAM(0.1), "accumulate_grad_batches": 2},
            "accumulate_grad_batches=2 cannot be combined with FedSAM",
        ),
        ({"algorithm": FedSAM(0.1), "gradient_clip_val": 1.0}, "gradient_clip_val=1.0 would clip the first gradient"),
        ({"algorithm": PFedMe(2.0, inner_steps=2), "accumulate_grad_batches": 2}, "which takes 2 steps on every batch"),
    ):
        with pytest.raises(FederatedError, match=message):
            check_trainer(trainer(**options))


def test_callbacks_that_would_log_nothing_warn(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for callback in (DeviceStatsMonitor(), LearningRateMonitor("step"), ThroughputMonitor(len)):
        few = trainer(callbacks=[callback], logger=logger, max_rounds=4)
        with pytest.warns(UserWarning, match=f"{type(callback).__name__} logs .* every 50 rounds.*log_every_n_steps=1"):
            warn_of_rare_logs(few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in (
            {"log_every_n_steps": 4},
            {"max_rounds": 50},
            {"max_rounds": -1},
            {"logger": False},
            {"callbacks": [LearningRateMonitor("epoch")]},
        ):
            unchanged = {"callbacks": [DeviceStatsMonitor()], "logger": logger, "max_rounds": 4}
            warn_of_rare_logs(trainer(**{**unchanged, **options}))


class After10(PersonalizedAccuracy):
    """Writes under its own name."""

    tag = "after_10"


def test_measures_with_duplicate_output_names_are_rejected() -> None:
    class Own(Measure):
        pass

    check_trainer(trainer(callbacks=[Own(), Own(), TrainingLoss(), UpdateCosine()]))
    check_trainer(trainer(callbacks=[ClientAccuracy(), ClientAccuracy(on="train"), ClientAccuracy("val_loss", "min")]))
    check_trainer(trainer(callbacks=[PersonalizedAccuracy(local_steps=1), After10(local_steps=10)]))
    for measures, name in (
        ([TrainingLoss(), TrainingLoss(weighting="uniform")], "population/train_loss"),
        ([GradientDissimilarity(), GradientDissimilarity(clients=2)], "gradient"),
        ([UpdateCosine(), UpdateCosine(2)], "update"),
        ([LocalDrift(), LocalDrift(2)], "drift"),
        ([PersonalizedAccuracy(local_steps=1), PersonalizedAccuracy(local_steps=10)], "personalized/val_acc"),
        ([ClientAccuracy(), ClientAccuracy("val_loss", "min", clients=2)], "clients/round_<n>.csv"),
    ):
        kind = type(measures[0]).__name__
        with pytest.raises(FederatedError, match=f"callbacks write '{name}', {kind} and {kind}, .* Remove one"):
            check_trainer(trainer(callbacks=measures))


@needs_opacus
def test_client_data_measures_are_rejected_with_privacy() -> None:
    privacy = DifferentialPrivacy(max_norm=1.0, noise_multiplier=1.0, delta=1e-3)
    drawn: dict[str, Any] = {"aggregator": privacy, "sampler": BernoulliSampler(0.5), "clients_per_round": None}
    check_trainer(trainer(**drawn))
    with pytest.raises(
        FederatedError, match="The callback TrainingLoss cannot be combined with aggregator=Differential"
    ):
        check_trainer(trainer(callbacks=[TrainingLoss()], **drawn))
