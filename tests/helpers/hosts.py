"""Two hosts on one machine: network namespaces that a cable joins, each with a host name of its own."""

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
    """One of them.

    Attributes:
        name: Its host name, that of its namespace too.
        address: Its address on the cable.
        interface: The end of the cable.
    """

    name: str
    address: str
    interface: str

    def enter(self) -> None:
        """Let this process run here from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        socket.sethostname(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface  # no name server knows the host name

    def pull_the_plug(self) -> None:
        """Cut this host off, without a word to the other."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two hosts, and remove them afterwards; skip the test where that is not allowed."""
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
