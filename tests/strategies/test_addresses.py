"""Wrong addresses between machines are named on all of them, and no process waits."""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed.rendezvous import rendezvous

from lightning_fed.strategies import peers
from lightning_fed.strategies.peers import check_addresses
from tests.helpers.hosts import Host, two_hosts
from tests.helpers.processes import HANGS, in_processes
from tests.helpers.training import data, seeded, trainer

NOWHERE = "192.0.2.1"  # reserved for documentation


def errors(prepare: Callable[[int], None], folder: Path, count: int = 3) -> list[str]:
    """Return the errors of processes that check their addresses after some preparation."""

    def run() -> None:
        rank = int(os.environ["RANK"])
        prepare(rank)
        store, *_ = next(rendezvous("env://", rank, count, timeout=timedelta(seconds=HANGS)))
        check_addresses(store, rank, count, limit=0.5)
        store.set(f"left/{rank}", "")
        if rank == 0:  # the store may end with this process
            store.wait([f"left/{other}" for other in range(count)], timedelta(seconds=HANGS))

    return [outcome.error for outcome in in_processes(run, folder, count)]


def on_machine(name: str) -> None:
    """Make this process appear to run on a machine whose name does not resolve."""
    peers.socket.gethostname = lambda: name  # type: ignore[assignment]
    real = socket.getaddrinfo

    def known(host: str, *args: object, **options: object) -> object:
        if host == name:
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *args, **options)  # type: ignore[arg-type]

    peers.socket.getaddrinfo = known  # type: ignore[assignment]


def test_processes_on_one_machine_may_use_loopback(tmp_path: Path) -> None:
    assert errors(lambda rank: on_machine("node"), tmp_path) == ["", "", ""]


def test_unusable_host_name_is_reported_on_all_machines(tmp_path: Path) -> None:
    found = errors(lambda rank: on_machine(f"node-{rank // 2}"), tmp_path)
    assert len(set(found)) == 1
    assert found[0].startswith(
        "FederatedError: Process 0 on node-0 cannot reach node-1 at 127.0.0.1, since the host name node-1 resolves to"
        " no address of that machine: only processes of the same machine reach it. Set GLOO_SOCKET_IFNAME on that"
    )


def test_unreachable_address_is_reported_on_all_machines(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        on_machine(f"node-{rank}")
        endpoint = {"host": f"node-{rank}", "machine": f"node-{rank}", "problem": "", "source": "to which it resolves"}
        peers._endpoint = lambda listening: {**endpoint, "ports": {NOWHERE: 1} if rank == 1 else {}}

    found = errors(prepare, tmp_path)
    assert len(set(found)) == 1
    assert f"Process 0 on node-0 cannot reach node-1 at {NOWHERE}, to which it resolves: " in found[0]


def test_missing_network_interface_is_reported_on_all_machines(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        on_machine(f"node-{rank}")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo,eth9" if rank == 1 else "lo"

    found = errors(prepare, tmp_path)
    assert len(set(found)) == 1
    assert "GLOO_SOCKET_IFNAME names eth9 on node-1, which has " in found[0]


def test_loopback_interface_is_rejected_between_machines(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        on_machine(f"node-{rank}")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    for error in errors(prepare, tmp_path):
        assert "at 127.0.0.1, the address of GLOO_SOCKET_IFNAME=lo there: only processes of the same" in error


@pytest.mark.thorough
@pytest.mark.parametrize("interface", [None, "lo", "eth9"])
def test_fit_on_two_hosts_with_wrong_addresses_fails_quickly(
    interface: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = Host.enter

    def wrongly(host: Host) -> None:
        enter(host)
        if interface is None or host.interface == "end-b":
            os.environ.pop("GLOO_SOCKET_IFNAME")
        if interface is not None and host.interface == "end-b":
            os.environ["GLOO_SOCKET_IFNAME"] = interface

    def run() -> float:
        start = time.monotonic()
        with pytest.raises(Exception, match="GLOO_SOCKET_IFNAME on that machine") as error:
            trainer(strategy="clients", devices=1, num_nodes=2).fit(seeded(), data())
        print(error.value)
        return time.monotonic() - start

    monkeypatch.setattr(Host, "enter", wrongly)
    with two_hosts() as hosts:
        for outcome in in_processes(run, tmp_path, 2, hosts=hosts):
            assert not outcome.error
            assert outcome.value < 60
