"""Regression on a small real data set: the strength of concrete, split into different clients."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.core.arguments import check_count, check_flags, check_number, check_paths, check_seed, check_texts
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.files.stored import StoredDataModule, find, read_table
from lightning_fed.data.files.tables import as_number
from lightning_fed.data.partitions import Partition, PartitionFunction, equal_shares, random_state

_COLUMNS = 9


class Concrete(StoredDataModule):
    """Yeh's concrete compressive strength (UCI, doi:10.24432/C5PK67): 1,030 mixtures, 8 features, one target.

    Inputs are float32 [n, 8] and targets float32 [n, 1]: the strength in MPa, possibly standardized. A random test part
    is both ``val`` and ``test``. The features are standardized by the mean and deviation of the training part. The
    training part is sorted by strength or by a feature and cut into equal pieces, one per client, so that clients
    differ in the sorted quantity.

    Args:
        root: The folder of data sets. The file is ``root/concrete/Concrete_Data.csv``: a heading, eight features, and
            the strength in the last column.
        num_clients: The number of clients.
        sort_by: "target" or the name of a feature's column; None for IID clients.
        partition: A partition to use instead of ``num_clients`` equal pieces sorted by ``sort_by``.
        test_fraction: The share of the mixtures in the test part.
        standardize_target: Whether to standardize the target by the training part too. Half the squared error is then
            half the unexplained share of the variance.
        batch_size: Examples in a client's training batch.
        seed: The seed of the test part; without ``sort_by``, also of the clients.

    Raises:
        FederatedError: If an argument is not allowed; in ``setup``, if the file is missing or damaged.
    """

    num_features = _COLUMNS - 1

    def __init__(
        self,
        root: str = "data",
        num_clients: int = 10,
        sort_by: str | None = "target",
        partition: Partition | PartitionFunction | None = None,
        test_fraction: float = 0.2,
        standardize_target: bool = False,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(partition=partition, batch_size=batch_size)
        check_paths("Concrete", root=root)
        check_flags("Concrete", standardize_target=standardize_target)
        if sort_by is not None:
            check_texts("Concrete", sort_by=sort_by)
        self.root = root
        self._pieces = num_clients if partition is not None else check_count("Concrete", "num_clients", num_clients)
        self.sort_by = sort_by
        self.test_fraction = check_number("Concrete", "test_fraction", test_fraction, "[0, 1)")
        self.standardize_target = standardize_target
        self.seed = check_seed("Concrete", seed)

    def _load(self) -> None:
        path = find(
            "Concrete",
            Path(self.root) / "concrete" / "Concrete_Data.csv",
            "Download Concrete_Data.xls from https://archive.ics.uci.edu/dataset/165 and save it as CSV.",
            "Or set root to the folder that has concrete/Concrete_Data.csv.",
        )
        rows = read_table(path)
        _, names = next(rows)
        if len(names) != _COLUMNS:
            raise FederatedError(f"{path}: the heading must have {_COLUMNS} columns, the strength last; found {names}.")
        numbers = list[float]()
        for line, row in rows:
            for name, text in zip(names, row, strict=True):
                number = as_number(text.strip())
                if number is None or not abs(number) <= torch.finfo(torch.float32).max:
                    raise FederatedError(
                        f"{path}: column {name!r} must hold finite numbers; line {line} holds {text!r}."
                    )
                numbers.append(number)
        table = torch.tensor(numbers, dtype=torch.float64).view(-1, _COLUMNS).float()
        order = torch.from_numpy(random_state(self.seed).permutation(len(table)))
        num_test = round(self.test_fraction * len(table))
        test, train = table[order[:num_test].sort().values], table[order[num_test:]]
        self.val = self.test = TensorDataset(*self._standardize(test, train)) if num_test else None
        if self.partition is not None:
            self.train = TensorDataset(*self._standardize(train, train))
            return
        if self.sort_by is not None:
            columns = {name: position for position, name in enumerate(names)} | {"target": _COLUMNS - 1}
            if self.sort_by not in columns:
                raise FederatedError(
                    f"Concrete(sort_by={self.sort_by!r}): {path} has 'target' and the columns {names}."
                )
            train = train[train[:, columns[self.sort_by]].argsort(stable=True)]
        if len(train) < self._pieces:
            raise FederatedError(f"Concrete: {len(train)} training mixtures for num_clients={self._pieces}.")
        shares = equal_shares(len(train), self._pieces).tolist()
        pieces = zip(*(tensor.split(shares) for tensor in self._standardize(train, train)), strict=True)
        self.set_clients([TensorDataset(*piece) for piece in pieces])

    def _standardize(self, rows: Tensor, train: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [n, 8] and targets [n, 1], standardized by the training part."""
        deviation, mean = torch.std_mean(train, dim=0, correction=0)
        deviation[deviation == 0] = 1
        standard = (rows - mean) / deviation
        return standard[:, :-1], (standard if self.standardize_target else rows)[:, -1:]
