"""Warnings name user-defined parts that keep state between rounds."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.server import Compressor, CoordinateMedian, SystemsHeterogeneity
from tests.helpers.training import clients, fit, seeded, trainer


class Counting(CoordinateMedian):
    """Takes medians, and counts rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: Tensor | None = None
        self.calls = 0

    def combine(self, *arguments: Any, **named: Any) -> Any:
        self._cache = torch.ones(3)
        self.calls += 1
        return super().combine(*arguments, **named)


class SavedCounts(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state_dict: Mapping[str, Any], x: Tensor) -> None:
        self.calls = state_dict.get("calls", 0)


class Drawing(SystemsHeterogeneity):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def __call__(self, *arguments: Any) -> Any:
        return [max(1, steps - self.generator.randrange(2)) for steps in arguments[-1]]


class Annealed(Compressor):
    def __init__(self) -> None:
        self._share = 1.0

    def __call__(self, message: Tensor, stream: torch.Generator) -> tuple[Tensor, int]:
        self._share *= 0.99
        return message * self._share, 4 * len(message)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"aggregator": Counting()}, r"aggregator=Counting\(...\) changes its attribute 'calls'.* Override state_dict"),
        ({"heterogeneity": Drawing()}, r"heterogeneity=Drawing\(...\) changes its attribute 'generator'"),
        ({"compression": Annealed()}, r"compression=Annealed\(...\) changes its attribute '_share'"),
    ],
    ids=["aggregator", "heterogeneity", "compression"],
)
def test_attribute_that_changes_between_rounds_warns(options: Any, found: str) -> None:
    with pytest.warns(UserWarning, match=found):
        fit(max_rounds=2, **options)


@pytest.mark.parametrize("aggregator", [SavedCounts(), CoordinateMedian()], ids=["saved", "shipped"])
def test_attributes_saved_in_checkpoints_do_not_warn(aggregator: Any, recwarn: pytest.WarningsRecorder) -> None:
    fit(max_rounds=2, aggregator=aggregator)
    assert not [warning for warning in recwarn if "changes its attribute" in str(warning.message)]


PARTS = clients([8, 8, 8])


class Noisy(Dataset[Any]):
    """Examples with noise from a generator that the data set holds."""

    def __init__(self, data: Any, generator: torch.Generator) -> None:
        self.data, self.generator = data, generator

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.randn(x.shape, generator=self.generator), y


class Own(FederatedDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=4)
        self.num_clients = 3
        self.stream = torch.Generator().manual_seed(1)

    def client_dataset(self, client_id: Any) -> Any:
        return PARTS[client_id]


class InHook(Own):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(batch[0].shape, generator=self.stream), *batch[1:]]


class InDataset(Own):
    def client_dataset(self, client_id: Any) -> Any:
        x, y = (PARTS[client_id][:][part] for part in (0, 1))
        return TensorDataset(x + torch.randn(x.shape, generator=self.stream), y)


class InOrder(Own):
    def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
        return DataLoader(PARTS[client_id], batch_size=4, shuffle=True, generator=self.stream)


class Held(Own):
    def client_dataset(self, client_id: Any) -> Any:
        return Noisy(PARTS[client_id], self.stream)


class Saved(InHook):
    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.stream.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stream.set_state(state_dict["stream"])


@pytest.mark.parametrize("data", [InHook, InDataset, InOrder])
@pytest.mark.parametrize("engine", ["sequential", pytest.param("vectorized", marks=pytest.mark.thorough)])
def test_unseeded_generator_warns(data: Any, engine: Any) -> None:
    with pytest.warns(UserWarning, match=f"{data.__name__} draws from the generator in its attribute 'stream'"):
        trainer(engine=engine, max_rounds=2, clients_per_round=2).fit(seeded(), data())


@pytest.mark.parametrize("data", [Own, Held, Saved])
def test_seeded_or_saved_generator_does_not_warn(data: Any, recwarn: pytest.WarningsRecorder) -> None:
    trainer(max_rounds=3, clients_per_round=2).fit(seeded(), data())
    assert not [warning for warning in recwarn if "draws from the generator" in str(warning.message)]
