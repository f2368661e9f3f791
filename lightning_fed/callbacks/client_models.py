"""Clients' models as files, round by round."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lightning_fed.callbacks.measures import Measure
from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_one_of, check_paths, format_value, kind_of
from lightning_fed.core.disk import flush_folder
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.types import ClientId, State


class ClientModels(Measure):
    """Save clients' models, a file per client and round.

    The file is ``<folder>/round_<completed rounds>/client_<id>.safetensors``. It has the tensors of the module's
    ``state_dict``, buffers included, so a module of the same class loads it. Files are complete or absent, even if the
    process is killed, and a resumed run writes the same files. A round's folder has only the files of the clients that
    completed it.

    The models are computed from clients' data. They are not protected, even if ``DifferentialPrivacy`` protects the
    messages.

    Args:
        models: "local" for the models :math:`y_i` of the round's clients after their work, before the server's step;
            "personal" for their personal models after it, as ``evaluate_clients(own=True)`` measures them: with
            personal parameters, Ditto, APFL and pFedMe.
        every_n_rounds: Save in every n-th round.
        clients: The ids of the clients to save. By default, the clients of the round. "local" saves only clients that
            are in the round, "personal" all of them.
        folder: The folder; by default ``client_models`` in the log directory, or without a logger in
            ``default_root_dir``.

    Raises:
        FederatedError: If an argument is not allowed; when training starts, if there is no such client, or if
            "personal" finds no personal models. Sites and their server refuse the callback.

    Example:
        >>> from lightning_fed.callbacks import ClientModels
        >>> saver = ClientModels(
        ...     "personal", every_n_rounds=10, clients=[0, 3], folder="models"
        ... )
        >>> ClientModels.path("models", round=10, client_id=3).as_posix()
        'models/round_000010/client_3.safetensors'
    """

    def __init__(
        self,
        models: Literal["local", "personal"] = "local",
        every_n_rounds: int = 1,
        clients: Sequence[ClientId] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(every_n_rounds)
        name = type(self).__name__
        self.models: Literal["local", "personal"] = check_one_of(name, "models", models, ("local", "personal"))
        is_list = isinstance(clients, Sequence) and not isinstance(clients, str | bytes)
        if clients is not None and not (is_list and all(type(client_id) in (int, str) for client_id in clients)):
            raise FederatedError(
                f"{name}(clients={format_value(clients)}): clients must be a list of ids, which are whole numbers or"
                f" texts, found {kind_of(clients)}."
            )
        self.clients = None if clients is None else list(clients)
        if folder is not None:
            check_paths(name, folder=folder)
        self.folder = self._chosen_folder = None if folder is None else Path(folder)

    @staticmethod
    def path(folder: str | os.PathLike[str], round: int, client_id: ClientId) -> Path:
        """Return the file of a client's model.

        Args:
            folder: The callback's folder.
            round: The number of completed rounds: 1 after the first one.
            client_id: The client's id.
        """
        name = str(client_id)
        if isinstance(client_id, str):  # "3" and 3 are different clients
            name = f"'{name}'" if name.lstrip("-").isdecimal() else quote(name, safe=" ")
        return Path(folder) / f"round_{round:06d}" / f"client_{name}.safetensors"

    @staticmethod
    def load(folder: str | os.PathLike[str], round: int, client_id: ClientId) -> State:
        """Return a client's saved model, for ``module.load_state_dict``; its tensors are on the CPU.

        Args:
            folder: The callback's folder.
            round: The number of completed rounds: 1 after the first one.
            client_id: The client's id.

        Raises:
            FederatedError: If there is no such file, or it is damaged.
        """
        file = ClientModels.path(folder, round, client_id)
        if not file.is_file():
            among = sorted(path.stem.removeprefix("client_") for path in file.parent.glob("client_*.safetensors"))
            rounds = sorted(path.name for path in Path(folder).glob("round_*"))
            here = f"in {file.parent.name} there are {among[:10]}" if among else f"the rounds are {rounds[:10]}"
            raise FederatedError(f"{folder} has no model of client {client_id!r} after round {round}: {here}.")
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise FederatedError(f"{file} cannot be read as a client's model: {error}.") from error

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the folder; refuse clients and models that do not exist."""
        loop, name = trainer.fit_loop, type(self).__name__
        if self.models == "personal" and not loop.settings.has_own_models:
            raise FederatedError(
                f"{name}(models='personal'): clients of {type(loop.settings.algorithm).__name__} have no personal"
                " models. Pass personal=[...] to the trainer, use a method such as Ditto, or save their local models"
                " with models='local'."
            )
        ids = loop.population.ids
        if (unknown := [client_id for client_id in self.clients or () if client_id not in ids]) != []:
            raise FederatedError(f"{name}(clients=...): there is no client {unknown[0]!r}; ids are such as {ids[0]!r}.")
        self.folder = self._folder_of(trainer)
        others = [c for c in getattr(trainer, "callbacks", []) if isinstance(c, ClientModels) and c is not self]
        if any(other._folder_of(trainer).absolute() == self.folder.absolute() for other in others):
            raise FederatedError(
                f"Two {name} write into {self.folder}, and would replace each other's files. Give each its own folder."
            )
        for part in self.folder.glob("round_*/.client_*.part") if trainer.is_global_zero else ():  # a killed run's
            part.unlink(missing_ok=True)

    def _folder_of(self, trainer: pl.Trainer) -> Path:
        """Return the folder for a run of this trainer; the callback may have been in another run."""
        if self._chosen_folder is not None:
            return self._chosen_folder
        return Path(trainer.log_dir or trainer.default_root_dir) / "client_models"

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        """Save a client's local model, if it is due."""
        if self.models == "local" and self.is_due(trainer.fit_loop.round + 1):
            self._save(trainer, pl_module, client_report.client_id, trainer.fit_loop.round + 1)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Save personal models, if they are due; remove files of clients that did not complete the round."""
        loop = trainer.fit_loop
        if not self.is_due(loop.round):
            return
        chosen = list(round_report.clients) if self.clients is None else self.clients
        assert self.folder is not None
        if trainer.is_global_zero:  # remove files of an earlier run, or of clients that have failed since
            of_round = self.path(self.folder, loop.round, 0).parent
            there = chosen if self.models == "personal" else [i for i in chosen if i in round_report.clients]
            kept = {self.path(self.folder, loop.round, client_id) for client_id in there}
            for file in set(of_round.glob("client_*.safetensors")) - kept:
                file.unlink(missing_ok=True)
        if self.models == "personal":
            for client_id in chosen:
                if loop.run_state.ranks.owns(loop.population.index_of(client_id)):
                    with loop.showing_client_model(client_id):
                        self._save(trainer, pl_module, client_id, loop.round)

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule, client_id: ClientId, round: int) -> None:
        if self.clients is not None and client_id not in self.clients:
            return
        if trainer.fit_loop.run_state.ranks.size == 1 and not trainer.is_global_zero:
            return  # all processes train this client together
        assert self.folder is not None
        tensors = {}
        for name, value in module.state_dict().items():
            if not isinstance(value, Tensor):
                raise FederatedError(
                    f"{type(self).__name__} saves tensors, and the state_dict of {type(module).__name__} has"
                    f" {kind_of(value)} at {name!r} (get_extra_state). Leave it out of the state_dict."
                )
            tensors[name] = value.detach().cpu().clone().contiguous()
        facts = json.dumps({"client": client_id, "round": round, "models": self.models})
        # a single entry, since safetensors writes several in no fixed order
        try:
            content = save(tensors, {"client_model": facts})
        except KeyError as error:
            names = [name for name, value in tensors.items() if value.dtype in error.args]
            raise FederatedError(
                f"{type(self).__name__} saves safetensors files, which have no type {error}; {type(module).__name__}"
                f" has it in {names}. Use another type, or leave them out of the state_dict with persistent=False."
            ) from error
        _write(self.path(self.folder, round, client_id), content)


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
        flush_folder(file.parent)
    except OSError as error:
        raise FederatedError(
            f"The client's model {file} could not be written: {error.strerror or error}. Make room, or give another"
            " folder."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
