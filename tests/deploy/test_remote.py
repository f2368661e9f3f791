"""Remote clients as the data module of a fit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import GradientDissimilarity
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import InProcess, Message, RemoteClients
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_data, make_trainer, parameters
from tests.helpers.training import classification

MAKE = partial(make_trainer, "Scaffold ii")


def test_callback_that_reads_client_data_is_rejected_on_the_server(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", callbacks=[GradientDissimilarity()]))
    with pytest.raises(FederatedError, match="are on its site"):
        wire.run()


def test_remote_clients_know_data_sizes_after_registration(tmp_path: Path) -> None:
    wire, given = Wire(tmp_path, partial(MAKE, max_rounds=1), with_val=True), {}

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if reply.header["phase"] == "register":
            given.update(batch_size=None if task.client == 3 else 8 - task.client)
            return [Message({**reply.header, **given})]
        return [reply]

    wire.comes = comes
    data = wire.clients()
    assert data.client_ids == [0, 1, 2, 3]
    with pytest.raises(FederatedError, match="size of client 1 is not known before it has registered"):
        data.client_size(1)
    wire.make().fit(model(), data)
    assert (data.known_sizes, data.client_size(1), data.batch_size) == ([15, 8, 22, 6], 8, 6)
    assert len(data.client_val_dataset(0)) == 15
    for look in (data.client_batches, data.client_dataset):
        with pytest.raises(FederatedError, match="data of client 'a' are on its site"):
            look("a")


def test_invalid_client_ids_are_rejected() -> None:
    for wrong, said in (([1.5], "must be an int or a str; found 1.5"), ("abc", "RemoteClients.client_ids is")):
        with pytest.raises(FederatedError, match=said):
            RemoteClients(InProcess([]), wrong)  # type: ignore[arg-type]


def test_sites_must_match_the_batch_size_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="batch_size"):
        RemoteClients(InProcess([]), ["a"], batch_size=0)
    wire = Wire(tmp_path, partial(MAKE, max_rounds=1))
    wire.make().fit(model(), wire.clients(batch_size=4))
    with pytest.raises(FederatedError, match="The site of client 0 has batch_size=4, and the run's is 16"):
        wire.make().fit(model(), wire.clients(batch_size=16))


def test_invalid_transport_and_invalid_replies_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"RemoteClients\(transport=a list\): a transport has a method exchange"):
        RemoteClients([], ["a"])  # type: ignore[arg-type]
    wire = Wire(tmp_path, MAKE)
    wire.comes = lambda task: [wire.answer(task).to_bytes()]  # type: ignore[list-item]
    with pytest.raises(FederatedError, match=r"Wire.exchange yields a bytes, where .*reply_from\(client_id, content\)"):
        wire.run()


class Validated(Net):
    """A network with a validation loss that no longer falls after two rounds."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(max(0, 2 - self.trainer.fit_loop.round)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", float(len(batch[0])))


def validated() -> Validated:
    torch.manual_seed(0)
    return Validated()


def test_checkpoints_validation_and_early_stopping_match_a_local_fit(tmp_path: Path) -> None:
    def make(**options: Any) -> FederatedTrainer:
        writes = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", monitor="val_loss", save_last=True)
        callbacks = [EarlyStopping("val_loss", patience=1), writes]
        kept = {"limit_val_batches": 1.0, "enable_checkpointing": True, "default_root_dir": tmp_path, **options}
        return make_trainer("Scaffold ii", callbacks=callbacks, **kept)

    val, expected = classification(12, 77), make()
    data = make_data()
    data.val = val
    expected.fit(validated(), data)
    assert expected.fit_loop.round == 3, "early stopping ends it"
    for file in (tmp_path / "kept").iterdir():
        file.unlink()

    wire, module = Wire(tmp_path, make, validated), validated()
    first, second = make(max_rounds=2), make()
    first.fit(module, wire.clients(val=val))
    wire.kill()
    clients = wire.clients(val=val, test=val, eval_batch_size=5)
    second.fit(module, clients, ckpt_path="last")
    assert second.fit_loop.round == 3
    assert second.callback_metrics["val_loss"] == 0.0
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"epoch=1.ckpt", "last.ckpt"}
    assert second.validate(module, clients, verbose=False)[0]["val_loss"] == 0.0
    (tested,) = second.test(module, clients, verbose=False)
    assert tested["tested"] == pytest.approx((5 * 5 + 5 * 5 + 2 * 2) / 12)


def test_plain_trainer_and_several_processes_are_rejected(tmp_path: Path, monkeypatch: Any) -> None:
    wire = Wire(tmp_path, MAKE)
    with pytest.raises(FederatedError, match="Train with FederatedTrainer"):
        pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
            model(), wire.clients()
        )
    monkeypatch.setattr(FederatedTrainer, "world_size", 2)
    with pytest.raises(FederatedError, match="are asked by a trainer of one process, found 2 processes"):
        wire.run()
    assert not wire.phases


def test_checkpoint_with_state_names_of_an_earlier_version_is_rejected(tmp_path: Path) -> None:
    """Sites of earlier versions named states after the round number alone."""
    wire, trainer = Wire(tmp_path, MAKE), MAKE(max_rounds=1)
    trainer.fit(model(), wire.clients())
    run = trainer.fit_loop.run_state
    run.sites["versions"] = {index: number for index, (number, _) in run.sites["versions"].items()}
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(
        FederatedError, match="begun with an earlier version of lightning_fed, whose sites kept states under"
    ):
        trainer.fit(trainer.lightning_module, wire.clients())
