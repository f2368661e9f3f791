"""The facts that a server and its sites must share: the settings and module of new trainers."""

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_fed._version import __version__
from lightning_fed.callbacks import ClientModels, Inexactness, Measure
from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.plain import plain_options
from lightning_fed.deploy.message import digest, printable
from lightning_fed.engines.gradients import buffer_owners
from lightning_fed.engines.lora import lora_a
from lightning_fed.engines.prepared import parameters_as_buffers, personal_names
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.settings.settings import Settings

_LIBRARIES = ("version of Lightning", "version of PyTorch")
_NOISE = ("noise_multiplier", "max_grad_norm", "sampling")  # delta and examples_at_once change no answer
_HOW = ("foreach", "fused", "capturable", "differentiable")  # options of optimizers that change only speed
_log = logging.getLogger("lightning_fed.deploy.site")


def check_single(trainer: Any, need: str, rounds: int = 0) -> None:
    """Refuse a trainer of several processes, and one that has run ``rounds``."""
    if trainer.world_size > 1 or rounds:
        found = f"{trainer.world_size} processes" if trainer.world_size > 1 else f"{rounds} rounds done"
        raise FederatedError(f"{need}, found {found}. Make a new FederatedTrainer with devices=1.")


def facts_of(trainer: Any, module: pl.LightningModule) -> dict[str, str]:
    """Return the facts that a server and its sites must share, as texts, before the module is trained."""
    settings: Settings = trainer.fit_loop.settings
    if any(isinstance(callback, pl.callbacks.GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise FederatedError(
            "GradientAccumulationScheduler changes the local work from round to round, and sites are not notified."
            " Set accumulate_grad_batches=... for all rounds."
        )
    if any(isinstance(callback, ClientModels) for callback in trainer.callbacks):
        raise FederatedError(
            "ClientModels saves models of simulated clients, and the clients of this run are on sites, which keep their"
            " models. Leave it out of the callbacks of the server and of all sites."
        )
    for callback in trainer.callbacks:
        is_measure = isinstance(callback, (Measure, Inexactness))
        if is_measure and type(callback).on_client_end is not FederatedCallback.on_client_end:
            raise FederatedError(
                f"{type(callback).__name__} follows the local work of simulated clients, and the clients of this run"
                " are on sites. Leave it out of the callbacks of the server and of all sites, or measure in a"
                " simulation."
            )
    parameters = [f"{n} {list(p.shape)} {p.dtype}" for n, p in module.named_parameters() if p.requires_grad]
    work, private, aggregator = settings.work(), settings.client_privacy, settings.aggregator
    bound = aggregator.max_norm if isinstance(aggregator, DifferentialPrivacy) else None
    layers = "\n".join(f"{name}: {layer}" for name, layer in module.named_children())
    given = plain_options({str(name): value for name, value in module.hparams.items() if str(name)[:1] != "_"})
    return {
        "version of lightning_fed": __version__,
        "version of Lightning": pl.__version__,
        "version of PyTorch": torch.__version__.partition("+")[0],  # the rest names the device
        "method": type(settings.algorithm).__name__,
        "trained parameters": f"{len(parameters)} with the checksum {_checksum(parameters)}",
        "layers": re.sub(" at 0x[0-9a-f]+", "", layers),
        "hyperparameters": "\n".join(f"{name}={value!r}" for name, value in sorted(given.items())) or "none",
        "average of LoRA": settings.lora,
        "frozen parameters": _digest(_frozen(settings, module)),
        "buffers at the start": _digest(_buffers(settings, module)),
        "parameters as buffers": repr(list(settings.as_buffers)),
        "personal parameters": repr(list(settings.personal)),
        "parameters at the start that stay with the client": _digest(_personal(settings, module)),
        "seed": str(settings.seed),
        "local_epochs": work["local_epochs"],
        "local_steps": work["local_steps"],
        "limit_train_batches": str(trainer.limit_train_batches),
        **changeable_facts(trainer),
        "precision": str(trainer.precision),
        "treatment of buffers": settings.buffers,
        "local_schedule": str(settings.local_schedule),
        "local_optimizer_state": "keep" if settings.keeps_solver else "reset",
        "compression": repr(settings.compression),
        "attack": work["attack"],
        "max_norm of DifferentialPrivacy": str(bound),
        "client_privacy": str({name: getattr(private, name, None) for name in _NOISE}),
    }


def changeable_facts(trainer: Any) -> dict[str, str]:
    """Return the facts that a callback can change between rounds without notice to the sites."""
    algorithm, corrected = trainer.fit_loop.settings.algorithm, trainer.fit_loop.corrected_clip
    clip, by = corrected or (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    return {
        "method options": repr(sorted(plain_options(algorithm.options()).items())),
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "gradient_clip_val": f"{clip} by {getattr(by, 'value', by or 'norm')}",
        "gradient_clip_on": "gradient" if corrected is None else "corrected",
    }


def optimizer_facts(trainer: Any) -> dict[str, str]:
    """Return the options of optimizer and schedules, which are the same in every round and after a restart.

    Raise for schedules that the module steps itself, since sites do not call the hooks that step them.
    """
    module = trainer.lightning_module
    if trainer.lr_scheduler_configs and not module.automatic_optimization:
        raise FederatedError(
            f"{type(module).__name__} uses manual optimization and steps its schedules itself, in hooks that sites do"
            " not call: their rates in a round are not known there. Return optimizers without schedules."
        )
    groups, names = [], {parameter: name for name, parameter in module.named_parameters()}
    for optimizer, group in [(one, group) for one in trainer.optimizers for group in one.param_groups]:
        moved = {"lr": group.get("initial_lr", group.get("lr"))}  # a schedule may move these three
        moved |= {name: optimizer.defaults[name] for name in ("momentum", "betas") if name in optimizer.defaults}
        options = {name: group[name] for name in optimizer.defaults if name not in _HOW} | moved
        own = _checksum(names.get(parameter, "") for parameter in group["params"])
        what = f"{len(group['params'])} parameters ({own})"
        groups.append(f"{type(optimizer).__name__} of {what} with {_plain(options)}")
    schedules = []
    for config in trainer.lr_scheduler_configs:
        given = inspect.signature(type(config.scheduler)).parameters.keys() - {"last_epoch"}
        options = {name: value for name, value in config.scheduler.state_dict().items() if name in given}
        schedules.append(f"{type(config.scheduler).__name__} every {config.frequency} with {_plain(options)}")
    return {
        "optimizer": "; ".join(groups),
        "schedules": "; ".join(schedules) or "none",
    }


def rates_of(trainer: Any) -> str:
    """Return the current learning rate of each parameter group, with which clients begin."""
    return _plain([group.get("lr") for one in trainer.optimizers for group in one.param_groups])


def check_facts(mine: Mapping[str, str], servers: Mapping[str, str], client: object) -> None:
    """Refuse a server whose facts differ from a client's site; warn if only a library's patch version differs."""
    for name, own in sorted(mine.items()):
        other = servers.get(name)
        if own == other:
            continue
        pairs = zip_longest(own.split("\n"), str(other).split("\n"))  # show the first line that differs
        mine_is, servers_is = next((pair for pair in pairs if pair[0] != pair[1]), (own, "not given"))
        found = f"its {name} is {str(mine_is).strip()}, the server's is {printable(str(servers_is).strip(), 500)}"
        if name in _LIBRARIES and other and own.split(".")[:2] == other.split(".")[:2]:
            _log.warning("The site of client %r: %s. The last bits of results may differ.", client, found)
            continue
        remedy = "Start both with the same model and the same trainer arguments."
        if name.startswith("version"):
            remedy = "Install the same version on both."
        if name == "hyperparameters":
            remedy = "Give both the same, or leave it out of save_hyperparameters(ignore=[...])."
        raise FederatedError(f"The site of client {client!r} has other settings than the server: {found}. {remedy}")


def _plain(options: Any) -> str:
    """Return options as text: plain values as they are, and anything else as its type."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else type(value).__name__

    return json.dumps(options, sort_keys=True, skipkeys=True, default=plain)


def _personal(settings: Settings, module: pl.LightningModule) -> dict[str, Tensor]:
    trained: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    buffers = buffer_owners(module) | parameters_as_buffers(settings, module, ())
    names, _ = personal_names(settings, module, trained, buffers)
    return trained if settings.algorithm.init_client_at_start else {name: trained[name] for name in names}


def _buffers(settings: Settings, module: pl.LightningModule) -> dict[str, Tensor]:
    own = parameters_as_buffers(settings, module, ())
    return {**dict(module.named_buffers()), **{name: owner.get_parameter(key) for name, (owner, key) in own.items()}}


def _frozen(settings: Settings, module: pl.LightningModule) -> dict[str, Tensor]:
    frozen: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return {**frozen, **(lora_a(module) if settings.lora == "frozen_a" else {})}


def _digest(values: Mapping[str, Tensor]) -> str:
    return _checksum(f"{name} {digest(values[name])}" for name in sorted(values))


def _checksum(texts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
