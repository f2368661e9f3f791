"""Drift and agreement of clients within a round, by hand."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import Inexactness, LocalDrift, LocalIterates, UpdateCosine
from lightning_fed.data import Quadratics
from lightning_fed.models import LinearRegression, Quadratic
from tests.helpers.training import Trajectory, data, fit, parameters, seeded, trainer


def test_drift_of_two_quadratics_matches_hand_computed_values(tmp_path: Path) -> None:
    # from x = 1 at rate 0.1: client 0 has gradients 2 y + 10, so y = -0.2 and -1.16; client 1 has -10, so y = 2 and 3
    callback, logger = LocalDrift(), CSVLogger(tmp_path)
    run = trainer(callbacks=callback, max_rounds=1, clients_per_round=2, local_steps=2, logger=logger)
    run.fit(Quadratic(x0=1.0, lr=0.1), Quadratics(a=(2.0, 0.0), G=10.0))
    assert callback.paths == {0: pytest.approx([1.2**2, 2.16**2]), 1: pytest.approx([1.0, 4.0])}
    assert callback.curve == pytest.approx([1.22, 4.3328])
    assert float(run.callback_metrics["drift/mean"]) == pytest.approx(2.7764)
    assert float(run.callback_metrics["drift/last"]) == pytest.approx(4.3328)
    with (Path(logger.log_dir) / "drift" / "round_000001.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "clients", "mean", "max"]
    assert [[float(cell) for cell in row] for row in rows] == [
        pytest.approx([1, 2, 1.22, 1.44]),
        pytest.approx([2, 2, 4.3328, 4.6656]),
    ]


def test_path_has_one_distance_per_optimizer_step() -> None:
    callback, ends = LocalDrift(), Trajectory()
    start = parameters(seeded())
    fit(callbacks=[callback, ends], max_rounds=1, clients_per_round=1.0, local_epochs=2, accumulate_grad_batches=3)
    batches = [-(-n // 4) for n in (13, 8, 21, 5, 16, 9)]
    assert [len(path) for path in callback.paths.values()] == [2 * -(-n // 3) for n in batches]
    for client_id, path in callback.paths.items():
        assert path[-1] == pytest.approx(float((ends.ends[0][client_id] - start).square().sum()), rel=1e-5)
    longest = max(len(path) for path in callback.paths.values())
    assert len(callback.curve) == longest


def test_clients_with_fewer_steps_drop_out_of_the_curve() -> None:
    callback = LocalDrift()
    callback.paths = {"a": [1.0, 4.0, 9.0], "b": [3.0]}
    assert callback.curve == [2.0, 4.0, 9.0]


@pytest.mark.parametrize(
    "callback", [LocalDrift(every_n_rounds=2), UpdateCosine(every_n_rounds=2)], ids=["drift", "cosine"]
)
def test_only_every_nth_round_is_measured(callback: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(callbacks=callback, max_rounds=5, logger=logger)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for tag in {name for name in rows[0] if name.startswith(("drift/", "update/cosine"))}:
        assert [int(row["step"]) for row in rows if row[tag]] == [2, 4]


def test_opposing_client_updates_have_cosine_minus_one() -> None:
    run = trainer(callbacks=UpdateCosine(), max_rounds=1, clients_per_round=2, local_steps=2)
    run.fit(Quadratic(x0=1.0, lr=0.1), Quadratics(a=(2.0, 0.0), G=10.0))
    assert float(run.callback_metrics["update/cosine"]) == pytest.approx(-1)


def test_cosine_is_the_mean_over_pairs_of_client_updates() -> None:
    ends, run = Trajectory(), trainer(callbacks=[UpdateCosine()], max_rounds=2)
    run.callbacks.append(ends)
    run.fit(seeded(), data())
    updates = [end - ends.models[0] for end in ends.ends[1].values()]
    units = torch.stack([u / u.norm() for u in updates])
    products = units @ units.T
    pairs = products[~torch.eye(len(units), dtype=torch.bool)]
    assert float(run.callback_metrics["update/cosine"]) == pytest.approx(float(pairs.mean()), abs=1e-5)


def test_single_client_has_no_cosine() -> None:
    run = trainer(callbacks=UpdateCosine(), max_rounds=1, clients_per_round=1)
    run.fit(seeded(), data())
    assert "update/cosine" not in run.callback_metrics


def measured(with_outlier: bool) -> tuple[dict[str, float], list[Any]]:
    """Return the logged values of six clients, optionally with a seventh whose update is dropped, and the callbacks."""
    stream = torch.Generator().manual_seed(0)
    clients = {
        i: TensorDataset(torch.randn(8, 3, generator=stream), torch.randn(8, 1, generator=stream)) for i in range(6)
    }
    if with_outlier:
        clients[99] = TensorDataset(torch.full((8, 3), 30.0), torch.full((8, 1), 1e4))
    callbacks = [UpdateCosine(), LocalDrift(), Inexactness(), LocalIterates()]
    dropping = {"on_client_error": "drop", "max_failed_share": 0.5, "max_update_ratio": 100}
    run = trainer(callbacks=callbacks, max_rounds=1, clients_per_round=1.0, local_steps=2, **dropping)
    torch.manual_seed(0)
    run.fit(LinearRegression(3, lr=0.1), FederatedDataModule(clients=clients, batch_size=8))
    tags = ("update/cosine", "drift/mean", "drift/last", "client/gamma", "client/gamma_max", "client/loss")
    return {tag: float(run.callback_metrics[tag]) for tag in tags}, callbacks


def test_restarted_round_is_measured_without_the_failed_clients() -> None:
    (alone, _), (found, (_, drift, inexactness, iterates)) = measured(False), measured(True)
    assert found == alone
    for of_clients in (drift.paths, inexactness.gamma, iterates.paths):
        assert sorted(of_clients) == list(range(6))
