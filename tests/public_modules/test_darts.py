"""darts: its LightningModules, as its forecasting models create them, on its own windows of series."""

# pip install: darts

from functools import partial
from typing import Any

import numpy as np
import torch

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs

needs("darts")
from darts import TimeSeries
from darts.models import NBEATSModel, TFTModel, TSMixerModel
from darts.utils.data.torch_datasets.utils import TorchTrainingBatch
from darts.utils.data.torch_datasets.utils import _batch_collate_fn_train as collate
from darts.utils.likelihood_models import QuantileRegression

torch.export.register_dataclass(TorchTrainingBatch)  # the vectorized engine then takes its batches

LENGTHS = {"input_chunk_length": 6, "output_chunk_length": 2}


def forecaster(cls: Any, **options: Any) -> Any:
    """Return a forecasting model that trains with SGD."""
    return cls(optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.05}, **LENGTHS, **options)


def windows(model: Any, n: int, seed: int) -> Any:
    """Return n windows of a series, with the covariates that the model takes."""
    numbers, steps = np.random.default_rng(seed), n + sum(LENGTHS.values()) - 1
    wave = np.sin(np.arange(steps) / (2 + seed)) + 0.1 * numbers.normal(size=steps)
    other = [TimeSeries.from_values(numbers.normal(size=(steps, 2)))]
    past, future = model.supports_past_covariates, model.supports_future_covariates
    series = [TimeSeries.from_values(wave)]
    return model._build_train_dataset(series, other if past else None, other if future else None, None, None)


def module(cls: Any, **options: Any) -> Any:
    """Return the LightningModule that ``fit`` of the forecasting model would make."""
    model = forecaster(cls, **options)
    model.train_sample = windows(model, 8, 0)[0]
    model.output_dim = 1
    return model._init_model()


def case(cls: Any, engine: str, reason: str, **options: Any) -> PublicCase:
    return PublicCase(
        cls.__name__,
        partial(module, cls, **options),
        lambda: [windows(forecaster(cls, **options), n, i) for i, n in enumerate(SIZES)],
        engine,
        reason,
        val=lambda: windows(forecaster(cls, **options), 12, 9),
        collate=collate,
        logged=("train_loss",),
    )


MIXER = {"hidden_size": 4, "ff_size": 4, "num_blocks": 1, "dropout": 0.0, "use_reversible_instance_norm": True}
FUSION = {"hidden_size": 4, "num_attention_heads": 2, "hidden_continuous_size": 4, "dropout": 0.0}
QUANTILES = QuantileRegression([0.1, 0.5, 0.9])
CASES = [
    case(NBEATSModel, "vectorized", AGREED, generic_architecture=False, num_blocks=1, num_layers=2, layer_widths=8),
    case(TSMixerModel, "sequential", "it changes the attribute 'rin.mean'", **MIXER),
    case(TFTModel, "sequential", "it changes the buffer 'attention_mask'", likelihood=QUANTILES, **FUSION),
]


class TestPublished(Published):
    cases = CASES
