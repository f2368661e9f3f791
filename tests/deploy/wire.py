"""A run over sites in one process. Messages travel as bytes, and arrive in any order."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import (
    APFL,
    Adam,
    Algorithm,
    CMime,
    Ditto,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedExP,
    FedNova,
    FedProx,
    FedProxVR,
    FedRep,
    FedSAM,
    FedSpeed,
    Mime,
    MimeLite,
    MimeMVR,
    MoFedSAM,
    PFedMe,
    Scaffold,
    ServerOnly,
    SGDm,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.deploy import FederatedSite, Message, Refusal, RemoteClients
from lightning_fed.server import FedAdam
from tests.deploy.site_models import Net, model
from tests.helpers.training import clients, trainer

SIZES = (15, 8, 22, 6)
METHODS: dict[str, Callable[[], Algorithm]] = {
    "ServerOnly": ServerOnly,
    "FedAvg": FedAvg,
    "FedProx": partial(FedProx, mu=0.1),
    "FedProx adaptive": partial(FedProx, mu=0.1, adaptive=True),
    "FedDane": partial(FedDane, mu=0.1),
    "FedDane own": partial(FedDane, mu=0.1, grad_cohort="own"),
    "Scaffold i": partial(Scaffold, option="i"),
    "Scaffold ii": Scaffold,
    "Scaffold ii gradient": partial(Scaffold, initial="gradient"),
    "Mime": Mime,
    "MimeLite Adam": partial(MimeLite, base=Adam()),
    "C-Mime": partial(CMime, base=SGDm(beta=0.9)),
    "MimeMVR": partial(MimeMVR, a=0.1),
    "FedCM": partial(FedCM, alpha=0.1),
    "FedDyn": partial(FedDyn, alpha=0.1),
    "FedExP": FedExP,
    "FedNova": FedNova,
    "FedRep": partial(FedRep, ["net.3.*"], head_epochs=1),
    "Ditto": partial(Ditto, 0.5, batches="own"),
    "APFL": partial(APFL, 0.5),
    "pFedMe": partial(PFedMe, 2.0, inner_steps=2),
    "FedSAM": partial(FedSAM, rho=0.1),
    "MoFedSAM": partial(MoFedSAM, rho=0.1, alpha=0.1),
    "FedSpeed": partial(FedSpeed, lam=2.0, rho=0.1),
    "FedProxVR svrg": partial(FedProxVR, mu=0.1),
    "FedProxVR sarah": partial(FedProxVR, mu=0.1, estimator="sarah"),
}


def make_trainer(method: str, **options: Any) -> FederatedTrainer:
    algorithm = METHODS[method]()
    wanted: dict[str, Any] = {
        "algorithm": algorithm,
        "engine": "sequential",
        "max_rounds": 5,
        "clients_per_round": 3,
        "local_epochs": 2 if algorithm.local_work else None,
        "limit_val_batches": 0,
        **({"server_optimizer": partial(FedAdam, lr=0.03)} if method == "FedAvg" else {}),
        **options,
    }
    return trainer(**wanted)


def make_data(ids: Sequence[int] = range(len(SIZES)), with_val: bool = False) -> FederatedDataModule:
    own = {i: clients(SIZES)[i] for i in ids}
    return FederatedDataModule(clients=own, client_val=own if with_val else None, batch_size=4)


class EndedError(Exception):
    """The server's process has ended, as after SIGKILL."""


class Rounds(FederatedCallback):
    """Records the reports of rounds, and saves checkpoints.

    Args:
        save: Where to save, by the number of completed rounds; None for any other number.
    """

    def __init__(self, save: Mapping[int | None, Path]) -> None:
        self.reports: list[RoundReport] = []
        self._save = save

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
        self.reports.append(round_report)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        path = self._save.get(trainer.fit_loop.round, self._save.get(None))
        if path is not None:
            trainer.save_checkpoint(path)


class Wire:
    """A transport to sites of this process.

    Args:
        folder: Holds the states of the sites.
        make: Makes a trainer.
        make_model: Makes the module.
        seed: Seeds the order of the replies.
        with_val: Whether clients have validation sets.

    Attributes:
        comes: Takes a task, and returns its replies. By default, the site's reply or refusal. Tests may replace it.
        phases: Round, phase and clients of every exchange.
        closed: Whether the last exchange has ended.
        last: The client whose task comes last in the exchange.
    """

    def __init__(
        self,
        folder: Path,
        make: Callable[[], FederatedTrainer],
        make_model: Callable[[], Net] = model,
        seed: int = 0,
        with_val: bool = False,
    ) -> None:
        self.with_val = with_val
        self.folder, self.make, self.make_model, self.order = folder, make, make_model, random.Random(seed)
        self.sites: dict[int, FederatedSite] = {}
        self.up, self.down = Counter[int](), Counter[int]()  # bytes of tensors by round, from sites and to them
        self.comes: Callable[[Message], Iterable[Message | Refusal]] = self.answers
        self.phases: list[tuple[int, str, list[Any]]] = []
        self.closed, self.last = True, None

    def clients(self, **options: Any) -> RemoteClients:
        return RemoteClients(self, range(len(SIZES)), **options)

    def run(
        self,
        module: Net | None = None,
        ckpt_path: Path | None = None,
        save: Mapping[int | None, Path] | None = None,
        trainer: FederatedTrainer | None = None,
    ) -> tuple[FederatedTrainer, list[RoundReport]]:
        """Fit, and return the trainer and the reports of the rounds."""
        rounds, fitted = Rounds(save or {}), trainer or self.make()
        fitted.callbacks.insert(0, rounds)
        fitted.fit(module or self.make_model(), self.clients(), ckpt_path=ckpt_path)
        return fitted, rounds.reports

    def site(self, client: int) -> FederatedSite:
        if client not in self.sites:
            data, folder = make_data([client], self.with_val), self.folder / str(client)
            self.sites[client] = FederatedSite(self.make(), self.make_model(), data, client, folder)
        return self.sites[client]

    def answer(self, task: Message) -> Message:
        arrived = Message.from_bytes(task.to_bytes())
        reply = Message.from_bytes(self.site(int(task.client)).answer(arrived).to_bytes())
        self.down[task.header["round"]] += sum(value.nbytes for value in arrived.tensors.values())
        self.up[task.header["round"]] += sum(value.nbytes for value in reply.tensors.values())
        return reply

    def answers(self, task: Message) -> list[Message | Refusal]:
        try:
            return [self.answer(task)]
        except FederatedError as error:
            return [Refusal(task.client, str(error))]

    def exchange(
        self, tasks: Mapping[Any, Message], registrations: Mapping[Any, Message]
    ) -> Iterator[Message | Refusal]:
        asked, header = [*registrations.values(), *tasks.values()], next(iter(tasks.values())).header
        self.phases.append((header["round"], header["phase"], list(tasks)))
        self.order.shuffle(asked)
        asked.sort(key=lambda task: task.client in tasks)  # tasks last: the fit stops reading after the last one
        self.last = asked[-1].client
        self.closed = False
        try:
            for task in asked:
                yield from self.comes(task)
        finally:
            self.closed = True

    def kill(self, client: int | None = None) -> None:
        """End sites as SIGKILL would: only their folders are left."""
        for name in list(self.sites) if client is None else [client]:
            if (site := self.sites.pop(name, None)) is not None:
                site._states.close()  # a process that ends releases its lock


def simulated(
    make: Callable[[], FederatedTrainer], make_model: Callable[[], Net] = model, **fit: Any
) -> FederatedTrainer:
    fitted = make()
    fitted.fit(make_model(), make_data(), **fit)
    return fitted


def parameters(module: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
