"""The meaning of Lightning's own options and terms in rounds."""

from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.nn.utils import prune
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.compat.private import Closure
from lightning_fed.core.errors import ClientError
from lightning_fed.data import Iid
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import Net, classification, clients, data, fit, parameters, seeded, trainer


class Batches(FederatedCallback):
    """Records every local batch, by round."""

    def __init__(self) -> None:
        self.rounds: list[list[torch.Tensor]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.rounds.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rounds[-1].append(batch[0])


# ------------------------------------------------------------------ steps


def test_max_steps_counts_the_local_steps_of_all_clients(tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        made = trainer(clients_per_round=1.0, local_steps=2, **options)  # 6 clients: 12 local steps a round
        made.fit(seeded(), data(), ckpt_path=options.get("resume"))
        return made

    assert [run(max_rounds=None, max_steps=n).current_epoch for n in (1, 12, 13)] == [1, 1, 2]
    assert run(max_rounds=1, max_steps=100).current_epoch == 1
    assert run(max_rounds=None, max_steps=0).current_epoch == 0
    assert run(max_rounds=None, max_steps=25).max_steps == 25


def test_resumed_run_continues_counting_local_steps(tmp_path: Path) -> None:
    options = {"clients_per_round": 1.0, "local_steps": 2, "max_rounds": None}
    saver = ModelCheckpoint(tmp_path, filename="a")
    fit(max_steps=12, callbacks=saver, enable_checkpointing=True, **options)
    resumed = trainer(max_steps=25, **options)
    resumed.fit(seeded(), data(), ckpt_path=tmp_path / "a.ckpt")
    assert (resumed.current_epoch, resumed.fit_loop.steps_taken) == (3, 36)


class StopsAtOnce(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(("least", "rounds"), [({"min_steps": 0}, 1), ({"min_steps": 30}, 3), ({"min_epochs": 2}, 2)])
def test_stop_request_waits_for_minimum_work_and_logs_it(
    least: dict[str, int], rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(clients_per_round=1.0, local_steps=2, max_rounds=5, callbacks=StopsAtOnce(), **least)
    with caplog.at_level("INFO"):
        run.fit(seeded(), data())
    assert run.current_epoch == rounds
    assert caplog.text.count("asked to stop after 1 rounds and 12 local steps, but continues") == int(rounds > 1)


def test_estimated_stepping_batches_counts_rounds() -> None:
    found = {}

    class Asks(Net):
        def configure_optimizers(self) -> Any:
            found[self.trainer.max_steps] = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    fit(seeded(Asks), max_rounds=2, max_steps=1)
    assert found == {1: 2}
    with pytest.raises(FederatedError, match=r"With max_steps=5 it is unknown .*Pass max_rounds too"):
        fit(seeded(Asks), max_rounds=None, max_steps=5)


# ------------------------------------------------------------------ validation and saving


def test_integer_val_check_interval_without_epochs_counts_rounds() -> None:
    seen: list[int] = []

    class Validated(pl.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.current_epoch)

    options: dict[str, Any] = {"callbacks": Validated(), "num_sanity_val_steps": 0, "max_rounds": 5}
    fit(val_check_interval=2, check_val_every_n_epoch=None, **options)
    assert seen == [1, 3]
    with pytest.raises(FederatedError, match=r"check_val_every_n_epoch=None with a whole number of rounds"):
        fit(val_check_interval=2, **options)


class Clock(pl.Callback):
    """Advances the clock by ten minutes in some rounds, and records the rounds that validate.

    Args:
        slow: The rounds that advance the clock.
        rank: The process whose clock advances.
    """

    def __init__(self, *slow: int, rank: int = 0) -> None:
        self.slow, self.rank, self.validated = slow, rank, list[int]()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in self.slow and trainer.global_rank == self.rank:
            trainer._last_val_time -= 600

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.current_epoch)


@cache
def six_rounds() -> torch.Tensor:
    return fit(max_rounds=6)


TEN_MINUTES = ("00:00:10:00", timedelta(minutes=10), {"minutes": 10})


@pytest.mark.parametrize(
    ("interval", "every", "validated"),
    [*((interval, 1, [1, 4]) for interval in TEN_MINUTES), (TEN_MINUTES[0], None, [1, 4]), (TEN_MINUTES[0], 3, [2, 5])],
)
def test_time_between_validations_is_checked_after_each_round(
    interval: Any, every: int | None, validated: list[int]
) -> None:
    clock = Clock(1, 4)
    found = fit(val_check_interval=interval, check_val_every_n_epoch=every, callbacks=clock, max_rounds=6)
    assert clock.validated == validated
    assert torch.equal(found, six_rounds())


def test_early_stopping_and_checkpoints_follow_timed_validations(tmp_path: Path) -> None:
    stops = EarlyStopping("val_loss", mode="max", patience=1, min_delta=1e6)  # stops at the second validation
    saver, clock = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1), Clock(1, 4)
    run = trainer(
        val_check_interval=TEN_MINUTES[0], callbacks=[clock, stops, saver], enable_checkpointing=True, max_rounds=9
    )
    run.fit(seeded(), data())
    assert (clock.validated, run.current_epoch) == ([1, 4], 5)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["epoch=1-step=2", "epoch=4-step=5"]


def test_stopped_run_validates_before_the_interval_elapses() -> None:
    clock = Clock()

    class Asks(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            trainer.should_stop = True

    fit(val_check_interval=TEN_MINUTES[0], callbacks=[clock, Asks()])
    assert clock.validated == [0]


def test_resumed_run_with_timed_validations_has_identical_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"val_check_interval": TEN_MINUTES[0], "max_rounds": 5}
    half = trainer(**{**options, "max_rounds": 3}, callbacks=Clock(1))
    half.fit(seeded(), data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    whole = fit(**options)
    assert torch.equal(fit(**options, callbacks=(clock := Clock(3)), ckpt_path=tmp_path / "half.ckpt"), whole)
    assert clock.validated == [3]


@pytest.mark.thorough
def test_first_process_decides_when_validation_time_has_passed(tmp_path: Path) -> None:
    def validated() -> list[list[int]]:
        clocks = [Clock(1), Clock(1, rank=1)]
        for clock in clocks:
            fit(val_check_interval=TEN_MINUTES[0], callbacks=clock, strategy="clients", devices=2)
        return [clock.validated for clock in clocks]

    for outcome in in_processes(validated, tmp_path):
        assert not outcome.error, outcome.trace
        assert outcome.value == [[1], []]


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ("00:10:00", "Expected 'DD:HH:MM:SS'"),
        ({"minute": 10}, "'minute'"),
        (timedelta(seconds=-1), "a time that is not negative, found -1 seconds"),
    ],
)
def test_invalid_times_are_rejected(interval: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        trainer(val_check_interval=interval)


def test_every_n_train_steps_counts_rounds(tmp_path: Path) -> None:
    class Brings(Net):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(tmp_path / "own", every_n_train_steps=3, save_top_k=-1)]

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(callbacks=saver, enable_checkpointing=True, max_rounds=5)
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == ["epoch=1-step=2", "epoch=3-step=4"]
    fit(seeded(Brings), enable_checkpointing=True, max_rounds=3)
    assert [path.stem for path in (tmp_path / "own").glob("*.ckpt")] == ["epoch=2-step=3"]
    fit(
        callbacks=(again := ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)),
        enable_checkpointing=True,
        max_rounds=6,
        ckpt_path=tmp_path / "epoch=3-step=4.ckpt",
    )
    assert Path(again.best_model_path).stem == "epoch=5-step=6"


# ------------------------------------------------------------------ data


class OwnLoaders(FederatedDataModule):
    """Clients with custom loaders."""

    sampler: Any = None

    def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
        dataset = self.client_dataset(client_id)
        if self.sampler is not None:
            return DataLoader(dataset, batch_size=4, sampler=self.sampler)
        return DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)


def test_overfit_batches_disables_shuffling_of_custom_loader() -> None:
    seen = Batches()
    options: dict[str, Any] = {"clients_per_round": 1, "max_rounds": 3, "callbacks": seen}
    datamodule = OwnLoaders(clients=clients((13,)), val=classification(8, 1))
    fit(datamodule=datamodule, overfit_batches=1, **options)
    stored = datamodule.client_dataset(0).tensors[0]
    assert all(len(batches) == 1 and torch.equal(batches[0], stored[:4]) for batches in seen.rounds)
    seen.rounds.clear()
    fit(datamodule=OwnLoaders(clients=clients((13,)), val=classification(8, 1), shuffle=False), **options)
    assert not torch.equal(seen.rounds[0][0], stored[:4])  # without overfit_batches, the loader chooses its order


def test_overfit_batches_warns_for_loader_with_unknown_order() -> None:
    datamodule = OwnLoaders(clients=clients((13,)), val=classification(8, 1))
    datamodule.sampler = WeightedRandomSampler([1.0] * 13, 13)
    with pytest.warns(UserWarning, match="overfit_batches may see other batches in every round"):
        fit(datamodule=datamodule, overfit_batches=1, clients_per_round=1, max_rounds=1)


def test_from_loader_with_partition_matches_explicit_datamodule() -> None:
    dataset = classification(60, 0)
    loader = DataLoader(dataset, batch_size=7, shuffle=True, drop_last=True)
    val = DataLoader(classification(4, 1))
    taken = FederatedDataModule.from_loader(loader, partition=Iid(num_clients=5), val=val)
    spelled = FederatedDataModule(train=dataset, partition=Iid(num_clients=5), val=val, batch_size=7, drop_last=True)
    assert torch.equal(fit(datamodule=taken), fit(datamodule=spelled))
    other = FederatedDataModule.from_loader(
        DataLoader(dataset, batch_size=7), partition=Iid(num_clients=5), batch_size=3
    )
    assert (other.shuffle, other.batch_size) == (False, 3)


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (classification(8, 0), "found a TensorDataset"),
        (DataLoader(classification(8, 0), sampler=WeightedRandomSampler([1.0] * 8, 8)), "WeightedRandomSampler"),
        (DataLoader(classification(8, 0), batch_size=None), "batch_size=None"),
    ],
    ids=["no loader", "weighted", "no batches"],
)
def test_from_loader_rejects_unsupported_loaders(loader: Any, found: str) -> None:
    with pytest.raises(FederatedError, match=f"from_loader.*{found}"):
        FederatedDataModule.from_loader(loader, partition=Iid(num_clients=2))


# ------------------------------------------------------------------ modules


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_step_may_be_a_partial(engine: str) -> None:
    model, plain = seeded(dropout=0.0), seeded(dropout=0.0)
    model.training_step = partial(model.training_step)
    fit(model, engine=engine, max_rounds=1)
    fit(plain, engine=engine, max_rounds=1)
    assert torch.equal(parameters(model), parameters(plain))


def test_backward_without_gradients_raises() -> None:
    class NoBackward(Net):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            """Compute no gradients."""

    with pytest.raises(ClientError, match="returned losses, but backward left no gradient on any trained parameter"):
        fit(seeded(NoBackward))


@pytest.mark.parametrize("hook", [None, "on_after_backward"])
def test_none_loss_warns(hook: str | None) -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx else super().training_step(batch, batch_idx)

    if hook:
        setattr(Skips, hook, lambda self: None)  # the hook makes Lightning's own code run
    Closure.warning_cache.clear()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        fit(seeded(Skips), max_rounds=1)


class Frozen(Net):
    """Trains only its head."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class RateOfZero(Net):
    """Trains its body only from the third round on."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [{"params": self.body.parameters(), "lr": 0.0}, {"params": self.head.parameters()}], lr=0.1
        )

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1


@pytest.mark.parametrize("engine", few(["sequential", "vectorized"], ["sequential"]))
def test_zero_rate_backbone_is_frozen_until_a_hook_raises_it(engine: Any) -> None:
    frozen, rested = (
        fit(seeded(Frozen), engine=engine, max_rounds=2),
        fit(seeded(RateOfZero), engine=engine, max_rounds=2),
    )
    torch.testing.assert_close(rested, frozen)
    body = sum(p.numel() for p in Frozen().body.parameters())
    assert torch.equal(rested[:body], frozen[:body])
    assert not torch.isclose(fit(seeded(RateOfZero), engine=engine, max_rounds=3)[:body], frozen[:body]).all()


class Pruned(Net):
    """Prunes more of its head after each round."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        prune.identity(self.head, "weight")

    def on_train_epoch_end(self) -> None:
        prune.l1_unstructured(self.head, "weight", amount=3)


class Average(pl.Callback):
    """Keeps the moving average of the server's models, and validates it instead of them."""

    def __init__(self) -> None:
        self.mean: dict[str, torch.Tensor] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        now = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.mean = {name: 0.5 * self.mean.get(name, value) + 0.5 * value for name, value in now.items()}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._own = {name: value.clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.mean or self._own)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self._own)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean = state_dict["mean"]


@pytest.mark.parametrize("engine", few(["sequential", "vectorized"], []))
def test_average_of_server_models_can_be_validated_instead(engine: Any, tmp_path: Path) -> None:
    def averaged(ckpt_path: Any = None) -> tuple[Any, ...]:
        mean, saver = Average(), ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}")
        run = trainer(engine=engine, callbacks=[mean, saver], enable_checkpointing=True, max_rounds=4)
        run.fit(model := seeded(), data(), ckpt_path=ckpt_path)
        return parameters(model), torch.cat([v.flatten() for v in mean.mean.values()]), run.callback_metrics["val_loss"]

    whole, plain = averaged(), fit(engine=engine, max_rounds=4)
    assert torch.equal(whole[0], plain)
    assert not torch.isclose(whole[1], plain).all()
    assert all(map(torch.equal, averaged(tmp_path / "step=2.ckpt"), whole))


@pytest.mark.thorough
def test_pruning_masks_may_grow_between_rounds(tmp_path: Path) -> None:
    def pruned(ckpt_path: Any = None) -> dict[str, torch.Tensor]:
        saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")
        model = seeded(Pruned)
        trainer(callbacks=saver, enable_checkpointing=True, max_rounds=4).fit(model, data(), ckpt_path=ckpt_path)
        assert int((model.head.weight == 0).sum()) == 12
        return dict(model.state_dict())

    whole, resumed = pruned(), pruned(tmp_path / "step=2.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# ------------------------------------------------------------------ monitoring and counting


class Named(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "name": "rate"}}


@pytest.mark.parametrize("interval", [None, "epoch", "step"])
def test_monitored_rate_is_logged_once_under_scheduler_name(interval: Any, tmp_path: Path) -> None:
    monitor, run = LearningRateMonitor(interval), partial(fit, seeded(Named), max_rounds=3, log_every_n_steps=1)
    run(logger=CSVLogger(tmp_path), callbacks=monitor)
    assert {name: [float(rate) for rate in rates] for name, rates in monitor.lrs.items()} == {
        "rate": [0.1, 0.05, 0.025]
    }
