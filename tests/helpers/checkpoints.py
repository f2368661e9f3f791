"""A short run that keeps a checkpoint after each round."""

from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed.algorithms import Scaffold
from tests.helpers.training import data, seeded, trainer


def run_keeping(folder: Path, rounds: int, ckpt_path: Any = None, model: Any = None, **options: Any) -> Any:
    """Run Scaffold and keep a checkpoint after each round."""
    keep = options.pop("keep", None) or ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
    callbacks = [keep, *options.pop("callbacks", [])]
    made = trainer(algorithm=Scaffold(), max_rounds=rounds, callbacks=callbacks, enable_checkpointing=True, **options)
    made.fit(model or seeded(), data(), ckpt_path=ckpt_path)
    return made
