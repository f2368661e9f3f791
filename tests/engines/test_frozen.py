"""Parameters that nobody trains: a client that changes one is refused, in any round, batch and engine."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed import FederatedError
from tests.engines.sequential.test_engine import Teacher
from tests.helpers.engines import Ordinary, run
from tests.helpers.training import data


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_teacher_that_follows_is_refused_by_name(engine: str) -> None:
    with pytest.raises(FederatedError, match=r"changes the parameter 'teacher\..*as_buffers=\['teacher\.\*'\]"):
        run(engine, Teacher)


class FromTheSecondRound(Teacher):
    """Has a teacher that follows from the second round on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch:
            self.follow()
        return Ordinary.training_step(self, batch, batch_idx)


class InLaterBatches(Teacher):
    """Has a teacher that follows from the third batch on, which the first clients do not have, in place."""

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            self.follow()
        return Ordinary.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "engine"),
    [(FromTheSecondRound, "sequential"), (InLaterBatches, "sequential"), (InLaterBatches, "vectorized")],
)
def test_a_teacher_that_begins_to_follow_later_is_refused_too(module: Any, engine: str) -> None:
    """Its changes would go from one client to the next: 130 % off after four rounds."""
    with pytest.raises(FederatedError, match=r"changes the parameter 'teacher\..*as_buffers=\['teacher\.\*'\]"):
        run(engine, module, partial(data, (8, 8, 8, 24)))


class Outside(Teacher):
    """Has a teacher among trained layers, which would have a gradient if the optimizer trained it."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({"teacher": self.teacher.requires_grad_(True), "head": self.head})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.1)


def test_the_pattern_that_is_offered_fits_no_trained_parameter() -> None:
    with pytest.raises(FederatedError, match="as_buffers=\\['teacher\\.\\*'\\]"):
        run("sequential", Outside)
