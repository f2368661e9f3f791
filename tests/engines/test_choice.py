"""Clients that the vectorized engine cannot run although its trial step passed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, Mime, MimeMVR, Scaffold, SGDm
from tests.helpers.engines import Ordinary, Record, assert_agree, assert_close, results_of, run, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES, clients, data, parameters, same

RESTARTS = "engine='auto' restarts round 0 with 'sequential', and stays with it: engine='vectorized' cannot run"


class Picky(Ordinary):
    """Calls ``item()`` on batches of one size, which fails for several clients at once."""

    size = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if len(x) == self.size:
            loss = loss * (1 + 0 * x.sum().item())
        self.log("loss", loss)
        return loss


class PickyInFullBatches(Picky):
    size = 8


class Cells(Ordinary):
    """A recurrent cell whose initial state has no client dimension, so that adding clients' inputs in place fails."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(FEATURES // 3, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 4, dtype=x.dtype)
        for part in x.split(FEATURES // 3, dim=1):
            h, c = self.cell(part, (h, c))
        return self.out(h)


full, ragged, uneven = (partial(data, sizes) for sizes in ((8, 8, 8, 8), (5, 5, 5, 5), (12, 4, 4, 4)))

CASES: dict[str, dict[str, Any]] = {
    "local steps": {"make": Picky, "algorithm": Scaffold(), "datamodule": ragged},
    "without state": {"make": Picky, "algorithm": FedAvg(), "datamodule": ragged},
    "full gradients at once": {"make": PickyInFullBatches, "algorithm": Mime(SGDm()), "datamodule": full},
    "a recurrent cell": {"make": Cells, "algorithm": Mime(SGDm()), "datamodule": uneven},
    "a moving anchor": {"make": Cells, "algorithm": MimeMVR(0.1), "datamodule": uneven},
}


@pytest.mark.parametrize("name", few(CASES, ["full gradients at once"]))
def test_auto_restarts_the_round_sequentially_and_warns_once(name: str) -> None:
    with pytest.warns(UserWarning, match=RESTARTS) as said:
        found = run("auto", **CASES[name])
    assert sum(RESTARTS in str(warning.message) for warning in said) == 1
    assert same(state_of(found), state_of(run("sequential", **CASES[name])))
    assert found.fit_loop.clients.engine_names == ["sequential"]


@pytest.mark.parametrize("name", few(CASES, ["a recurrent cell"]))
def test_vectorized_raises_without_blaming_a_client(name: str) -> None:
    with pytest.raises(FederatedError, match="'vectorized' cannot run clients of .* in round 0") as refusal:
        run("vectorized", **CASES[name])
    assert "Client" not in str(refusal.value)


class FromRestart(Record):
    """Clears its recorded order at a restart. The restart restores its counter of clients."""

    clients, restarts = 0, 0

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        super().on_client_start(trainer, pl_module, round, client_id)
        self.clients += 1

    def on_round_restart(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.restarts += 1
        self.order.clear()


class Compares(FederatedCallback):
    """Checks that the module holds each client's model in its hook."""

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        assert torch.equal(parameters(pl_module), trainer.fit_loop.client_model[0])


@pytest.mark.thorough
def test_reports_and_hooks_after_a_restart_match_sequential() -> None:
    records = [FromRestart(), FromRestart()]
    with pytest.warns(UserWarning, match=RESTARTS):
        found = run("auto", **CASES["local steps"], callbacks=[records[0], Compares()])
    assert same(state_of(found), state_of(run("sequential", **CASES["local steps"], callbacks=records[1])))
    assert records[0].order == records[1].order
    assert [record.restarts for record in records] == [1, 0]
    assert [record.clients for record in records] == [12, 12]
    assert all(map(torch.equal, records[0].models, records[1].models))
    assert [r.cohort for r in records[0].rounds] == [r.cohort for r in records[1].rounds]


def test_resumed_run_yields_identical_bits(tmp_path: Path) -> None:
    options = {"make": PickyInFullBatches, "algorithm": Mime(SGDm()), "datamodule": full}
    with pytest.warns(UserWarning, match=RESTARTS):
        whole, half = (run("auto", max_rounds=rounds, **options) for rounds in (4, 2))
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run("auto", max_rounds=4, ckpt_path=tmp_path / "half.ckpt", **options)
    assert same(state_of(resumed), state_of(whole))


class Fails(Picky):
    """Fails on one client's data, which is an error of the client and not of the engine."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(batch[0]) and bool((batch[0] > 90).any()):
            raise RuntimeError("these examples are bad")
        return super().training_step(batch, batch_idx)


def with_invalid() -> FederatedDataModule:
    parts = clients((5, 5, 5, 5))
    parts[2].tensors[0][0] = 99.0
    return FederatedDataModule(parts, batch_size=4)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:engine='auto' restarts")
def test_single_failing_client_is_dropped() -> None:
    options = {"make": Fails, "datamodule": with_invalid, "on_client_error": "drop", "max_failed_share": 0.5}
    found, expected = (run(engine, limit_val_batches=0, **options) for engine in ("auto", "sequential"))
    assert_agree(found, expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:engine='auto' restarts")
@pytest.mark.parametrize("name", ["local steps", "full gradients at once"])
def test_two_processes_match_one(name: str, tmp_path: Path) -> None:
    case = {"clients_per_round": 4, "max_rounds": 2, "limit_val_batches": 0, **CASES[name]}
    alone = results_of(run("sequential", **case))["state"]
    for outcome in in_processes(partial(run_in_two, case), tmp_path):
        assert_close(outcome.value, alone)


def run_in_two(case: dict[str, Any]) -> Any:
    return results_of(run("auto", strategy="clients", devices=2, **case))["state"]


class Misses(Ordinary):
    """Reads an attribute that is not set before the trial step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.teacher[0].sum()


class Distills(Misses):
    """Stores the server's model of the round, as FedNTD does, in an attribute that __init__ does not set."""

    def on_train_epoch_start(self) -> None:
        self.teacher = [p.detach().clone() for p in self.parameters()]


@pytest.mark.parametrize(("make", "is_named"), [(Distills, True), (Misses, False)])
def test_error_for_attribute_set_after_trial_step_has_a_remedy(make: Any, is_named: bool) -> None:
    with pytest.raises(FederatedError, match="trial step in round 0: AttributeError: .*'teacher'") as raised:
        run("vectorized", make, max_rounds=1)
    assert ("give what they set a first value of the same kind in __init__" in str(raised.value)) is is_named


class Freezes(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(self.parameters()).requires_grad = False
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_step_that_freezes_a_parameter_is_rejected(engine: str) -> None:
    with pytest.raises(FederatedError, match="^Freezes or a callback has frozen the parameter"):
        run(engine, Freezes, max_rounds=1)
