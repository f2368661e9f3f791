"""Schedules that depend on a metric step right after validation."""

from typing import Any

import torch
from pytorch_lightning.callbacks import Checkpoint

from tests.helpers.training import Net, data, seeded, trainer


class Follows(Net):
    """Halves its rate in every round: no loss falls below a negative one."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Rates(Checkpoint):
    """Records the rate whenever a checkpoint could be written after validation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_metric_scheduler_steps_once_per_round_before_saving() -> None:
    rates = Rates()
    run = trainer(max_rounds=3, callbacks=rates, num_sanity_val_steps=2, enable_checkpointing=True)
    run.fit(model := seeded(Follows), data())
    assert rates.seen == [0.4, 0.2, 0.1]  # the sanity check does not count
    (config,) = run.lr_scheduler_configs
    run.validate(model, data(), verbose=False)
    assert config.scheduler.optimizer.param_groups[0]["lr"] == 0.1
