"""A checkpoint in the middle of a round holds the last completed round, without changes by this round's hooks."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_fed import ClientError, FederatedCallback
from lightning_fed.algorithms import Scaffold
from tests.helpers.checkpoints import run_keeping as run
from tests.helpers.selection import covering
from tests.helpers.training import Net, data, seeded, trainer


class Slower(FederatedCallback):
    """Sets a lower rate for one client."""

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        if client_id == 2:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01


class Shrinks(FederatedCallback):
    """Shrinks the weights and the rate as a round begins, and counts rounds and clients."""

    def __init__(self, hook: str) -> None:
        self.begun = self.clients = 0
        setattr(self, hook, self._shrink)

    def _shrink(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.begun += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
        with torch.no_grad():
            for value in pl_module.parameters():
                value.mul_(0.9)

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.clients += 1

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "clients": self.clients}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun, self.clients = state_dict["begun"], state_dict["clients"]


class Strikes(FederatedCallback):
    """Saves a checkpoint, or raises, after a batch of client 2 in a round."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.is_due = round == 2 and client_id == 2

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.is_due and isinstance(self.what, Path):
            trainer.save_checkpoint(self.what)
        elif self.is_due and self.what is not None:
            raise self.what


HOOKS: dict[str, Callable[[], Any]] = {
    "Slower": Slower,
    "Shrinks as Lightning's epoch begins": lambda: Shrinks("on_train_epoch_start"),
    "Shrinks as a round begins": lambda: Shrinks("on_round_start"),
}
ALL = {"clients_per_round": None}


def ends(made: Any, callback: Any) -> Any:
    """Return the final x of a run, the callback's state, and the rates."""
    groups = made.optimizers[0].param_groups
    return made.fit_loop.state.x.tolist(), callback.state_dict(), [group["lr"] for group in groups]


@pytest.mark.parametrize(("hooks", "how"), covering([*HOOKS], ["saved", "exception", "interrupt"]))
def test_interrupted_round_restarts_with_identical_bits(hooks: str, how: str, tmp_path: Path) -> None:
    make = HOOKS[hooks]
    whole = make()
    expected = ends(run(tmp_path / "whole", 4, callbacks=[whole], **ALL), whole)
    file = tmp_path / "saved.ckpt"
    if how == "saved":
        run(tmp_path / "cut", 3, callbacks=[make(), Strikes(file)], **ALL)
    else:
        error, kept = (RuntimeError, "on_exception") if how == "exception" else (KeyboardInterrupt, "last")
        file = tmp_path / "cut" / f"{kept}.ckpt"
        callbacks = [make(), Strikes(error()), OnExceptionCheckpoint(tmp_path / "cut")]
        keep = ModelCheckpoint(tmp_path / "cut", every_n_epochs=9)
        with pytest.raises((ClientError, SystemExit)):
            run(tmp_path / "cut", 4, callbacks=callbacks, keep=keep, **ALL)
    resumed = make()
    assert ends(run(tmp_path / "cut", 4, ckpt_path=file, callbacks=[resumed], **ALL), resumed) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("hooks", HOOKS)
def test_interrupted_trainer_continues_with_identical_bits(hooks: str, tmp_path: Path) -> None:
    make = HOOKS[hooks]
    expected = run(tmp_path / "whole", 4, callbacks=[make()], **ALL)
    strike, model = Strikes(RuntimeError()), seeded()
    again = trainer(algorithm=Scaffold(), max_rounds=4, callbacks=[make(), strike], **ALL)
    with pytest.raises(ClientError):
        again.fit(model, data())
    strike.what = None
    again.fit(model, data())
    assert torch.equal(again.fit_loop.state.x, expected.fit_loop.state.x)


class Follows(Net):
    """Has a teacher that follows the head as a round begins."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(8, 3).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_train_epoch_start(self) -> None:
        self.teacher.weight.data.lerp_(self.head.weight.data, 0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["saved", "left"])
def test_teacher_is_updated_once_in_an_interrupted_round(how: str, tmp_path: Path) -> None:
    expected, strike = seeded(Follows), Strikes(tmp_path / "saved.ckpt" if how == "saved" else RuntimeError())
    run(tmp_path / "whole", 4, model=expected, **ALL)
    model = seeded(Follows)
    made = trainer(algorithm=Scaffold(), max_rounds=4 if how == "left" else 3, callbacks=strike, **ALL)
    with pytest.raises(ClientError) if how == "left" else nullcontext():
        made.fit(model, data())
    if how == "left":
        strike.what = None
        made.fit(model, data())
    else:
        run(tmp_path / "resumed", 4, tmp_path / "saved.ckpt", model=(model := seeded(Follows)), **ALL)
    assert torch.equal(model.teacher.weight, expected.teacher.weight)


def test_teacher_too_large_to_copy_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.trainer.server_model._COPIED", 23)
    with pytest.warns(UserWarning, match=r"A hook has changed 'teacher.weight'.*24 numbers, .*in on_train_epoch_end"):
        run(tmp_path, 3, model=seeded(Follows), callbacks=[Strikes(tmp_path / "saved.ckpt")], **ALL)


class Draws(FederatedCallback):
    """Adds noise from the global generators to the weights in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._draw)

    def _draw(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for value in pl_module.parameters():
                value.add_(0.1 * torch.randn_like(value) + random.random() + np.random.rand())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hook", "engine"),
    [
        pytest.param(hook, engine, id=f"{hook}-{engine}")
        for hook in ("on_train_epoch_start", "on_round_start", "on_round_end", "on_train_epoch_end")
        for engine in ("sequential", "vectorized")
    ],
)
def test_round_hooks_draw_the_same_numbers_in_a_resumed_run(hook: str, engine: Any, tmp_path: Path) -> None:
    def drawing(name: str, rounds: int, ckpt_path: Any = None) -> Any:
        options = {"engine": engine, "limit_val_batches": 0, "model": seeded(dropout=0.0)}
        return run(tmp_path / name, rounds, ckpt_path, callbacks=[Draws(hook)], **options).fit_loop.state.x

    whole = drawing("whole", 3)
    drawing("half", 2)
    assert torch.equal(drawing("resumed", 3, tmp_path / "half" / "step=2.ckpt"), whole)


class LogsSteps(Net):
    """Logs the loss of each step as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss_of", loss, on_step=True, on_epoch=True)
        return loss


def test_step_metrics_of_an_interrupted_round_are_not_saved(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_epochs=9)
    made = trainer(callbacks=[keep, Strikes(KeyboardInterrupt())], enable_checkpointing=True, max_rounds=4, **ALL)
    with pytest.raises(SystemExit):
        made.fit(seeded(LogsSteps), data())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["metrics"]
    assert "loss_of_epoch" in saved
    assert "loss_of_step" not in saved
