"""The server's half of a round, driven by hand-written replies: no module, no data, no trainer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import Algorithm, FedAvg, FedProx, Mime, Scaffold, SGDm
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.rounds.cohort import DrawnCohort
from lightning_fed.rounds.failures import Faults
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, Task
from lightning_fed.rounds.server_round import ServerRound
from lightning_fed.server import CoordinateMedian
from lightning_fed.server.participation import Participant, Population
from lightning_fed.server.server import Server, plain_sgd
from lightning_fed.settings.settings import Settings
from tests.helpers.counting import Counted

IDS = ["ann", "bob", "cy", "dee", "eve"]
SIZES = dict(zip(IDS, (13, 8, 21, 5, 16), strict=True))
COHORT = (3, 0, 4, 1)  # stored indices, in the order in which they were drawn
SIZE = 40  # length of a vector


DEFAULTS = {name: one.default for name, one in signature(FederatedTrainer).parameters.items()}


def settings_of(algorithm: Algorithm, **options: Any) -> Settings:
    return Settings.of({**DEFAULTS, "algorithm": algorithm, "local_epochs": 1, "seed": 0, **options})


def vectors(seed: int, count: int = 1) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))


class Half:
    """The server's half of a round, with methods that make and pass replies.

    Args:
        algorithm: The method.
        cohort: The stored indices of the clients, in the order in which they were drawn.
        options: Settings of the run.
    """

    def __init__(
        self, algorithm: Algorithm | None = None, cohort: Sequence[int] = (3, 0, 4, 1), **options: Any
    ) -> None:
        self.algorithm = algorithm or FedAvg()
        self.settings = settings_of(self.algorithm, **options)
        x = vectors(99)[0]
        self.server = Server(self.algorithm, x, Layout([x.shape]), plain_sgd, None, IDS, 0)
        self.population = Population(IDS, SIZES.__getitem__, list(SIZES.values()))
        members = [Participant(IDS[i], i, SIZES[IDS[i]], steps=2 + i) for i in cohort]
        self.cohort = DrawnCohort(members, members if self.algorithm.full_grad_at else ())
        s = self.settings
        self.faults = Faults(s.drops_failed, s.max_failed_share, s.max_update_ratio, 0)
        self.begin()

    def begin(self) -> None:
        """Begin the round, or restart it without the failed clients."""
        self.round = ServerRound(self.server, self.settings, self.population, self.cohort, self.faults)
        self.phases = self.round.phases()
        self.task = next(self.phases)

    def next(self) -> Task:
        """Close the phase, and start the next one."""
        assert self.round.close_phase()
        self.task = next(self.phases)
        return self.task

    def reply(self, *clients: int, **parts: Any) -> Reply:
        """Return some clients' reply to the current task."""
        task, values = self.task, torch.cat([vectors(i) for i in clients])
        known: dict[str, Any] = {"clients": clients}
        if task.phase == GRADIENTS:
            norms = {i: float(torch.linalg.vector_norm(vectors(i)[0])) for i in clients}
            points = self.algorithm.full_grad_at
            known |= {"send": dict.fromkeys(points, values), "norms": dict.fromkeys(points, norms)}
        elif task.phase == LOSS:
            known |= {"loss": float(sum(i + 0.1 for i in clients)), "loss_examples": len(clients)}
        else:
            reports = [
                ClientReport(IDS[i], SIZES[IDS[i]], 2 + i, 0.5 + i, {}, float(vectors(i).norm()), 0.0) for i in clients
            ]
            send = {name: values if name == "delta" else 2 * values for name in self.algorithm.reduces}
            known |= {"send": send, "models": task.x + values, "changes": values, "reports": reports}
            known |= {"examples": [SIZES[IDS[i]] for i in clients]}
        return Reply(task.round, task.phase, **{**known, **parts})

    def receive(self, *clients: int, **parts: Any) -> list[Any]:
        """Pass the reply of some clients to the round."""
        return self.round.receive(self.reply(*clients, **parts))

    def close(self) -> RoundReport:
        """Close the last phase and the round."""
        assert self.round.close_phase()
        assert next(self.phases, None) is None
        return self.round.close({}, 0.0)


def test_population_loss_is_the_mean_over_its_examples() -> None:
    half = Half(FedProx(0.1, adaptive=True))
    half.receive(3, 0)
    half.receive(1, 2, 4)
    half.next()
    assert float(half.round.state["loss"]) == pytest.approx((0.1 + 1.1 + 2.1 + 3.1 + 4.1) / 5)


def ended(half: Half, orders: Mapping[str, Iterable[int]]) -> tuple[Tensor, Any, RoundReport]:
    """Let clients reply in these orders, by phase, and return the server's x and state, and the report."""
    while True:
        for i in orders.get(half.task.phase, half.task.clients):
            half.receive(i)
        if half.task.phase == TRAIN:
            report = half.close()
            return half.server.x, half.server.state, report
        half.next()


METHODS: dict[str, Any] = {
    "FedAvg": FedAvg,
    "Scaffold": Scaffold,
    "Mime": lambda: Mime(base=SGDm()),
    "FedProx": lambda: FedProx(mu=0.1, adaptive=True),
}


@pytest.mark.parametrize("name", list(METHODS))
@given(order=st.permutations([3, 0, 4, 1]), gradients=st.permutations([3, 0, 4, 1]), losses=st.permutations(range(5)))
def test_order_of_replies_keeps_identical_bits(
    name: str, order: Sequence[int], gradients: Sequence[int], losses: Sequence[int]
) -> None:
    x, state, report = ended(Half(METHODS[name]()), {})
    half = Half(METHODS[name]())
    y, other, moved = ended(half, {TRAIN: order, GRADIENTS: gradients, LOSS: losses})
    assert torch.equal(x, y)
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())
    assert report == moved
    assert report.cohort == ("dee", "ann", "eve", "bob")


def test_tasks_have_the_expected_phases_and_clients() -> None:
    half = Half(FedProx(mu=0.1, adaptive=True))
    assert (half.task.phase, half.task.clients) == (LOSS, (0, 1, 2, 3, 4))
    for i in range(5):
        half.receive(i)
    task = half.next()
    assert (task.round, task.phase, task.clients) == (0, TRAIN, (3, 0, 4, 1))
    assert task.steps == {3: 5, 0: 2, 4: 6, 1: 3}
    assert half.server.state["mu"] == 0.1
    half = Half(Mime(base=SGDm()))
    assert (half.task.phase, half.task.clients, half.task.cohort_grad) == (GRADIENTS, (3, 0, 4, 1), {})
    for i in half.task.clients:
        half.receive(i)
    assert half.next().cohort_grad.keys() == {"x"}


def test_mean_of_clients_is_weighted_by_examples() -> None:
    half = Half()
    start = half.server.x.clone()
    x, _, report = ended(half, {})
    sizes = torch.tensor([5.0, 13.0, 16.0, 8.0], dtype=torch.float64)
    mean = (sizes / sizes.sum()) @ torch.cat([vectors(i) for i in (3, 0, 4, 1)]).double()
    assert torch.allclose(x.double(), start.double() + mean, atol=1e-6)
    assert report.weights == pytest.approx({"dee": 5 / 42, "ann": 13 / 42, "eve": 16 / 42, "bob": 8 / 42})
    assert report.loss == pytest.approx((5 * 3.5 + 13 * 0.5 + 16 * 4.5 + 8 * 1.5) / 42)


def test_work_of_a_round_grows_linearly_with_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    for count in (20, 80):
        ids = list(map(Counted, range(1000, 1000 + count)))
        monkeypatch.setattr(f"{__name__}.IDS", ids)
        monkeypatch.setattr(f"{__name__}.SIZES", dict.fromkeys(ids, 7))
        half = Half(cohort=range(count))
        half.receive(*range(count))
        Counted.looks = 0
        half.close()
        looks.append(Counted.looks)
    assert looks[1] < 5 * looks[0]


def test_several_clients_can_reply_together_in_any_order() -> None:
    def run(*orders: Sequence[int]) -> Tensor:
        half = Half()
        for clients in orders:
            half.receive(*clients)
        half.close()
        return half.server.x

    whole = run((3, 0), (4, 1))
    assert torch.equal(whole, run((4, 1), (3, 0)))
    assert torch.equal(whole, run((1, 4), (0, 3))) or torch.allclose(whole, run((1, 4), (0, 3)))
    assert torch.allclose(whole, run((1,), (0, 3, 4)))


def test_waiting_reply_is_a_copy() -> None:
    half = Half()
    early = half.reply(1)
    assert half.round.receive(early) == []
    for tensor in (*early.send.values(), early.models, early.changes):
        tensor.fill_(1e9)  # an engine may reuse its memory
    assert [half.receive(i) for i in (3, 0)] == [["dee"], ["ann"]]
    assert half.receive(4) == ["eve", "bob"]
    half.close()
    assert torch.equal(half.server.x, ended(Half(), {})[0])


def test_duplicate_reply_counts_once() -> None:
    half = Half()
    assert half.receive(3) == ["dee"]
    assert half.receive(3) == []
    for i in (1, 1, 0, 4, 4):
        half.receive(i)
    report = half.close()
    x, _, once = ended(Half(), {})
    assert torch.equal(half.server.x, x)
    assert report == once


def test_late_replies_are_ignored_with_a_warning() -> None:
    half = Half(Mime(base=SGDm()))
    late = half.reply(3)
    for i in half.task.clients:
        half.receive(i)
    half.next()
    with pytest.warns(
        UserWarning, match="A reply to 'gradients' of round 0 comes too late: it is at 'train' of round 0"
    ):
        assert half.round.receive(late) == []
    for i in half.task.clients:
        half.receive(i)
    last = half.reply(3)
    half.close()
    with pytest.warns(UserWarning, match="A reply to 'train' of round 0 comes too late: the round is over"):
        half.round.receive(last)
    half.begin()
    with pytest.warns(UserWarning, match="'train' of round 0 comes too late: it is at 'gradients' of round 1"):
        half.round.receive(last)


def test_unexpected_replies_are_rejected() -> None:
    half = Half()
    with pytest.raises(FederatedError, match="the client with stored index 2, which was not asked"):
        half.receive(2)
    half.receive(3)
    with pytest.raises(FederatedError, match="some of them have answered before, such as the one with stored index 3"):
        half.receive(0, 3)
    with pytest.raises(
        FederatedError, match=r"sent the messages \['delta', 'more'\], but `reduces` declares \['delta'\]"
    ):
        half.receive(0, send={"delta": vectors(0), "more": vectors(0)})


def test_missing_client_is_named_and_stops_the_run() -> None:
    half = Half()
    for i in (0, 1):
        half.receive(i)
    assert half.round.missing() == ["dee", "eve"]
    with pytest.raises(ClientError, match="Client 'dee' has sent no reply to 'train' of round 0") as caught:
        half.round.close_phase()
    assert caught.value.culprit == "dee"


@pytest.mark.parametrize("aggregator", [None, CoordinateMedian()], ids=repr)
def test_missing_client_is_dropped_with_on_client_error_drop(aggregator: Any) -> None:
    half = Half(on_client_error="drop", aggregator=aggregator)
    for i in (1, 4, 0):  # all of them wait for the missing one
        assert half.receive(i) == []
    report = half.close()
    x, _, without = ended(Half(cohort=(0, 4, 1), aggregator=aggregator), {})
    assert torch.allclose(half.server.x, x, rtol=0, atol=1e-6)
    assert (report.cohort, report.dropped) == (("ann", "eve", "bob"), ("dee",))
    assert report.failed == {"dee": "Client 'dee' has sent no reply to 'train' of round 0."}
    assert report.weights == pytest.approx(dict(without.weights))


def test_round_restarts_when_others_depend_on_a_missing_client() -> None:
    half = Half(Mime(base=SGDm()), on_client_error="drop")
    for i in (1, 4, 0):
        half.receive(i)
    assert not half.round.close_phase()
    half.begin()
    assert half.task.clients == (0, 4, 1)
    x, state, report = ended(half, {})
    other, theirs, without = ended(Half(Mime(base=SGDm()), cohort=(0, 4, 1)), {})
    assert torch.equal(x, other)
    assert all(torch.equal(value, theirs[key]) for key, value in state.items())
    assert (report.cohort, report.dropped) == (without.cohort, ("dee",))


def test_too_many_missing_clients_end_the_run() -> None:
    half = Half(on_client_error="drop")
    half.receive(0)
    with pytest.raises(ClientError, match="3 of 4 clients failed in round 0, more than max_failed_share=0.5 allows"):
        half.round.close_phase()


def test_client_that_reports_a_failure_is_dropped_or_stops_the_run() -> None:
    failed = {3: ClientError("Client 'dee' failed: the disk is gone.", "dee")}
    with pytest.raises(ClientError, match="the disk is gone"):
        Half().receive(3, failed=failed)
    half = Half(on_client_error="drop")
    assert half.receive(3, failed=failed) == []
    for i in (0, 4, 1):
        half.receive(i)
    report = half.close()
    assert report.failed == {"dee": "Client 'dee' failed: the disk is gone."}
    assert torch.allclose(half.server.x, ended(Half(cohort=(0, 4, 1)), {})[0], rtol=0, atol=1e-6)


def test_client_without_a_step_has_zero_weight() -> None:
    half = Half()
    for i in half.task.clients:
        reply = half.reply(i)
        idle = [replace(reply.reports[0], steps=0, loss=float("nan"))]
        half.round.receive(replace(reply, reports=idle) if i == 3 else reply)
    report = half.close()
    assert report.weights["dee"] == 0
    assert report.cohort == ("dee", "ann", "eve", "bob")
    assert torch.allclose(half.server.x, ended(Half(cohort=(0, 4, 1)), {})[0], rtol=0, atol=1e-6)
