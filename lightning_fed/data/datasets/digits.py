"""A small real data set that needs no download: handwritten digits, split into clients."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed.core.arguments import check_flags, check_number
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partitions import Dirichlet, Partition, PartitionFunction

_VAL_FRACTION = 0.1


class Digits(FederatedDataModule):
    """The 1,797 handwritten digits (8x8 pixels, 10 classes) that come with scikit-learn.

    A fixed split, stratified by class, reserves 20 % of the examples for testing and 10 % for validation; the clients
    share the rest. It depends on ``test_fraction`` but not on ``seed``, so that runs with different clients are
    evaluated on the same examples. ``trainer.predict`` gets the images of the test set, without labels.

    Args:
        num_clients: The number of clients.
        alpha: The concentration of the :class:`Dirichlet` partition; small values give clients with few classes.
        partition: A partition to use instead of ``Dirichlet(num_clients, alpha, seed=seed)``.
        batch_size: Examples in a client's training batch.
        test_fraction: The share of the examples in the test set, in (0, 0.9).
        seed: The seed of the Dirichlet partition.
        flatten: Whether an image has shape [64] instead of [1, 8, 8]. Pixels are float32 in [0, 1] either way.
        client_val_fraction: The share of each client's examples, in [0, 1) and rounded down, that ``client_val`` holds
            instead of the training set. It does not depend on any seed.

    Raises:
        FederatedError: If an argument is not allowed.

    Example:
        >>> data = Digits(num_clients=10, batch_size=8)
        >>> data.num_clients, sum(data.known_sizes), len(data.val), len(data.test)
        (10, 1259, 179, 359)
    """

    num_classes = 10

    def __init__(
        self,
        num_clients: int = 30,
        alpha: float = 0.3,
        partition: Partition | PartitionFunction | None = None,
        batch_size: int = 16,
        test_fraction: float = 0.2,
        seed: int = 0,
        flatten: bool = False,
        client_val_fraction: float = 0.0,
    ) -> None:
        check_flags("Digits", flatten=flatten)
        check_number("Digits", "client_val_fraction", client_val_fraction, "[0, 1)")
        check_number("Digits", "test_fraction", test_fraction, "(0, 0.9)")  # validation takes 0.1 of the examples
        images, labels = _load()
        images = images.view(-1, 64) if flatten else images
        train, val, test = (TensorDataset(images[part], labels[part]) for part in _split(labels, test_fraction))
        super().__init__(
            train=train,
            partition=Dirichlet(num_clients, alpha, seed=seed) if partition is None else partition,
            val=val,
            test=test,
            predict=cast("Dataset[Any]", test.tensors[0]),
            batch_size=batch_size,
        )
        if client_val_fraction:
            random, shared = np.random.RandomState(0), self._need_clients()
            clients: dict[ClientId, Dataset[Any]] = {}
            held_out: dict[ClientId, Dataset[Any]] = {}
            for i in shared.ids:
                own, order = shared.dataset(i), random.permutation(shared.size(i)).tolist()
                num_val = int(client_val_fraction * len(order))
                clients[i], held_out[i] = Subset(own, order[num_val:]), Subset(own, order[:num_val])
            self.client_val = held_out
            self.set_clients(clients)


def _load() -> tuple[Tensor, Tensor]:
    """Return the images [1797, 1, 8, 8] in [0, 1] and their labels [1797]."""
    from sklearn.datasets import load_digits  # lazy import: it takes seconds

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(bunch.target, dtype=torch.int64)


def _split(labels: Tensor, test_fraction: float) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of the training, validation and test examples, stratified by class."""
    random = np.random.RandomState(0)
    train, val, test = list[int](), list[int](), list[int]()
    for label in range(Digits.num_classes):
        members = random.permutation(torch.nonzero(labels == label).flatten().numpy()).tolist()
        num_test, num_val = round(test_fraction * len(members)), round(_VAL_FRACTION * len(members))
        test += members[:num_test]
        val += members[num_test : num_test + num_val]
        train += members[num_test + num_val :]
    return sorted(train), sorted(val), sorted(test)
