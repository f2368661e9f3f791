"""pytorch-forecasting: its LightningModules, unchanged, on batches of its TimeSeriesDataSet."""

# pip install: pytorch-forecasting lightning

from functools import cache
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.public_modules.harness import FLOAT32, SIZES, PublicCase, Published, needs

needs("pytorch_forecasting", lightning="lightning")
import pandas as pd
from pytorch_forecasting import DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import NaNLabelEncoder
from pytorch_forecasting.metrics import MAE, NormalDistributionLoss, QuantileLoss

LENGTHS = {"max_encoder_length": 6, "max_prediction_length": 2}


def frame(series: int, seed: int) -> pd.DataFrame:
    numbers = np.random.default_rng(seed)
    steps = 7 + SIZES[series]  # one window of eight steps for each of the client's examples
    wave = np.sin(np.arange(steps) / (2 + series)) + 0.1 * numbers.normal(size=steps) + 3
    kinds = [str(n) for n in numbers.integers(0, 3, steps)]
    return pd.DataFrame({"value": wave, "time": np.arange(steps), "series": str(series), "kind": kinds})


@cache
def whole(known: bool) -> TimeSeriesDataSet:
    """Return the data set that determines all clients' scales and encodings."""
    named = {"time_varying_known_categoricals": ["kind"], "time_varying_known_reals": ["time"]} if known else {}
    return TimeSeriesDataSet(
        pd.concat([frame(i, seed=i) for i in range(len(SIZES))], ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["series"],
        time_varying_unknown_reals=["value"],
        categorical_encoders={"series": NaNLabelEncoder().fit([str(i) for i in range(len(SIZES))])},
        **LENGTHS,
        **named,
    )


def part(series: int, known: bool, seed: int | None = None) -> TimeSeriesDataSet:
    return TimeSeriesDataSet.from_dataset(whole(known), frame(series, series if seed is None else seed))


def clients(known: bool) -> list[TimeSeriesDataSet]:
    return [part(i, known) for i in range(len(SIZES))]


def loader(dataset: TimeSeriesDataSet) -> DataLoader:
    return dataset.to_dataloader(train=False, batch_size=4)


def temporal_fusion_transformer() -> Any:
    small = {
        "hidden_size": 4,
        "attention_head_size": 1,
        "hidden_continuous_size": 4,
        "dropout": 0.0,
        "learning_rate": 0.01,
    }
    return TemporalFusionTransformer.from_dataset(whole(True), loss=QuantileLoss(), optimizer="sgd", **small)


def deep_ar() -> Any:
    small = {"hidden_size": 4, "rnn_layers": 1, "dropout": 0.0}
    return DeepAR.from_dataset(whole(True), loss=NormalDistributionLoss(), optimizer="sgd", learning_rate=0.01, **small)


def n_beats() -> Any:
    small = {"widths": [8, 16], "num_blocks": [1, 1], "backcast_loss_ratio": 0.1, "optimizer": "sgd"}
    return NBeats.from_dataset(whole(False), loss=MAE(), learning_rate=0.01, **small)


def case(name: str, module: Any, known: bool) -> PublicCase:
    return PublicCase(
        name,
        module,
        lambda: clients(known),
        "sequential",
        "on_after_backward is called for every batch",
        val=lambda: loader(part(0, known, seed=9)),
        loader=loader,
        logged=("train_loss",),
        **FLOAT32,
    )


CASES = [
    case("TemporalFusionTransformer", temporal_fusion_transformer, True),
    case("DeepAR", deep_ar, True),
    case("NBeats", n_beats, False),
]


class TestPublished(Published):
    cases = CASES
