"""Checks before the first round for modules, optimizers and data that rounds do not support."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fed.algorithms import Ditto, PFedMe
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl, refuse_foreign
from lightning_fed.compat.private import is_overridden
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.torch_optimizers import (
    JointOptimizer,
    copies_of_parameters,
    inner_optimizers,
    is_plain_sgd,
    refuse_lost_statistics,
    refuse_unsupported,
)
from lightning_fed.core.types import LocalScheduleMode
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.files.tables import ClientTable
from lightning_fed.server.aggregation.mean import Aggregator
from lightning_fed.server.oort import OortSampler
from lightning_fed.server.privacy import ClientPrivacy
from lightning_fed.strategies.ddp import WithinClientStrategy


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
    if torch.is_inference_mode_enabled():  # else the first client would be blamed
        raise FederatedError(
            "FederatedTrainer.fit was called within torch.inference_mode(), where PyTorch computes no gradients. Call"
            " it outside."
        )
    if any(map(torch.is_autocast_enabled, {"cpu", module.device.type} - {"meta"})):
        raise FederatedError(
            "FederatedTrainer.fit was called within torch.autocast(), which keeps converted copies of the weights until"
            " it is left: later local steps would have wrong gradients. Call it outside, and pass"
            " precision='bf16-mixed', say, to the trainer."
        )
    if not module.automatic_optimization:
        _check_manual_optimization(trainer)
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise FederatedError(f"{name}.training_step(dataloader_iter) is not supported: take `batch` instead.")
    if is_overridden("configure_gradient_clipping", module, pl.LightningModule):
        _check_own_clipping(trainer)
    for key, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise FederatedError(
                f"{name}.{key} has no shape yet, and all clients start from the same parameters. Give the layer its"
                " sizes, or run an example through the module before the fit."
            )
        if value.is_inference():
            raise FederatedError(
                f"{key!r} of {name} was made within torch.inference_mode(), and PyTorch cannot train such tensors. Make"
                " the module outside. If validate() or predict() has made it before the fit, pass inference_mode=False"
                " to the trainer that did."
            )
        if value.layout != torch.strided or value.is_nested:
            kind, remedy = (
                ("nested", "to_padded_tensor(...)")
                if value.is_nested
                else ("sparse", "to_dense() on it, or register its indices and values, and make it of them in forward")
            )
            raise FederatedError(
                f"{name}.{key} is a {kind} tensor ({value.layout}), and parameters and buffers must be dense, because"
                f" clients start from copies of them. Call {remedy}."
            )
    if (privacy := trainer.fit_loop.settings.client_privacy) is not None:
        _check_private_module(trainer, privacy)


def _check_manual_optimization(trainer: pl.Trainer) -> None:
    """Raise for settings that need the loss from ``training_step``, or steps that the trainer takes."""
    settings, what = trainer.fit_loop.settings, f"{type(trainer.lightning_module).__name__} uses manual optimization"
    method = settings.algorithm
    if (use := method.reads_beyond_steps) is not None:
        raise FederatedError(
            f"{what}: its training_step steps the optimizer, and is not a function of the parameters that returns the"
            f" loss. It cannot be combined with {method!r}, {use}. Use a method that corrects the gradient of each step"
            " alone, such as FedAvg, FedProx, Scaffold, FedDyn or FedCM. Or leave steps to the trainer: remove"
            " `self.automatic_optimization = False` and return the loss."
        )
    measure = next((type(one).__name__ for one in trainer.callbacks if getattr(one, "needs_loss", False)), None)
    reasons = {
        f"the callback {measure}, which measures the loss or its gradient": (measure is not None, "Remove it"),
        "engine='vectorized'": (settings.engine == "vectorized", "Set engine='sequential'"),
        "client_privacy=...": (settings.client_privacy is not None, "Leave it unset"),
        f"local_schedule={settings.local_schedule!r}": (
            settings.local_schedule is not None,
            "Leave it unset, and step the schedule in on_train_epoch_end, once a round",
        ),
        f"sampler={settings.sampler!r}, which chooses clients by their losses": (
            hasattr(settings.sampler, "needs_losses_of") or isinstance(settings.sampler, OortSampler),
            "Use another sampler",
        ),
        "strategy='ddp'": (isinstance(trainer.strategy, WithinClientStrategy), "Set strategy='clients'"),
        "gradient_clip_val": (
            bool(trainer.gradient_clip_val) or trainer.fit_loop.corrected_clip is not None,
            "Leave it unset, and call self.clip_gradients in training_step",
        ),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches != 1, "Leave it at 1, and accumulate yourself"),
    }
    for setting, (is_set, remedy) in reasons.items():
        if is_set:
            raise FederatedError(f"{what}, which cannot be combined with {setting}. {remedy}.")


def _check_private_module(trainer: pl.Trainer, privacy: ClientPrivacy) -> None:
    """Raise for a module or data that do not allow private gradients of single examples."""
    module, what = trainer.lightning_module, f"client_privacy={privacy!r} cannot be combined with"
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise FederatedError(
                f"{what} {name} ({type(layer).__name__}), which mixes the examples of a batch: no example would have"
                " its own gradient. Use GroupNorm, or opacus.validators.ModuleValidator.fix(network)."
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise FederatedError(
                f"{what} the parameter {name!r} of type {parameter.dtype}: its rounded sums do not keep the bound of"
                " clipped gradients. Call module.float() before the fit."
            )
    data = trainer.datamodule
    rules = data.missing if isinstance(data, ClientTable) else None
    if "client_mean" in (rules.values() if isinstance(rules, Mapping) else [rules]):
        raise FederatedError(
            f"{what} missing='client_mean': the mean of a client's rows would put each of them into the others. Set a"
            " number or 'indicator'."
        )
    names = ("client_dataloader", "client_batches")
    own = [name for name in names if getattr(type(data), name) is not getattr(FederatedDataModule, name)]
    if own:
        raise FederatedError(
            f"{what} {type(data).__name__}.{own[0]}: how often your own loader uses an example is unknown. Override"
            " client_dataset(client_id) instead."
        )


def _check_own_clipping(trainer: pl.Trainer) -> None:
    """Raise if the module's own clipping would not see the gradient of the step."""
    hook, loop = f"{type(trainer.lightning_module).__name__}.configure_gradient_clipping", trainer.fit_loop
    method = loop.settings.algorithm
    if loop.corrected_clip is not None:
        raise FederatedError(
            f"gradient_clip_on='corrected' cannot be combined with {hook}, which is called before the correction."
            " Remove it, and the trainer clips the corrected gradient by gradient_clip_val. Or leave gradient_clip_on"
            " at 'gradient'."
        )
    if method.looks_ahead:
        raise FederatedError(
            f"{hook} would clip the first gradient of {type(method).__name__}, which determines the point of the second"
            " one, and not the step. Remove it, and pass gradient_clip_val with gradient_clip_on='corrected', which"
            " clips the step."
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


def check_memory(module: nn.Module, trained: Mapping[str, Tensor], others: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a trained parameter shares memory with another tensor of the module: the run would separate them.

    Args:
        module: The module.
        trained: The trained parameters by name.
        others: All tensors of the module by name: parameters, buffers, and those in other attributes.
    """
    devices = {value.device for value in trained.values()}
    named = {id(value): (name, value) for name, value in (*others, *trained.items())}  # each tensor once
    places = []
    for name, value in named.values():
        if f"{name}_orig" in trained:  # torch.nn.utils.spectral_norm: each pass assigns the weight again
            continue
        is_dense = value.layout is torch.strided and not value.is_nested
        if value.device in devices and is_dense and not is_lazy(value) and value.numel():
            places.append((value.data_ptr(), _end_of(value), name, value))
    places.sort(key=itemgetter(0))
    for i, (_, end, name, value) in enumerate(places):
        for j in range(i + 1, len(places)):
            start, _, other, theirs = places[j]
            if start >= end:
                break
            if (name in trained or other in trained) and _overlap(value, theirs):
                ours, copy = (name, other) if name in trained else (other, name)
                raise FederatedError(
                    f"{type(module).__name__} has {copy!r} in the memory of {ours!r}, which the optimizer trains, as"
                    " after nn.Parameter(weight), weight.t(), weight.data or weight.detach(). Trained parameters move"
                    " into one vector, which would part the two. Use the parameter itself in both places, as in"
                    " self.b.weight = self.a.weight or F.linear(x, self.a.weight.t()), or clone() it."
                )


def _end_of(value: Tensor) -> int:
    """Return the address after a tensor's last byte."""
    steps = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr() + (steps + 1) * value.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a byte. Columns of a matrix do not, although their addresses alternate."""
    start = min(one.data_ptr(), other.data_ptr())
    taken = torch.zeros(max(_end_of(one), _end_of(other)) - start, dtype=torch.bool)
    bytes_of_one, bytes_of_other = (
        taken.as_strided(
            (*value.shape, value.element_size()),
            (*(step * value.element_size() for step in value.stride()), 1),
            value.data_ptr() - start,
        )
        for value in (one, other)
    )
    bytes_of_one.fill_(True)
    return bool(bytes_of_other.any())


def check_buffers(aggregator: Aggregator, buffers: Buffers) -> None:
    """Raise for exchanged buffers, which the aggregator does not cover."""
    sent = [name for name in buffers.server if name not in buffers.personal]
    if buffers.mode != "server" and sent:
        raise FederatedError(
            f"{aggregator.argument}={aggregator!r} cannot be combined with buffers={buffers.mode!r}: it does not"
            f" replace the mean of buffers such as {sent[0]!r}. Set buffers='server', or use layers without running"
            " statistics, such as GroupNorm."
        )


def check_optimization(trainer: pl.Trainer, algorithm: Algorithm, keeps_state: bool = False) -> Optimizer:
    """Return the local optimizer; raise if clients would share its state, or the method cannot use it."""
    name = f"{type(trainer.lightning_module).__name__}.configure_optimizers()"
    for optimizer in trainer.optimizers:
        if type(optimizer).__name__ == "_MockOptimizer":
            raise FederatedError(f"{name} returned None; return a torch optimizer, such as SGD.")
        refuse_unsupported(optimizer, f"{name}: the local optimizer")
        if not type(optimizer).__module__.startswith("torch.optim."):
            keeper = type(algorithm).__name__ if algorithm.uses_solver_state else None
            _check_state(optimizer, name, "local_optimizer_state='keep'" if keeps_state else keeper)
    # Lightning rejects several optimizers unless the module steps them itself
    optimizer = _joined(trainer.optimizers, name) if len(trainer.optimizers) > 1 else trainer.optimizers[0]
    base = getattr(algorithm, "base", None)
    if base is not None and not is_plain_sgd(optimizer):
        raise FederatedError(
            f"{type(algorithm).__name__}(base={type(base).__name__}) preconditions the gradient itself;"
            f" {name} returned {type(optimizer).__name__}, which would do so"
            " once more. Return SGD with momentum 0, or drop `base` to mimic your own optimizer."
        )
    if isinstance(algorithm, Ditto | PFedMe) and algorithm.personal_rate != 1:
        _check_personal_rate(trainer, algorithm, optimizer, name)
    return optimizer


def _joined(optimizers: Sequence[Optimizer], name: str) -> Optimizer:
    """Join optimizers into one; raise if two of them train the same parameter, since a step has one rate for it."""
    seen: set[int] = set()
    for optimizer in optimizers:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own & seen:
            raise FederatedError(
                f"{name} returned {len(optimizers)} optimizers, and two of them share a parameter: a method"
                " corrects the steps of one optimizer for each parameter. Give every parameter to one of them."
            )
        seen |= own
    return JointOptimizer(optimizers)


def _check_personal_rate(trainer: pl.Trainer, algorithm: Ditto | PFedMe, optimizer: Optimizer, name: str) -> None:
    """Raise unless a factor of the gradients of personal models acts as a factor of their rates."""
    use = f"{type(algorithm).__name__}(personal_rate={algorithm.personal_rate!r})"
    if type(optimizer) is not torch.optim.SGD:
        raise FederatedError(
            f"{use} multiplies the gradients of personal models, which makes another rate for SGD alone. {name}"
            f" returned {type(optimizer).__name__}, which may divide the factor out again. Return torch.optim.SGD, or"
            " leave personal_rate at 1."
        )
    if trainer.fit_loop.corrected_clip is not None:
        raise FederatedError(
            f"{use} multiplies the gradients of personal models, and gradient_clip_on='corrected' would clip the"
            " products, to a length that depends on the factor. Leave gradient_clip_val unset, or personal_rate at 1."
        )


def _check_state(optimizer: Optimizer, name: str, keeper: str | None) -> None:
    """Raise if a third-party optimizer passes state between clients; ``keeper`` names what keeps its state, if any."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not isinstance(rate := group.get("lr"), (Real, Tensor)):
            raise FederatedError(
                f"{name} returned {kind}, whose parameter group has lr={rate!r}: methods, schedules and logs read the"
                " rate of every group there. Give it a number, such as lr=1e-3, and turn off an option that computes"
                " the rate, such as relative_step. If it takes no lr, return another optimizer."
            )
    if "param_groups" not in (found := optimizer.state_dict()):
        raise FederatedError(
            f"{name} returned {kind}, whose state_dict() has {', '.join(map(repr, found))} instead of 'param_groups':"
            " checkpoints and rounds read the options of its groups there. Return the optimizer that it wraps, or add"
            " them in state_dict() and load_state_dict()."
        )
    if (attribute := copies_of_parameters(optimizer)) is not None:
        raise FederatedError(
            f"{name} returned {kind}, whose attribute {attribute!r} holds copies of the parameters. Clients start from"
            " the server's, with a new optimizer each, and these copies would stay. Let the optimizer make them in its"
            " first step, in self.state[parameter]."
        )
    is_shared = any(getattr(value, "state", None) is optimizer.state for value in vars(optimizer).values())
    if not is_shared and any(entry != {} for entry in optimizer.state.values()):
        raise FederatedError(
            f"{name} returned {kind}, whose state is not empty when it is created. Every client starts with an"
            " empty one. Let the optimizer fill self.state[parameter] in its first step, or return another optimizer."
        )
    if keeper is not None and (inner := inner_optimizers(optimizer)):
        raise FederatedError(
            f"{name} returned {kind}, which wraps {type(inner[0]).__name__}. {keeper} keeps the state of one optimizer:"
            f" return {type(inner[0]).__name__} alone."
        )
    if keeper is not None:
        refuse_lost_statistics(optimizer, keeper)


def check_schedules(trainer: pl.Trainer, local_schedule: LocalScheduleMode | None) -> None:
    """Raise if schedules by local step exist without ``local_schedule``, or ``local_schedule`` without them."""
    by_step = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
    by_round = [config for config in trainer.lr_scheduler_configs if config.interval != "step"]
    if not by_step and local_schedule is not None:
        names = ", ".join(type(config.scheduler).__name__ for config in by_round)
        found = f"{names}, which steps once a round" if names else "no schedule"
        raise FederatedError(
            f"local_schedule={local_schedule!r} is for schedules with interval='step', and"
            f" {type(trainer.lightning_module).__name__}.configure_optimizers() returns"
            f" {found}. Leave local_schedule unset, or return {{'scheduler': ..., 'interval': 'step'}}."
        )
    if not by_step:
        return
    name = type(by_step[0].scheduler).__name__
    if local_schedule is None:
        raise FederatedError(
            f"The LR scheduler {name} has interval='step': it steps after each local step, and clients take theirs in"
            " every round from the start. Choose what it counts: local_schedule='restart' (the steps of a client in the"
            " round), 'continue' (the client's own steps in all its rounds) or 'total' (the steps of the run). Or use"
            " interval='epoch' (the default): it is then stepped once a round."
        )
    if by_round:
        raise FederatedError(
            f"{name} steps by local step and {type(by_round[0].scheduler).__name__} by round: both change the rates of"
            " one local optimizer, and the result would depend on the order of clients. Use one interval for all."
        )
    if any(config.reduce_on_plateau for config in by_step):
        raise FederatedError(
            f"{name} follows a metric, and has interval='step': no metric is known between local steps. Use"
            " interval='epoch' (the default): it is then stepped once a round."
        )
