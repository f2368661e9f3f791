"""Local work flushes denormal numbers to zero, and nothing else does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightning_fed.engines.processor import denormals_as_zero
from tests.helpers.training import Net, data, seeded, trainer

ENGINES = ("sequential", "vectorized")


def takes_for_zero() -> bool:
    return (torch.tensor(1e-38) / 10).item() == 0


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot take denormal numbers for zero")
    yield
    torch.set_flush_denormal(False)


def test_denormals_are_restored_after_work_and_after_an_error() -> None:
    with denormals_as_zero():
        assert takes_for_zero()
    assert not takes_for_zero()
    with pytest.raises(ZeroDivisionError), denormals_as_zero():
        _ = 1 / 0
    assert not takes_for_zero()


def test_user_setting_is_kept() -> None:
    torch.set_flush_denormal(True)
    with denormals_as_zero():
        assert takes_for_zero()
    assert takes_for_zero()


def test_setting_is_unchanged_with_several_threads() -> None:
    torch.set_num_threads(2)
    with denormals_as_zero():
        assert not takes_for_zero()


class Faint(Net):
    """Has a parameter that only denormal gradients move, and records whether denormals are zero outside local work."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.faint = nn.Parameter(torch.zeros(1))
        self.seen: set[bool] = set()

    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args) + 1e-39 * self.faint.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_validation_epoch_end(self) -> None:
        self.seen.add(takes_for_zero())

    def on_train_epoch_end(self) -> None:
        self.seen.add(takes_for_zero())


def fitted(engine: str) -> Faint:
    model = seeded(Faint)
    trainer(engine=engine, max_rounds=2).fit(model, data())
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_denormals_are_flushed_only_during_local_work(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitted(engine)
    assert model.faint.item() == 0
    assert model.seen == {False}
    assert not takes_for_zero()
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: False)  # a processor without support
    without = fitted(engine)
    assert without.faint.item() != 0
    assert_close(without.state_dict(), model.state_dict(), rtol=0, atol=1e-38)
