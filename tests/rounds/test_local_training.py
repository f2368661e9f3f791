"""Clients' local work: the gradients they take first, and the method's own solve."""

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, FedDane, FedRep, Mime, Scaffold
from lightning_fed.core.errors import ClientError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.engines.base import ChunkResult, WorkPlan
from lightning_fed.rounds import local_training
from lightning_fed.rounds.local_training import ClientGradients, InnerSolve, Outgoing, prepared_for_inner_solve
from lightning_fed.server import TopK
from lightning_fed.server.client_states.state import ClientState
from lightning_fed.server.participation import Participant
from tests.helpers.engines import Ordinary, Record, full_batches, run
from tests.helpers.training import data, seeded, trainer

INPUTS: Any = SimpleNamespace(round=4)


class Engine:
    """Returns gradients of clients, and records the clients."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.flat = algorithm, SimpleNamespace(y=torch.zeros(2))
        self.taken: list[int] = []
        self.reads_later = False

    def each_full_gradients(self, inputs: Any, plans: Sequence[WorkPlan]) -> Iterator[tuple[WorkPlan, Any]]:
        for plan in plans:
            index = plan.participant.index
            self.taken.append(index)
            value: Any = {"x": torch.tensor([3.0, 4.0]) * (float("nan") if index == 8 else index)}
            yield plan, ClientError("Client 9 has no data.", 9) if index == 9 else value


def plans(*indices: int) -> list[WorkPlan]:
    return [WorkPlan(Participant(i, i, 5, 1, 2), None, (2,)) for i in indices]  # type: ignore[arg-type]


def gradients(algorithm: Algorithm, clients: int = 3) -> tuple[ClientGradients, Engine]:
    engine = Engine(algorithm)
    found = ClientGradients(engine)  # type: ignore[arg-type]
    found.begin_round(clients)
    return found, engine


def test_gradient_used_by_server_and_client_is_computed_once() -> None:
    found, engine = gradients(FedDane(0.1))
    assert [plan.participant.index for plan, _ in found.each(INPUTS, plans(1, 2))] == [1, 2]
    own = found.of_workers(INPUTS, plans(2, 3))
    assert engine.taken == [1, 2, 3]
    assert own[2]["x"].tolist() == [6.0, 8.0]
    assert found.norms_of([1, 2, 3]) == {"x": {1: 5.0, 2: 10.0, 3: 15.0}}
    assert found.norms_of([1, 2, 3], recomputed=True) == {"x": {3: 15.0}}
    found.begin_round(3)
    assert found.norms_of([1, 2, 3]) == {}


def test_gradients_too_large_to_cache_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "_CACHE_BYTES", 3 * 2 * 4 - 1)
    found, engine = gradients(FedDane(0.1))
    list(found.each(INPUTS, plans(1)))
    assert not found.caches
    found.of_workers(INPUTS, plans(1))
    assert engine.taken == [1, 1]


def test_gradients_read_only_by_the_server_are_not_computed_for_work() -> None:
    found, engine = gradients(Mime())
    assert found.of_workers(INPUTS, plans(1)) == {}
    assert engine.taken == []


def test_gradients_read_only_by_clients_are_computed_for_their_work() -> None:
    found, engine = gradients(Scaffold(option="i"))
    assert not found.caches
    assert found.of_workers(INPUTS, plans(1, 2)).keys() == {1, 2}
    assert engine.taken == [1, 2]


def test_client_without_a_finite_gradient_is_named() -> None:
    found, _ = gradients(FedDane(0.1))
    answers = {plan.participant.index: answer for plan, answer in found.each(INPUTS, plans(8, 1, 9))}
    assert isinstance(answers[8], ClientError)
    assert "Client 8 returned, in round 4, a full-batch gradient at x that is not finite" in str(answers[8])
    assert answers[8].culprit == 8
    assert str(answers[9]) == "Client 9 has no data."
    assert not isinstance(answers[1], ClientError)
    for bad in (8, 9):
        with pytest.raises(ClientError):
            gradients(FedDane(0.1))[0].of_workers(INPUTS, plans(1, bad))


class Batches:
    """A stand-in for a client's data, with this number of batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def num_batches(self) -> int:
        return self.count

    def for_own_solve(self) -> "Batches":
        return self


def inner_solve(method: Algorithm, accumulated: int = 1) -> InnerSolve:
    trainer = SimpleNamespace(accumulate_grad_batches=accumulated, limit_train_batches=1.0)
    engine = SimpleNamespace(algorithm=method.own_solve, trainer=trainer)
    return InnerSolve(engine, SimpleNamespace(steps=lambda length, accumulated: 1))  # type: ignore[arg-type]


def test_inner_solve_length_defaults_to_the_work_of_the_round() -> None:
    plan = WorkPlan(Participant("ann", 0, 20, 1, 3), Batches(5), (3,))  # type: ignore[arg-type]
    assert inner_solve(Ditto(0.5)).plan(plan) is plan
    longer = inner_solve(FedRep(["head.*"], 2)).plan(plan)
    assert (longer.participant.steps, longer.epochs) == (10, (5, 5))
    accumulated = inner_solve(FedRep(["head.*"], 2), accumulated=2).plan(plan)
    assert (accumulated.participant.steps, accumulated.epochs) == (6, (5, 5))


@pytest.mark.parametrize("batches", ["own", "same"])
def test_inner_solve_draws_separate_batches_only_if_requested(batches: str) -> None:
    method = Ditto(0.5, batches=batches)
    prepared: Any = SimpleNamespace(algorithm=method, seed=7)
    other = prepared_for_inner_solve(prepared)
    assert other.algorithm is method.own_solve
    assert prepared.algorithm is method
    assert (other.seed == 7) == (not method.own_solve.own_batches)


def test_logs_and_buffers_of_inner_solves_are_excluded_from_the_round() -> None:
    class Counts(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.steps += 1
            self.log("steps", self.steps.clone())
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.detach())
            return loss

    record, options = Record(), {"max_rounds": 1, "clients_per_round": 6, "limit_val_batches": 0}
    t = run("sequential", Counts, full_batches, algorithm=Ditto(0.5), callbacks=record, **options)
    steps = [report.steps for report in record.reports]
    assert steps == [report.size // 4 for report in record.reports]
    for report, n in zip(record.reports, steps, strict=True):
        assert report.metrics["steps"] == pytest.approx((n + 1) / 2), "counted from the server's buffer on"
    examples = sum(report.size for report in record.reports)
    losses = sum(report.size * report.metrics["loss"] for report in record.reports)
    assert record.rounds[0].metrics["loss"] == pytest.approx(losses / examples), "without those of the own solves"
    assert record.rounds[0].gradients == 2 * examples, "its gradients are computed all the same"
    assert float(t.fit_loop.state.buffers["steps"]) == pytest.approx(
        sum(report.size * n for report, n in zip(record.reports, steps, strict=True)) / examples
    )


class OneRests:
    """Gives client 1 no steps."""

    def __call__(self, seed: int, round: int, indices: Sequence[int], epochs: Any, planned: Sequence[int]) -> list[int]:
        return [0 if index == 1 else steps for index, steps in zip(indices, planned, strict=True)]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_first_gradients_are_computed_once_and_kept_without_steps(engine: Any) -> None:
    taken: list[int] = []

    class Costs(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            steps = sum(report.size for report in round_report.clients.values() if report.steps)
            taken.append(round_report.gradients - steps)

    settings: Any = {"engine": engine, "precision": "64-true", "heterogeneity": OneRests(), "clients_per_round": 4}
    fitted = trainer(algorithm=Scaffold(initial="gradient"), callbacks=[Costs()], **settings)
    fitted.fit(seeded(), data())
    state = fitted.fit_loop.state
    own = [state.client_state(index)["c_i"] for index in range(6)]
    assert own[1].norm() > 0
    torch.testing.assert_close(state.state["c"], torch.stack(own).mean(0), rtol=1e-12, atol=1e-15)
    assert taken == [54, 0, 0]  # the examples of the first cohort, including client 1


class States:
    """Records the clients' new states, and has a residual for one client's message."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.at_once: list[Sequence[int]] = []

    def stage(self, index: int, state: dict[str, Tensor]) -> None:
        self.kept[index] = state

    def stage_all(self, indices: Sequence[int], states: dict[str, Tensor]) -> None:
        self.at_once.append(indices)
        for row, index in enumerate(indices):
            self.kept[index] = {name: value[row] for name, value in states.items()}

    def residuals(self, index: int, send: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"delta": torch.full((4,), 0.5)} if index == 20 else {}


def outgoing(compression: Any = None, kept_buffers: Sequence[str] = ()) -> Outgoing:
    engine = SimpleNamespace(algorithm=FedAvg(), buffers=SimpleNamespace(kept=kept_buffers), seed=0)
    return Outgoing(engine, SimpleNamespace(compression=compression, attack=None))  # type: ignore[arg-type]


def chunk(steps: Sequence[int] = (2, 2, 2), **options: Any) -> ChunkResult:
    """Return a result of clients with stored indices 20, 10 and 30, requested in the order 10, 20, 30."""
    members = [Participant(f"c{i}", i, 5, 1, 2) for i in (20, 10, 30)]
    reports = [ClientReport(m.client_id, 5, n, 0.5, {}, 1.0, 0.0) for m, n in zip(members, steps, strict=True)]
    y = torch.arange(12.0).view(3, 4)
    given = {"send": {"delta": y}, "keep": {"c": y + 100}, "sends_delta": True, "implied": ("delta_c",), **options}
    return ChunkResult(participants=members, y=y, delta=y, reports=reports, asked=[1, 0, 2], **given)


def replies(out: Outgoing, result: ChunkResult, states: States) -> list[tuple[slice, dict[str, Any]]]:
    before = [{"c": torch.full((4,), float(i))} for i in range(3)]
    return list(out.of(result, before, 0, states))  # type: ignore[arg-type]


def test_clients_of_a_chunk_reply_together_and_keep_their_states() -> None:
    states, result = States(), chunk()
    ((at, sent),) = replies(outgoing(), result, states)
    assert at == slice(None)
    assert sent["send"] is result.send
    assert sent["changes"] is result.delta
    assert torch.equal(sent["models"], result.shared)
    assert sent["implied"] == ("delta_c",)
    assert states.at_once == [[20, 10, 30]]
    assert torch.equal(states.kept[10]["c"], torch.arange(4.0, 8.0) + 100)


def test_models_are_not_sent_when_a_message_is_not_a_plain_change() -> None:
    ((_, sent),) = replies(outgoing(), chunk(sends_delta=False), States())
    assert sent["models"] is None


@pytest.mark.parametrize("keep", [{"c": torch.zeros(3, 4)}, {}], ids=["new states", "old states"])
def test_failed_clients_and_clients_without_steps_keep_nothing_new(keep: dict[str, Tensor]) -> None:
    states = States()
    replies(
        outgoing(), chunk(steps=(2, 0, 2), keep=keep, faults={2: ClientError("no", "c30")}, buffers=[{}] * 3), states
    )
    assert states.kept.keys() == {20}
    assert states.kept[20]["c"].tolist() == ([0.0] * 4 if keep else [1.0] * 4), "as it was, of the second one asked"


def test_per_client_optimizers_and_buffers_are_kept_with_its_state() -> None:
    states = States()
    solver = [{"0.momentum": torch.full((1,), float(i))} for i in range(3)]
    buffers = [{"mean": torch.full((1,), float(i)), "shared": torch.zeros(1)} for i in range(3)]
    replies(outgoing(kept_buffers=["mean"]), chunk(solver=solver, buffers=buffers), states)
    assert not states.at_once
    expected = ClientState({"c": torch.arange(8.0, 12.0) + 100}, {"mean": torch.tensor([2.0])}, solver[2]).joined()
    assert states.kept[30].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in states.kept[30].items())


def test_compressed_messages_are_sent_singly_and_residuals_are_kept() -> None:
    states, result = States(), chunk(faults={2: ClientError("no", "c30")})
    found = replies(outgoing(TopK(0.25)), result, states)
    assert [at for at, _ in found] == [slice(1, 2), slice(0, 1)], "in the order asked, without the one at fault"
    (_, first), (_, second) = found
    assert first["send"]["delta"].tolist() == [[0.0, 0.0, 0.0, 7.0]]
    assert second["send"]["delta"].tolist() == [[0.0, 0.0, 0.0, 3.5]], "what was left out before is added"
    assert first["message_bytes"] == second["message_bytes"] > 0
    assert torch.equal(second["changes"], result.delta[:1]), "the change itself, for the drift"
    residuals = {name: value for name, value in states.kept[20].items() if "delta" in name}
    assert [value.tolist() for value in residuals.values()] == [[0.5, 1.5, 2.5, 0.0]]
    assert result.send["delta"][0].tolist() == [0.0, 1.0, 2.0, 3.0], "messages are not changed in place"


def test_client_without_a_step_sends_no_compressed_message() -> None:
    states = States()
    found = replies(outgoing(TopK(0.25)), chunk(steps=(0, 2, 2)), states)
    sent = {at.start: parts for at, parts in found}
    assert (sent[0]["send"], sent[0]["message_bytes"]) == ({}, 0)
    assert 20 not in states.kept


# ------------------------------------------------------------------ hooks that draw random numbers


class Draws(FederatedCallback):
    """Draws in the hooks of clients."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[str, int, Any], float] = {}

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.drawn["start", round, client_id] = float(torch.rand(()))

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: ClientReport) -> None:
        self.drawn["end", trainer.fit_loop.round, client_report.client_id] = float(torch.rand(()))


def drawn(clients: Sequence[int], dropout: float = 0.0, **options: Any) -> dict[tuple[str, int, Any], float]:
    """Return the random numbers that hooks of these clients draw."""
    seen, engine = Draws(), options.pop("engine", "sequential")
    run(
        engine,
        partial(Ordinary, dropout=dropout),
        full_batches,
        clients_per_round=None,
        sampler=lambda seed, round, population: list(clients),
        callbacks=[seen],
        **{"max_rounds": 2, **options},
    )
    return seen.drawn


def test_hooks_of_a_client_draw_the_same_for_any_cohort() -> None:
    together = drawn([4, 0, 2])
    assert len(set(together.values())) == len(together) == 12
    alone = drawn([2], dropout=0.5)
    assert alone == {key: together[key] for key in alone}


@pytest.mark.thorough
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_hooks_of_a_client_draw_the_same_in_every_engine(chunk_size: int, dropout: float) -> None:
    assert drawn([4, 0, 2], dropout, engine="vectorized", chunk_size=chunk_size) == drawn([4, 0, 2])
