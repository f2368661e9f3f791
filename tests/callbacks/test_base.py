"""The hooks of a callback, and the calls of the rounds' hooks."""

from typing import Any

from pytorch_lightning.callbacks import Callback, LambdaCallback

from lightning_fed import FederatedCallback
from lightning_fed.callbacks.base import any_uses_hook, uses_hook
from tests.helpers.training import data, seeded, trainer


class Logs(FederatedCallback):
    """Logs in both hooks of a round."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        pl_module.log("started", float(round))

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        pl_module.log("ended", float(round_report.round))


def test_hook_is_used_if_overridden_in_class_or_on_instance() -> None:
    assert uses_hook(LambdaCallback(on_fit_start=print), "on_fit_start")
    assert not uses_hook(LambdaCallback(on_fit_end=print), "on_fit_start")
    assert uses_hook(Logs(), "on_round_end", FederatedCallback)
    assert not uses_hook(Logs(), "on_client_end", FederatedCallback)


def test_plain_lightning_callbacks_get_no_round_hooks() -> None:
    class Named(Callback):
        def on_round_end(self, *_: Any) -> None:
            raise AssertionError

    run = trainer(callbacks=[Named(), Logs()], max_rounds=1)
    assert any_uses_hook(run, "on_round_start")
    assert not any_uses_hook(run, "on_round_restart")
    run.fit(seeded(), data())


def test_values_can_be_logged_at_round_start_and_end() -> None:
    run = trainer(callbacks=Logs(), max_rounds=2)
    run.fit(seeded(), data())
    assert {name: float(run.callback_metrics[name]) for name in ("started", "ended")} == {"started": 1.0, "ended": 1.0}
