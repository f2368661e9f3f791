"""Clients with a batch of one example, which BatchNorm in training mode cannot normalise: found before round 0."""

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.callbacks.base import hears
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import ClientId
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.batch_hooks import uses_batch_hook
from lightning_fed.engines.client_errors import ONE_VALUE
from lightning_fed.engines.gradients import GradientPass, prepare_batch
from lightning_fed.rounds.client_work import ClientWork
from lightning_fed.rounds.local_plans import limited
from lightning_fed.settings.settings import cut

__all__ = ["check_lone_examples"]


def check_lone_examples(work: ClientWork, sizes: Iterable[tuple[ClientId, int]]) -> None:
    """Refuse clients whose only or last batch has one example, if the module cannot train on such a batch.

    The module's step is tried on one example of such a client, since that depends on shapes: BatchNorm2d can normalise
    one picture. Nothing of the trial remains. Where hooks of the module or of callbacks run before a batch, they may
    set modes, and nothing is refused here.

    Args:
        work: Answers for clients.
        sizes: Clients with their numbers of examples.

    Raises:
        FederatedError: Naming the client, its number of examples, the layer and the ways out.
    """
    trainer, settings = work.trainer, work.settings
    module = trainer.lightning_module
    if settings.drops_failed or not _uses_batch_statistics(module) or _may_set_modes(trainer):
        return
    clients: dict[int, ClientId] = {}
    counts = Counter[int]()
    for client_id, size in sizes:
        clients.setdefault(size, client_id)
        counts[size] += 1
    for is_lone, in_epochs in ((_ends_alone(work), True), (_passes_alone(work), False)):
        lone = [size for size in sorted(clients) if is_lone(size)]
        plan = _plan_of(work, clients[lone[0]]) if lone else None
        if plan is None or (in_epochs and not _trains_alone(plan, settings.algorithm.steps_per_batch)):
            continue
        layer = _failing_layer(work, plan)
        if layer is not None:
            raise _refusal(trainer, plan, layer, in_epochs, sum(counts[size] for size in lone))


def _uses_batch_statistics(module: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in module.modules())


def _may_set_modes(trainer: pl.Trainer) -> bool:
    """Whether hooks that come before a client's batches are there, of the module or of the user's callbacks."""
    users = [callback for callback in trainer.callbacks if not isinstance(callback, pl.callbacks.ProgressBar)]
    return (
        is_overridden("on_train_batch_start", trainer.lightning_module, pl.LightningModule)
        or any(uses_batch_hook(callback, "on_train_batch_start") for callback in users)
        or hears(trainer, "on_client_start")
    )


def _ends_alone(work: ClientWork) -> Callable[[int], bool]:
    """Return a function that tells of a number of examples whether local epochs of so many reach a batch of one."""
    data, trainer, settings = work.trainer.datamodule, work.trainer, work.settings
    batch_size, accumulated = data.batch_size, trainer.accumulate_grad_batches
    repeats = settings.algorithm.steps_per_batch

    def is_lone(size: int) -> bool:
        if size == 0 or (size % batch_size != 1 and batch_size != 1) or (data.drop_last and size > batch_size > 1):
            return False
        length = -(-size // batch_size)
        num_batches = limited(length, trainer.limit_train_batches) * repeats
        epochs = cut(settings.steps(num_batches, accumulated), num_batches, accumulated)
        return max(epochs, default=0) > (0 if batch_size == 1 else (length - 1) * repeats)

    return is_lone


def _passes_alone(work: ClientWork) -> Callable[[int], bool]:
    """Return the same for passes over all examples, of methods that take full-batch gradients."""
    if not work.algorithm.full_grad_at:
        return lambda size: False
    batch_size = work.trainer.datamodule.full_batch_size or max(work.trainer.datamodule.batch_size, 512)
    return lambda size: size > 0 and (size % batch_size == 1 or batch_size == 1)


def _plan_of(work: ClientWork, client_id: ClientId) -> WorkPlan | None:
    try:
        return work.plans.for_round(0).plan(client_id, warns=False)
    except ClientError:
        return None  # it is reported when the client is at work


def _trains_alone(plan: WorkPlan, repeats: int) -> bool:
    """Whether the client's own batches end with one example: a data module may make other batches than it says."""
    batches, length = plan.batches, plan.batches.num_batches()
    return batches.num_examples(length) - batches.num_examples(length - repeats) == repeats


def _failing_layer(work: ClientWork, plan: WorkPlan) -> tuple[str, nn.Module] | None:
    """Return the layer that cannot normalise one example of a client, None if the module's step works."""
    trainer = work.trainer
    module, device = trainer.lightning_module, trainer.strategy.root_device
    gradients = GradientPass(trainer, work.engine.flat)
    try:
        with preserved_random_state(device), _kept(module), gradients.silent():
            for batch, _ in islice(plan.batches.one(torch.Generator()), 1):
                gradients.forward(prepare_batch(trainer, batch), 0)
    except ValueError as error:
        if ONE_VALUE not in str(error):
            return None
        at_work = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        named = [(name, m) for name, m in module.named_modules() if any(m is other for other in at_work)]
        return next((pair for pair in named if isinstance(pair[1], _BatchNorm)), ("a layer", module))
    except Exception:
        return None  # it is reported with the client's name when the client is at work
    return None


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Give modules the attributes that they have now, and lists, dicts and sets in them their contents, on exit."""
    held = [(part, dict(vars(part))) for part in module.modules()]
    contents: list[tuple[Any, Any]] = [
        (value, copy.copy(value)) for _, own in held for value in own.values() if isinstance(value, (list, dict, set))
    ]
    try:
        yield
    finally:
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        for part, own in held:
            vars(part).clear()
            vars(part).update(own)


def _refusal(
    trainer: pl.Trainer, plan: WorkPlan, layer: tuple[str, nn.Module], in_epochs: bool, clients: int
) -> FederatedError:
    data, size = trainer.datamodule, plan.participant.size
    name, value = "batch_size", data.batch_size
    if not in_epochs:
        name, value = "full_batch_size", data.full_batch_size or max(data.batch_size, 512)
    if value == 1:
        remedy = f"Raise {name}"
    elif size == 1:
        remedy = "Merge it with another client or leave it out"
    else:
        remedy = "Set drop_last=True or another batch_size" if in_epochs else "Set another full_batch_size"
    number, more = ("1 example", "") if size == 1 else (f"{size} examples", " at the end")
    others = f" ({clients - 1:,} other clients have such a batch)" if clients > 1 else ""
    return FederatedError(
        f"Client {plan.participant.client_id!r} has {number}, and {name}={value} makes a batch of one{more}{others}."
        f" {layer[0]} ({type(layer[1]).__name__}) normalises by the statistics of a batch, and a batch of one example"
        f" has none. {remedy}, use GroupNorm, or set on_client_error='drop' to leave such clients out of their rounds."
    )
