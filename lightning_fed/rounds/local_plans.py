"""Planning clients' work from their data, and checks for batches that a module cannot train on."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Subset

from lightning_fed.callbacks.base import any_uses_hook
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden, rank_zero_warn
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import preserved_random_state, seed_global
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.batches import (
    ChangedBatches,
    ClientBatches,
    LoaderBatches,
    PoissonBatches,
    RepeatedBatches,
    TensorBatches,
)
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.batch_hooks import has_transfer_hooks, uses_batch_hook
from lightning_fed.engines.changes import Snapshot
from lightning_fed.engines.client_errors import ONE_VALUE, NamesClient
from lightning_fed.engines.gradients import GradientPass, prepare_batch
from lightning_fed.engines.vectorized.batches import flatten
from lightning_fed.server.participation import Participant, Population
from lightning_fed.settings.settings import Settings, cut

_TRIED = 10  # trials stop after this number of clients whose data cannot be built


class LocalPlans:
    """Plans clients' work from their data; ``attackers`` are the stored indices of simulated bad clients."""

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: Settings,
        population: Population,
        clients: Sequence[ClientId] | None = None,
        seed: int = 0,
    ) -> None:
        self.trainer, self.settings, self.population = trainer, settings, population
        self.clients: Sequence[ClientId] = population if clients is None else clients  # clients with local data
        self.seed, attack = seed, settings.attack
        self.attackers = frozenset[int]() if attack is None else attack.attackers(seed, population)

    def some(self) -> Iterator[WorkPlan]:
        """Lazily yield the work of clients that have examples, for trials."""
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
        """Raise if the examples in clients' batches cannot be counted. This tries one client."""
        try:
            plan = next(self.some(), None)
        except ClientError:
            return  # reported when the client trains
        if plan is not None:
            plan.batches.check_counts()


class RoundPlans:
    """Plans the work of one round, and builds each client's data once."""

    def __init__(self, plans: LocalPlans, round: int) -> None:
        self.round, self.settings, self.population, self._seed = round, plans.settings, plans.population, plans.seed
        self._accumulated = plans.trainer.accumulate_grad_batches
        attack, privacy = plans.settings.attack, plans.settings.client_privacy
        self._samples = privacy is not None and privacy.sampling == "poisson"
        self._attackers = plans.attackers if attack is not None and attack.changes_batches else frozenset[int]()
        self._limit, self._repeats = plans.trainer.limit_train_batches, plans.settings.algorithm.steps_per_batch
        self._batches_of: Callable[[ClientId], ClientBatches] = plans.trainer.datamodule.batches_of()
        self._work: dict[int, tuple[int, tuple[int, ...]]] = {}  # caches steps and batches by the length of an epoch
        self._plans: dict[ClientId, WorkPlan | None] = {}  # None for clients without examples

    def plan(self, client_id: ClientId, warns: bool = True) -> WorkPlan | None:
        """Return a client's full work, or None if it has no examples."""
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
            if self._samples:
                assert isinstance(batches, TensorBatches | LoaderBatches)
                batches = PoissonBatches(batches, self._seed, self.round, self.population.index_of(client_id))
            if self._attackers and self.population.index_of(client_id) in self._attackers:
                assert self.settings.attack is not None
                batches = ChangedBatches(batches, self.settings.attack.batch)
            if self._repeats > 1:
                batches = RepeatedBatches(batches, self._repeats)
        except Exception as error:
            if isinstance(error, FederatedError) and not isinstance(error, ClientError):
                raise  # this package's own error: no client is to blame
            with NamesClient(client_id, self.round, "the making of its data", lambda: None):
                raise
        if batches.size == 0:
            return None
        if length == 0 and self.settings.algorithm.local_work:
            rank_zero_warn(
                f"Client {client_id!r} has {batches.size:,} examples, and its loader has no batch of them: it takes no"
                " local step. With drop_last=True, set a batch_size of at most that many."
            )
        if length not in self._work:
            num_batches = limited(length, self._limit) * self._repeats
            steps = self.settings.steps(num_batches, self._accumulated)
            self._work[length] = steps, cut(steps, num_batches, self._accumulated)
        steps, epochs = self._work[length]
        who = Participant(client_id, self.population.index_of(client_id), batches.size, 1, steps)
        return WorkPlan(who, batches, epochs)

    def of(self, index: int, steps: int | None = None) -> WorkPlan:
        """Return a client's planned work, cut to its requested steps if these are fewer."""
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
    """Return the number of examples in a client's local epochs."""
    return sum(map(plan.batches.num_examples, plan.epochs))


def check_lone_examples(plans: LocalPlans, flat: FlatParameters, sizes: Iterable[tuple[ClientId, int]]) -> None:
    """Raise for clients whose only or last batch has one example that the module cannot train on.

    The result depends on shapes: BatchNorm2d can normalize one image. So this tries the module's step on one example of
    such a client, without side effects. It does not raise if hooks of the module or of callbacks run before a batch,
    since they may set modes.
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
            continue  # reported when the client trains
        if plan is None:
            continue
        # a data module may build batches that differ from its settings
        batches, length, repeats = plan.batches, plan.batches.num_batches(), settings.algorithm.steps_per_batch
        if in_epochs and batches.num_examples(length) - batches.num_examples(length - repeats) != repeats:
            continue
        layer = _failing_layer(plans.trainer, flat, plan)
        if layer is not None:
            raise _refusal(trainer, plan, layer, in_epochs, sum(counts[size] for size in lone))


def check_separate_examples(plans: LocalPlans) -> None:
    """Raise if examples of a batch depend on each other, as after mixup, under record-level privacy.

    This builds a client's batch twice from the same random numbers, with different examples in the second half. It also
    raises if that fails, or if the batches cannot be compared.
    """
    trainer, privacy, device = plans.trainer, plans.settings.client_privacy, plans.trainer.strategy.root_device
    if privacy is None:
        return
    plan = next((plan for plan in plans.some() if plan.participant.size > 1), None)
    if plan is None:
        return
    batches: Any = plan.batches
    while not isinstance(batches, (TensorBatches, LoaderBatches)):
        batches = batches.batches
    settings = replace(batches.settings, num_workers=0)
    if not _changes_batches(trainer, batches):
        return
    if isinstance(batches, LoaderBatches):
        batches = LoaderBatches(batches.dataset, settings)
    half = max(1, min(settings.batch_size, batches.size) // 2)
    client = f"a batch of {2 * half} examples of client {plan.participant.client_id!r}"
    found: list[list[Tensor]] = []
    for others in (torch.arange(half, 2 * half), torch.arange(half)):
        stream = torch.Generator().manual_seed(1)
        try:
            with preserved_random_state(device):
                seed_global(1, device)
                augmentation = settings.augment_stream(stream)
                loaded = next(batches.load([torch.cat([torch.arange(half), others])], stream))
                seed_global(2, device)  # loading different examples may draw more random numbers
                batch, _ = next(settings.finish(iter([loaded]), augmentation))
                leaves, _ = flatten(prepare_batch(trainer, batch))
        except Exception as error:
            raise FederatedError(
                f"client_privacy={privacy!r} makes {client} twice, to see whether its examples depend on each other."
                f" That failed: {type(error).__name__}: {error}. Let collate_fn, transform, augment and the hooks"
                " around the transfer of batches take such a batch."
            ) from error
        found.append([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 2 * half])
    if found[0] and len(found[0]) == len(found[1]) and _are_separate(found[0], found[1], half):
        return
    what = "differ" if found[0] and len(found[0]) == len(found[1]) else "cannot be compared, for want of a row for each"
    raise FederatedError(
        f"client_privacy={privacy!r} cannot be combined with batches in which examples depend on each other: with other"
        f" examples in the second half of {client}, those in the first half {what}. The clipped gradient of an example"
        " would then hold several. Let collate_fn, transform, augment and the hooks around the transfer of batches"
        " change each example alone, without mixup."
    )


def _changes_batches(trainer: pl.Trainer, batches: TensorBatches | LoaderBatches) -> bool:
    """Return whether user code processes whole batches before ``training_step``."""
    dataset = batches.dataset if isinstance(batches, LoaderBatches) else None
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    settings = batches.settings
    functions = settings.collate_fn, settings.augment, settings.transform, getattr(dataset, "__getitems__", None)
    return any(function is not None for function in functions) or has_transfer_hooks(trainer)


def _are_separate(one: Sequence[Tensor], other: Sequence[Tensor], half: int) -> bool:
    """Return whether two batches have equal first halves, or ``one`` contains all rows of ``other``."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.shape == b.shape]  # padding may change shapes
    if all(torch.allclose(a[:half], b[:half], rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs):
        return True
    rows = [{tuple(a[i].tobytes() for a in arrays) for i in range(2 * half)} for arrays in map(_arrays, (one, other))]
    return rows[1] <= rows[0]  # the order may differ, such as after sorting by length


def _arrays(leaves: Sequence[Tensor]) -> list[Any]:
    return [leaf.detach().cpu().double().numpy() for leaf in leaves]


def _may_set_modes(trainer: pl.Trainer) -> bool:
    """Return whether the module or user callbacks have hooks that run before a client's batches."""
    users = [callback for callback in trainer.callbacks if not isinstance(callback, pl.callbacks.ProgressBar)]
    return (
        is_overridden("on_train_batch_start", trainer.lightning_module, pl.LightningModule)
        or any(uses_batch_hook(callback, "on_train_batch_start") for callback in users)
        or any_uses_hook(trainer, "on_client_start")
    )


def _ends_alone(plans: LocalPlans) -> Callable[[int], bool]:
    """Return a function that checks if local epochs over a number of examples contain a batch of one."""
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
    """Return the same check for full passes, for methods that use full-batch gradients."""
    if not plans.settings.algorithm.full_grad_at:
        return lambda size: False
    batch_size = plans.trainer.datamodule.batch_settings.full_batch_size
    return lambda size: size > 0 and (size % batch_size == 1 or batch_size == 1)


def _failing_layer(trainer: pl.Trainer, flat: FlatParameters, plan: WorkPlan) -> tuple[str, nn.Module] | None:
    """Return the layer that cannot normalize one example of a client, or None if the module's step works."""
    module, device = trainer.lightning_module, trainer.strategy.root_device
    gradients, snapshot = GradientPass(trainer, flat), Snapshot(module.named_modules())
    try:
        with preserved_random_state(device), gradients.silent():
            for batch, _ in islice(plan.batches.one(torch.Generator()), 1):
                gradients.forward(prepare_batch(trainer, batch), 0)
    except ValueError as error:
        if ONE_VALUE not in str(error):
            return None
        active = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        named = [(name, m) for name, m in module.named_modules() if any(m is other for other in active)]
        return next((pair for pair in named if isinstance(pair[1], _BatchNorm)), ("a layer", module))
    except Exception:
        return None  # reported with the client's name when the client trains
    finally:
        snapshot.restore()
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
