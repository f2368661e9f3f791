"""gluonts: its LightningModules, as its estimators create them, on windows that they cut from series."""

# pip install: gluonts lightning

from itertools import islice
from typing import Any

import numpy as np
import torch

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs

needs("gluonts", lightning="lightning")
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator

FEED_FORWARD = SimpleFeedForwardEstimator(prediction_length=2, context_length=6, hidden_dimensions=[4], batch_size=4)
DEEP_AR = DeepAREstimator(
    "D", prediction_length=2, context_length=6, hidden_size=4, num_layers=1, dropout_rate=0.0, batch_size=4
)


def windows(estimator: Any, n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return n windows at random places of a series, as examples of a map-style data set."""
    numbers = np.random.default_rng(seed)
    values = np.sin(np.arange(60) / (2 + seed)) + 0.1 * numbers.normal(size=60)
    series = ListDataset([{"start": pd.Period("2020-01-01", freq="D"), "target": values.astype(np.float32)}], freq="D")
    np.random.seed(seed)  # gluonts draws the places from NumPy's global generator
    transformed = estimator.create_transformation().apply(series, is_train=True)
    loader = estimator.create_training_data_loader(transformed, estimator.create_lightning_module())
    examples = (dict(zip(batch, own, strict=True)) for batch in loader for own in zip(*batch.values(), strict=True))
    return [{k: v for k, v in own.items() if isinstance(v, torch.Tensor)} for own in islice(examples, n)]


def case(name: str, estimator: Any, engine: str, reason: str, with_val: bool) -> PublicCase:
    return PublicCase(
        name,
        estimator.create_lightning_module,
        lambda: [windows(estimator, n, seed) for seed, n in enumerate(SIZES)],
        engine,
        reason,
        val=(lambda: windows(estimator, 12, 9)) if with_val else None,  # else its schedule follows "train_loss"
        logged=("train_loss",),
    )


CASES = [
    case("DeepAR", DEEP_AR, "sequential", "PyTorch runs its layer 'model.rnn' .LSTM. for one client", with_val=True),
    case("SimpleFeedForward", FEED_FORWARD, "vectorized", AGREED, with_val=False),
]


class TestPublished(Published):
    cases = CASES
