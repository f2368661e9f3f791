"""A data module may replace the clients' half of a round."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.types import ClientId
from lightning_fed.rounds.client_half import ClientHalf
from lightning_fed.rounds.messages import Reply, Task
from lightning_fed.server.participation import Participant
from tests.helpers.training import Net, clients, seeded, trainer


class Oracle(ClientHalf):
    """Clients that move every parameter by one, without a module or data."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.calls = trainer, list[str]()

    @property
    def engine_names(self) -> list[str]:
        return ["oracle"]

    def participants(self, drawn: Mapping[ClientId, int], round: int, failed: Any = None) -> list[Participant]:
        self.calls.append("hello")
        return [Participant(client, int(client), 5, count, 1) for client, count in drawn.items()]

    def begin(self, round: int, members: Sequence[Participant], reads_later: bool = False) -> None:
        self.calls.append("begin")

    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        return [[index] for index in reversed(clients)]

    def answer(self, task: Task, clients: Sequence[int], states: Any) -> Iterator[Reply]:
        ones = torch.ones(1, len(task.x))
        report = ClientReport(clients[0], 5, 1, 1.0, {}, math.sqrt(len(task.x)), 0.0)
        yield Reply(task.round, task.phase, clients, {"delta": ones}, (report,), changes=ones, examples=(5,))

    def end_training(self) -> None:
        self.calls.append("end of training")

    def savepoint(self) -> Callable[[], None]:
        return lambda: None

    def completed(self, report: RoundReport) -> None:
        self.calls.append(f"completed {report.round} of {self.trainer.fit_loop.round}")

    def end(self) -> None:
        self.calls.append("end")


class Elsewhere(FederatedDataModule):
    """Clients that an oracle answers for, without reading their data."""

    def connect_clients(self) -> Oracle:
        self.half = Oracle(self.trainer)
        return self.half

    def client_batches(self, client_id: ClientId) -> Any:
        raise AssertionError("the data is elsewhere")


def test_remote_clients_replace_the_engine() -> None:
    data, module, run = Elsewhere(clients(), batch_size=4), seeded(), trainer(max_rounds=2)
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    run.fit(module, data)
    after = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.testing.assert_close(after, before + 2)
    once = ["hello", "begin", "end of training"]
    assert data.half.calls == [*once, "completed 0 of 1", "end", *once, "completed 1 of 2", "end"]
    assert run.fit_loop.clients is data.half
    assert run.fit_loop.run_state.state_dict()["engine"]["taken"] == ["oracle"]
    assert data.half.measure_on_sites is None


class AsksForAGradient(FederatedCallback):
    """Reads the engine's local steps."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
        trainer.fit_loop.local_steps  # noqa: B018


def test_gradient_request_without_an_engine_raises() -> None:
    run = trainer(max_rounds=1, callbacks=AsksForAGradient())
    with pytest.raises(FederatedError, match="trained on their sites"):
        run.fit(seeded(Net), Elsewhere(clients(), batch_size=4))


def test_clients_run_locally_by_default() -> None:
    assert FederatedDataModule(clients(), batch_size=4).connect_clients() is None
