"""neuralforecast: its LightningModules on batches of series from its own loader."""

# pip install: neuralforecast

from typing import Any

import numpy as np
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


HALVING = {"max_steps": 6, "num_lr_decays": 2}  # the rate is halved after three local steps


def mlp() -> Any:
    return MLP(h=2, input_size=4, num_layers=1, hidden_size=8, loss=MAE(), **HALVING, windows_batch_size=None)


def nhits() -> Any:
    return NHITS(h=2, input_size=4, mlp_units=[[8, 8]] * 3, loss=MAE(), **HALVING, windows_batch_size=8)


def case(name: str, module: Any, draws: bool, local_schedule: str | None = "total") -> PublicCase:
    options = {"loader": loader, "draws": draws, "local_schedule": local_schedule, **FLOAT32}
    return PublicCase(name, module, clients, "sequential", "found an Index in one", **options)


CASES = [case("MLP", mlp, draws=False), case("NHITS on sampled windows", nhits, draws=True)]


class TestPublished(Published):
    cases = CASES


def test_schedule_that_counts_steps_is_rejected() -> None:
    assert "interval" in refusal(case("MLP", mlp, draws=False, local_schedule=None))
