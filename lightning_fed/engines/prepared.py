"""The preparation of a module and a trainer for local work, with or without a fit."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import call, rank_zero_warn
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters, trained_parameters
from lightning_fed.engines.changes import attribute_tensors, own_tensors, parts_of
from lightning_fed.engines.device_data import DeviceData
from lightning_fed.engines.gradients import buffer_owners
from lightning_fed.engines.local_schedule import LocalSchedule
from lightning_fed.engines.lora import lora_a, lora_pairs
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.server.aggregation.lora import ExactLora
from lightning_fed.server.server import steps_not_counted
from lightning_fed.settings.method_checks import check_method, has_parts_of_users, try_hooks
from lightning_fed.settings.module_checks import check_buffers, check_memory, check_optimization, check_schedules
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.ddp import WithinClientStrategy, split_of


class PreparedModule:
    """A module ready for an engine: one vector of trained parameters, and an optimizer that corrects gradients.

    The trainer's strategy has set up module, precision and optimizer; the wrapper replaces its optimizer. Of the
    module's buffers, the run exchanges those named in ``buffers``, by default all.
    """

    def __init__(self, trainer: pl.Trainer, buffers: Collection[str] | None = None) -> None:
        self.settings: Settings = trainer.fit_loop.settings
        settings = self.settings
        self.trainer, self.algorithm, self.seed = trainer, settings.algorithm, settings.seed
        base = check_optimization(trainer, settings.algorithm, settings.keeps_solver)
        self.module = trainer.lightning_module
        self.steps_itself = not self.module.automatic_optimization
        if (trainer.lr_scheduler_configs or settings.local_schedule is not None) and not self.steps_itself:
            check_schedules(trainer, settings.local_schedule)
        check_method(settings.algorithm)
        self._frozen: list[nn.Parameter] = []  # for this run alone
        if settings.lora == "frozen_a":
            self._frozen = [p for p in lora_a(self.module).values() if p.requires_grad]
        for p in self._frozen:
            p.requires_grad_(False)
        try:
            self._lay_out(base, buffers)
        except BaseException:  # the user's next fit of this module may train them
            self._unfreeze()
            raise

    def _lay_out(self, base: Optimizer, exchanged: Collection[str] | None) -> None:
        """Make one vector of the trained parameters, and wrap their optimizer."""
        trainer, settings = self.trainer, self.settings
        named, owners = trained_parameters(self.module, base), buffer_owners(self.module)
        if exchanged is not None:
            owners = {name: owner for name, owner in owners.items() if name in exchanged}
        if settings.as_buffers:
            owners |= parameters_as_buffers(settings, self.module, dict(named))
        personal, own_buffers = frozenset[str](), frozenset[str]()
        if settings.has_personal_parameters:
            personal, own_buffers = personal_names(settings, self.module, dict(named), owners)
        everywhere = list(parts_of(self.module))
        tensors = (*own_tensors(everywhere), *attribute_tensors(everywhere))
        check_memory(self.module, dict(named), ((name, value) for (_, name), value in tensors))
        self.flat = FlatParameters(named, personal)  # the trained parameters
        if has_parts_of_users(self.algorithm):
            try_hooks(self.algorithm, self.flat.numel)
        places = [name.rpartition(".") for name in self.flat.names]
        owned = {owner: self.module.get_submodule(owner)._parameters for owner, _, _ in places}
        # a scripted module has no dictionaries of parameters and parts, and they stay as they are
        owned |= {owner: dict(own.items()) for owner, own in owned.items() if not isinstance(own, dict)}
        self._places = [(owned[owner], key) for owner, _, key in places]
        parts = [part._modules for part in self.module.modules() if isinstance(part._modules, dict)]
        self._holders = [held for held in parts for _ in held]
        self._keys = [key for held in parts for key in held]
        self._parts = [*map(dict.get, self._holders, self._keys)]
        held, trained = {id(p) for group in base.param_groups for p in group["params"]}, dict(named)
        self._untrained = [(n, p) for n, p in self.module.named_parameters() if id(p) in held and n not in trained]
        self.lora = ExactLora(lora_pairs(self.module, self.flat)) if settings.lora == "exact" else None
        self.optimizer = FederatedOptimizer(base, self.flat)
        if self.steps_itself:
            self.optimizer.refuse_frozen = self.refuse_frozen
        self._optimizers: list[Any] = [*self.optimizer.parts] or [self.optimizer]  # the ones that are stepped
        if settings.local_schedule is not None:
            schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
            self.optimizer.schedule = LocalSchedule(settings.local_schedule, base, schedules, self._step_schedules)
        trainer.strategy.optimizers = list(self._optimizers)
        if (clip := trainer.fit_loop.corrected_clip) is not None:
            self.optimizer.clip = partial(trainer.precision_plugin.clip_gradients, self.optimizer, *clip)
        self.buffers = Buffers(owners, settings.buffers, own_buffers)
        self.data = DeviceData(self.flat.y.device)
        if settings.aggregator is not None:
            check_buffers(settings.aggregator, self.buffers)
        if isinstance(trainer.strategy, WithinClientStrategy):
            trainer.strategy.share(self.flat.params)
        self.split = split_of(trainer)
        self.shuffle = not trainer.overfit_batches  # in addition to the data module's setting
        self.keeps_solver = settings.keeps_solver
        self.round = 0  # the schedules' round, if set by :meth:`set_round`
        self._at_start: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None
        self._made_dense = self._make_dense()

    def _make_dense(self) -> list[nn.Embedding | nn.EmbeddingBag]:
        """Give sparse embeddings dense gradients, with a warning, unless only plain SGD reads them; return them."""
        layers = {
            name: layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad
        }
        if not layers:
            return []
        plan = self.optimizer.plan_of(self.algorithm)
        takes_sparse = (
            self.settings.engine == "sequential"
            and plan.is_plain
            and not plan.injects
            and not any(self.optimizer.decay)
            and self.algorithm.own_solve is None
            and not self.trainer.gradient_clip_val
            and self.settings.client_privacy is None
            and self.split.size == 1
        )
        if takes_sparse:
            return []
        rank_zero_warn(
            f"{', '.join(map(repr, layers))}: sparse=True has no effect in this run. Gradients are dense, with the same"
            " numbers, since the method, the optimizer, the engine or clipping needs all of their entries. Only"
            " engine='sequential' with a method that leaves gradients as they are, such as FedAvg, and plain SGD takes"
            " sparse gradients."
        )
        for layer in layers.values():
            layer.sparse = False
        return list(layers.values())

    def _step_schedules(self, step: int) -> None:
        """Step the schedules by local step after step t, through the module's hook."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        epoch_loop.schedule_step = step + 1
        try:
            for config in self.trainer.lr_scheduler_configs:
                if (step + 1) % config.frequency == 0:
                    call._call_lightning_module_hook(self.trainer, "lr_scheduler_step", config.scheduler, None)
        finally:
            epoch_loop.schedule_step = None

    def check_parameters(self) -> None:
        """Raise if a hook has replaced the optimizer, or replaced, frozen or unfrozen a parameter.

        The vector of the trained parameters is fixed, and the wrapped optimizer corrects their gradients.
        """
        if self.trainer.strategy.optimizers != self._optimizers:
            raise FederatedError(
                "A hook has replaced the local optimizer (trainer.optimizers), which is reset for every client anyway."
                " Change the options of its groups instead: trainer.optimizers[0].param_groups."
            )
        reached = None  # ids of the module's parameters, once a submodule was replaced
        if [*map(dict.get, self._holders, self._keys)] != self._parts:
            reached = set(map(id, self.module.parameters()))
        for name, p, (held, key) in zip(self.flat.names, self.flat.params, self._places, strict=True):
            if held.get(key) is not p or (reached is not None and id(p) not in reached):
                raise FederatedError(
                    f"{type(self.module).__name__} has replaced the parameter {name!r}, which the optimizer trains, by"
                    " another one, which it does not. Write to the parameter instead: with torch.no_grad(),"
                    " parameter.copy_(value)."
                )
        self.refuse_frozen(range(len(self.flat.params)))
        for name, p in self._untrained:
            if p.requires_grad:  # the local optimizer would move it, but no client would send it
                raise FederatedError(
                    f"{type(self.module).__name__} or a callback has unfrozen the parameter {name!r}: the trained"
                    " parameters are fixed when the fit starts. To train it from a later round on, do not freeze it."
                    " Give it a group of the optimizer with rate 0, and let a hook raise the rate in that round."
                )

    def refuse_frozen(self, members: Iterable[int]) -> None:
        """Raise if a trained parameter is frozen, of those with these indices: a method would still move it."""
        for i in members:
            if not self.flat.params[i].requires_grad:
                raise FederatedError(
                    f"{type(self.module).__name__} or a callback has frozen the parameter {self.flat.names[i]!r}: the"
                    " trained parameters are fixed when the fit starts. Freeze it in the module's __init__. To let it"
                    " rest in some rounds, give it a group of the optimizer, whose rate a hook sets to 0."
                )

    def begin_round(self, step: int) -> None:
        """Show the initial rates of a round, given the run's step in its schedules by local step."""
        if self.optimizer.schedule is not None:
            self.optimizer.schedule.begin_round(step)

    def set_round(self, round: int, plateaus: Sequence[Mapping[str, Any]] = ()) -> None:
        """Set the learning rates, and the trainer's epoch, to those of a round, from any earlier round.

        Schedules step one by one, as in a fit, so rates have the same bits. ``plateaus`` has the states of schedules
        that follow a metric (``ReduceLROnPlateau``) after the previous round; the last of them sets the rates.
        """
        configs = self.trainer.lr_scheduler_configs
        metric_schedules = [config.scheduler for config in configs if config.reduce_on_plateau]
        if (round > 0 or plateaus) and len(plateaus) != len(metric_schedules):
            raise FederatedError(
                f"{len(metric_schedules)} schedules of {type(self.module).__name__} are ReduceLROnPlateau, which follow"
                f" a metric of earlier rounds. Round {round} needs the state of each, found {len(plateaus)}. Pass"
                " set_round(round, plateaus=[scheduler.state_dict() ...]), or use a schedule of the round number."
            )
        self._rewind(round)
        loop = self.trainer.fit_loop
        for number in range(self.round, round):
            loop.set_progress(number)
            with steps_not_counted():
                loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        loop.set_progress(round)
        self.round = round
        for scheduler, state in zip(metric_schedules, plateaus, strict=False):
            scheduler.load_state_dict(dict(state))
            for group, rate in zip(self.optimizer.param_groups, state["_last_lr"], strict=True):
                group["lr"] = rate

    def _rewind(self, round: int) -> None:
        """Reset schedules and rates to the start, unless they are at or before the round."""
        configs, groups = self.trainer.lr_scheduler_configs, self.optimizer.param_groups
        if self._at_start is None:
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            self._at_start = copy.deepcopy((options, [config.scheduler.state_dict() for config in configs]))
        has_plateaus = any(config.reduce_on_plateau for config in configs)
        if round >= self.round and not has_plateaus:
            return
        options, states = copy.deepcopy(self._at_start)
        for group, own in zip(groups, options, strict=True):
            group.update(own)
        for config, state in zip(configs, states, strict=True):
            config.scheduler.load_state_dict(state)
        self.round = 0

    def give_back_optimizers(self) -> None:
        """Restore the user's own optimizers in the trainer."""
        self.trainer.strategy.optimizers = [optimizer.base for optimizer in self._optimizers]

    def release(self) -> None:
        """Give the module's parameters their own storage, undo changes of the module, and drop copies of data."""
        if self.optimizer.schedule is not None:
            self.optimizer.schedule.release()
        self.flat.release()
        self.data.clear()
        for layer in self._made_dense:
            layer.sparse = True
        self._unfreeze()

    def _unfreeze(self) -> None:
        for p in self._frozen:
            p.requires_grad_(True)


def parameters_as_buffers(
    settings: Settings, module: nn.Module, trained: Collection[str]
) -> dict[str, tuple[nn.Module, str]]:
    """Return the owner and local name, by qualified name, of each untrained parameter that is treated as a buffer."""
    others = [name for name, _ in module.named_parameters() if name not in trained]
    found: dict[str, tuple[nn.Module, str]] = {}
    for pattern in settings.as_buffers:
        if moved := next((name for name in trained if fnmatchcase(name, pattern)), None):
            raise FederatedError(
                f"as_buffers={pattern!r} fits {moved!r}, which the optimizer of {type(module).__name__} trains. Name"
                " only parameters that it does not train, such as a teacher's."
            )
        fitting = [name for name in others if fnmatchcase(name, pattern)]
        if not fitting:
            close = get_close_matches(pattern, others, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(map(repr, others)) or 'none'}."
            raise FederatedError(
                f"as_buffers={pattern!r} fits no untrained parameter of {type(module).__name__}. {hint}"
            )
        for name in fitting:
            prefix, _, key = name.rpartition(".")
            found[name] = module.get_submodule(prefix), key
    return found


def personal_names(
    settings: Settings, module: nn.Module, trained: Mapping[str, Any], buffers: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the trained parameters, and of the buffers, that stay on each client."""
    algorithm = settings.algorithm
    own: Any = algorithm.personal_names(module)
    if isinstance(own, str) or not isinstance(own, Sequence):
        raise FederatedError(
            f"{type(algorithm).__name__}.personal_names() must return a list of patterns, found {own!r}. Return"
            " ['head.*'], say, or [] for none."
        )
    patterns = (*settings.personal, *own)
    names = (*trained, *buffers)
    found = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    for pattern, fitting in found.items():
        if not fitting:
            close = get_close_matches(pattern, names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(map(repr, names))}."
            raise FederatedError(
                f"personal={pattern!r} fits no trained parameter and no buffer of {type(module).__name__}. {hint}"
            )
    personal = {name for fitting in found.values() for name in fitting}
    if personal and personal >= trained.keys():
        raise FederatedError(
            f"personal={list(patterns)} leaves no trained parameter of {type(module).__name__} to be shared, so there"
            " is nothing to federate. Leave some parameters out of it."
        )
    reasons = {  # a method may need more than the shared part of a model
        "gives clients no local steps to train them in": not algorithm.local_work,
        "takes clients' gradients at the server's model": bool(algorithm.full_grad_at or algorithm.anchor_at),
        "gives every client its own whole model": algorithm.init_client_at_start,
        "watches the loss of the server's model": algorithm.population_loss,
    }
    for reason, holds in reasons.items():
        if personal and holds:
            raise FederatedError(
                f"personal parameters cannot be combined with {algorithm!r}, which {reason}: the server has a part of"
                " the model only. Use another method, such as FedAvg or Scaffold('ii')."
            )
    return frozenset(trained.keys() & personal), frozenset(personal.intersection(buffers))
