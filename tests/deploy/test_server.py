"""A server that is driven message by message."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.deploy import FederatedServer
from tests.deploy.site_models import Net, model
from tests.deploy.wire import Wire, make_trainer, parameters, simulated
from tests.helpers.selection import few

MAKE = partial(make_trainer, "Scaffold ii")


def test_a_second_copy_counts_once_and_a_late_reply_is_refused(tmp_path: Path) -> None:
    wire, module = Wire(tmp_path, MAKE), model()
    with wire.server(module) as server:
        wire.phase(server)
        replies = list(wire.exchange(server.tasks()))
        for reply in (*replies, replies[0]):
            server.receive(reply)
        assert server.close_phase() is not None
        with pytest.raises(FederatedError, match="is to 'train' of round 0 .*, and 'train' of round 1"):
            server.receive(replies[0])
        wire.run(server)
        with pytest.raises(FederatedError, match="all rounds are done"):
            server.receive(replies[0])
    assert torch.equal(parameters(module), parameters(simulated(MAKE).lightning_module))


def test_a_phase_does_not_close_without_clients_that_are_not_to_be_dropped(tmp_path: Path) -> None:
    wire = Wire(tmp_path, MAKE)
    with wire.server() as server:
        for reply in list(wire.exchange(server.tasks()))[1:]:
            server.receive(reply)
        with pytest.raises(FederatedError, match="1 clients have not answered to 'hello': .*on_client_error='drop'"):
            server.close_phase()
        wire.run(server)  # they may still answer


@pytest.mark.parametrize("method", few(["FedAvg", "Scaffold ii", "Mime"], ["Scaffold ii", "Mime"]))
def test_clients_that_do_not_answer_leave_the_round_where_that_is_wanted(method: str, tmp_path: Path) -> None:
    make = partial(make_trainer, method, clients_per_round=1.0, on_client_error="drop", max_rounds=2)
    wire = Wire(tmp_path, make)
    with wire.server() as server:
        wire.phase(server)
        while server.phase is not None:
            tasks = server.tasks()
            for reply in wire.exchange({i: task for i, task in tasks.items() if (task.header["round"], i) != (0, 1)}):
                server.receive(reply)
            report = server.close_phase()
            if report is not None:
                assert list(report.cohort) == ([0, 2, 3] if report.round == 0 else [0, 1, 2, 3])
                if report.round == 0:
                    assert "has sent no reply to" in report.failed[1]


class Failing(Net):
    """A network that fails on one client in the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) == 3 and self.trainer.current_epoch == 1:  # the last batch of client 0
            raise RuntimeError("the disk is gone")
        return super().training_step(batch, batch_idx)


def failing() -> Failing:
    torch.manual_seed(0)
    return Failing()


def test_a_client_that_fails_says_why_and_leaves_the_round_where_that_is_wanted(tmp_path: Path) -> None:
    make = partial(make_trainer, "FedAvg", clients_per_round=1.0, on_client_error="drop")
    wire, module = Wire(tmp_path / "drop", make, failing), failing()
    with wire.server(module) as server:
        reports = wire.run(server)
    assert "the disk is gone" in reports[1].failed[0]
    assert torch.equal(parameters(module), parameters(simulated(make, failing).lightning_module))
    wire = Wire(tmp_path / "raise", partial(make_trainer, "FedAvg", clients_per_round=1.0), failing)
    with wire.server() as server, pytest.raises(ClientError, match="the disk is gone"):
        wire.run(server)
    assert server.phase is None


def test_a_server_takes_a_new_trainer_and_loads_before_it_begins(tmp_path: Path) -> None:
    fitted = simulated(partial(make_trainer, "FedAvg"))
    with pytest.raises(FederatedError, match="found 5 rounds done"):
        FederatedServer(fitted, model(), range(4))
    fitted.save_checkpoint(tmp_path / "five.ckpt")
    wire = Wire(tmp_path, partial(make_trainer, "FedAvg"))
    with wire.server() as server:
        with pytest.raises(FederatedError, match="nothing to save"):
            server.save(tmp_path / "x.ckpt")
        (tmp_path / "none.ckpt").write_text("none")
        with pytest.raises(FederatedError, match="is no checkpoint of federated rounds"):
            server.load(tmp_path / "none.ckpt")
        wire.phase(server)
        with pytest.raises(FederatedError, match="before the first message"):
            server.load(tmp_path / "five.ckpt")
