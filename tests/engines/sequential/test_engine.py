"""What one client's steps change reaches no other: frozen parameters, momentum, buffers of parts of a batch."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedDataModule
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.sequential.engine import SequentialEngine
from tests.helpers.engines import Ordinary, run, state_of
from tests.helpers.training import clients


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


class Late(Teacher):
    """Makes its teacher in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = None

    def follow(self) -> None:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.head).requires_grad_(False)


def test_a_frozen_parameter_may_be_made_in_a_step() -> None:
    assert run("sequential", Late).lightning_module.teacher is not None


def test_buffers_of_parts_of_a_batch_weigh_as_many_examples_as_each_process_saw() -> None:
    written: dict[str, Tensor] = {}
    before = {"mean": torch.zeros(1), "same": torch.ones(1)}
    engine: Any = SimpleNamespace(
        buffers=SimpleNamespace(read=lambda: {**before, "mean": torch.tensor([4.0])}, write=written.update),
        split=SimpleNamespace(gather=lambda mine: [mine, (1, {"mean": torch.tensor([8.0])})]),
        epoch_loop=SimpleNamespace(own_examples=3),
    )
    merged = SequentialEngine._merged_buffers(engine, before)
    assert {name: value.item() for name, value in merged.items()} == {"mean": 5.0, "same": 1.0}
    assert written == merged


class Breaks(Ordinary):
    """Fails in the step of a client whose features are huge, from the given batch on."""

    at = 0

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if float(batch[0].abs().max()) > 100 and batch_idx >= self.at:
            raise ValueError("too large")
        return super().training_step(batch, batch_idx)


class BreaksLater(Breaks):
    at = 2


def test_the_momentum_of_a_client_that_fails_reaches_nobody() -> None:
    def end(make: type[Breaks]) -> dict[str, Any]:
        rows = clients((8, 13, 7))
        rows[1].tensors[0].mul_(1000)
        datamodule = partial(FederatedDataModule, clients=rows, batch_size=4)
        return state_of(run("sequential", make, datamodule, clients_per_round=3, on_client_error="drop"))

    assert torch.equal(end(Breaks)["x"], end(BreaksLater)["x"])
