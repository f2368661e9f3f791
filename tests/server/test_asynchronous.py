"""Asynchronous runs: against a plain program, and against synchronous runs if no client is late."""

import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedError, FederatedTrainer
from lightning_fed.algorithms import (
    Algorithm,
    FedAvg,
    FedCM,
    FedExP,
    FedNova,
    FedProx,
    Mime,
    MimeLite,
    Scaffnew,
    Scaffold,
    ServerOnly,
)
from lightning_fed.callbacks import SimulatedTime
from lightning_fed.deploy import InProcess, RemoteClients
from lightning_fed.server import (
    Asynchronous,
    ClientClock,
    CoordinateMedian,
    FedAdam,
    FedAsync,
    FedBuff,
    SystemsHeterogeneity,
    UniformSampler,
)
from lightning_fed.server.asynchronous import Arrival, Arrivals
from tests.helpers.selection import covering
from tests.helpers.training import Net, clients, data, seeded, trainer

LATE = ClientClock(slow_share=0.4, slow_factor=5.0, spread=0.4, jitter=0.3)
FINAL = partial(torch.nn.utils.parameters_to_vector)


def run(asynchronous: Asynchronous | None, algorithm: Algorithm | None = None, **options: Any) -> FederatedTrainer:
    """Return a trainer of six clients after some rounds."""
    module, fit = options.pop("module", None), options.pop("fit", {})
    wanted = {"max_rounds": 8, "limit_val_batches": 0, **options}
    if asynchronous is not None:
        wanted |= {"clients_per_round": None, "asynchronous": asynchronous}
    done = trainer(algorithm=algorithm or FedAvg(), **wanted)
    torch.manual_seed(0)
    done.fit(module or Net(), data(), **fit)
    return done


def parameters(done: FederatedTrainer) -> Tensor:
    return FINAL(done.lightning_module.parameters()).detach().clone()


# ---------------------------------------------------------------------- against a plain program


def trained(net: Net, x: Tensor, examples: Any, lr: float, steps: int = 2) -> Tensor:
    """Return a client's parameters after some steps on all of its examples."""
    torch.nn.utils.vector_to_parameters(x.clone(), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    inputs, labels = examples.tensors
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs.double()), labels).backward()
        optimizer.step()
    return FINAL(net.parameters()).detach().clone()


class Plain(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "asynchronous",
    [
        FedBuff(2, 6, clock=LATE),
        FedAsync(3, alpha=0.7, clock=LATE),
        FedAsync(4, alpha=0.5, staleness="hinge", a=2.0, b=1.0, clock=LATE),
    ],
)
def test_run_matches_a_plain_pytorch_program(asynchronous: Asynchronous) -> None:
    owned, events = (
        clients((13, 8, 21, 5, 16, 9)),
        Arrivals(3, range(6), LATE, asynchronous.size, asynchronous.concurrency),
    )
    torch.manual_seed(0)
    net = Plain(dropout=0.0).double()
    x, began = FINAL(net.parameters()).detach().clone(), dict[tuple[int, int], tuple[Tensor, Tensor]]()
    staleness = Counter[int]()
    for r in range(8):
        between, step = events.in_round(r), torch.zeros_like(x)
        for i in between.begin:
            began[r, i] = x, trained(net, x, owned[i], lr=0.1)
        for u, i in between.arrive:
            start, y = began[u, i]
            staleness[r - u] += 1
            change = y - start if isinstance(asynchronous, FedBuff) else y - x
            step += asynchronous.weight(r - u) / asynchronous.size * change
        x = x + step
    assert len(staleness) > 2
    torch.manual_seed(0)
    done = trainer(
        asynchronous=asynchronous, clients_per_round=None, local_epochs=None, local_steps=2, precision="64-true",
        max_rounds=8, seed=3,
    )  # fmt: skip
    done.fit(Plain(dropout=0.0), FederatedDataModule(clients=owned, batch_size=21))
    assert float((parameters(done) - x).abs().max()) < 1e-13


def test_buffer_of_all_clients_matches_a_synchronous_run() -> None:
    whole = run(None, clients_per_round=1.0, weighting="uniform", max_rounds=4)
    assert torch.allclose(parameters(run(FedBuff(6, 6), max_rounds=4)), parameters(whole), atol=1e-6)


def test_concurrency_of_one_matches_sequential_training() -> None:
    def clients_in_turn(seed: int, round: int) -> list[int]:
        return Arrivals(0, range(6), ClientClock(), 1, 1).in_round(round).begin

    in_turn = run(None, clients_per_round=None, sampler=clients_in_turn)
    assert torch.allclose(parameters(run(FedAsync(1, alpha=1.0))), parameters(in_turn), atol=1e-6)


def test_server_optimizer_takes_the_step() -> None:
    by_adam, by_sgd = (
        run(FedBuff(2, 4, clock=LATE), max_rounds=4, **options)
        for options in ({"server_optimizer": partial(FedAdam, lr=0.03)}, {})
    )
    assert not torch.allclose(parameters(by_adam), parameters(by_sgd), atol=1e-3)


def test_scaffold_c_is_the_mean_of_arrived_client_states() -> None:
    done = run(FedBuff(6, 6), Scaffold(), max_rounds=4)  # all arrive: c is the mean of all c_i
    kept = [done.fit_loop.state.clients.get(i)["c_i"] for i in range(6)]
    assert torch.allclose(done.fit_loop.server["c"], torch.stack(kept).mean(0), atol=1e-6)


# ---------------------------------------------------------------------- engines, processes, resume


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [FedProx(mu=0.1), FedCM(alpha=0.3), Scaffold()], ids=repr)
def test_engines_agree(algorithm: Algorithm) -> None:
    one, other = (
        run(FedBuff(2, 4, clock=LATE), algorithm, engine=engine, module=seeded(dropout=0.0), precision="64-true")
        for engine in ("sequential", "vectorized")
    )
    assert one.fit_loop.round == other.fit_loop.round == 8
    torch.testing.assert_close(parameters(one), parameters(other), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("asynchronous", "algorithm"),
    covering([FedBuff(2, 5, clock=LATE), FedAsync(4, clock=LATE)], [Scaffold(), FedAvg()]),
)
def test_resumed_run_has_identical_bits(asynchronous: Asynchronous, algorithm: Algorithm, tmp_path: Path) -> None:
    whole, half = run(asynchronous, algorithm), run(asynchronous, algorithm, max_rounds=5)
    assert half.fit_loop.settings.aggregator.state_dict()["messages"]
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(asynchronous, algorithm, module=Net(lr=0.1), fit={"ckpt_path": tmp_path / "half.ckpt"})
    assert torch.equal(parameters(resumed), parameters(whole))
    half.max_rounds = 8
    half.fit(half.lightning_module, data())
    assert torch.equal(parameters(half), parameters(whole))


def test_checkpoint_with_other_concurrency_is_rejected(tmp_path: Path) -> None:
    run(FedBuff(2, 5, clock=LATE), max_rounds=3).save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(
        FederatedError, match=r"aggregator is FedBuff.*concurrency=5.*this run's is FedBuff.*concurrency=4"
    ):
        run(FedBuff(2, 4, clock=LATE), fit={"ckpt_path": tmp_path / "run.ckpt"})


DAMAGES: dict[str, Any] = {
    "no triple": lambda messages: [(0, 1)],
    "no mapping": lambda messages: [(0, 1, 2.0)],
    "shape": lambda messages: [(*key, {"delta": torch.zeros(3)}) for *key, _ in messages],
    "nan": lambda messages: [(*key, {"delta": own["delta"] * float("nan")}) for *key, own in messages],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_corrupt_messages_in_a_checkpoint_are_rejected(damage: Any, tmp_path: Path) -> None:
    run(FedBuff(2, 5, clock=LATE), max_rounds=3).save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    kept = saved["loops"]["fit_loop"]["state_dict"]["aggregator"]
    kept["messages"] = damage(kept["messages"])
    torch.save(saved, tmp_path / "run.ckpt")
    with pytest.raises(FederatedError, match=r"run\.ckpt does not fit this run: restoring the messages on their way"):
        run(FedBuff(2, 5, clock=LATE), fit={"ckpt_path": tmp_path / "run.ckpt"})


def test_missing_message_in_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    run(FedBuff(2, 5, clock=LATE), max_rounds=3).save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    del saved["loops"]["fit_loop"]["state_dict"]["aggregator"]
    torch.save(saved, tmp_path / "run.ckpt")
    with pytest.raises(FederatedError, match=r"no message of client \d, .* or the checkpoint has lost it"):
        run(FedBuff(2, 5, clock=LATE), fit={"ckpt_path": tmp_path / "run.ckpt"})


@pytest.mark.parametrize("aggregator", [None, CoordinateMedian()])
def test_synchronous_run_rejects_an_asynchronous_checkpoint(aggregator: Any, tmp_path: Path) -> None:
    run(FedBuff(2, 5), max_rounds=3).save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(FederatedError, match="aggregator is FedBuff"):
        run(None, aggregator=aggregator, clients_per_round=3, fit={"ckpt_path": tmp_path / "run.ckpt"})


# ---------------------------------------------------------------------- events, and time


@pytest.mark.parametrize(("size", "concurrency"), [(1, 1), (3, 7), (6, 2), (8, 8)])
def test_events_are_consistent_and_deterministic(size: int, concurrency: int) -> None:
    population, in_progress, last = range(8), list[Arrival](), 0.0
    events = Arrivals(5, population, LATE, size, concurrency)
    for r in range(30):
        between = events.in_round(r)
        assert len(set(between.begin)) == len(between.begin)
        assert len(between.arrive) == size
        assert len(between.left) <= concurrency
        there = Counter([*in_progress, *(Arrival(r, i) for i in between.begin)])
        assert there == Counter([*between.arrive, *between.left])
        assert last <= between.time
        in_progress, last = between.left, between.time
    assert Arrivals(5, population, LATE, size, concurrency).in_round(17) == events.in_round(17)
    assert Arrivals(6, population, LATE, size, concurrency).in_round(17) != events.in_round(17)


def test_messages_are_freed_after_arrival() -> None:
    run, ids, sent = FedBuff(2, 3), list("abcde"), list[Any]()
    for number in range(12):
        begun = {client_id: {"delta": torch.zeros(1)} for client_id in run(0, number, ids)}
        sent += [weakref.ref(messages["delta"]) for messages in begun.values()]
        run.taken(begun)
        del begun
    assert len(sent) > 20
    assert sum(message() is not None for message in sent) <= 2 + 3


def test_slow_clients_are_staler_and_arrive_less_often() -> None:
    clock = ClientClock(slow_share=0.5, slow_factor=10.0)
    events, seen, stale = (
        Arrivals(0, range(10), clock, 2, 6),
        Counter[bool](),
        dict[bool, list[int]]({True: [], False: []}),
    )
    slow = {i for i in range(10) if clock.seconds_of(0, range(10), i, 0) > 1}
    assert len(slow) == 5
    for r in range(300):
        for u, i in events.in_round(r).arrive:
            seen[i in slow] += 1
            stale[i in slow].append(r - u)
    assert seen[False] > 2 * seen[True]
    assert np.mean(stale[True]) > 2 * np.mean(stale[False])


def test_simulated_time_follows_slowest_client_or_last_arrival(tmp_path: Path) -> None:
    times = SimulatedTime(ClientClock({0: 1.0, 1: 2.0, 2: 3.0, 3: 5.0, 4: 8.0, 5: 13.0}))
    done = run(
        None, callbacks=times, clients_per_round=None, sampler=lambda seed, r: [[0, 3], [1], [5, 2]][r], max_rounds=3
    )
    assert times.seconds == done.callback_metrics["time/simulated"] == 5.0 + 2.0 + 13.0
    waits = SimulatedTime()
    run(FedBuff(2, 4, clock=LATE), callbacks=waits)
    assert waits.seconds == Arrivals(0, range(6), LATE, 2, 4).in_round(7).time


@pytest.mark.parametrize("asynchronous", [None, FedBuff(2, 4)])
def test_simulated_time_continues_in_a_resumed_run(asynchronous: Asynchronous | None, tmp_path: Path) -> None:
    run(asynchronous, callbacks=SimulatedTime(), max_rounds=2).save_checkpoint(tmp_path / "run.ckpt")
    resumed, whole = SimulatedTime(), SimulatedTime()
    run(asynchronous, callbacks=resumed, max_rounds=4, fit={"ckpt_path": tmp_path / "run.ckpt"})
    run(asynchronous, callbacks=whole, max_rounds=4)
    assert resumed.seconds == whole.seconds > 0


def test_simulated_time_starts_at_zero_in_a_new_run() -> None:
    times = SimulatedTime(ClientClock(2.0))
    for _ in range(2):
        run(None, callbacks=times, max_rounds=2)
        assert times.seconds == 4.0


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"algorithm": Mime()},
            r"FedBuff\(\.\.\.\) cannot be combined with Mime, which needs a gradient that is averaged",
        ),
        ({"algorithm": MimeLite()}, "cannot be combined with MimeLite"),
        ({"algorithm": FedNova()}, "combined with FedNova, which needs means with weights that sum to one"),
        ({"algorithm": FedExP()}, "combined with FedExP, which needs means with weights that sum to one"),
        ({"algorithm": Scaffnew(prob=0.5)}, "cannot be combined with Scaffnew, which needs all clients"),
        ({"algorithm": ServerOnly(), "local_epochs": None}, "cannot be combined with ServerOnly"),
        ({"algorithm": FedProx(mu=0.1, adaptive=True)}, "^asynchronous=FedBuff.* cannot be combined with FedProx"),
        (
            {"algorithm": FedAvg("normalized"), "asynchronous": FedAsync(concurrency=2)},
            r"FedAsync\(\.\.\.\) moves.*FedAvg\(pseudo_grad='normalized'\) send mean gradients\. Set pseudo_grad='raw'",
        ),
        ({"clients_per_round": 3}, "clients_per_round=3 cannot be combined with asynchronous=FedBuff"),
        ({"sampler": UniformSampler(3)}, "sampler=.* cannot be combined with asynchronous=FedBuff"),
        ({"aggregator": CoordinateMedian()}, "aggregator=.* cannot be combined with asynchronous=FedBuff"),
        ({"heterogeneity": SystemsHeterogeneity(0.5)}, "heterogeneity=.* cannot be combined with asynchronous=FedBuff"),
        ({"on_client_error": "drop"}, "on_client_error='drop' cannot be combined with asynchronous=FedBuff"),
        ({"weighting": "examples"}, "weighting='examples' cannot be combined with asynchronous=FedBuff"),
        ({"asynchronous": "FedBuff"}, "asynchronous must be an Asynchronous such as FedBuff"),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        trainer(**{"asynchronous": FedBuff(2, 4), "clients_per_round": None, **options})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FedBuff(0, 4), r"FedBuff\(size=0\)"),
        (lambda: FedBuff(2, 0), r"FedBuff\(concurrency=0\)"),
        (lambda: FedBuff(2, 4, staleness_exponent=-1), r"staleness_exponent=-1"),
        (lambda: FedBuff(2, 4, clock=3), r"clock=3"),
        (lambda: FedAsync(4, alpha=1.5), r"alpha must be a finite number in \(0, 1\]"),
        (lambda: FedAsync(4, staleness="cubic"), "staleness='cubic'"),
        (lambda: FedAsync(4, b=2.0), "b=2.0"),
        (lambda: ClientClock(0.0), r"ClientClock\(seconds=0"),
        (lambda: ClientClock(slow_share=1.5), "slow_share=1.5"),
        (lambda: ClientClock(slow_factor=0.5), "slow_factor=0.5"),
        (lambda: ClientClock("gone.csv"), r"no file 'gone\.csv' with a seconds"),
        (lambda: SimulatedTime(3), "clock=3"),
    ],
)
def test_invalid_arguments_are_rejected(make: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        make()


def test_invalid_settings_are_rejected_when_fit_starts() -> None:
    with pytest.raises(FederatedError, match=r"FedBuff\(concurrency=7\) needs at least as many clients; there are 6"):
        run(FedBuff(2, 7))
    with pytest.raises(FederatedError, match=r"SimulatedTime\(clock=...\) cannot be combined with asynchronous="):
        run(FedBuff(2, 4), callbacks=SimulatedTime(LATE))
    with pytest.raises(FederatedError, match=r"asynchronous=FedBuff\(...\) has a simulated clock"):
        trainer(asynchronous=FedBuff(2, 4), clients_per_round=None).fit(Net(), RemoteClients(InProcess([]), range(6)))
