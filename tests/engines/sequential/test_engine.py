"""A frozen parameter that a step changes is refused: clients would find each other's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from tests.helpers.engines import Ordinary, run


class Teacher(Ordinary):
    """A student, and a frozen teacher that follows it in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        return super().training_step(batch, batch_idx)


class Watched(Teacher):
    """Has a teacher that stays as it is."""

    def follow(self) -> None:
        assert all(not p.requires_grad for p in self.teacher.parameters())


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_teacher_that_follows_is_refused_by_name(engine: str) -> None:
    with pytest.raises(FederatedError, match=r"changes the parameter 'teacher\..*register_buffer"):
        run(engine, Teacher)


def test_a_frozen_parameter_that_stays_is_allowed() -> None:
    module = Watched()
    with torch.no_grad():
        module.teacher.weight[0] = float("nan")
    run("sequential", lambda: module)
