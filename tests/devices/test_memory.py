"""The number of clients that fit in a device's memory, and the fallbacks if it is too small."""

import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, Mime, Scaffold, SGDm
from lightning_fed.core.errors import ClientError
from lightning_fed.engines import device_data
from tests.devices.conftest import Place
from tests.helpers.selection import few
from tests.helpers.training import FEATURES, Net, clients, same, seeded, trainer

COHORT, KB = 12, 1000


class Wide(Net):
    """27 parameters, but 100 kB of activations in a step on four examples: parameters do not show the memory use."""

    def __init__(self, dropout: float = 0.3, width: int = 3000, optimizer: Any = None) -> None:
        super().__init__(dropout=dropout)
        pooled = [nn.Sigmoid(), nn.Tanh(), nn.AdaptiveAvgPool1d(8), nn.Flatten()]
        self.body = nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Upsample(size=width), *pooled, nn.Dropout(dropout))
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Limits(FederatedCallback):
    """Limits a device's memory at the start of the first round. Records the memory use there and at each restart."""

    def __init__(self, mini: Any, limit: int = 0) -> None:
        self.mini, self.limit = mini, limit
        self.used: list[int] = []

    def note(self) -> None:
        self.mini.core.reset_peak(0)
        self.used.append(self.mini.core.memory(0)["used"])

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == 0:
            self.mini.set_limit(0, self.limit)
            self.note()

    def on_round_restart(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.note()


@pytest.fixture(autouse=True)
def collected() -> None:
    """Collect garbage: other tests' trainers, which are reference cycles, hold memory."""
    gc.collect()


def even(size: int = 8) -> FederatedDataModule:
    """Return clients of one size, in batches of four."""
    return FederatedDataModule(clients((size,) * COHORT), batch_size=4)


def fitted(place: Place, engine: str = "vectorized", *, model: Any = None, data: Any = None, **options: Any) -> Any:
    """Fit on the device without validation, and return the trainer."""
    path, given = options.pop("ckpt_path", None), {"clients_per_round": COHORT, "max_rounds": 1, "limit_val_batches": 0}
    t = trainer(engine=engine, **{**given, **place.options(), **options})
    t.fit(seeded(Wide) if model is None else model, even() if data is None else data, ckpt_path=path)
    return t


def state_of(t: Any) -> dict[str, Any]:
    """Return the server's parameters and the client states, on the CPU."""
    server = t.fit_loop.state
    kept = {f"{i}.{name}": v for i, state in server.clients.state_dict().items() for name, v in state.items()}
    return {name: value.cpu() for name, value in {"x": server.x, **kept}.items()}


# ---------------------------------------------------------------------- chunk size


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_chunk_size_fills_half_of_the_memory(mini: Any, place: Place, engine: str, recwarn: Any) -> None:
    mini.set_limit(0, 1000 * KB)
    found = fitted(place, engine).fit_loop.clients
    assert (found.engine_names, found.chunk_size) == (["vectorized"], 4)  # 98 kB each
    assert not [warning for warning in recwarn if "memory" in str(warning.message)]


def test_chunk_size_is_independent_of_other_memory_use(mini: Any, place: Place) -> None:
    mini.set_limit(0, 1000 * KB)
    other = torch.zeros(100 * KB, device=place.device)
    assert fitted(place).fit_loop.clients.chunk_size == 4
    del other


def test_first_client_with_a_partial_batch_counts_as_a_full_batch(mini: Any, place: Place) -> None:
    mini.set_limit(0, 1000 * KB)
    few_examples = FederatedDataModule(clients((1, *(8,) * (COHORT - 1))), batch_size=4)
    assert fitted(place, data=few_examples).fit_loop.clients.chunk_size == 4


def test_device_that_fits_only_one_client_uses_chunk_size_one(mini: Any, place: Place, recwarn: Any) -> None:
    mini.set_limit(0, 180 * KB)
    found = fitted(place, "auto").fit_loop.clients
    assert (found.engine_names, found.chunk_size) == (["vectorized"], 1)
    assert not [warning for warning in recwarn if "memory" in str(warning.message)]


def test_chunk_size_accounts_for_full_batch_gradients(mini: Any, place: Place, recwarn: Any) -> None:
    mini.set_limit(0, 4000 * KB)
    options: dict[str, Any] = {"algorithm": Mime(SGDm()), "model": seeded(Wide, dropout=0.0), "data": even(32)}
    assert fitted(place, **options).fit_loop.clients.chunk_size == 16  # all clients fit, but not with 32 examples each
    assert not [warning for warning in recwarn if "memory" in str(warning.message)]


# ---------------------------------------------------------------------- with less memory

METHODS: dict[str, tuple[Algorithm, Any]] = {
    "FedAvg": (FedAvg(), None),
    "local Adam": (FedAvg(), partial(torch.optim.Adam, lr=0.01)),
    "states": (Scaffold(), None),
    "gradient phase": (Mime(SGDm()), None),
    "own solve": (Ditto(0.1), None),
}


@pytest.mark.parametrize("dropout", few([0.0, 0.3], [0.3]))
@pytest.mark.parametrize("method", few(METHODS, ["states"]))
def test_out_of_memory_round_restarts_with_half_the_clients(
    mini: Any, place: Place, method: str, dropout: float
) -> None:
    algorithm, optimizer = METHODS[method]

    def start(chunk_size: int, limits: Limits) -> Any:
        model = seeded(Wide, dropout=dropout, optimizer=optimizer)
        return fitted(place, model=model, algorithm=algorithm, chunk_size=chunk_size, max_rounds=2, callbacks=[limits])

    text = (
        r"mini:0 has run out of memory with {} clients at once. Round 0 restarts with chunk_size={}, and the run stays"
    )
    limits = Limits(mini, 500 * KB)
    with pytest.warns(UserWarning, match=text.format(12, 6)), pytest.warns(UserWarning, match=text.format(6, 3)):
        found = start(12, limits)
    assert found.fit_loop.clients.chunk_size == 3
    first, *others = limits.used
    assert len(others) == 2
    assert max(others) < first + 10 * KB, "what failed is released, and copies of data are dropped"
    assert same(state_of(found), state_of(start(3, Limits(mini))))


class Rows(Wide):
    """Takes examples of 600 numbers. The vectorized engine looks up many batches of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(600, 8)


def test_auto_falls_back_to_sequential_if_it_needs_less_memory(
    mini: Any, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_data, "_SHARE", 10**9)  # otherwise copies of the data dominate both peaks

    def start(engine: str, limits: Limits) -> Any:
        rows = [TensorDataset(torch.ones(64, 600), torch.zeros(64, dtype=torch.int64)) for _ in range(COHORT)]
        options: dict[str, Any] = {} if engine == "sequential" else {"chunk_size": 1}
        options |= {"model": seeded(Rows), "data": FederatedDataModule(rows, batch_size=4), "callbacks": [limits]}
        return fitted(place, engine, **options)

    peaks = []
    for engine in ("vectorized", "sequential"):
        expected = state_of(start(engine, Limits(mini)))
        peaks.insert(0, mini.core.memory(0)["peak"])
        gc.collect()
    assert 1.3 * peaks[0] < peaks[1]
    with pytest.warns(UserWarning, match="restarts round 0 with 'sequential'.*mini:0 has run out of memory with one"):
        found = start("auto", Limits(mini, int(1.15 * peaks[0])))
    assert found.fit_loop.clients.engine_names == ["sequential"]
    assert same(state_of(found), expected)


@pytest.mark.filterwarnings("ignore:.*has run out of memory")
@pytest.mark.parametrize("engine", ["vectorized", "auto", "sequential"])
def test_device_too_small_for_one_client_raises_with_a_remedy(mini: Any, place: Place, engine: str) -> None:
    text = r"Client \d+ failed in its local work in round 0, .*mini out of memory.*Use a smaller batch_size"
    with pytest.raises(ClientError, match=text) as caught:
        fitted(place, engine, callbacks=[Limits(mini, 50 * KB)], on_client_error="drop", max_failed_share=0.9)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert ("engine='sequential' takes the least memory" in str(caught.value)) == (engine == "vectorized")


# ---------------------------------------------------------------------- in checkpoints and processes


def test_resumed_run_keeps_the_chunk_size_of_its_first_device(mini: Any, place: Place, tmp_path: Path) -> None:
    mini.set_limit(0, 1000 * KB)
    whole, half = (fitted(place, max_rounds=rounds) for rounds in (3, 1))
    half.save_checkpoint(tmp_path / "half.ckpt")
    mini.set_limit(0, 0)  # a larger device
    found = fitted(place, max_rounds=3, ckpt_path=tmp_path / "half.ckpt")
    assert found.fit_loop.clients.chunk_size == 4
    assert same(state_of(found), state_of(whole))


def test_processes_use_the_smallest_chunk_size_of_all(mini: Any, place: Place) -> None:
    mini.set_limit(0, 1000 * KB)
    work = fitted(place, "auto").fit_loop.clients
    for others, expected in ((8, 4), (2, 2), (None, None)):  # None: another process uses the sequential engine
        work.agree(SimpleNamespace(size=2, gather=lambda own, others=others: [own, others]))
        assert work.chunk_size == expected
