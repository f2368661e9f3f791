"""The transport to sites in the server's process."""

import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite, InProcess, Message, Refusal, RemoteClients, reply_from
from tests.deploy.site_models import model
from tests.deploy.wire import make_data, make_trainer, parameters, simulated

MAKE = partial(make_trainer, "Scaffold ii", max_rounds=2)


def test_sites_in_one_process_answer_for_all_their_clients(tmp_path: Path) -> None:
    module = model()
    with ExitStack() as stack:
        shares = ([0], [1, 3], [2])
        made = [FederatedSite(MAKE(), model(), make_data(ids), ids, tmp_path / str(ids[0])) for ids in shares]
        sites = [stack.enter_context(site) for site in made]
        MAKE().fit(module, RemoteClients(InProcess(sites), range(4)))
        with pytest.raises(FederatedError, match="'register': 0.*Client 0: no site here has it"):
            MAKE().fit(model(), RemoteClients(InProcess(sites[1:]), range(4)))
        with pytest.raises(FederatedError, match="Client 0: The site of client 0 has other settings.* its seed is 0"):
            MAKE(seed=1).fit(model(), RemoteClients(InProcess(sites), range(4)))
    assert torch.equal(parameters(module), parameters(simulated(MAKE).lightning_module))


@pytest.mark.thorough
def test_site_in_this_process_registers_again_after_its_folder_is_lost(tmp_path: Path) -> None:
    failed: list[dict[Any, str]] = []

    class Loses(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            failed.append(round_report.failed)
            if round_report.round == 0:
                shutil.rmtree(tmp_path / "1")

    make = partial(make_trainer, "FedAvg", clients_per_round=1.0, on_client_error="drop", max_rounds=4)
    with ExitStack() as stack:
        made = [FederatedSite(make(), model(), make_data([n]), n, tmp_path / str(n)) for n in range(4)]
        sites = [stack.enter_context(site) for site in made]
        make(callbacks=[Loses()]).fit(model(), RemoteClients(InProcess(sites), range(4)))
    assert [list(of_round) for of_round in failed] == [[], [1], [1], []]


def test_client_on_two_sites_is_rejected(tmp_path: Path) -> None:
    with ExitStack() as stack:
        shares = enumerate(([0, 1], [1, 2]))
        made = [FederatedSite(MAKE(), model(), make_data(ids), ids, tmp_path / str(n)) for n, ids in shares]
        sites = [stack.enter_context(site) for site in made]
        with pytest.raises(FederatedError, match="InProcess: two sites have client 1"):
            InProcess(sites)


def test_reply_bytes_are_accepted_only_from_their_own_client() -> None:
    reply = Message({"client": "a", "phase": "train"})
    assert reply_from("a", reply.to_bytes()) == reply
    assert reply_from("b", reply.to_bytes()) == Refusal("b", "The reply is from client 'a'.")
    for content in (b"", b"hello", Message([]).to_bytes()):  # type: ignore[arg-type]
        refused = reply_from("a", content)
        assert isinstance(refused, Refusal)
        assert refused.client == "a"


def test_in_process_transport_refuses_clients_without_a_site() -> None:
    task = Message({"client": "a"})
    assert list(InProcess([]).exchange({"a": task}, {"b": task})) == [
        Refusal("b", "no site here has it"),
        Refusal("a", "no site here has it"),
    ], "registrations first, since the fit reads nothing after the last reply to a task"
