"""Batches of one client from a user-defined loader."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.batches import ClientBatches, LoaderBatches
from lightning_fed.data.batches.counting import RecordedBatches, count_examples, has_index_lists, possible_counts
from lightning_fed.data.batches.random_states import RandomStates, WorkerSeeds
from lightning_fed.data.batches.settings import Batches, BatchSettings, options_of, order_of, repeats_or_skips


class CustomBatches(ClientBatches):
    """Batches from a user-defined loader; ``make`` builds the loader of one local epoch from a generator.

    A full pass reads the loader's data set in stored order if the loader is a ``DataLoader`` over a whole map-style
    data set. Any other loader is iterated and must yield every example once.

    A ``DataLoader``'s batch sampler counts the examples in a batch. For other loaders, ``batch_size_of`` counts them,
    or else :func:`lightning_fed.data.batches.counting.count_examples`. ``size`` is the client's number of examples;
    None reads it from the loader.
    """

    def __init__(
        self,
        make: Callable[[torch.Generator], Iterable[Any]],
        client_id: ClientId,
        settings: BatchSettings,
        size: int | None = None,
    ) -> None:
        self.client_id = client_id
        self.settings = settings
        self._make = make
        self._measured = make(torch.Generator())  # never iterated, only measured
        if type(self._measured).__name__ == "CombinedLoader":  # Lightning's, which this folder does not import
            raise FederatedError(
                f"client_dataloader({client_id!r}, ...) returned a CombinedLoader, whose items are not batches. Return"
                " an object with __len__, the number of batches, and with __iter__, which zips the loaders. Override"
                " client_size(client_id), and pass batch_size_of=..., a function from a tuple of batches to its number"
                " of examples, to the data module."
            )
        self.size = self._measure() if size is None else size

    def num_batches(self) -> int:
        """Return the length of the loader."""
        try:
            return len(self._measured)  # type: ignore[arg-type]
        except TypeError as error:
            raise self._error("has no len()", "Give it a __len__, its number of batches") from error

    def num_examples(self, num_batches: int) -> int:
        """Return the number of examples in the first batches, without the examples that ``drop_last`` skips."""
        loader = self._measured
        if not has_index_lists(loader):
            return super().num_examples(num_batches)
        assert isinstance(loader, DataLoader)
        if isinstance(loader.batch_sampler, (list, tuple)):
            return sum(map(len, loader.batch_sampler[:num_batches]))
        if type(loader.batch_sampler) is BatchSampler:
            return min(min(num_batches, self.num_batches()) * loader.batch_sampler.batch_size, self.size)
        return super().num_examples(num_batches)

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the batches of a new loader, with its own shuffling.

        Without ``shuffle``, a ``DataLoader`` over a whole data set yields the stored order. Any other loader keeps its
        order, with a warning.
        """
        loader: Any = self._measured
        is_in_order = isinstance(loader, DataLoader) and isinstance(order_of(loader), SequentialSampler)
        if not shuffle and not is_in_order:
            if (stored := self._stored()) is not None:
                cut = loader.batch_sampler
                stored.settings = replace(stored.settings, batch_size=cut.batch_size, drop_last=cut.drop_last)
                return stored.epoch(generator, shuffle=False)
            warnings.warn(
                "A client's loader decides on its own which examples it gives, and in which order: overfit_batches may"
                " see other batches in every round. Return a DataLoader with shuffle=False.",
                stacklevel=2,
            )
        return self._to_the_end(self._finished(generator, augment=True))

    def full(self, generator: torch.Generator) -> Batches:
        """Yield every example once; raise unless the batches have ``size`` examples in total."""
        stored = self._for_full_pass()
        return self._complete(stored.full(generator) if stored else self._finished(generator, augment=True))

    def unaugmented(self, generator: torch.Generator) -> Batches:
        """Yield every example once, without augmentation; otherwise like :meth:`full`."""
        stored = self._for_full_pass()
        return self._complete(stored.unaugmented(generator) if stored else self._finished(generator, augment=False))

    def check_counts(self) -> None:
        """Raise if the examples in a batch cannot be counted; this may load one batch."""
        if self.settings.batch_size_of is not None or has_index_lists(self._measured) or not self.size:
            return
        with preserved_random_state():
            try:
                batch = next(iter(self._make(torch.Generator())), None)
            except Exception:
                return  # training reports the error with the client's name
        if batch is None:
            return
        try:
            likely = count_examples(batch)
        except FederatedError as error:
            raise FederatedError(f"client_dataloader({self.client_id!r}, ...): {error}") from error
        others = [other for other in possible_counts(batch) if other != likely]
        if others and (not self._may_be(likely) or any(map(self._may_be, others))):
            found = " or ".join(map(str, (likely, *others)))
            raise FederatedError(
                f"client_dataloader({self.client_id!r}, ...): a batch of type {type(batch).__name__} may hold {found}"
                " examples. Pass batch_size_of=..., a function from a batch to its number of examples, to the data"
                " module."
            )

    def _may_be(self, examples: int) -> bool:
        """Return whether the loader's length fits batches of this many examples."""
        whole, rest = divmod(self.size, examples) if examples else (0, 0)
        return self.num_batches() in (whole, whole + (rest > 0))

    def _stored(self) -> LoaderBatches | None:
        """Return the batches of the loader's data set in stored order, if the loader reads all of it."""
        loader = self._measured
        if not isinstance(loader, DataLoader) or not _reads_all(loader):
            return None
        settings = replace(
            self.settings,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            loader_options=options_of(loader),
        )
        return LoaderBatches(loader.dataset, settings)

    def _for_full_pass(self) -> LoaderBatches | None:
        """Return :meth:`_stored` for a full pass; warn if that is None and the loader repeats or skips examples."""
        loader, stored = self._measured, self._stored()
        if stored is None and isinstance(loader, DataLoader) and repeats_or_skips(loader):
            warnings.warn(
                f"Clients' loaders draw examples with {type(order_of(loader)).__name__}, some again or not at all. So"
                " the full-batch gradients and losses of this run are those of a random draw, and not of each example"
                " once. For these, return a DataLoader that visits every example once.",
                stacklevel=3,
            )
        return stored

    def _complete(self, batches: Batches) -> Batches:
        total = 0
        for batch, examples in batches:
            total += examples
            yield batch, examples
        if total != self.size:
            raise FederatedError(
                f"client_dataloader({self.client_id!r}, ...) gave {total:,} examples in a pass over the client, which"
                f" has {self.size:,}: a full-batch gradient or loss needs each of them once. Return a DataLoader over"
                " all of the client's data set, or correct client_size or batch_size_of."
            )

    def _finished(self, generator: torch.Generator, augment: bool) -> Batches:
        stream = self.settings.augment_stream(generator) if augment else None
        return self.settings.finish(self._counted(generator), stream)

    def _counted(self, generator: torch.Generator) -> Batches:
        """Yield the batches of a new loader and their numbers of examples; seed the data's random states."""
        loader, noted = self._make(generator), None
        besides = (generator, getattr(loader, "generator", None))
        roots = (loader.dataset, loader.collate_fn) if isinstance(loader, DataLoader) else (loader,)
        states, seed = RandomStates(*roots, besides=besides), None
        has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        if (states and not has_workers) or (has_workers and getattr(loader, "generator", None) is None):
            seed = int(torch.randint(2**63 - 1, (), generator=generator))
        if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
            loader, noted = _recording(loader, seed)
        elif states and has_workers:
            warnings.warn(
                f"The random states of the data of {kind_of(loader)} are not seeded in its workers, since it"
                " iterates in its own way: a resumed run may see other random numbers. Seed them in worker_init_fn from"
                " torch.initial_seed().",
                stacklevel=2,
            )
        iterator = iter(loader)
        for batch_idx in count():
            if states and not has_workers:
                assert seed is not None
                states.seed(seed, batch_idx)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            examples = noted.lengths.popleft() if noted is not None and noted.lengths else None
            yield batch, count_examples(batch, self.settings.batch_size_of) if examples is None else examples

    def _to_the_end(self, batches: Batches) -> Batches:
        """Yield the batches; warn if there are fewer than :meth:`num_batches`, the basis of the planned local steps."""
        given = 0
        for batch, examples in batches:
            given += 1
            yield batch, examples
        if given < (length := self.num_batches()):
            warnings.warn(
                f"client_dataloader({self.client_id!r}, ...) returned {kind_of(self._measured)} that ends after"
                f" {given:,} batches, and its length is {length:,}: the client takes fewer local steps than planned."
                " Give it the __len__ of what it yields.",
                stacklevel=2,
            )

    def _measure(self) -> int:
        loader: Any = self._measured
        remedy = "Override client_size(client_id) as well"
        try:
            if not isinstance(loader, DataLoader):
                return len(loader.dataset)
            if loader.batch_sampler is None:
                raise self._error("has batch_size=None, so its data set gives whole batches", remedy)
            if isinstance(loader.batch_sampler, (list, tuple)):
                return sum(map(len, loader.batch_sampler))
            if loader.batch_size:  # a sampler may select a part of the data set
                return len(loader.sampler)  # type: ignore[arg-type]
            sampler = getattr(loader.batch_sampler, "sampler", None)
            return len(sampler) if hasattr(sampler, "__len__") else len(loader.dataset)  # type: ignore[arg-type]
        except (AttributeError, TypeError) as error:
            raise self._error("does not have a known number of examples", remedy) from error

    def _error(self, problem: str, remedy: str) -> FederatedError:
        found = f"{kind_of(self._measured)} that {problem}"
        return FederatedError(f"client_dataloader({self.client_id!r}, ...) returned {found}. {remedy}.")


def _recording(loader: DataLoader[Any], seed: int | None) -> tuple[DataLoader[Any], RecordedBatches | None]:
    """Copy a loader, to seed its workers (with ``seed`` if it has no generator) and to record its batches."""
    copied, noted = copy.copy(loader), None
    copied._iterator = None
    inside: dict[str, Any] = copied.__dict__  # DataLoader forbids setting these attributes
    if loader.num_workers > 0:
        if loader.persistent_workers:
            warnings.warn(
                "persistent_workers=True of a client's loader has no effect: workers start in every local epoch, with"
                " seeds of that epoch, so that a resumed run repeats.",
                stacklevel=2,
            )
        inside["persistent_workers"] = False
        inside["in_order"] = True
        if not isinstance(loader.worker_init_fn, WorkerSeeds):
            inside["worker_init_fn"] = WorkerSeeds(loader.collate_fn, loader.worker_init_fn)
        if seed is not None:
            inside["generator"] = torch.Generator().manual_seed(seed)
    if has_index_lists(loader):
        noted = RecordedBatches(loader.batch_sampler)  # type: ignore[arg-type]
        inside["batch_sampler"] = noted
    return copied, noted


def _reads_all(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads every example of a map-style data set once, as PyTorch's default loader does."""
    kind, examples = type(loader), loader.dataset
    is_plain = kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
    if not is_plain or type(loader.batch_sampler) is not BatchSampler or isinstance(examples, IterableDataset):
        return False
    return isinstance(order_of(loader), (RandomSampler, SequentialSampler)) and not repeats_or_skips(loader)
