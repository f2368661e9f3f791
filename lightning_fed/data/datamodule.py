"""The LightningDataModule of a federation: clients to train on, and data sets to evaluate the server model."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count, check_flags
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.core.unset import NamesUnset
from lightning_fed.data.batches.batches import ClientBatches, LoaderBatches, TensorBatches
from lightning_fed.data.batches.counting import BatchSizeOf
from lightning_fed.data.batches.custom_batches import CustomBatches
from lightning_fed.data.batches.evaluation import (
    are_several,
    check_client_val,
    check_evaluation,
    evaluation_loader,
    transformed_loader,
)
from lightning_fed.data.batches.examples import check_map_style, size_of
from lightning_fed.data.batches.settings import (
    BatchAugmentation,
    BatchSettings,
    BatchTransform,
    chain,
    check_options,
    settings_of,
)
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.partitions import (
    ByKey,
    Partition,
    PartitionFunction,
    check_client_id,
    check_client_ids,
    check_partition,
)

if TYPE_CHECKING:
    AnyDataset: TypeAlias = Dataset[Any]
    AnyLoader: TypeAlias = DataLoader[Any]
else:  # jsonargparse does not match a class_path against Dataset[Any]
    AnyDataset, AnyLoader = Dataset, DataLoader

Clients: TypeAlias = Sequence[AnyDataset] | Mapping[ClientId, AnyDataset] | FederatedDataset
EvalData: TypeAlias = AnyDataset | AnyLoader | Sequence[AnyDataset | AnyLoader]
EvalLoader: TypeAlias = AnyLoader | list[AnyLoader]


Method = TypeVar("Method", bound=Callable[..., Any])


class _DefinedWithVal:
    """Hides ``val_dataloader`` from Lightning if there is no validation set and ``setup`` cannot set one.

    For an empty list, Lightning would warn about a missing ``validation_step`` or loaders of length zero. Lightning
    checks before ``setup``, so a data module that overrides ``setup`` or ``prepare_data`` always shows the method.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        if instance.val is not None or instance._val_may_come:
            return MethodType(self._method, instance)

        @wraps(pl.LightningDataModule.val_dataloader)  # Lightning follows `wraps`: the method counts as not overridden
        def absent() -> Any:
            return instance._need("val", instance.val)

        return absent


_defined_with_val = cast("Callable[[Method], Method]", _DefinedWithVal)


class FederatedDataModule(NamesUnset, pl.LightningDataModule):
    """Clients to train on, and data sets to validate and test the server model.

    There are three ways to define clients:

    - ``clients``: one data set per client, as a list, a mapping id -> data set, or a :class:`FederatedDataset`.
    - ``train`` and ``partition``: one data set, and how to split it into clients.
    - A subclass. To build clients on demand, define ``num_clients`` (or ``client_ids``) and override
      :meth:`client_dataset`. Then only participating clients are built, and a million clients cost nothing. To load
      data in ``setup``, set ``self.train`` and ``self.partition`` there, or call :meth:`set_clients`, and set
      ``self.val``, ``self.test`` and ``self.predict``.

    Any map-style data set works. A ``TensorDataset``, or a ``Subset`` of one, is indexed a batch at a time, which is
    many times faster than a ``DataLoader`` and yields the same batches.

    Args:
        clients: One data set per client.
        train: The data set that ``partition`` splits into clients.
        partition: A :class:`Partition`, or any callable from labels [n] to each client's indices.
        val: The server model's validation set: a data set, a loader, or a list of these.
        test: The test set, in the same forms.
        predict: The data for ``trainer.predict``, in the same forms, by default the test set.
        batch_size: Examples in a client's training batch.
        eval_batch_size: Examples in a batch of ``val``, ``test`` and ``predict``; 256 by default.
        full_batch_size: Examples in a batch when a method needs a client's full-batch gradient. It only affects memory
            and speed, unless the loss compares the examples of a batch, as contrastive losses do: then set it to
            ``batch_size``. The default is ``batch_size``, but at least 512.
        shuffle: Whether clients shuffle their examples in every local epoch.
        drop_last: Whether clients drop a last, smaller batch. A client with fewer examples than ``batch_size`` keeps
            its only batch.
        collate_fn: Collates a list of examples into a batch, for clients and evaluation.
        num_workers: Loader processes, for clients and evaluation. They restart in every local epoch of every client,
            which only pays off if examples are slow to load.
        pin_memory: Whether batches sent to an accelerator are in pinned memory, so that the transfer overlaps with the
            host's work. It only matters if data are not stored on the accelerator: for data sets other than tensors,
            with ``transform``, ``augment`` or transfer hooks, or if tensors take over a quarter of its free memory.
        client_val: Map-style validation sets of individual clients, by id.
        transform: A deterministic function batch -> batch, or a list of functions. It applies to every collated batch
            of clients, ``val``, ``test`` and ``predict``, for example to convert bytes to normalized floats.
        augment: A random function (batch, generator) -> batch, or a list of functions. It applies before ``transform``
            to every collated batch that a client computes a gradient on, once per batch, so that all gradients on a
            batch see the same data. The generator is on the CPU; each local epoch and each full pass has its own.
        batch_size_of: A function from a batch to its number of examples, for loaders whose batches are ambiguous, such
            as batches with time as the first dimension. A ``DataLoader`` over a map-style data set does not need it.
        worker_init_fn: A function of the worker's number that each loader process calls first. By then, the worker's
            generators and the data set's random states are seeded by (seed, round, client, worker).
        loader_options: Other arguments of loaders with workers: ``timeout``, ``prefetch_factor`` and
            ``multiprocessing_context``.

    Raises:
        FederatedError: If the arguments do not define the clients or contradict each other, or a value is not allowed.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_fed.data import Iid
        >>> train = TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
        >>> data = FederatedDataModule(
        ...     train=train, partition=Iid(num_clients=10), batch_size=4
        ... )
        >>> (
        ...     data.num_clients,
        ...     data.client_size(0),
        ...     data.client_batches(0).num_batches(),
        ... )
        (10, 10, 3)
    """

    _clients: FederatedDataset | None = None
    _made_from: tuple[Any, Any, tuple[str, Any, Any]] | None = None  # train, partition, its options at set_clients
    _is_split = False  # whether this module split the clients itself
    _source: tuple[FederatedDataset, TensorBatches | None] | None = None
    _num_clients: int | None = None  # class attributes, so that subclasses may set them before __init__
    _client_ids: Sequence[ClientId] | None = None

    def __init__(
        self,
        clients: Clients | None = None,
        train: AnyDataset | None = None,
        partition: Partition | PartitionFunction | None = None,
        val: EvalData | None = None,
        test: EvalData | None = None,
        predict: EvalData | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        full_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        client_val: Mapping[ClientId, AnyDataset] | None = None,
        transform: Sequence[BatchTransform] | BatchTransform | None = None,
        augment: Sequence[BatchAugmentation] | BatchAugmentation | None = None,
        batch_size_of: BatchSizeOf | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        loader_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.train = train
        self.partition = partition
        self.val = val
        self.test = test
        self.predict = predict
        self.batch_size = check_count(name, "batch_size", batch_size, least=1)
        self.eval_batch_size = eval_batch_size
        self.full_batch_size = full_batch_size
        for key in ("eval_batch_size", "full_batch_size"):
            if getattr(self, key) is not None:
                check_count(name, key, getattr(self, key), least=1)
        check_flags(name, shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate_fn = collate_fn
        self.num_workers = check_count(name, "num_workers", num_workers, least=0)
        self.pin_memory = pin_memory
        if client_val is not None and not isinstance(client_val, Mapping):
            raise FederatedError(f"{name}(client_val={client_val!r}): client_val must map client ids to data sets.")
        self.client_val = {} if client_val is None else client_val
        # Use other names: a subclass's `self.transform` is usually a function of one example.
        self.batch_transform = chain(name, "transform", transform)
        self.batch_augment = chain(name, "augment", augment)
        self.batch_size_of = batch_size_of
        self.worker_init_fn = worker_init_fn
        self.loader_options = check_options(name, loader_options)
        if self.loader_options and not num_workers:
            raise FederatedError(
                f"{name}(loader_options={self.loader_options!r}) is for loader processes, and num_workers=0 starts"
                " none. Set num_workers, or leave loader_options unset."
            )
        self._check_sources(clients)
        if clients is not None:
            self.set_clients(clients)

    @classmethod
    def from_loader(
        cls, loader: AnyLoader, partition: Partition | PartitionFunction, val: EvalData | None = None, **kwargs: Any
    ) -> "FederatedDataModule":
        """Return a data module that splits a loader's data set into clients and uses the loader's settings.

        Args:
            loader: A ``DataLoader`` over a whole map-style data set, in stored or random order. It sets the batch size,
                ``shuffle``, ``drop_last``, ``collate_fn``, ``num_workers``, ``pin_memory``, ``worker_init_fn``,
                ``timeout``, ``prefetch_factor`` and ``multiprocessing_context``. Its ``generator`` and
                ``persistent_workers`` are ignored, with a warning.
            partition: How the data set is split into clients.
            val: The server model's validation set: a data set, a loader, or a list of these.
            kwargs: Other arguments of the class, which override the loader's settings.

        Raises:
            FederatedError: If the loader selects or repeats examples, or is not a ``DataLoader``.

        Example:
            >>> dataset = torch.utils.data.TensorDataset(
            ...     torch.randn(12, 2), torch.arange(12) % 3
            ... )
            >>> loader = DataLoader(dataset, batch_size=2, shuffle=True)
            >>> FederatedDataModule.from_loader(
            ...     loader, partition=lambda labels: [range(6), range(6, 12)]
            ... ).num_clients
            2
        """
        settings = settings_of(loader)
        if kwargs.get("num_workers") == 0:
            del settings["loader_options"]
        return cls(partition=partition, val=val, **{**settings, **kwargs})

    # Clients

    @property
    def clients(self) -> FederatedDataset | None:
        """The clients' data sets, split from ``train`` on first access; None if clients are built on demand.

        Replacing ``train`` or ``partition``, as for another fold, splits them again. If an option of the partition
        changes, the next fit splits them again.
        """
        if self.train is None or self.partition is None:
            return self._clients
        before = self._made_from
        is_old = before is not None and (before[0] is not self.train or before[1] is not self.partition)
        if is_old and not self._is_split:
            raise self._were_set("train or partition", "replaced")
        if self._clients is None or is_old:
            self.set_clients(FederatedDataset.from_partition(self.train, self.partition))
            self._is_split = True
        return self._clients

    def set_clients(self, clients: Clients) -> None:
        """Set the clients, for subclasses that load them in ``setup``.

        Args:
            clients: Like the class's argument ``clients``.

        Raises:
            FederatedError: If a client's data set is not map-style, or ``client_val`` has an unknown client id.
        """
        self._clients = clients if isinstance(clients, FederatedDataset) else FederatedDataset(clients)
        has_both = self.train is not None and self.partition is not None
        self._made_from = (self.train, self.partition, _options_of(self.partition)) if has_both else None
        self._is_split = False
        if self.client_val:
            _check_client_val_ids(self.client_val, self._clients.ids)

    @property
    def num_clients(self) -> int:
        """The number of clients N. A subclass that builds clients on demand overrides or assigns it."""
        if self._num_clients is not None:
            return self._num_clients
        if self._client_ids is not None or self._overrides("client_ids"):
            return len(self.client_ids)
        return len(self._need_clients())

    @num_clients.setter
    def num_clients(self, value: int) -> None:
        self._num_clients = check_count(self, "num_clients", value, least=1)
        self._check_number(self._client_ids, self._num_clients)

    @property
    def client_ids(self) -> Sequence[ClientId]:
        """The clients' ids, in the order of their stored indices. A subclass may override or assign it."""
        if self._client_ids is not None:
            return self._client_ids
        if self.clients is None and (self._num_clients is not None or self._overrides("num_clients")):
            return range(self.num_clients)
        return self._need_clients().ids

    @client_ids.setter
    def client_ids(self, value: Sequence[ClientId]) -> None:
        self._client_ids = check_client_ids(type(self).__name__, value)
        self._check_number(self._client_ids, self._num_clients)

    def describe_columns(self) -> Sequence[str]:
        """Return words for the meaning of inputs and targets, to compare when sites register; empty if unknown.

        The words leave a site, so they must contain only names and declared categories, and nothing of a row.
        """
        return ()

    def column_words(self, columns: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Return the words in some columns of the local data, before ``setup``, for sites to agree on.

        Override it together with :meth:`use_words`. The words leave a site only if its operator allows it.

        Args:
            columns: The names of the columns.
        """
        raise FederatedError(
            f"The run agrees on the words of {list(columns)}, and {type(self).__name__} has no words to agree on."
            " Override column_words and use_words, or leave agree_on unset for the run."
        )

    def use_words(self, words: Mapping[str, Sequence[str]]) -> None:
        """Make the next ``setup`` number the words of columns in the order that the sites of a run agreed on.

        Args:
            words: The words of all sites by column; empty for the local words.
        """
        if words:
            self.column_words(list(words))

    @property
    def known_sizes(self) -> list[int] | None:
        """The clients' numbers of examples, in the order of ``client_ids``; None if clients would have to be built."""
        built = self._overrides("client_dataset", "client_dataloader", "client_size", "client_ids", "num_clients")
        if built or self._client_ids is not None or self._num_clients is not None:
            return None
        return self._need_clients().known_sizes

    # Client data

    def client_dataset(self, client_id: ClientId) -> AnyDataset:
        """Return a client's training set; override it to build clients on demand.

        Args:
            client_id: One of ``client_ids``.

        Raises:
            FederatedError: If the client id is unknown.
        """
        return self._need_clients().dataset(client_id)

    def client_size(self, client_id: ClientId) -> int:
        """Return a client's number of training examples.

        For clients built on demand, override it if counting is cheaper than building the client.
        """
        if self._overrides("client_dataloader"):
            return self.client_batches(client_id).size
        if self._overrides("client_dataset"):
            return size_of(self._map_style(client_id))
        return self._need_clients().size(client_id)

    def batches_in_epoch(self, client_id: ClientId, size: int) -> int:
        """Return the number of batches in a local epoch of a client with ``size`` examples."""
        return self.batch_settings.num_batches(size)

    def client_batches(self, client_id: ClientId) -> ClientBatches:
        """Return a client's training batches."""
        return self._make_batches_of()(client_id)

    def batches_of(self) -> Callable[[ClientId], ClientBatches]:
        """Return :meth:`client_batches` as a function that reads the settings only once for many clients."""
        return self.client_batches if self._overrides("client_batches") else self._make_batches_of()

    def _make_batches_of(self) -> Callable[[ClientId], ClientBatches]:
        settings = self.batch_settings
        if self._overrides("client_dataloader"):
            size = self.client_size if self._overrides("client_size") else lambda _: None
            return lambda i: CustomBatches(partial(self.client_dataloader, i), i, settings, size(i))
        if not self._overrides("client_dataset") and (source := self._tensor_source(settings)) is not None:
            indices = self._need_clients().indices
            return lambda client_id: source.part(indices(client_id), settings)

        def batches(client_id: ClientId) -> ClientBatches:
            dataset = self._map_style(client_id)
            return TensorBatches.of(dataset, settings) or LoaderBatches(dataset, settings)

        return batches

    def _tensor_source(self, settings: BatchSettings) -> TensorBatches | None:
        """Return the batches of the data set that all clients share, if it consists of tensors."""
        clients = self._need_clients()
        if self._source is None or self._source[0] is not clients:
            batches = None if clients.source is None else TensorBatches.of(clients.source, settings)
            self._source = (clients, batches)
        return self._source[1] if settings.collate_fn is None else None

    def client_dataloader(self, client_id: ClientId, generator: torch.Generator) -> Iterable[Any]:
        """Return a loader of one local epoch; override it to load a client's batches yourself.

        Args:
            client_id: One of ``client_ids``.
            generator: The source of the examples' order; with any other source, a resumed run differs.

        Returns:
            Any iterable of batches with a ``__len__``, its number of batches. If it is not a ``DataLoader``, also
            override :meth:`client_size`, and pass ``batch_size_of`` if the examples in a batch cannot be counted.
        """
        return LoaderBatches(self._map_style(client_id), self.batch_settings).loader(generator)

    def client_val_dataset(self, client_id: ClientId) -> AnyDataset | None:
        """Return a client's validation set, or None.

        Raises:
            FederatedError: If ``client_id`` cannot be the id of a client.
        """
        return self.client_val.get(check_client_id(client_id))

    # Remote clients

    def connect_clients(self) -> Any:
        """Return an object that trains remote clients in this fit, or None to train in this process.

        A fit calls it after a checkpoint is loaded, and before it reads the clients' ids and sizes. A data module of
        remote clients overrides it; see :class:`lightning_fed.deploy.RemoteClients`.

        Returns:
            A :class:`lightning_fed.rounds.client_half.ClientHalf`, or None.
        """
        return None

    # Evaluation of the server model

    def train_dataloader(self) -> NoReturn:
        """Raise, since each client has its own loader."""
        raise FederatedError(
            f"{type(self).__name__} has no train_dataloader(), but one loader for each client. Train with"
            " FederatedTrainer. For a centralised baseline give Trainer.fit a DataLoader of the undivided training set."
            " If the module calls it, override the hook that does: sum(map(data.client_size, data.client_ids)) is the"
            " number of examples, data.client_dataset(client_id) has those of a client, and"
            " trainer.estimated_stepping_batches is the length of a schedule."
        )

    @_defined_with_val
    def val_dataloader(self) -> EvalLoader:
        """Return the loader of the validation set."""
        return [] if self.val is None else self._eval_loader(self.val)

    def test_dataloader(self) -> EvalLoader:
        """Return the loader of the test set."""
        return self._eval_loader(self._need("test", self.test))

    def predict_dataloader(self) -> EvalLoader:
        """Return the loader of the prediction set, by default of the test set."""
        return self._eval_loader(self._need("predict", self.test if self.predict is None else self.predict))

    def _eval_loader(self, data: EvalData) -> EvalLoader:
        if are_several(data):
            parts = cast("Sequence[AnyDataset | AnyLoader]", data)
            return [cast("AnyLoader", self._eval_loader(part)) for part in parts]
        if isinstance(data, DataLoader):
            return data if self.batch_transform is None else transformed_loader(data, self.batch_transform)
        settings = replace(self.batch_settings, batch_size=self.eval_batch_size or 256)
        return evaluation_loader(cast("AnyDataset", data), settings)

    # Checks

    def _were_set(self, what: str, changed: str) -> FederatedError:
        return FederatedError(
            f"{what} of {type(self).__name__} has been {changed}, and its clients were set by set_clients before. Call"
            " set_clients again, or make a new data module."
        )

    def _check_number(self, ids: Sequence[ClientId] | None, number: int | None) -> None:
        if ids is not None and number is not None and len(ids) != number:
            raise FederatedError(
                f"{type(self).__name__} has {len(ids):,} client_ids and num_clients={number:,}. Give client_ids alone,"
                " which also set the number."
            )

    @property
    def batch_settings(self) -> BatchSettings:
        """The settings of the clients' batches."""
        return BatchSettings(
            batch_size=self.batch_size,
            full_batch_size=self.full_batch_size or max(self.batch_size, 512),
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            transform=self.batch_transform,
            augment=self.batch_augment,
            batch_size_of=self.batch_size_of,
            worker_init_fn=self.worker_init_fn,
            loader_options=self.loader_options,
        )

    def _map_style(self, client_id: ClientId) -> AnyDataset:
        dataset = self.client_dataset(client_id)
        check_map_style(dataset, f"Client {client_id!r}")
        return dataset

    @property
    def _val_may_come(self) -> bool:
        """True if a subclass has hooks that may set a validation set."""
        return self._overrides("setup", "prepare_data")

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(FederatedDataModule, name) for name in names)

    def _check_sources(self, clients: Clients | None) -> None:
        name = type(self).__name__
        given = [key for key in ("train", "partition") if getattr(self, key) is not None]
        if clients is not None and given:
            raise FederatedError(f"{name}(clients=..., {given[0]}=...): give either clients, or train and partition.")
        if type(self) is FederatedDataModule and clients is None and len(given) < 2:
            found = f"found {given[0]} alone" if given else "found neither"
            raise FederatedError(f"{name} needs either clients=..., or both train=... and partition=...; {found}.")
        if self.train is not None:
            check_map_style(self.train, f"{name}(train=...)")
        for key in ("val", "test", "predict"):
            check_evaluation(name, key, getattr(self, key))
        check_client_val(name, self.client_val)
        if self.partition is not None:
            check_partition(self.partition)
        functions = {
            "collate_fn": "a list of examples",
            "batch_size_of": "a batch",
            "worker_init_fn": "a worker's number",
        }
        for key, of in functions.items():
            if (given := getattr(self, key)) is not None and not callable(given):
                raise FederatedError(f"{name}({key}={given!r}) must be a function of {of}.")

    def _need_clients(self) -> FederatedDataset:
        clients = self.clients
        if clients is None:
            raise FederatedError(
                f"{type(self).__name__} has no clients. Pass clients, or train and partition, or set them in setup()."
                " For clients made on demand, give num_clients and override client_dataset(client_id)."
            )
        return clients

    def _need(self, name: str, data: EvalData | None) -> EvalData:
        if data is None:
            raise FederatedError(f"{type(self).__name__} has no {name} set: pass {name}=... to it.")
        return data


def _check_client_val_ids(client_val: Mapping[ClientId, Any], ids: Sequence[ClientId]) -> None:
    """Raise for validation sets of clients that do not exist."""
    known = ids if isinstance(ids, range) else set(ids)
    unexpected = sorted(repr(key) for key in client_val if key not in known)
    if unexpected:
        shown = ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")
        raise FederatedError(
            f"client_val has unknown client ids: {', '.join(unexpected)}. The {len(ids):,} clients are {shown}."
        )


def _options_of(partition: Any) -> tuple[str, Any, Any]:
    """Return a partition's text, and two options that it abbreviates: a partition within, and the keys of ``ByKey``.

    The text is without the addresses of functions, which differ between processes.
    """
    inner = getattr(partition, "partition", partition)
    return re.sub(" at 0x[0-9a-f]+", "", repr(partition)), inner, inner.keys if isinstance(inner, ByKey) else None


def check_clients(data: FederatedDataModule) -> None:
    """Drop the clients if a partition option has changed; raise for invalid ids and for attributes without effect.

    The next access splits dropped clients again. A user's subclass may define its own attributes of these names.
    """
    if data._made_from is not None:
        (shown, *before), (shown_now, *now) = data._made_from[2], _options_of(data.partition)
        if shown != shown_now or any(old is not new for old, new in zip(before, now, strict=True)):
            if not data._is_split:
                raise data._were_set("an option of partition", "set")
            data._clients = None
    for name in ("transform", "augment"):
        if type(data).__module__.partition(".")[0] == "lightning_fed" and name in vars(data):
            raise FederatedError(
                f"{type(data).__name__}.{name} was assigned, which has no effect. Assign batch_{name}, a function of a"
                f" batch, or pass {name}=... to a new FederatedDataModule."
            )
    if data._overrides("client_ids"):
        check_client_ids(type(data).__name__, data.client_ids)
    if data._overrides("client_ids") or data._client_ids is not None:
        data._check_number(data.client_ids, data.num_clients)
    if data.client_val:
        _check_client_val_ids(data.client_val, data.client_ids)
