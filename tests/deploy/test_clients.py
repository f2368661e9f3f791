"""A client that is trained by tasks outside a fit has the bits of the simulation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import Adam, Algorithm, FedAvg, FedCM, FedDane, FedDyn, Mime, MimeLite, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.site import ClientsOutsideFit
from lightning_fed.rounds import client_work, messages
from lightning_fed.rounds.client_work import ClientWork
from lightning_fed.rounds.cohort import CohortSampling
from lightning_fed.rounds.failures import Faults
from lightning_fed.rounds.messages import Reply, Task
from lightning_fed.rounds.server_round import ServerRound
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.client_states.store import MemoryClientStore
from lightning_fed.server.participation import Population
from lightning_fed.server.server import Server
from tests.helpers.crowding import FITS, take_memory
from tests.helpers.selection import covering, few
from tests.helpers.training import CLASSES, FEATURES, clients, same, trainer

ENGINES = ["sequential", "vectorized"]
SIZES = (13, 8, 21, 5)
METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "Scaffold": Scaffold(),
    "Scaffold-i": Scaffold(option="i"),
    "Mime": Mime(),
    "MimeLite": MimeLite(base=Adam()),
    "FedDyn": FedDyn(alpha=0.1),
    "FedCM": FedCM(alpha=0.1),
    "FedDane": FedDane(mu=0.1),
}


class Net(pl.LightningModule):
    """A network with dropout and a schedule by rounds."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "monitor": "x"}}


class Site(FederatedDataModule):
    """Has the ids of all clients, and the data of some."""

    def __init__(self, mine: Sequence[int] = range(len(SIZES))) -> None:
        super().__init__(batch_size=4)
        self.num_clients, self.mine = len(SIZES), mine

    def client_dataset(self, client_id: ClientId) -> Any:
        assert client_id in self.mine
        return clients(SIZES)[int(client_id)]


HALVED = partial(StepLR, step_size=2, gamma=0.5)


def model(schedule: Any = HALVED, kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind(schedule)


def run_of(method: str, engine: str, **options: Any) -> FederatedTrainer:
    wanted = {"algorithm": METHODS[method], "engine": engine, "max_rounds": 4, "local_epochs": 2, **options}
    return trainer(limit_val_batches=0, **wanted)


def copied(state: Any) -> Any:
    return {name: value.detach().clone() for name, value in (state or {}).items()}


@dataclass
class Noted:
    """A task of the simulation for one client, its reply, and the client state before and after."""

    task: Task
    before: dict[str, Tensor]
    reply: Reply
    after: dict[str, Tensor]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FederatedTrainer, list[Noted]]]:
    """Return a function that runs a simulation, and returns its trainer and one client's tasks and replies."""

    def run(client: int, fitted: FederatedTrainer, module: pl.LightningModule) -> tuple[FederatedTrainer, list[Noted]]:
        notes: list[Noted] = []
        answer = ClientWork.answer

        def noting(self: Any, task: Task, chunk: Sequence[int], states: ClientStates) -> Iterator[Reply]:
            before = copied(states.of(client))
            for reply in answer(self, task, chunk, states):
                if list(reply.clients) == [client]:
                    parts = {name: copied(getattr(task, name)) for name in ("server", "cohort_grad", "buffers")}
                    noted = replace(task, x=task.x.clone(), **parts)
                    notes.append(Noted(noted, before, messages._copied(reply), {}))
                yield reply

        class Keeps(FederatedCallback):
            def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
                if notes:
                    notes[-1].after = copied(trainer.fit_loop.state.clients.get(client))

        monkeypatch.setattr(client_work, "_TOGETHER", 0)  # every client answers alone
        monkeypatch.setattr(ClientWork, "answer", noting)
        fitted.callbacks.append(Keeps())
        fitted.fit(module, Site())
        monkeypatch.setattr(ClientWork, "answer", answer)
        return fitted, notes

    return run


def assert_same_reply(one: Reply, other: Reply) -> None:
    for name in ("round", "phase", "clients", "norms", "examples", "server_read", "cohort_grad_read"):
        assert getattr(one, name) == getattr(other, name), name
    assert same(one.send, copied(other.send))
    for name in ("models", "changes"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), name
    assert [replace(report, seconds=0.0) for report in one.reports] == [replace(r, seconds=0.0) for r in other.reports]


def stored(state: dict[str, Tensor]) -> MemoryClientStore:
    store = MemoryClientStore()
    store.stage(2, copied(state))
    store.commit()
    return store


@pytest.mark.parametrize(("method", "engine"), covering(list(METHODS), ENGINES))
def test_single_client_matches_simulation_bits_in_any_round_order(method: str, engine: str, simulated: Any) -> None:
    options = {"chunk_size": 1} if engine == "vectorized" else {}
    _, notes = simulated(2, run_of(method, engine, clients_per_round=4, **options), model())
    rounds = {note.task.round: [n for n in notes if n.task.round == note.task.round] for note in notes}
    assert len(rounds) == 4
    with closing(ClientsOutsideFit(run_of(method, engine, **options), model(), Site([2]), [2])) as site:
        (member,) = site.work.participants({2: 1}, 0)
        assert (member.index, member.size, member.steps) == (2, SIZES[2], 12)
        for number in (3, 0, 2, 2, 1):
            for note in rounds[number]:
                store = stored(note.before)
                (reply,) = site.answer(note.task, site.states(note.task, store))
                assert_same_reply(note.reply, reply)
            store.commit()
            assert same(store.get(2) or {}, rounds[number][-1].after)


class Skips(Net):
    """Skips the last batch of an epoch, which is shorter than the batch of the trial step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[0]) > 1 else None


def test_client_that_cannot_be_vectorized_restarts_sequentially() -> None:
    def answer(engine: str) -> Reply:
        with closing(ClientsOutsideFit(run_of("Scaffold", engine), model(kind=Skips), Site([2]), [2])) as site:
            x = site.prepared.flat.y.clone()
            server = {"c": torch.zeros_like(x)}
            task = Task(0, messages.TRAIN, [2], {2: 12}, x, server, buffers=site.buffers)
            (reply,) = map(messages._copied, site.answer(task, site.states(task, MemoryClientStore())))
            assert site.work.engine_names == ["sequential"]
            return reply

    with pytest.warns(UserWarning, match="engine='auto' restarts round 0 with 'sequential'"):
        found = answer("auto")
    assert_same_reply(answer("sequential"), found)


class Crowded(Net):
    """Runs out of memory with more clients at once than :data:`FITS` allows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        take_memory(batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.thorough
def test_out_of_memory_clients_restart_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(fits: int, chunk_size: int) -> list[Reply]:
        given, here = run_of("Scaffold", "vectorized", chunk_size=chunk_size), [0, 1, 2, 3]
        with closing(ClientsOutsideFit(given, model(kind=Crowded), Site(here), here)) as site:
            x = site.prepared.flat.y.clone()
            task = Task(0, messages.TRAIN, here, {}, x, {"c": torch.zeros_like(x)}, buffers=site.buffers)
            monkeypatch.setitem(FITS, "clients", fits)
            replies = list(map(messages._copied, site.answer(task, site.states(task, MemoryClientStore()))))
            monkeypatch.delitem(FITS, "clients")
            return replies

    with pytest.warns(UserWarning, match="with 4 clients at once. Round 0 restarts with chunk_size=2"):
        found = answer(1, 4)
    expected = answer(1, 1)
    assert len(found) == len(expected) == 4
    for one, other in zip(expected, found, strict=True):
        assert_same_reply(one, other)


SCHEDULES: dict[str, Any] = {
    "step": partial(StepLR, step_size=2, gamma=0.3),
    "cosine": partial(CosineAnnealingLR, T_max=7),
    "lambda": partial(LambdaLR, lr_lambda=lambda round: 0.9**round),
    "one cycle": partial(OneCycleLR, max_lr=0.5, total_steps=20),
    "sequential": lambda o: SequentialLR(o, [StepLR(o, 1, 0.5), CosineAnnealingLR(o, 5)], milestones=[3]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_learning_rates_can_jump_to_any_round(name: str) -> None:
    class Rates(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            seen.append([dict(group, params=None) for group in trainer.optimizers[0].param_groups])

    seen: list[Any] = []
    run_of("FedAvg", "sequential", max_rounds=8, callbacks=[Rates()]).fit(model(SCHEDULES[name]), Site())
    with closing(ClientsOutsideFit(run_of("FedAvg", "sequential"), model(SCHEDULES[name]), Site())) as site:
        prepared = site.work.engine.prepared
        for number in (5, 2, 7, 7, 0, 1):
            prepared.set_round(number)
            assert [dict(group, params=None) for group in prepared.optimizer.param_groups] == seen[number]
            assert site.trainer.current_epoch == number == site.trainer.global_step


def test_metric_driven_schedule_requires_its_state() -> None:
    plateau = partial(ReduceLROnPlateau, patience=0, factor=0.1)
    with closing(ClientsOutsideFit(run_of("FedAvg", "sequential"), model(plateau), Site())) as site:
        prepared = site.work.engine.prepared
        prepared.set_round(0)
        with pytest.raises(FederatedError, match="1 schedules of Net are ReduceLROnPlateau.* Round 3 .* found 0"):
            prepared.set_round(3)
        scheduler = plateau(torch.optim.SGD(Net(HALVED).parameters(), lr=0.1))
        for metric in (1.0, 2.0, 3.0):
            scheduler.step(metric)
        prepared.set_round(3, plateaus=[scheduler.state_dict()])
        assert prepared.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        prepared.set_round(0)
        assert prepared.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("method", few(METHODS, ["Scaffold-i"]))  # test_same_bits.py covers the others
def test_server_with_sites_matches_the_simulation(method: str) -> None:
    fitted, module = run_of(method, "sequential", clients_per_round=3), model()
    fitted.fit(module, Site())
    with ExitStack() as stack:
        sites = [
            stack.enter_context(closing(ClientsOutsideFit(run_of(method, "sequential"), model(), Site([i]), [i])))
            for i in range(len(SIZES))
        ]
        settings, prepared = fitted.fit_loop.settings, sites[0].work.engine.prepared
        server = Server(
            METHODS[method], prepared.flat.y, prepared.flat.layout, settings.server_optimizer, None, range(4), 0
        )
        server.advance_solver = prepared.optimizer.advance_solver
        population, stores = Population(range(4), SIZES.__getitem__), [MemoryClientStore() for _ in sites]
        sampling = CohortSampling(settings, population, seed=0)
        for number in range(4):
            cohort = sampling.draw(
                number, lambda drawn: [m for i in drawn for m in sites[i].work.participants({i: 1}, 0)]
            )
            half = ServerRound(server, settings, population, cohort, Faults())
            for task in half.phases():
                for i in reversed(task.clients):
                    for reply in sites[i].answer(task, sites[i].states(task, stores[i])):
                        half.receive(reply)
                assert half.close_phase()
            half.close({}, 0.0)
            for store in stores:
                store.commit()
    state = fitted.fit_loop.state
    assert same(copied(state.state), copied(server.state))
    assert torch.equal(state.x, server.x)
    assert (state.bytes_up, state.bytes_down) == (server.bytes_up, server.bytes_down)
    assert same({i: state.clients.get(i) for i in range(4)}, {i: store.get(i) for i, store in enumerate(stores)})


def test_work_outside_a_fit_rejects_a_fitted_trainer() -> None:
    fitted = run_of("FedAvg", "sequential")
    fitted.fit(model(), Site())
    with pytest.raises(FederatedError, match="that has run none, found 4 rounds done"):
        ClientsOutsideFit(fitted, model(), Site())


def test_unsupported_modules_are_rejected_as_in_a_fit() -> None:
    module = model()
    module.automatic_optimization = False
    with pytest.raises(FederatedError, match="manual optimization.*Mime"):
        ClientsOutsideFit(run_of("Mime", "sequential"), module, Site())
    momentum = model()
    momentum.configure_optimizers = lambda: torch.optim.SGD(momentum.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(FederatedError, match="would do so once more"):
        ClientsOutsideFit(run_of("MimeLite", "sequential"), momentum, Site())


def test_module_hooks_around_a_fit_are_called() -> None:
    class Hooked(Net):
        def setup(self, stage: str) -> None:
            hooks.append("sets up " + str(stage == "fit"))

        def on_fit_start(self) -> None:
            hooks.append("fit starts")

        def on_train_start(self) -> None:
            hooks.append("train starts")

        def on_train_end(self) -> None:
            hooks.append("train ends")

        def on_fit_end(self) -> None:
            hooks.append("fit ends")

        def teardown(self, stage: str) -> None:
            hooks.append("tears down " + str(stage == "fit"))

    hooks: list[str] = []
    site = ClientsOutsideFit(run_of("FedAvg", "sequential"), model(kind=Hooked), Site())
    assert hooks == ["sets up True", "fit starts", "train starts"]
    site.close()
    site.close()
    assert hooks[3:] == ["train ends", "fit ends", "tears down True"]
