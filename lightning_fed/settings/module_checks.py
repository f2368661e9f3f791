"""Checks before the first round for modules, optimizers and data that rounds do not support."""

import inspect

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl, refuse_foreign
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.torch_optimizers import is_plain_sgd, refuse_unsupported
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.server.aggregation.base import Aggregator

__all__ = [
    "check_batch_statistics",
    "check_buffers",
    "check_module",
    "check_optimization",
    "no_federated_data",
]


def no_federated_data(found: object) -> FederatedError:
    """Return the error for data that are not split into clients; ``found`` is the given data, if any."""
    what = "no datamodule" if found is None else kind_of(found)
    if isinstance(found, DataLoader):
        return FederatedError(
            "FederatedTrainer.fit needs to know the clients, found a DataLoader. Say how it is split among them:"
            " trainer.fit(model, FederatedDataModule.from_loader(loader, partition=Dirichlet(num_clients=10,"
            " alpha=0.5), val=val_loader)), with Dirichlet or another partition of lightning_fed.data."
        )
    return FederatedError(
        f"FederatedTrainer.fit needs a FederatedDataModule, found {what}. Pass trainer.fit(model,"
        " FederatedDataModule(clients=[...])) or FederatedDataModule(train=..., partition=...)."
    )


def check_module(trainer: pl.Trainer) -> None:
    """Raise for modules and data that rounds do not support."""
    module = trainer.lightning_module
    name = type(module).__name__
    refuse_foreign(trainer.callbacks)  # including the module's own, from configure_callbacks
    if not isinstance(trainer.datamodule, FederatedDataModule):
        raise no_federated_data(trainer.datamodule)
    if type(trainer.datamodule).train_dataloader is not FederatedDataModule.train_dataloader:
        raise FederatedError(
            f"{type(trainer.datamodule).__name__} overrides train_dataloader, which no round calls: every client has"
            " its own loader. Override client_dataset(client_id), or client_dataloader(client_id, generator), or pass"
            " collate_fn, transform or augment. For a centralised baseline use Lightning's own Trainer."
        )
    if not module.automatic_optimization:
        raise FederatedError(
            f"{name} uses manual optimization, so the method cannot correct the gradient between backward and step."
            " Remove `self.automatic_optimization = False` and return the loss from training_step."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise FederatedError(f"{name}.training_step(dataloader_iter) is not supported: take `batch` instead.")
    lazy = next((key for key, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise FederatedError(
            f"{name}.{lazy} has no shape yet, and all clients start from the same parameters. Give the layer its sizes,"
            " or run an example through the module before the fit."
        )


def check_batch_statistics(module: pl.LightningModule) -> None:
    """Raise for layers that compute batch statistics, since every process sees a part of a batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise FederatedError(
                f"{name} ({type(layer).__name__}) normalises by the statistics of a batch, and with strategy='ddp' each"
                " process has a part of the batch: results would depend on the number of processes. Use GroupNorm, or"
                " strategy='clients', which leaves batches whole."
            )


def check_buffers(aggregator: Aggregator, buffers: Buffers) -> None:
    """Raise for exchanged buffers, which the aggregator does not cover."""
    sent = [name for name in buffers.server if name not in buffers.personal]
    if buffers.mode != "server" and sent:
        raise FederatedError(
            f"aggregator={aggregator!r} cannot be combined with buffers={buffers.mode!r}: it does not replace the mean"
            f" of buffers such as {sent[0]!r}. Set buffers='server', or use layers without running statistics, such as"
            " GroupNorm."
        )


def check_optimization(trainer: pl.Trainer, algorithm: Algorithm) -> Optimizer:
    """Return the single local optimizer.

    Args:
        trainer: The trainer, whose strategy has set up optimizers and schedules.
        algorithm: The method.

    Raises:
        FederatedError: If there is no optimizer, it does not support corrections, a schedule steps within a client, or
            both the method and the optimizer precondition gradients.
    """
    name = f"{type(trainer.lightning_module).__name__}.configure_optimizers()"
    (optimizer,) = trainer.optimizers  # Lightning has already rejected several
    if type(optimizer).__name__ == "_MockOptimizer":
        raise FederatedError(f"{name} returned None; return a torch optimizer, such as SGD.")
    refuse_unsupported(optimizer, f"{name}: the local optimizer")
    for config in trainer.lr_scheduler_configs:
        if config.interval != "epoch":
            raise FederatedError(
                f"The LR scheduler {type(config.scheduler).__name__} has interval={config.interval!r}: a schedule over"
                " the local steps of one client would restart in every round. Use interval='epoch' (the default), which"
                " steps it once a round."
            )
    base = getattr(algorithm, "base", None)
    if base is not None and not is_plain_sgd(optimizer):
        raise FederatedError(
            f"{type(algorithm).__name__}(base={type(base).__name__}) preconditions the gradient itself;"
            f" {name} returned {type(optimizer).__name__}, which would do so"
            " once more. Return SGD with momentum 0, or drop `base` to mimic your own optimizer."
        )
    return optimizer
