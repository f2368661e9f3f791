"""The work of clients in a round, planned from their data, and the refusal of batches that a module cannot train on."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.callbacks.base import hears
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden, rank_zero_warn
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.batches import ClientBatches, RepeatedBatches
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.batch_hooks import uses_batch_hook
from lightning_fed.engines.client_errors import ONE_VALUE, NamesClient
from lightning_fed.engines.gradients import GradientPass, prepare_batch
from lightning_fed.engines.vectorized.changes import Snapshot
from lightning_fed.server.participation import Participant, Population
from lightning_fed.settings.settings import Settings, cut

__all__ = ["LocalPlans", "RoundPlans", "check_lone_examples", "limited", "num_examples"]

_TRIED = 10  # clients whose data cannot be made, before the first round


class LocalPlans:
    """Plan what clients do, from their data."""

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: Settings,
        population: Population,
        clients: Sequence[ClientId] | None = None,
    ) -> None:
        self.trainer, self.settings, self.population = trainer, settings, population
        self.clients: Sequence[ClientId] = population if clients is None else clients  # whose data is here

    def some(self) -> Iterator[WorkPlan]:
        """Yield the work of the first few clients that have examples, to try things out on."""
        failures: list[ClientError] = []
        for client_id in self.clients:
            try:
                plan = RoundPlans(self, 0).plan(client_id, warns=False)
            except ClientError as error:
                failures.append(error)
                if len(failures) in (_TRIED, len(self.clients)):
                    raise
                continue
            if plan is not None:
                yield plan

    def check_counts(self) -> None:
        """Refuse clients' loaders whose batches do not tell how many examples they have; one client is tried."""
        try:
            plan = next(self.some(), None)
        except ClientError:
            return  # it is reported when the client is at work
        if plan is not None:
            plan.batches.check_counts()


class RoundPlans:
    """Plan the work of one round; each client's data is built once."""

    def __init__(self, plans: LocalPlans, round: int) -> None:
        self.round, self.settings, self.population = round, plans.settings, plans.population
        self._accumulated = plans.trainer.accumulate_grad_batches
        self._limit, self._repeats = plans.trainer.limit_train_batches, plans.settings.algorithm.steps_per_batch
        self._batches_of: Callable[[ClientId], ClientBatches] = plans.trainer.datamodule.batches_of()
        self._work: dict[int, tuple[int, tuple[int, ...]]] = {}  # steps and batches by the length of an epoch
        self._plans: dict[ClientId, WorkPlan | None] = {}  # None of clients without examples

    def of_drawn(
        self, drawn: Mapping[ClientId, int], failed: Callable[[ClientError], None] | None
    ) -> list[Participant]:
        """Plan the work asked of each client, and return those that can take part; one drawn twice is trained once.

        ``failed`` records clients whose data cannot be made; by default their error is raised.
        """
        members = []
        for client_id, count in drawn.items():
            try:
                plan = self.plan(client_id)
            except ClientError as error:
                if failed is None:
                    raise
                failed(error)
                continue
            if plan is not None:
                members.append(plan.participant if count == 1 else replace(plan.participant, count=count))
        return members

    def plan(self, client_id: ClientId, warns: bool = True) -> WorkPlan | None:
        """Return a client's whole work, None if it has no examples."""
        if client_id not in self._plans:
            self._plans[client_id] = self._plan(client_id)
        plan = self._plans[client_id]
        if plan is None and warns:
            rank_zero_warn(f"Client {client_id!r} is empty: it is left out of round {self.round}.")
        return plan

    def _plan(self, client_id: ClientId) -> WorkPlan | None:
        try:
            batches = self._batches_of(client_id)
            length = batches.num_batches() if batches.size else 0
            if self._repeats > 1:
                batches = RepeatedBatches(batches, self._repeats)
        except Exception as error:
            if isinstance(error, FederatedError) and not isinstance(error, ClientError):
                raise  # what a module refuses by name is refused here too
            with NamesClient(client_id, self.round, "the making of its data", lambda: None):
                raise
        if batches.size == 0:
            return None
        if length not in self._work:
            num_batches = limited(length, self._limit) * self._repeats
            steps = self.settings.steps(num_batches, self._accumulated)
            self._work[length] = steps, cut(steps, num_batches, self._accumulated)
        steps, epochs = self._work[length]
        who = Participant(client_id, self.population.index_of(client_id), batches.size, 1, steps)
        return WorkPlan(who, batches, epochs)

    def of(self, index: int, steps: int | None = None) -> WorkPlan:
        """Return the work planned for a client, cut to the steps asked of it, if fewer."""
        client_id = self.population.ids[index]
        plan = self._plans.get(client_id) or self.plan(client_id)
        if plan is None:
            raise ClientError(f"Client {client_id!r} has no examples.", client_id)
        if steps is None or steps == plan.participant.steps:
            return plan
        epochs = cut(steps, plan.epochs[0], self._accumulated)
        return WorkPlan(replace(plan.participant, steps=steps), plan.batches, epochs)


def limited(num_batches: int, limit: int | float) -> int:
    """Apply ``limit_train_batches`` to a client's epoch: a count, or a share of at least one batch."""
    if isinstance(limit, int):
        return min(num_batches, limit)
    return min(num_batches, max(1, int(num_batches * limit)))


def num_examples(plan: WorkPlan) -> int:
    """Return how many examples a client goes through in its local epochs."""
    return sum(map(plan.batches.num_examples, plan.epochs))


def check_lone_examples(plans: LocalPlans, flat: FlatParameters, sizes: Iterable[tuple[ClientId, int]]) -> None:
    """Refuse clients whose only or last batch has one example, if the module cannot train on such a batch.

    The module's step is tried on one example of such a client, since that depends on shapes: BatchNorm2d can normalise
    one picture. Nothing of the trial remains. Where hooks of the module or of callbacks run before a batch, they may
    set modes, and nothing is refused here.
    """
    trainer, settings = plans.trainer, plans.settings
    module = trainer.lightning_module
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    uses_batch_statistics = any(layer.training or layer.running_mean is None for layer in layers)
    if settings.drops_failed or not uses_batch_statistics or _may_set_modes(trainer):
        return
    clients: dict[int, ClientId] = {}
    counts = Counter[int]()
    for client_id, size in sizes:
        clients.setdefault(size, client_id)
        counts[size] += 1
    for is_lone, in_epochs in ((_ends_alone(plans), True), (_passes_alone(plans), False)):
        lone = [size for size in sorted(clients) if is_lone(size)]
        try:
            plan = RoundPlans(plans, 0).plan(clients[lone[0]], warns=False) if lone else None
        except ClientError:
            continue  # it is reported when the client is at work
        if plan is None:
            continue
        # a data module may make other batches than its settings tell
        batches, length, repeats = plan.batches, plan.batches.num_batches(), settings.algorithm.steps_per_batch
        if in_epochs and batches.num_examples(length) - batches.num_examples(length - repeats) != repeats:
            continue
        layer = _failing_layer(plans.trainer, flat, plan)
        if layer is not None:
            raise _refusal(trainer, plan, layer, in_epochs, sum(counts[size] for size in lone))


def _may_set_modes(trainer: pl.Trainer) -> bool:
    """Whether hooks that come before a client's batches are there, of the module or of the user's callbacks."""
    users = [callback for callback in trainer.callbacks if not isinstance(callback, pl.callbacks.ProgressBar)]
    return (
        is_overridden("on_train_batch_start", trainer.lightning_module, pl.LightningModule)
        or any(uses_batch_hook(callback, "on_train_batch_start") for callback in users)
        or hears(trainer, "on_client_start")
    )


def _ends_alone(plans: LocalPlans) -> Callable[[int], bool]:
    """Return a function that tells of a number of examples whether local epochs of so many reach a batch of one."""
    data, trainer, settings = plans.trainer.datamodule, plans.trainer, plans.settings
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


def _passes_alone(plans: LocalPlans) -> Callable[[int], bool]:
    """Return the same for passes over all examples, of methods that take full-batch gradients."""
    if not plans.settings.algorithm.full_grad_at:
        return lambda size: False
    batch_size = plans.trainer.datamodule.batch_settings.full_batch_size
    return lambda size: size > 0 and (size % batch_size == 1 or batch_size == 1)


def _failing_layer(trainer: pl.Trainer, flat: FlatParameters, plan: WorkPlan) -> tuple[str, nn.Module] | None:
    """Return the layer that cannot normalise one example of a client, None if the module's step works."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    gradients, snapshot = GradientPass(trainer, flat), Snapshot(module.modules())
    try:
        with preserved_random_state(device), gradients.silent():
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
    finally:
        snapshot.put_back()
    return None


def _refusal(
    trainer: pl.Trainer, plan: WorkPlan, layer: tuple[str, nn.Module], in_epochs: bool, clients: int
) -> FederatedError:
    data, size = trainer.datamodule, plan.participant.size
    name, value = "batch_size", data.batch_size
    if not in_epochs:
        name, value = "full_batch_size", data.batch_settings.full_batch_size
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
