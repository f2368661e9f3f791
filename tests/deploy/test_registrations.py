"""A client that registers after the first round has begun takes part from the next round on."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.deploy import FederatedSite, Message, Refusal, RemoteClients
from lightning_fed.deploy.exchange import Registration, Registrations
from lightning_fed.server import WeightedSampler
from tests.deploy.site_models import model
from tests.deploy.wire import SIZES, Wire, make_trainer, parameters
from tests.helpers.optional import needs_pyarrow
from tests.helpers.selection import few
from tests.helpers.training import classification, clients

DROPS = {"on_client_error": "drop", "max_failed_share": 0.9}
LATE = 2  # the late client


def late(wire: Wire, comes_in: tuple[int, str] = (1, "train")) -> None:
    """Keep the late client silent until the exchange of a round and phase, and then let it register."""

    def comes(task: Message) -> list[Message]:
        is_there = task.header["phase"] != "register" or comes_in in [at[:2] for at in wire.phases]
        return [wire.answer(task)] if task.client != LATE or is_there else []

    wire.comes = comes


@pytest.mark.parametrize("method", few(["Scaffold ii", "FedProx adaptive", "Mime"], ["FedProx adaptive", "Mime"]))
def test_late_client_joins_from_the_next_round_as_after_a_restart(method: str, tmp_path: Path) -> None:
    sampler = WeightedSampler(3, weights="examples")
    make = partial(make_trainer, method, clients_per_round=None, sampler=sampler, **DROPS)
    wire, module, again = Wire(tmp_path, make), model(), model()
    late(wire)
    _, reports = wire.run(module, save={2: tmp_path / "two.ckpt"})
    there = [LATE in report.clients for report in reports]
    assert there[:2] == [False, False]
    assert any(there)
    wire.kill()
    wire.comes = wire.answers
    wire.run(again, ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(parameters(module), parameters(again))


def test_site_that_restarts_with_other_settings_is_rejected(tmp_path: Path) -> None:
    """Neither a seed nor a bound of gradients shows in the numbers of a task."""
    for changes in ({"seed": 3}, {"gradient_clip_val": 0.01}):
        make = partial(make_trainer, "FedAvg", clients_per_round=1.0)
        wire = Wire(tmp_path / next(iter(changes)), make)

        other = partial(make, **changes)

        def comes(task: Message, wire: Wire = wire, other: Any = other) -> list[Message | Refusal]:
            if task.header["round"] == 2 and task.client == LATE:
                wire.kill(LATE)
                wire.make = other
            return wire.answers(task)

        wire.comes = comes
        with pytest.raises(FederatedError, match=f"its {next(iter(changes))} is .*, the server's is .*. Start both"):
            wire.run()


@pytest.mark.parametrize("method", ["FedAvg", "Scaffold ii"])
def test_site_that_has_lost_its_folder_registers_again(method: str, tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, method, clients_per_round=1.0, **DROPS))

    def comes(task: Message) -> list[Message | Refusal]:
        if task.header["round"] == 1 and task.client == LATE:
            wire.kill(LATE)
            shutil.rmtree(tmp_path / str(LATE))
        return wire.answers(task)

    wire.comes = comes
    _, reports = wire.run()
    why = [report.failed.get(LATE, "") for report in reports]
    assert "has lost its state_dir" in why[1]
    assert "has not registered" in why[2]
    assert [bool(reason) for reason in why] == [False, True, True, *[method != "FedAvg"] * 2]


@pytest.mark.parametrize(
    ("size", "batch_size", "said"),
    [(SIZES[LATE] + 1, 4, "size=23 here, and the server plans with size=22"), (SIZES[LATE], 3, "batches=8 here, .*=6")],
)
def test_client_whose_data_change_during_a_run_is_rejected(
    size: int, batch_size: int, said: str, tmp_path: Path
) -> None:
    make = partial(make_trainer, "FedAvg", clients_per_round=1.0)
    wire = Wire(tmp_path, make)

    def comes(task: Message) -> list[Message | Refusal]:
        if task.header["round"] == 2 and LATE in wire.sites:
            wire.kill()
            data = FederatedDataModule(clients={LATE: classification(size, seed=LATE)}, batch_size=batch_size)
            wire.sites[LATE] = FederatedSite(make(), model(), data, LATE, tmp_path / str(LATE))
        return wire.answers(task)

    wire.comes = comes
    with pytest.raises(FederatedError, match=f"Client 2 has {said}: its data have changed since it registered"):
        wire.run()


class Ill(FederatedDataModule):
    """Simulated clients. One of them cannot be read while it is ill."""

    is_ill = False

    def client_batches(self, client_id: Any) -> Any:
        if client_id == LATE and self.is_ill:
            raise OSError("not there")
        return super().client_batches(client_id)


class Illness(FederatedCallback):
    """Makes one client unreadable in some rounds."""

    def __init__(self, *rounds: int) -> None:
        self.rounds = rounds

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.datamodule.is_ill = 0 in self.rounds

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: RoundReport) -> None:
        trainer.datamodule.is_ill = round_report.round + 1 in self.rounds


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["FedAvg", "Scaffold ii"])
def test_late_client_counts_as_failed_in_earlier_rounds(method: str, tmp_path: Path) -> None:
    """N counts the client from the start, and SCAFFOLD's mean of control variates depends on N."""
    expected = make_trainer(method, callbacks=[Illness(0, 1)], **DROPS)
    expected.fit(model(), Ill(clients=clients(SIZES), batch_size=4))
    module, wire = model(), Wire(tmp_path, partial(make_trainer, method, **DROPS))
    late(wire)
    wire.run(module)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["FedAvg", "Scaffold i", "Scaffold ii"])
def test_registered_size_of_an_absent_client_counts_after_a_restart(method: str, tmp_path: Path) -> None:
    sampler = WeightedSampler(6, weights="examples")
    make = partial(make_trainer, method, clients_per_round=None, sampler=sampler, **DROPS)
    expected = make(callbacks=[Illness(2, 3)])
    expected.fit(model(), Ill(clients=clients(SIZES), batch_size=4))
    module, wire, two, three = model(), Wire(tmp_path, make), tmp_path / "two.ckpt", tmp_path / "three.ckpt"
    wire.run(trainer=make(max_rounds=2), save={2: two})
    wire.comes = lambda task: [] if task.client == LATE else wire.answers(task)
    wire.run(ckpt_path=two, trainer=make(max_rounds=3), save={3: three})  # it is still known after the next restart
    wire.phases.clear()
    late(wire, comes_in=(3, "train"))
    wire.run(module, ckpt_path=three)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


@pytest.mark.thorough
def test_checkpoint_without_registered_sizes_resumes(tmp_path: Path) -> None:
    """An earlier version did not save them."""
    make, two = partial(make_trainer, "FedAvg", clients_per_round=1.0, **DROPS), tmp_path / "two.ckpt"
    wire = Wire(tmp_path, make)
    wire.run(trainer=make(max_rounds=2), save={2: two})
    saved = torch.load(two, weights_only=False)
    del saved["loops"]["fit_loop"]["state_dict"]["sites"]["numbers"]
    torch.save(saved, two)
    wire.comes = lambda task: [] if task.client == LATE else wire.answers(task)
    fitted, _ = wire.run(ckpt_path=two)
    assert fitted.datamodule.client_size(LATE) == round((15 + 8 + 6) / 3)


def test_unregistered_client_is_named_and_too_many_end_the_run(tmp_path: Path) -> None:
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg", clients_per_round=1.0, max_rounds=3, **DROPS))
    late(wire)
    _, reports = wire.run()
    assert [report.failed for report in reports] == [{LATE: f"Client {LATE} has not registered."}] * 2 + [{}]
    assert [LATE in clients for _, phase, clients in wire.phases if phase == "train"] == [False, False, True]
    wire.kill()
    few = {**DROPS, "max_failed_share": 0.1}
    strict = Wire(tmp_path, partial(make_trainer, "FedAvg", clients_per_round=1.0, **few))
    late(strict)
    with pytest.raises(ClientError, match="1 of 4 clients failed.*\n- Client 2 has not registered"):
        strict.run()


def test_mismatched_late_client_is_rejected_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(make_trainer, "FedAvg", **DROPS)
    wire = Wire(tmp_path, make)
    wire.comes = lambda task: [] if task.client == LATE else [wire.answer(task)]

    def comes(task: Message) -> list[Message | Refusal]:
        if task.client != LATE or wire.phases[-1][1] == "register":
            return [] if task.client == LATE else [wire.answer(task)]
        if wire.phases[-1][0] == 1:
            wire.kill(LATE)
            reply = wire.answer(task)
            return [Message({**reply.header, "size": -1})]
        wire.make = partial(make, seed=3)
        try:
            return wire.answers(task)
        finally:
            wire.make = make

    wire.comes = comes
    _, reports = wire.run()
    assert [report.round for report in reports] == list(range(5))
    assert (
        "Client 2 does not answer: The site of client 2 has other settings than the server: its seed is 3"
        in caplog.text
    )
    assert "of client 2 is not valid: its size is -1" in caplog.text


def registration(size: int, **more: Any) -> dict[str, Any]:
    return {"size": size, "batches": min(3, size), "val_size": 0, "batch_size": 4, **more}


def test_unregistered_client_counts_with_mean_size_until_accepted() -> None:
    found = Registrations(["a", "b", "c"])
    found.add("c", registration(10))
    found.add("a", registration(5))
    found.close()
    assert list(found.known) == ["a", "b", "c"]  # in the order of their stored indices
    assert [found.known[client].size for client in "abc"] == [5, 8, 10]
    assert (found.unregistered, found.pending(), found.accept_late()) == ({"b"}, ["b"], False)
    found.add("b", registration(3))
    assert (found.unregistered, found.pending(), found.known["b"].size) == ({"b"}, [], 8)
    assert found.accept_late()
    assert (found.unregistered, found.known["b"]) == (set(), Registration(3, 3, 4))


def test_restarted_server_knows_registered_clients_within_its_limits() -> None:
    found = Registrations(["a", "b", "c", "d"])
    found.add("a", registration(5, batch_size=2))
    found.add("b", registration(900))
    found.add("c", registration(30))
    found.close()
    again = Registrations(["a", "b", "c", "d"], max_examples=100, earlier=found.numbers())
    again.add("c", registration(10))
    again.close()
    assert again.known["a"] == Registration(5, 3, 2)
    assert [again.known[client].size for client in "abcd"] == [5, 8, 10, 8]
    assert again.unregistered == {"a", "b", "d"}
    assert list(again.numbers()) == ["a", "c"]


def test_registration_with_invalid_counts_is_rejected() -> None:
    with pytest.raises(FederatedError, match="has 11 examples, more than max_examples=10 allows"):
        Registrations(["a"], max_examples=10).add("a", registration(11))
    Registrations(["a"], max_examples=10).add("a", registration(10))
    found = Registrations(["a"])
    found.add("a", registration(1, batch_size=-3))
    assert found.known["a"].batch_size is None
    for name, value in (
        ("size", 10**400),
        ("val_size", 2**53 + 1),
        ("size", -1),
        ("batches", True),
        ("val_size", "7"),
        ("size", None),
    ):
        with pytest.raises(
            FederatedError, match=f"The reply of client 'a' is not valid: its {name} is {repr(value)[:40]}"
        ):
            Registrations(["a"]).add("a", {**registration(1), name: value})


def test_client_with_more_batches_than_examples_is_rejected() -> None:
    with pytest.raises(FederatedError, match="its batches is 12, and a whole number from 0 to 11 is expected"):
        Registrations(["a"]).add("a", {**registration(11), "batches": 12})


def test_batch_size_different_from_the_runs_is_rejected() -> None:
    sites = Registrations(["bank", "clinic"], batch_size=4)
    sites.add("bank", registration(8))
    with pytest.raises(FederatedError, match="The site of client 'clinic' has batch_size=16, and the run's is 4. Give"):
        sites.add("clinic", registration(8, batch_size=16))
    assert list(sites.known) == ["bank"]


def test_different_batch_sizes_warn_if_the_run_sets_none(caplog: pytest.LogCaptureFixture) -> None:
    sites = Registrations(["bank", "clinic", "plant"])
    with caplog.at_level("WARNING", logger="lightning_fed.deploy"):
        sites.add("bank", registration(8))
        sites.add("clinic", registration(8))
        sites.close()
        assert not caplog.text
        sites.add("plant", registration(8, batch_size=16))
        sites.accept_late()
    assert "Sites have different batch sizes: 4 (client 'clinic'), 16 (client 'plant')." in caplog.text


def said(*columns: Any) -> dict[str, Any]:
    return {"size": 3, "batches": 1, "val_size": 0, "batch_size": 4, "columns": list(columns)}


def test_sites_with_different_columns_are_rejected() -> None:
    sites = Registrations(["a", "b", "c", "d"])
    sites.add("a", said("age", "sex=f", "sex=m"))
    sites.add("b", said())  # a data module without column names
    sites.add("c", said("age", "sex=f", "sex=m"))
    told = r"'d' and 'a' do not mean the same by their .*: column 1 is 'sex=m' at the first and 'sex=f' at the second"
    with pytest.raises(FederatedError, match=told):
        sites.add("d", said("age", "sex=m", "sex=f"))
    with pytest.raises(FederatedError, match=r"column 2 is 'nothing' at the first and 'sex=m' at the second"):
        sites.add("d", said("age", "sex=f"))
    sites.add("a", said("age", "sex=f", "sex=m"))  # a repeated registration
    for columns in ("age", [1], None):
        with pytest.raises(FederatedError, match="says that its columns are"):
            sites.add("b", {**said(), "columns": columns})
    assert [known.columns for known in sites.known.values()] == [
        ("age", "sex=f", "sex=m"),
        (),
        ("age", "sex=f", "sex=m"),
    ]


@needs_pyarrow
def test_sites_with_different_class_numbering_are_rejected(tmp_path: Path) -> None:
    from lightning_fed.data import ClientTable
    from lightning_fed.deploy import FederatedSite

    wire = Wire(tmp_path, partial(make_trainer, "FedAvg"))

    def site(client: int, labels: list[str], **options: Any) -> FederatedSite:
        path, names = tmp_path / f"{client}.csv", [f"x{n}" for n in range(6)]
        rows = [f"{client},{','.join(str(n + k) for n in range(6))},{label}" for k, label in enumerate(labels)]
        path.write_text("\n".join([",".join(["who", *names, "y"]), *rows]))
        data = ClientTable(str(path), "who", "y", names, val_fraction=0, **options)
        return FederatedSite(make_trainer("FedAvg"), model(), data, str(client), tmp_path / f"state {client}")

    data = RemoteClients(wire, ["0", "1"])
    for options, told in (
        ({}, r"column 6 is 'y of \d classes with the checksum \w+' at the first and 'y of \d classes"),
        ({"classes": ["well", "ill"]}, ""),
    ):
        wire.sites = {0: site(0, ["ill", "well"], **options), 1: site(1, ["well", "well"], **options)}
        trainer = make_trainer("FedAvg", max_rounds=1, clients_per_round=None)
        if told:
            with pytest.raises(FederatedError, match=told):
                trainer.fit(model(), data)
        else:
            trainer.fit(model(), data)
            assert trainer.fit_loop.round == 1
        for each in wire.sites.values():
            each.__exit__(None, None, None)
