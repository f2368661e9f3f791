"""pytorch_tabular: the LightningModules of its TabularModel, on its data sets."""

# pip install: einops omegaconf pandas requests rich scikit-base
# pip install: --no-deps pytorch_tabular

from functools import cache
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from tests.public_modules.harness import SIZES, PublicCase, Published, needs

needs("pytorch_tabular")
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig, GANDALFConfig


def table(n: int, seed: int) -> pd.DataFrame:
    numbers = np.random.default_rng(seed)
    a, b = numbers.normal(size=(2, n)).astype(np.float32)
    kind = numbers.integers(0, 3, n)
    return pd.DataFrame({"a": a, "b": b, "kind": kind.astype(str), "label": (a + kind > 1).astype(int)})


@cache
def prepared(config: type, **options: Any) -> tuple[TabularModel, Any]:
    model = TabularModel(
        data_config=DataConfig(target=["label"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
        model_config=config(task="classification", learning_rate=0.1, **options),
        optimizer_config=OptimizerConfig(optimizer="SGD"),
        trainer_config=TrainerConfig(accelerator="cpu"),
        verbose=False,
        suppress_lightning_logger=True,
    )
    return model, model.prepare_dataloader(train=table(sum(SIZES), 0), validation=table(8, 9), seed=0)


def clients(config: type, **options: Any) -> list[Dataset]:
    rows = prepared(config, **options)[1].train_dataloader().dataset
    ends = np.cumsum(SIZES)
    return [Subset(rows, range(end - n, end)) for n, end in zip(SIZES, ends, strict=True)]


def module(config: type, **options: Any) -> Any:
    model, data = prepared(config, **options)
    return model.prepare_model(data)


def case(config: type, reason: str, **options: Any) -> PublicCase:
    name = config.__name__.removesuffix("Config") + (
        " without BatchNorm" if "batch_norm_continuous_input" in options else ""
    )
    return PublicCase(
        name,
        lambda: module(config, **options),
        lambda: clients(config, **options),
        "sequential",
        reason,
        val=lambda: prepared(config, **options)[1].val_dataloader().dataset,
        logged=("train_loss",),
    )


ATTENTION = {"input_embed_dim": 8, "num_heads": 2, "num_attn_blocks": 1}
ATTENTION |= dict.fromkeys(("attn_dropout", "ff_dropout", "add_norm_dropout"), 0.0)
STATISTICS = "moves running statistics"
PLAIN = {"batch_norm_continuous_input": False}
CASES = [
    case(CategoryEmbeddingModelConfig, STATISTICS, layers="8-4"),
    case(CategoryEmbeddingModelConfig, r"a boolean mask does, in base_model\.py", layers="8-4", **PLAIN),
    case(GANDALFConfig, STATISTICS, gflu_stages=1),
    case(FTTransformerConfig, STATISTICS, **ATTENTION),
    case(
        FTTransformerConfig,
        r"it changes the attribute '_backbone\.(attention_weights_|local_feature_importance)'",
        **ATTENTION,
        **PLAIN,
    ),
]


class TestPublished(Published):
    cases = CASES
