"""The clients' half of a round, called directly: a reply depends only on the task and the client."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, FedDane, Scaffold
from lightning_fed.core.errors import ClientError
from lightning_fed.engines.base import OnlySequentialError, Restart
from lightning_fed.rounds.client_work import ClientWork, gradients_together
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, Task
from lightning_fed.server.client_states.state import ClientStates
from tests.helpers.engines import Ordinary, full_batches, run

ROUND = 5
SIZES = (12, 8, 20, 4, 16, 8)
Answers = list[Reply]


def copied(reply: Reply) -> Reply:
    """Return a reply with cloned tensors."""

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return {name: copy(own) for name, own in value.items()} if isinstance(value, dict) else value

    return replace(reply, **{f.name: copy(getattr(reply, f.name)) for f in fields(reply) if f.name != "failed"})


class Asked(FederatedCallback):
    """Asks clients before the trainer's own round."""

    def __init__(self, ask: Callable[["Asked"], Any]) -> None:
        self.ask = ask

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        server = trainer.fit_loop.state
        self.work: ClientWork = trainer.fit_loop.clients
        self.states = ClientStates(server.new_client, server.clients, server.expected_state)
        self.x, self.server = server.x.clone(), server.state
        self.found = self.ask(self)
        self.work.end()
        server.clients.discard()

    def task(self, phase: str, clients: Sequence[int], **parts: Any) -> Task:
        return Task(ROUND, phase, clients, {}, self.x, self.server, **parts)

    def begin(self, *clients: int) -> list[Any]:
        members = self.work.participants(dict.fromkeys(clients, 1), ROUND)
        self.work.begin(ROUND, members)
        return members

    def answers(self, task: Task) -> Answers:
        chunks = self.work.chunks(task, task.clients)
        return [copied(reply) for some in chunks for reply in self.work.answer(task, some, self.states)]


def asked(ask: Callable[[Asked], Any], algorithm: Algorithm | None = None, engine: str = "sequential") -> Any:
    """Return the result of a function that asks the clients of a trainer."""
    who = Asked(ask)
    options = {"max_rounds": 1, "limit_val_batches": 0, "callbacks": who}
    run(engine, Ordinary, full_batches, algorithm=algorithm or FedAvg(), **options)
    return who.found


def same_replies(one: Answers, other: Answers) -> bool:
    def value(reply: Reply) -> Any:
        return {name: tensor.tolist() for name, tensor in reply.send.items()}, [r.loss for r in reply.reports]

    return [value(reply) for reply in one] == [value(reply) for reply in other]


def test_sampled_clients_report_their_size_and_steps() -> None:
    def ask(who: Asked) -> Any:
        return who.work.participants({4: 1, 0: 3}, ROUND)

    found = asked(ask)
    assert [(m.client_id, m.index, m.size, m.count, m.steps) for m in found] == [(4, 4, 16, 1, 4), (0, 0, 12, 3, 3)]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_reply_depends_only_on_the_task_and_the_client(engine: str) -> None:
    def ask(who: Asked) -> list[Answers]:
        found = []
        for clients in ((0, 3), (0, 3), (3, 2, 0)):
            who.begin(*clients)
            found.append(who.answers(who.task(TRAIN, clients)))
        return found

    first, again, among_others = asked(ask, engine=engine)
    assert same_replies(first, again)
    assert [client for reply in first for client in sorted(reply.clients)] == [0, 3]
    alone, other = (
        {i: reply.send["delta"][row] for reply in found for row, i in enumerate(reply.clients)}
        for found in (first, among_others)
    )
    for i in (0, 3):
        torch.testing.assert_close(alone[i], other[i], rtol=1e-12, atol=1e-14)
    for reply in first:
        assert (reply.round, reply.phase) == (ROUND, TRAIN)
        assert reply.changes is not None
        assert torch.equal(reply.send["delta"], reply.changes)
        assert [report.size for report in reply.reports] == [SIZES[i] for i in reply.clients]
        assert list(reply.examples) == [SIZES[i] for i in reply.clients]


def test_server_can_request_fewer_steps_than_a_client_would_take() -> None:
    def ask(who: Asked) -> list[int]:
        who.begin(2)
        task = replace(who.task(TRAIN, [2]), steps={2: 2})
        assert [member.steps for member in who.work.members(task, [2])] == [2]
        (reply,) = who.answers(task)
        return [report.steps for report in reply.reports]

    assert asked(ask) == [2]


def test_gradients_not_requested_before_are_computed_before_the_work() -> None:
    def ask(who: Asked) -> tuple[Answers, Answers, Answers]:
        who.begin(0, 1)
        gradients = who.answers(who.task(GRADIENTS, [0, 1]))
        mean = {"x": torch.cat([reply.send["x"] for reply in gradients]).mean(0)}
        asked_first = who.answers(who.task(TRAIN, [0, 1], cohort_grad=mean))
        who.begin(0, 1)
        return gradients, asked_first, who.answers(who.task(TRAIN, [0, 1], cohort_grad=mean))

    gradients, asked_first, not_asked = asked(ask, FedDane(0.1))
    assert same_replies(asked_first, not_asked)
    assert [dict(reply.norms) for reply in asked_first] == [{}, {}], "told with the gradients"
    norms = {i: norm for reply in gradients for i, norm in reply.norms["x"].items()}
    later = {i: norm for reply in not_asked for i, norm in reply.norms["x"].items()}
    assert norms == later
    assert norms.keys() == {0, 1}
    assert "x" in not_asked[0].cohort_grad_read


def test_server_values_read_by_clients_are_reported() -> None:
    def ask(who: Asked) -> Answers:
        who.begin(1)
        return who.answers(who.task(TRAIN, [1]))

    assert asked(ask, Scaffold())[0].server_read == {"c"}
    assert asked(ask, FedAvg())[0].server_read == frozenset()


def test_losses_of_all_clients_are_summed() -> None:
    def ask(who: Asked) -> list[Reply]:
        return [who.answers(who.task(LOSS, clients))[0] for clients in ([0, 1, 2], [0], [1, 2])]

    whole, *parts = asked(ask)
    assert (whole.clients, whole.loss_examples) == ([0, 1, 2], 40)
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-12)
    assert whole.loss > 0


@pytest.mark.thorough
def test_only_errors_another_engine_avoids_cause_a_restart() -> None:
    def ask(who: Asked) -> list[Any]:
        cause = OnlySequentialError("the module draws")
        wrapped = ClientError("Client 1 failed.", 1)
        wrapped.__cause__ = cause
        return [who.work.restart_after(error) for error in (cause, wrapped, FederatedError("no"))]

    assert asked(ask, engine="auto") == [Restart("the module draws"), Restart("the module draws"), None]
    assert asked(ask) == [None, None, None], "no other engine is left"


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["auto", "vectorized", "sequential"])
def test_out_of_memory_shrinks_chunks_then_changes_the_engine(engine: str) -> None:
    held = list[Any]()

    def fails() -> None:
        held.append(weakref.ref(tensor := torch.zeros(3)))
        raise torch.OutOfMemoryError(f"no memory for {tensor}")

    def ask(who: Asked) -> list[Any]:
        found = []
        for clients in ([0, 1, 2], [0, 1], [0]):
            who.work.answer(who.task(TRAIN, clients), clients, None)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                fails()
            wrapped = ClientError("Client 0 failed.")
            wrapped.__cause__ = cause = caught.value
            both = [who.work.restart_after(error) for error in (cause, wrapped)]
            assert both[0] == both[1]
            assert held[-1]() is None, "the error keeps memory of the device"
            found.append(both[0])
        assert who.work.engine.data._is_full
        return found

    less = [Restart(f"cpu has run out of memory with {count} clients at once.", 1) for count in (3, 2)]
    last = {"auto": Restart("cpu has run out of memory with one client at a time.")}.get(engine)
    assert asked(ask, engine=engine) == ([None] * 3 if engine == "sequential" else [*less, last])


@pytest.mark.thorough
def test_inner_solve_uses_the_chunk_size_of_the_work() -> None:
    def ask(who: Asked) -> Any:
        with pytest.warns(UserWarning, match="restarts with chunk_size=2"):
            who.work.restart(0, Restart("no memory.", 2))
        return [engine.chunk_size for engine in who.work.engines]  # type: ignore[attr-defined]

    assert asked(ask, Ditto(0.1), engine="vectorized") == [2, 2]


def test_small_gradients_of_several_clients_are_summed_together() -> None:
    assert gradients_together(torch.zeros(100)) == 2**16 // 100
    assert gradients_together(torch.zeros(2**17)) == 1
