"""A device that runs out of memory trains fewer clients at once, down to one, and then uses the other engine."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, Mime, Scaffold, SGDm
from lightning_fed.core.errors import ClientError
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.rounds.server_round import ServerRound
from lightning_fed.tracing.traces import Trace
from tests.helpers.crowding import FITS, NEVER, take_memory
from tests.helpers.engines import Ordinary, Record, run, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import data, same

EVEN = partial(data, (8, 8, 8, 8))


class Greedy(Ordinary):
    """Runs out of memory with more clients at once than fit. If 0 fit, it fails with any in the vectorized engine."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1), dropout)

    def forward(self, x: Tensor) -> Tensor:
        take_memory(x)
        if FITS.get("clients") == 0 and isinstance(getattr(vars(self).get("log"), "__self__", None), ModuleStep):
            raise torch.OutOfMemoryError("no memory for 1 clients here")
        return super().forward(x)


class Shrinks(FederatedCallback):
    """Reduces the memory when a round begins, and counts the restarts of rounds."""

    def __init__(self, fits: int, round: int = 0, rank: int | None = None) -> None:
        self.fits, self.round, self.rank, self.restarts = fits, round, rank, 0

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == self.round and self.rank in (None, trainer.global_rank):
            FITS["clients"] = self.fits

    def on_round_restart(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.restarts += 1


@pytest.fixture(autouse=True)
def memory() -> Any:
    FITS.clear()
    yield
    FITS.clear()


def start(engine: str = "vectorized", dropout: float = 0.3, chunk_size: int | None = 4, **options: Any) -> Any:
    """Run rounds of four equal clients."""
    given: dict[str, Any] = {"datamodule": EVEN, "max_rounds": 2, "limit_val_batches": 0, **options}
    return run(engine, partial(Greedy, dropout), chunk_size=chunk_size, **given)


METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "states": Scaffold(),
    "gradients at once": Mime(SGDm()),
    "own solve": Ditto(0.1),
}


@pytest.mark.parametrize("dropout", few([0.3, 0.0], [0.3]))
@pytest.mark.parametrize("method", few(METHODS, ["states"]))
@pytest.mark.parametrize("engine", few(["vectorized", "auto"], ["vectorized"]))
def test_round_restarts_with_half_the_chunk_and_identical_bits(engine: str, method: str, dropout: float) -> None:
    shrinks, options = Shrinks(1), {"algorithm": METHODS[method], "dropout": dropout}
    text = r"cpu has run out of memory with {} clients at once. Round 0 restarts with chunk_size={}, and the run stays"
    with (
        pytest.warns(UserWarning, match=text.format(4, 2)),
        pytest.warns(UserWarning, match=text.format(2, 1)) as said,
    ):
        found = start(engine, callbacks=[shrinks], **options)
    assert sum("has run out of memory" in str(warning.message) for warning in said) == 2
    assert shrinks.restarts == 2
    assert found.fit_loop.clients.chunk_size == 1
    FITS.clear()
    assert same(state_of(found), state_of(start(chunk_size=1, **options)))
    if dropout:  # masks depend on the chunk, so this proves that it shrank
        assert not same(state_of(found), state_of(start(chunk_size=4, **options)))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_traces_are_used_after_the_chunk_shrinks() -> None:
    found = start(dropout=0.0, callbacks=[Shrinks(1)])
    assert len(found.fit_loop.clients.engine.step.traces) > 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_out_of_memory_in_a_trace_keeps_traces_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Trace.__call__

    def of_one(self: Trace, parameter: Tensor, *rest: Any) -> Any:
        if parameter.ndim == 3:  # a layer's weight, stacked over several clients
            parameter.add_(1.0)
            raise torch.OutOfMemoryError("no memory")
        return call(self, parameter, *rest)

    expected = start(dropout=0.0, chunk_size=1)
    monkeypatch.setattr(Trace, "__call__", of_one)
    found = start(dropout=0.0)
    assert len(found.fit_loop.clients.engine.step.traces) > 0
    assert same(state_of(found), state_of(expected))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_hooks_and_logs_reflect_only_the_last_attempt() -> None:
    class FromRestart(Record):
        def on_round_restart(self, trainer: Any, pl_module: Any, round: int) -> None:
            self.order.clear()

    records = [FromRestart(), Record()]
    found = start(callbacks=[Shrinks(2), records[0]])
    FITS.clear()
    expected = start(chunk_size=2, callbacks=[records[1]])
    assert records[0].order == records[1].order
    assert found.callback_metrics["train_loss"] == expected.callback_metrics["train_loss"]
    assert found.fit_loop.steps_taken == expected.fit_loop.steps_taken


@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_chunk_larger_than_cohort_shrinks_to_half_the_cohort() -> None:
    shrinks = Shrinks(2)
    assert start(chunk_size=64, callbacks=[shrinks]).fit_loop.clients.chunk_size == 2
    assert shrinks.restarts == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_out_of_memory_in_aggregation_shrinks_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = ServerRound.receive

    def of_one(self: ServerRound, reply: Any) -> Any:
        if len(reply.clients) > 1:
            raise torch.OutOfMemoryError("no memory for the sum")
        return receive(self, reply)

    monkeypatch.setattr(ServerRound, "receive", of_one)
    assert same(state_of(start(algorithm=Scaffold())), state_of(start(chunk_size=1, algorithm=Scaffold())))


def test_auto_falls_back_to_sequential_if_no_client_fits() -> None:
    text = r"restarts round 1 with 'sequential', and stays with it: cpu has run out of memory with one client at a time"
    with pytest.warns(UserWarning, match=text):
        found = start("auto", callbacks=[Shrinks(0, round=1)], max_rounds=3, algorithm=Scaffold())
    assert found.fit_loop.clients.engine_names == ["sequential"]
    assert found.fit_loop.clients.chunk_size is None


@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
@pytest.mark.parametrize(
    ("engine", "fits"),
    few([pytest.param(*c, id=c[0]) for c in (("vectorized", 0), ("auto", NEVER), ("sequential", NEVER))], ["auto"]),
)
@pytest.mark.filterwarnings("ignore:engine='auto' restarts round 0")
def test_client_that_does_not_fit_stops_the_run_even_with_drop(engine: str, fits: int) -> None:
    options: dict[str, Any] = {} if engine != "sequential" else {"chunk_size": None}
    with pytest.raises(ClientError, match=r"Client \d failed in its local work in round 0.*no memory for") as caught:
        start(engine, callbacks=[Shrinks(fits)], on_client_error="drop", max_failed_share=0.9, **options)
    assert "does not hold the work of one client at a time. Use a smaller batch_size" in str(caught.value)
    assert ("engine='sequential' takes the least" in str(caught.value)) == (engine == "vectorized")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["vectorized", "auto"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_chunk_size_is_one_if_a_trial_step_of_two_does_not_fit(
    engine: str, chunk_size: int | None, recwarn: pytest.WarningsRecorder
) -> None:
    FITS["clients"] = 1
    found = start(engine, chunk_size=chunk_size)
    text = "chunk_size=4 is too large: cpu ran out of memory when two clients took a step at once"
    assert any(text in str(warning.message) for warning in recwarn) == (chunk_size == 4)
    assert found.fit_loop.clients.engine_names == ["vectorized"]
    assert found.fit_loop.clients.chunk_size == 1
    assert same(state_of(found), state_of(start(chunk_size=1)))


@pytest.mark.thorough
def test_trial_step_that_does_not_fit_raises_or_auto_falls_back() -> None:
    FITS["clients"] = 0
    with pytest.raises(
        ClientError, match=r"failed in a trial step.*no memory for 1 clients here.*'auto' falls back on"
    ):
        start()
    assert start("auto").fit_loop.clients.engine_names == ["sequential"]


# ---------------------------------------------------------------------- the chunk in the checkpoint


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
@pytest.mark.parametrize("asked", [4, None])
def test_resumed_run_keeps_its_reduced_chunk_size(asked: int | None, tmp_path: Path) -> None:
    shrinking: dict[str, Any] = {"chunk_size": asked, "algorithm": Scaffold()}
    whole = start(callbacks=[Shrinks(2, round=1)], max_rounds=4, **shrinking)
    FITS.clear()
    start(callbacks=[Shrinks(2, round=1)], max_rounds=2, **shrinking).save_checkpoint(tmp_path / "half.ckpt")
    FITS.clear()  # the memory is available again
    options = {"max_rounds": 4, "ckpt_path": tmp_path / "half.ckpt", "algorithm": Scaffold()}
    found = start(chunk_size=asked, **options)
    assert found.fit_loop.clients.chunk_size == 2
    assert same(state_of(found), state_of(whole))
    assert start(chunk_size=3, **options).fit_loop.clients.chunk_size == 3, "another wish of the user's"


def test_run_resumed_without_chunk_size_keeps_it(tmp_path: Path) -> None:
    start(chunk_size=3).save_checkpoint(tmp_path / "half.ckpt")
    assert start(chunk_size=None, max_rounds=3, ckpt_path=tmp_path / "half.ckpt").fit_loop.clients.chunk_size == 3


@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_second_fit_keeps_the_reduced_chunk_size() -> None:
    found = start(callbacks=[Shrinks(2)])
    FITS.clear()
    found.fit_loop.max_epochs = 3
    found.fit(found.lightning_module, EVEN())
    assert found.fit_loop.clients.chunk_size == 2


def test_checkpoint_without_chunk_size_loads(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    start(chunk_size=None).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["loops"]["fit_loop"]["state_dict"].pop("chunk_size")["asked"] is None
    torch.save(checkpoint, path)
    assert start(chunk_size=None, max_rounds=3, ckpt_path=path).fit_loop.round == 3


# ---------------------------------------------------------------------- several processes


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:cpu has run out of memory")
def test_all_processes_shrink_their_chunks_together(tmp_path: Path) -> None:
    one, other = in_processes(shrunk_in_two, tmp_path)
    assert (one.error, other.error) == ("", "")
    assert same(one.value, other.value)


def shrunk_in_two() -> Any:
    options = {"strategy": "clients", "devices": 2, "algorithm": Scaffold(), "clients_per_round": 4}
    shrinks = Shrinks(1, rank=1)  # the other process alone would continue with two
    found = start(chunk_size=2, callbacks=[shrinks], **options)
    FITS.clear()
    assert (found.fit_loop.clients.chunk_size, shrinks.restarts) == (1, 1)
    assert same(state_of(found), state_of(start(chunk_size=1, **options)))
    return found.fit_loop.state.x


@pytest.mark.thorough
def test_out_of_memory_in_one_process_ends_all(tmp_path: Path) -> None:
    outcomes = in_processes(out_of_memory_in_one, tmp_path)
    assert "Process 1 failed: Client" in outcomes[0].error
    assert all("no memory for" in outcome.error for outcome in outcomes)


def out_of_memory_in_one() -> None:
    start(chunk_size=1, callbacks=[Shrinks(0, rank=1)], strategy="clients", devices=2, clients_per_round=4)
