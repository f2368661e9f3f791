"""Client states that do not belong to the run are refused by name, whatever their source."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Update
from lightning_fed.server import TopK
from lightning_fed.server.client_states.disk_store import DiskClientStore
from tests.helpers.selection import covering
from tests.helpers.training import FEATURES, Net, data, parameters, same, seeded, trainer


class Normed(Net):
    """A module with buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body.insert(0, nn.BatchNorm1d(FEATURES))


class WithMomentum(Net):
    """A module whose local optimizer has a state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fit(module: type[Net] = Net, load: str | None = None, save: str | None = None, **options: Any) -> torch.Tensor:
    fitted = trainer(**{"clients_per_round": 6, "max_rounds": 1, **options})
    fitted.fit(model := seeded(module), data(sizes=(14, 8, 22, 6, 16, 10)), ckpt_path=load)
    if save is not None:
        fitted.save_checkpoint(save)
    return parameters(model)


RUNS: dict[str, dict[str, Any]] = {
    "the method's": {"algorithm": Scaffold()},
    "residuals": {"compression": TopK(0.1)},
    "buffers": {"module": Normed, "buffers": "local"},
}
NAMES = {"the method's": "c_i", "residuals": "delta", "buffers": "body.0."}


def longer(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value.reshape(-1), value.reshape(-1), torch.zeros(1)])


def single(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(())


def wider(value: torch.Tensor) -> torch.Tensor:
    return value.double()


def stage_changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Make disk stores write intact states of another model or method."""
    stage = DiskClientStore.stage
    monkeypatch.setattr(
        DiskClientStore,
        "stage",
        lambda self, index, state: stage(self, index, {name: change(value) for name, value in state.items()}),
    )


@pytest.mark.parametrize(("name", "change"), covering(list(RUNS), [longer, single, wider]))
def test_disk_states_with_wrong_shape_or_dtype_are_rejected(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stage_changed(patch, change)
        fit(client_states="disk", save="a.ckpt", **RUNS[name])
    with pytest.raises(
        FederatedError, match=rf"The stored state of client \d does not belong to this run: '{NAMES[name]}"
    ):
        fit(client_states="disk", load="a.ckpt", **{**RUNS[name], "max_rounds": 2})


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("on_client_error", ["raise", "drop"])
def test_invalid_states_in_a_checkpoint_are_rejected_not_dropped(engine: str, on_client_error: str) -> None:
    options = {"algorithm": Scaffold(), "client_states": "memory", "engine": engine, "on_client_error": on_client_error}
    fit(save="a.ckpt", **options)
    content = torch.load("a.ckpt", weights_only=True)
    states = content["loops"]["fit_loop"]["state_dict"]["client_states"]
    states[2] = {"c_i": torch.zeros(3)}
    torch.save(content, "a.ckpt")
    with pytest.raises(
        FederatedError, match=r"The stored state of client 2 .*: 'c_i' is \[3\] of torch.float32, and \[155\]"
    ):
        fit(load="a.ckpt", max_rounds=2, **options)


def test_kept_state_that_differs_from_init_client_is_rejected() -> None:
    class Forgets(FedAvg):
        def init_client(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"h": torch.zeros_like(x), "k": torch.zeros(())}

        def finish(self, y: torch.Tensor, run: Any) -> Update:
            return Update(send={"delta": run.delta}, keep={"h": run.delta})

    with pytest.raises(FederatedError, match=r"Forgets\.finish\(\) must keep .* 'k' \[\], found 'h' \[P\]"):
        fit(algorithm=Forgets(), max_rounds=2)


def test_local_optimizer_state_of_a_missing_parameter_is_rejected() -> None:
    options = {"module": WithMomentum, "local_optimizer_state": "keep", "client_states": "memory"}
    fit(save="a.ckpt", **options)
    content = torch.load("a.ckpt", weights_only=True)
    states = content["loops"]["fit_loop"]["state_dict"]["client_states"]
    states[4]["solver.6.momentum_buffer"] = states[4].pop("solver.0.momentum_buffer")
    torch.save(content, "a.ckpt")
    with pytest.raises(
        FederatedError, match=r"The stored state of client 4 .*'solver.6.momentum_buffer', and the model has 6"
    ):
        fit(load="a.ckpt", **{**options, "max_rounds": 2})


@pytest.mark.thorough
def test_reset_local_optimizer_ignores_state_kept_in_a_checkpoint() -> None:
    fit(WithMomentum, save="kept.ckpt", local_optimizer_state="keep")
    fit(WithMomentum, save="afresh.ckpt")
    assert same(fit(WithMomentum, "kept.ckpt", max_rounds=2), fit(WithMomentum, "afresh.ckpt", max_rounds=2))


def test_errors_use_the_users_client_ids() -> None:
    named = dict(zip(("ann", "bob"), (data().client_dataset(i) for i in (0, 1)), strict=True))
    run = trainer(algorithm=Scaffold(), max_rounds=1, clients_per_round=2)
    run.fit(model := seeded(), FederatedDataModule(clients=named, batch_size=4))
    run.fit_loop.state.clients.load_state_dict({1: {"c_i": torch.zeros(3)}})
    run.max_rounds = 2
    with pytest.raises(FederatedError, match="The stored state of client 'bob' .*"):
        run.fit(model, FederatedDataModule(clients=named, batch_size=4))


class Unchanged(FedAvg):
    """A method whose clients have a state, but never return a new one."""

    def init_client(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.full_like(x, 3.0)}

    def finish(self, y: torch.Tensor, run: Any) -> Update:
        return Update(send={"delta": run.delta})


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_client_that_keeps_nothing_retains_its_previous_state(engine: str) -> None:
    options = {"algorithm": Unchanged(), "compression": TopK(0.1), "engine": engine}
    t = trainer(clients_per_round=6, max_rounds=2, **options)
    t.fit(seeded(Net), data(sizes=(14, 8, 22, 6, 16, 10)))
    states = t.fit_loop.state.clients.state_dict()
    assert len(states) == 6
    for state in states.values():
        assert state.keys() == {"h", "residual.delta"}
        assert bool((state["h"] == 3.0).all())
    assert len({state["h"].data_ptr() for state in states.values()}) == 6  # no two clients share memory
