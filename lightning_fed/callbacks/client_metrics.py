"""The server model's metrics on single clients, before and after a few local steps."""

from typing import Any, Literal

from lightning_fed.callbacks.base import write_histogram
from lightning_fed.callbacks.measures import ClientMeasure, write_table
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden, rank_zero_warn
from lightning_fed.core.arguments import check_count, check_one_of, check_texts
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.metrics import spread


class ClientAccuracy(ClientMeasure):
    r"""Measure the server model on each client's own examples with the module's ``validation_step``.

    It logs, over the clients, ``clients/<monitor>/mean``, ``std``, ``worst_10`` (the mean over the worst tenth of the
    clients), ``p10`` and ``p90`` (percentiles), with equal weights: see :func:`lightning_fed.metrics.spread`. All
    values that ``validation_step`` logs go to ``clients/round_<completed rounds>.csv`` in the log directory, by client.
    With ``on="train"`` the tag and the folder are ``clients_train``. TensorBoard shows a histogram.

    If clients have personal models (personal parameters, Ditto, APFL, pFedMe), these are measured too, under the tag
    ``clients_own``.

    ``validation_step`` runs in eval mode, without gradients, on batches of ``eval_batch_size`` examples. Values are
    reduced as in Lightning's validation. Each client has new torchmetrics objects.

    Args:
        monitor: The metric to summarize, as ``validation_step`` names it.
        mode: "max" if more is better, "min" if less is. It decides which clients are the worst.
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure, a fixed sample of those that have examples; all by default.
        on: "val" for the clients' own validation sets (``client_val`` or ``client_val_dataset`` of the data module),
            "train" for their training sets.

    Attributes:
        table: All values logged in the last measurement, by client id and name.
        own_table: The same for clients' personal models.

    Raises:
        FederatedError: If an argument is not allowed, the module has no ``validation_step`` or does not log ``monitor``
            in it, or no client has a validation set.
    """

    tag: str = "clients"
    steps = 0
    """The local steps before a client is measured."""

    def __init__(
        self,
        monitor: str = "val_acc",
        mode: Literal["max", "min"] = "max",
        every_n_rounds: int = 1,
        clients: int | None = None,
        on: Literal["val", "train"] = "val",
    ) -> None:
        super().__init__(every_n_rounds, clients)
        self.mode: Literal["max", "min"] = check_one_of(self, "mode", mode, ("max", "min"))
        self.on = check_one_of(self, "on", on, ("val", "train"))
        check_texts(self, monitor=monitor)
        self.monitor = monitor
        self.table: dict[ClientId, dict[str, float]] = {}
        self.own_table: dict[ClientId, dict[str, float]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the clients to measure; raise without data or ``validation_step``."""
        if not is_overridden("validation_step", pl_module, pl.LightningModule):
            raise FederatedError(
                f"{type(self).__name__} measures with validation_step, which {type(pl_module).__name__} does not have."
                f" Write one that logs {self.monitor!r}."
            )
        super().on_train_start(trainer, pl_module)

    @property
    def written(self) -> dict[str, Any]:
        """The outputs by name: the monitored metric, and tables of all metrics of its clients."""
        folder = self._folder
        return {f"{folder}/{self.monitor}": self, f"{folder}/round_<n>.csv": (self.clients, self.steps)}

    @property
    def _folder(self) -> str:
        return self.tag if self.on == "val" else f"{self.tag}_train"

    @property
    def needs(self) -> str:
        """The condition for a client to be measured, in words."""
        return super().needs if self.on == "train" else "a validation set"

    def refusal(self) -> FederatedError:
        """Return the error that no client can be measured."""
        if self.on == "train":
            return super().refusal()
        return FederatedError(
            f"{type(self).__name__}(on='val') needs clients with their own validation sets, and there are none. Pass"
            " client_val to the data module, or override client_val_dataset. To measure on their training sets, set"
            " on='train'."
        )

    def can_measure(self, trainer: pl.Trainer, client_id: ClientId) -> bool:
        """Return whether the client has examples to be measured on."""
        if self.on == "train":
            return super().can_measure(trainer, client_id)
        dataset = trainer.datamodule.client_val_dataset(client_id)
        return dataset is not None and len(dataset) > 0

    def measure(self, trainer: pl.Trainer) -> None:
        """Measure every client, log the summary and write the table."""
        loop, tag = trainer.fit_loop, self._folder
        self.table = loop.evaluate_clients(self.measured, self.on, self.steps)
        self._log(trainer, tag, self.table)
        if loop.settings.has_own_models:
            self.own_table = loop.evaluate_clients(self.measured, self.on, self.steps, own=True)
            self._log(trainer, f"{tag}_own", self.own_table)

    def _log(self, trainer: pl.Trainer, tag: str, table: dict[ClientId, dict[str, float]]) -> None:
        if not table:
            return  # no site has answered
        without = [i for i, logged in table.items() if self.monitor not in logged]
        for i in without:
            what = f"{type(self).__name__}(monitor={self.monitor!r}): validation_step logs {sorted(table[i])[:20]} for"
            if len(without) == len(table) or not trainer.fit_loop.settings.drops_failed:
                raise FederatedError(f"{what} client {i!r}. Set monitor to one of these.")
            rank_zero_warn(f"{what} client {i!r}, which is left out.")  # a site may send anything
            del table[i]
        found = spread(values := [logged[self.monitor] for logged in table.values()], self.mode)
        trainer.fit_loop.log_round(found.named(f"{tag}/{self.monitor}"))
        write_histogram(trainer, f"{tag}/{self.monitor}", values)
        names = sorted({name for logged in table.values() for name in logged})
        rows = [[i, *(logged.get(name, "") for name in names)] for i, logged in table.items()]
        write_table(trainer, tag, ["client", *names], rows)


class PersonalizedAccuracy(ClientAccuracy):
    r"""Measure each client after a few local steps from the server model.

    It logs like :class:`ClientAccuracy`, under the tags ``personalized`` and ``personalized_own``. It first fine-tunes
    on the client's training set: a new optimizer of the user takes plain steps on shuffled batches of ``batch_size``
    examples. The run's gradient clipping applies, the method's correction does not. A step is one batch: there is no
    accumulation, and the hooks of module and callbacks around a step are not called. Jiang et al., *Improving Federated
    Learning Personalization via Model Agnostic Meta Learning*, 2019 (https://arxiv.org/abs/1909.12488), compare methods
    by this number.

    Args:
        monitor: The metric to summarize, as ``validation_step`` names it.
        mode: "max" if more is better, "min" if less is.
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure, a fixed sample of those that have examples; all by default.
        on: "val" for the clients' own validation sets, "train" for their training sets.
        local_steps: The steps of fine-tuning.

    Raises:
        FederatedError: As :class:`ClientAccuracy`, or if the number of steps is not positive.
    """

    tag = "personalized"
    needs_loss = True

    def __init__(
        self,
        monitor: str = "val_acc",
        mode: Literal["max", "min"] = "max",
        every_n_rounds: int = 1,
        clients: int | None = None,
        on: Literal["val", "train"] = "val",
        local_steps: int = 5,
    ) -> None:
        super().__init__(monitor, mode, every_n_rounds, clients, on)
        self.steps = self.local_steps = check_count(self, "local_steps", local_steps, least=1)

    @property
    def needs(self) -> str:
        """The condition for a client to be measured, in words."""
        return super().needs if self.on == "train" else "a validation set and training examples"

    def can_measure(self, trainer: pl.Trainer, client_id: ClientId) -> bool:
        """Return whether the client has examples to train on first, and examples to be measured on."""
        has_examples = bool(trainer.fit_loop.population.size(client_id) > 0)
        return has_examples and super().can_measure(trainer, client_id)
