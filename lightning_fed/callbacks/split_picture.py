"""A picture of the data's split among clients, in TensorBoard."""

from importlib.util import find_spec

from lightning_fed.callbacks.base import FederatedCallback, boards
from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.skew_report import skew_table, split_figure


class SplitPicture(FederatedCallback):
    """Write the split of the data to TensorBoard when a fit starts.

    It writes the figure of ``split_figure`` and the table of ``skew_table``, with the tag ``split`` and the number of
    completed rounds as the step. A resumed fit writes them again, since its logs usually go to another folder. The run
    itself stays the same, bit for bit. Every client is visited for its labels. This takes long if millions of them are
    built on demand. Without this callback, :class:`RoundLogger` writes both if it knows the labels.

    Args:
        max_clients: The largest number of clients whose bubbles are drawn, evenly spaced among all.

    Raises:
        FederatedError: When a fit starts, if there is no ``TensorBoardLogger``, matplotlib is missing, or the clients'
            labels cannot be found.
    """

    def __init__(self, max_clients: int = 50) -> None:
        self.max_clients = check_count("SplitPicture", "max_clients", max_clients, least=1)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse loggers that cannot show a figure, except with ``fast_dev_run``, which removes all loggers."""
        if stage == "fit" and not trainer.fast_dev_run and not boards(trainer):
            found = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
            raise FederatedError(
                f"SplitPicture draws for TensorBoard, and the trainer's loggers are: {found}. Give"
                " FederatedTrainer(logger=TensorBoardLogger(...)), or draw with `lightning-fed data`."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw on rank 0."""
        shown_on = boards(trainer)
        if not trainer.is_global_zero or not shown_on:
            return
        data, step = trainer.datamodule, trainer.fit_loop.round
        with preserved_random_state(pl_module.device):  # clients built on demand may draw random numbers
            table = "\n".join(f"    {line}" for line in str(skew_table(data)).splitlines())
            figure = split_figure(data, self.max_clients)
            for board in shown_on:
                board.experiment.add_figure("split", figure, step, close=False)  # pyplot does not manage it
                board.experiment.add_text("split", table, step)


def is_cheap(trainer: pl.Trainer) -> bool:
    """Return whether no callback draws the split, and drawing visits no clients: the partition used the labels."""
    data = trainer.datamodule
    if not isinstance(data, FederatedDataModule) or data._overrides("client_dataset", "client_dataloader"):
        return False
    if find_spec("matplotlib") is None or any(isinstance(callback, SplitPicture) for callback in trainer.callbacks):
        return False
    return data.clients is not None and data.clients.knows_labels and data.num_clients <= 10_000  # fast to count
