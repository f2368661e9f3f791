"""Clients that are elsewhere, as the data module of a fit."""

import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partitions import check_client_ids
from lightning_fed.deploy.exchange import Exchange
from lightning_fed.deploy.facts import check_single, facts_of, optimizer_facts
from lightning_fed.deploy.message import check_columns
from lightning_fed.deploy.registrations import Registration, Registrations
from lightning_fed.deploy.remote_work import RemoteWork
from lightning_fed.deploy.transport import Transport
from lightning_fed.server.asynchronous import Asynchronous
from lightning_fed.server.optimal_sampling import OptimalClientSampling
from lightning_fed.trainer.loop import FederatedLoop
from lightning_fed.trainer.run_state import RunState


class RemoteClients(FederatedDataModule):
    """The clients of a run on remote sites, and the server's own validation set.

    A fit with them is like any other fit. It asks the clients when a simulation calls its engine. Callbacks, loggers,
    validation, early stopping, checkpoints and ``ckpt_path`` work as always. The parameters have the same bits::

        trainer.fit(model, RemoteClients(transport, client_ids, val=val), ckpt_path="last")

    Before the first round all clients must register. See ``docs/deploy.md``.

    Args:
        transport: Sends messages to the clients' sites; see :class:`lightning_fed.deploy.Transport`.
        client_ids: The clients' ids, in the order of their stored indices.
        val: The validation set of the server model, as for :class:`lightning_fed.FederatedDataModule`.
        max_examples: The largest number of examples that a client may have. A client's weight is the number that its
            site states.
        batch_size: The batch size that the data module of every site must have. None: sites may differ, and the log
            warns.
        agree_on: The columns whose words the sites agree on before the first round: each sends its own, and all get the
            sorted words of all. ``val`` may then be a function that returns the validation set, given the words by
            column.
        evaluation: Other arguments of that class that concern evaluation: ``test``, ``eval_batch_size``, ``transform``
            and the like.

    Raises:
        FederatedError: If the ids are not ids, or the transport is not one. In a fit: if the trainer runs several
            processes or an asynchronous server, or clients do not register.
    """

    _val_may_come = False  # though there is a setup

    def __init__(
        self,
        transport: Transport,
        client_ids: Sequence[ClientId],
        val: Any = None,
        max_examples: int | None = None,
        batch_size: int | None = None,
        agree_on: Sequence[str] = (),
        **evaluation: Any,
    ) -> None:
        name = type(self).__name__
        self._agree_on = check_columns(name, "agree_on", agree_on)
        self._make_val = val if self._agree_on and callable(val) else None
        self._val_may_come = self._make_val is not None
        super().__init__(val=None if self._make_val else val, **evaluation)
        if not callable(getattr(transport, "exchange", None)):
            raise FederatedError(f"{name}(transport={kind_of(transport)}): a transport has a method exchange.")
        self._max_examples = None if max_examples is None else check_count(name, "max_examples", max_examples)
        self._asked_batch_size = None if batch_size is None else check_count(name, "batch_size", batch_size, least=1)
        self.transport = transport
        self.client_ids = list(check_client_ids(name, client_ids))
        self._sites: Registrations | None = None
        self._stated: tuple[pl.LightningModule, dict[str, str]] | None = None

    def setup(self, stage: str) -> None:
        """Check the trainer, and note what sites must have in common with it and with the module as it was made."""
        loop = None if self.trainer is None else self.trainer.fit_loop
        if stage != "fit" or not isinstance(loop, FederatedLoop):
            return
        trainer: Any = self.trainer
        check_single(trainer, "Remote clients are asked by a trainer of one process")
        if isinstance(loop.settings.aggregator, Asynchronous):
            raise FederatedError(
                f"asynchronous={type(loop.settings.aggregator).__name__}(...) has a simulated clock, and real clients"
                " take real time. Leave it unset."
            )
        if isinstance(loop.settings.aggregator, OptimalClientSampling):
            raise FederatedError(
                f"aggregator={loop.settings.aggregator!r} cannot be combined with {type(self).__name__}: it decides who"
                " sends an update once all norms are known, and a site replies once. Pass"
                " sampler=UpdateNormSampler(...), which uses the norms of earlier rounds."
            )
        if self._make_val is not None:
            loop.epoch_loop.val_loop._restarting = True  # so that Lightning runs no sanity check before there are words
        module = trainer.lightning_module
        if self._stated is None or self._stated[0] is not module:  # a second fit finds it trained
            self._stated = module, facts_of(trainer, module)

    def connect_clients(self) -> RemoteWork:
        """Register all clients, and return the half of the round that reaches them."""
        trainer: Any = self.trainer
        run: RunState = trainer.fit_loop.run_state
        assert self._stated is not None
        words = self._known_words(trainer.fit_loop)
        versions = run.sites.get("versions") or {}
        if any(isinstance(version, int) for version in versions.values()):
            raise FederatedError(
                "The run was begun with an earlier version of lightning_fed, whose sites kept states under other names."
                " Continue with that version, or start a new run."
            )
        run.sites = {"run": run.sites.get("run") or secrets.token_hex(8), "versions": versions}
        self._sites = sites = Registrations(self.client_ids, self._max_examples, self._asked_batch_size)
        server_facts = {"facts": self._stated[1], "optimizer": optimizer_facts(trainer)}
        exchange = Exchange(self.transport, trainer, sites, run.sites["run"], server_facts)
        if self._agree_on:
            run.sites["words"] = words = words or exchange.agree(self._agree_on)
            if self._make_val is not None:
                self.val = self._make_val(words)
        exchange.register(words)
        sizes = [known.batch_size for known in sites.known.values() if known.batch_size]
        self.batch_size = min(sizes, default=1)
        return RemoteWork(trainer, exchange)

    def _known_words(self, loop: FederatedLoop) -> dict[str, list[str]]:
        """Return the words that the sites of a run have agreed on, empty before its first round."""
        words: dict[str, list[str]] = loop.run_state.sites.get("words", {})
        if loop.round == 0:
            return {}
        if sorted(words) != sorted(self._agree_on):
            raise FederatedError(
                f"The sites have agreed on the words of {sorted(words) or 'no columns'} when the run began, and the run"
                f" continues with agree_on={self._agree_on}. Pass the same columns, or start a new run."
            )
        return words

    def _known(self, client_id: ClientId) -> Registration:
        if self._sites is None or client_id not in self._sites.known:
            raise FederatedError(f"The size of client {client_id!r} is not known before it has registered, in a fit.")
        return self._sites.known[client_id]

    @property
    def known_sizes(self) -> list[int]:
        """Each client's number of examples, in the order of ``client_ids``."""
        return [self._known(client_id).size for client_id in self.client_ids]

    def client_size(self, client_id: ClientId) -> int:
        """Return a client's number of examples."""
        return self._known(client_id).size

    def batches_in_epoch(self, client_id: ClientId, size: int) -> int:
        """Return the batches in a local epoch of a client, as its site has registered them."""
        return self._known(client_id).batches

    def client_val_dataset(self, client_id: ClientId) -> Any:
        """Return an object with the length of a client's validation set, None if it has none."""
        size = self._known(client_id).val_size
        return range(size) if size else None

    def client_dataset(self, client_id: ClientId) -> NoReturn:
        """Refuse: the data is not here."""
        raise FederatedError(
            f"The data of client {client_id!r} are on its site. Callbacks and hooks that read clients' data on the"
            " server, such as a callback that measures gradients, work in a simulation only. Leave them out of"
            " callbacks."
        )
