"""Two hosts on one machine: network namespaces joined by a virtual cable, each with its own host name."""

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

__all__ = ["Host", "two_hosts"]

_NEW_NET, _NEW_UTS = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS of Linux


@dataclass(frozen=True)
class Host:
    """One of the two hosts.

    Attributes:
        name: The name of the host and of its namespace.
        address: Its address on the cable.
        interface: Its end of the cable.
    """

    name: str
    address: str
    interface: str

    def enter(self) -> None:
        """Move this process to the host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        socket.sethostname(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface  # the host name cannot be resolved

    def pull_the_plug(self) -> None:
        """Disconnect this host without notifying the other."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Create two hosts, and remove them afterwards. Skip the test if that is not permitted."""
    hosts = [Host(f"host-{end}-{os.getpid()}", f"10.231.77.{k + 1}", f"end-{end}") for k, end in enumerate("ab")]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        one, other = hosts
        _ip("-n", one.name, "link", "add", one.interface, "type", "veth",
            "peer", "name", other.interface, "netns", other.name)  # fmt: skip
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.name, "link", "set", interface, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(hosts)
        pytest.skip(f"network namespaces are not allowed here: {error} {getattr(error, 'stderr', '')}")
    try:
        yield hosts
    finally:
        _remove(hosts)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _remove(hosts: list[Host]) -> None:
    for host in hosts:
        if os.path.exists(f"/var/run/netns/{host.name}"):
            _ip("netns", "delete", host.name)
