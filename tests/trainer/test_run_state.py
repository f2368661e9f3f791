"""A trainer after its fit can be copied, its files are closed, and its module is the trained one."""

import copy
import gc
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer, algorithms
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server import CoordinateMedian, FedAdam, FedBuff, SystemsHeterogeneity, TopK
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import FEATURES, Net, data, parameters, same, seeded, trainer

DISK: dict[str, Any] = {"algorithm": algorithms.Scaffold(), "client_states": "disk"}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda trained: pickle.loads(pickle.dumps(trained)),
    "deepcopy": copy.deepcopy,
}


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def fitted(module: type[Net] = Net, **options: Any) -> FederatedTrainer:
    run = trainer(**options)
    run.fit(seeded(module), data())
    return run


def go_on(run: FederatedTrainer) -> None:
    run.max_rounds = 5
    run.fit(run.lightning_module, data())


WHOLE: dict[str, Any] = {"enable_checkpointing": True, "logger": True}
EVERYTHING: dict[str, Any] = {**DISK, **WHOLE}
RUNS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "vectorized": {"engine": "vectorized", **WHOLE},
    "states on disk": DISK,
    "auto": {"engine": "auto"},
    "states on disk beside checkpoints": {**DISK, **WHOLE, "engine": "vectorized"},
    "states in memory": {"algorithm": algorithms.Scaffold()},
    "a second gradient": {"algorithm": algorithms.FedSAM(rho=0.1)},
    "the optimizer's statistics": {"algorithm": algorithms.Mime()},
    "own models": {"algorithm": algorithms.Ditto(lam=0.1)},
    "personal parameters": {"personal": ["head*"]},
    "asynchronous": {"asynchronous": FedBuff(2, 4), "clients_per_round": None},
    "robust": {"aggregator": CoordinateMedian()},
    "compressed": {"compression": TopK(0.3)},
    "a schedule that follows a metric": {"module": Plateau},
    "the server's optimizer": {"server_optimizer": partial(FedAdam, lr=0.1)},
    "kept optimizers": {"local_optimizer_state": "keep"},
    "stragglers": {"heterogeneity": SystemsHeterogeneity(0.5)},
    "clipping": {"gradient_clip_val": 0.1, "gradient_clip_on": "corrected"},
    "bf16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
    "progress": {"enable_progress_bar": True},
    "strategy clients": {"strategy": "clients"},
    "callbacks": {
        "callbacks": [
            EarlyStopping("val_loss", patience=9),
            LearningRateMonitor(),
            ModelCheckpoint(save_last=True),
            Timer(),
        ],
        **WHOLE,
    },
}


@pytest.mark.parametrize(
    ("name", "way"),
    few(
        [pytest.param(name, way, id=f"{name}-{way}") for name in RUNS for way in COPIES],
        ["sequential-deepcopy", "vectorized-deepcopy", "states on disk-pickle"],
    ),
)
def test_copied_trainer_continues_with_identical_bits(name: str, way: str) -> None:
    run = fitted(**copy.deepcopy(RUNS[name]))
    other = COPIES[way](run)
    assert other.fit_loop.round == 3
    assert same(other.lightning_module.state_dict(), run.lightning_module.state_dict())
    go_on(other)
    go_on(run)
    assert other.fit_loop.round == 5
    assert same(other.lightning_module.state_dict(), run.lightning_module.state_dict())
    assert same(other.fit_loop.state.clients.state_dict(), run.fit_loop.state.clients.state_dict())
    assert type(other.fit_loop.state.clients) is type(run.fit_loop.state.clients)


@pytest.mark.thorough
@pytest.mark.parametrize("way", COPIES)
def test_copied_trainers_continue_in_two_processes(way: str, tmp_path: Path) -> None:
    def work() -> bool:
        run = fitted(**DISK, **WHOLE, strategy="clients", devices=2, client_states_dir=tmp_path / "states")
        other = COPIES[way](run)
        go_on(run)
        go_on(other)
        return same(other.lightning_module.state_dict(), run.lightning_module.state_dict())

    for outcome in in_processes(work, tmp_path):
        assert not outcome.error, outcome.trace
        assert outcome.value


def test_copied_trainer_can_be_queried_saved_and_validated(tmp_path: Path) -> None:
    run = fitted(**DISK)
    other = pickle.loads(pickle.dumps(run))
    assert same(other.fit_loop.client_state(1), run.fit_loop.client_state(1))
    other.save_checkpoint(tmp_path / "copy.ckpt")
    resumed = trainer(**DISK, max_rounds=5)
    resumed.fit(model := seeded(), data(), ckpt_path=tmp_path / "copy.ckpt")
    go_on(run)
    assert torch.equal(parameters(model), parameters(run.lightning_module))
    (validated,) = other.validate(other.lightning_module, data(), verbose=False)
    assert validated["val_loss"] > 0
    with pytest.raises(FederatedError, match="once this trainer has begun a fit; a copy has not"):
        other.fit_loop.full_gradient(0, other.fit_loop.state.x)


def test_users_optimizer_is_restored_after_fit() -> None:
    assert type(fitted().optimizers[0]) is torch.optim.SGD


# ------------------------------------------------------------------ files


def this_process() -> Any:
    return pytest.importorskip("psutil", reason="no psutil, which lists open files").Process()


def kept_open() -> list[str]:
    return [file.path for file in this_process().open_files() if ".states" in file.path or ".sqlite" in file.path]


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="descriptors are counted by the system")
@pytest.mark.parametrize("options", [{}, {"engine": "vectorized"}, DISK, EVERYTHING], ids=str)
def test_no_file_stays_open_after_fit(options: dict[str, Any]) -> None:
    fitted(**options)  # opens files that a process opens only once
    gc.collect()
    before, runs = this_process().num_fds(), []
    for _ in range(2):
        runs.append(fitted(**options))
        assert kept_open() == []
    go_on(runs[0])
    assert this_process().num_fds() == before


def test_states_are_closed_after_a_failed_fit() -> None:
    class Fails(Net):
        def on_train_epoch_end(self) -> None:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fitted(Fails, **DISK)
    assert kept_open() == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_aborted_round_leaves_no_staged_states(error: type[BaseException]) -> None:
    class Leaves(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            if trainer.fit_loop.round == 1:
                raise error("now")

    run = trainer(algorithm=algorithms.Scaffold(), engine="sequential", limit_val_batches=0, callbacks=[Leaves()])
    with pytest.raises((RuntimeError, SystemExit)):
        run.fit(seeded(), data())
    kept = run.fit_loop.state.clients
    before = kept.state_dict()
    kept.commit()
    assert same(kept.state_dict(), before)


@pytest.mark.thorough
def test_states_are_readable_after_another_fit_in_the_same_folder() -> None:
    first = fitted(**DISK)
    before = first.fit_loop.state.clients.state_dict()
    second = fitted(**DISK, seed=1, **WHOLE, client_states_dir=first.fit_loop.state.clients.folder)
    assert second.fit_loop.state.clients.folder == first.fit_loop.state.clients.folder
    assert same(first.fit_loop.state.clients.state_dict(), before)
    go_on(first)


@pytest.mark.thorough
def test_states_are_closed_after_a_multi_process_fit(tmp_path: Path) -> None:
    this_process()  # skips here if psutil is missing, since the other processes cannot

    def open_after() -> list[str]:
        fitted(**DISK, **WHOLE, strategy="clients", devices=2, client_states_dir=tmp_path / "states")
        return kept_open()

    for outcome in in_processes(open_after, tmp_path):
        assert not outcome.error, outcome.trace
        assert outcome.value == []


class Converts(SingleDeviceStrategy):
    """Converts the module's dtype at the end of a fit, just as Lightning moves a module from a GPU to the CPU."""

    def teardown(self) -> None:
        super().teardown()
        self.lightning_module.double()


class WithBatchNorm(Net):
    fails_in = ""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation")
        super().validation_step(batch, batch_idx)

    def fail(self, stage: str) -> None:
        if self.fails_in == stage and not self.trainer.sanity_checking and self.trainer.current_epoch == 1:
            raise KeyError(stage)


@pytest.mark.parametrize(("fails_in", "rounds"), [("", 3), ("training", 1), ("validation", 2)])
def test_module_stays_where_the_strategy_left_it_after_fit(fails_in: str, rounds: int) -> None:
    module, unmoved = seeded(WithBatchNorm), seeded(WithBatchNorm)
    run = trainer(accelerator="auto", strategy=Converts("cpu"))
    module.fails_in = fails_in
    with pytest.raises((FederatedError, KeyError)) if fails_in else nullcontext():
        run.fit(module, data(drop_last=True))
    trainer(max_rounds=rounds).fit(unmoved, data(drop_last=True))
    floats = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    assert {value.dtype for value in floats.values()} == {torch.float64}
    assert all(torch.equal(value.float(), unmoved.state_dict()[name]) for name, value in floats.items())


class WithMask(Net):
    """Makes a buffer of the batch's size in the forward pass, unless it has one."""

    def __init__(self, is_set: bool = False) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("mask", torch.ones(1, 1) if is_set else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        return super().forward(x) * self.mask


def with_mask(module: WithMask | None = None, ckpt_path: str | None = None, **options: Any) -> Tensor:
    """Fit and return the parameters; the validation's batches are larger than the clients'."""
    module, run = module or seeded(WithMask), trainer(**options)
    run.fit(module, data(val=data().client_dataset(2)), ckpt_path=ckpt_path)
    assert run.fit_loop.state.buffers == {}
    return parameters(module)


def test_buffers_that_validation_makes_are_not_exchanged() -> None:
    assert torch.equal(with_mask(max_rounds=1), with_mask(max_rounds=1, num_sanity_val_steps=0))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"engine": "auto"}], ids=["sequential", "auto"])
def test_run_resumes_without_buffers_that_validation_makes(tmp_path: Path, options: dict[str, Any]) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    whole = with_mask(num_sanity_val_steps=0, **options)
    assert torch.equal(with_mask(**options), whole)
    with_mask(max_rounds=2, callbacks=[saving], enable_checkpointing=True, **options)
    assert torch.equal(with_mask(ckpt_path=f"{tmp_path}/last.ckpt", **options), whole)


@pytest.mark.thorough
def test_next_fit_does_not_exchange_buffers_that_the_first_has_made(tmp_path: Path) -> None:
    module = seeded(WithMask)
    run = trainer(max_rounds=2, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    run.fit(module, data())
    resumed, resuming = copy.deepcopy(module), trainer()
    resuming.fit(resumed, data(), ckpt_path=f"{tmp_path}/last.ckpt")
    run.max_rounds = 3
    run.fit(module, data())
    assert torch.equal(parameters(module), parameters(resumed))
    assert run.fit_loop.state.buffers == resuming.fit_loop.state.buffers == {}


def test_exchanged_buffer_that_changes_its_shape_is_rejected() -> None:
    module = seeded(WithMask, is_set=True)
    with pytest.raises(FederatedError, match=r"'mask' has changed its shape from \[1, 1\] to \[\d, 1\]"):
        trainer(num_sanity_val_steps=0).fit(module, data())
    assert module.mask.shape == (1, 1)


class Replaces(FederatedCallback):
    """Replaces the optimizer as a round starts."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1)]


def test_error_of_a_replaced_optimizer_ends_the_fit_in_order(tmp_path: Path) -> None:
    run = trainer(**DISK, client_states_dir=tmp_path, callbacks=Replaces())
    with pytest.raises(FederatedError, match="A hook has replaced the local optimizer"):
        run.fit(seeded(), data())
    trainer(**DISK, client_states_dir=tmp_path, max_rounds=1).fit(seeded(), data())  # the folder is free


def test_fit_that_cannot_be_ended_gives_everything_else_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise OSError("stop here")

    run, model = trainer(**DISK, client_states_dir=tmp_path), seeded()
    with monkeypatch.context() as patch:
        patch.setattr(PreparedModule, "release", fail)
        with pytest.raises(OSError, match="stop here"):
            run.fit(model, data())
    assert type(run.optimizers[0]) is torch.optim.SGD
    trainer(**DISK, client_states_dir=tmp_path, max_rounds=1).fit(seeded(), data())
