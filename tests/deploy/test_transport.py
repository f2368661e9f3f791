"""The transport to sites in the server's process."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

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
        Refusal("a", "no site here has it"),
        Refusal("b", "no site here has it"),
    ]
