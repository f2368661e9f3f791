"""neuralforecast: its LightningModules on batches of series from its own loader."""

# pip install: neuralforecast

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.public_modules.harness import FLOAT32, SIZES, PublicCase, Published, needs, refusal

needs("neuralforecast")
import pandas as pd
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import MLP, NHITS
from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader


def series(n: int, seed: int) -> TimeSeriesDataset:
    steps = np.arange(10)
    values = np.random.default_rng(seed).normal(size=(n, 10)).cumsum(1)
    rows = [pd.DataFrame({"unique_id": i, "ds": steps, "y": values[i].astype(np.float32)}) for i in range(n)]
    return TimeSeriesDataset.from_df(pd.concat(rows, ignore_index=True))[0]


def clients() -> list[TimeSeriesDataset]:
    return [series(n, seed) for seed, n in enumerate(SIZES)]


def loader(dataset: TimeSeriesDataset) -> DataLoader:
    return TimeSeriesLoader(dataset, batch_size=4)


def without_schedule(cls: type) -> type:
    """Return a published module with its optimizer alone: its schedule counts the steps of one training run."""

    class WithoutSchedule(cls):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    return WithoutSchedule


def mlp(change: Any = without_schedule) -> Any:
    return change(MLP)(h=2, input_size=4, num_layers=1, hidden_size=8, loss=MAE(), max_steps=3, windows_batch_size=None)


def nhits() -> Any:
    small = {"mlp_units": [[8, 8]] * 3, "loss": MAE(), "max_steps": 3}
    return without_schedule(NHITS)(h=2, input_size=4, **small, windows_batch_size=8)


def case(name: str, module: Any, draws: bool) -> PublicCase:
    return PublicCase(
        name, module, clients, "sequential", "found an Index in one", loader=loader, draws=draws, **FLOAT32
    )


CASES = [case("MLP", mlp, draws=False), case("NHITS on sampled windows", nhits, draws=True)]


class TestPublished(Published):
    cases = CASES


def test_a_schedule_that_counts_steps_is_refused_by_name() -> None:
    assert "interval" in refusal(case("MLP", lambda: mlp(lambda cls: cls), draws=False))
