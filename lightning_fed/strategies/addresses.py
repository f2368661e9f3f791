"""The addresses that gloo gives to other machines, tried out before gloo uses them.

With a wrong one, gloo fails on one machine, and waits on the other for half an hour or without end.
"""

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.peers import LIMIT

_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux
_KEYS = "lightning_fed/addresses"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_addresses(store: Any, rank: int, size: int, limit: float = LIMIT) -> None:
    """Let every process connect to one process of each other machine; all raise the same error if one cannot.

    All must call it, with the store of their process group. ``limit`` are the seconds for each connection.
    """
    with ExitStack() as listening:
        store.set(f"{_KEYS}/endpoint/{rank}", json.dumps(_endpoint(listening)))
        endpoints = [json.loads(store.get(f"{_KEYS}/endpoint/{other}")) for other in range(size)]
        first = {endpoint["machine"]: endpoint for endpoint in reversed(endpoints)}
        own = endpoints[rank]["machine"]
        problems = [endpoint["problem"] for endpoint in endpoints if endpoint["problem"]]
        if not problems and len(first) > 1:
            found = (_problem(rank, endpoints[rank], endpoint, limit) for of, endpoint in first.items() if of != own)
            store.set(f"{_KEYS}/found/{rank}", next(filter(None, found), ""))
            keys = [f"{_KEYS}/found/{other}" for other in range(size)]
            store.wait(keys, timedelta(seconds=limit * (len(first) + 1)))
            problems = [text.decode() for text in map(store.get, keys) if text]
    if problems:
        store.set(f"{_KEYS}/read/{rank}", "")
        if rank == 0:  # whose end may end the store
            with suppress(RuntimeError):
                store.wait([f"{_KEYS}/read/{other}" for other in range(size)], timedelta(seconds=limit))
        raise FederatedError(
            f"{problems[0]} Set GLOO_SOCKET_IFNAME on that machine to the interface that the others reach, such as"
            " GLOO_SOCKET_IFNAME=eth0; `ip -brief address` lists them."
        )


def _endpoint(listening: ExitStack) -> dict[str, Any]:
    """Return this machine, the addresses that gloo uses on it, with a port at which each listens, and where from."""
    host, names = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    machine = [host, _BOOT.read_text() if _BOOT.is_file() else ""]
    endpoint: dict[str, Any] = {"host": host, "machine": " ".join(machine), "ports": {}, "problem": ""}
    if names:
        endpoint["source"] = f"the address of GLOO_SOCKET_IFNAME={names} there"
        there = [name for _, name in socket.if_nameindex()]
        if missing := [name for name in names.split(",") if name not in there]:
            endpoint["problem"] = f"GLOO_SOCKET_IFNAME names {missing[0]} on {host}, which has {', '.join(there)}."
        addresses = [address for name in names.split(",") for address in _of_interface(name)]
    else:
        endpoint["source"] = f"to which the host name {host} resolves there"
        addresses = list(_of_host(host))[:1]
        if not addresses:
            addresses = ["127.0.0.1"]
            endpoint["source"] = f"since the host name {host} resolves to no address of that machine"
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = listening.enter_context(socket.create_server((address, 0), family=family, backlog=1024))
        endpoint["ports"][address] = listener.getsockname()[1]
    return endpoint


def _of_host(host: str) -> Iterator[str]:
    """Yield the addresses of this machine to which a name resolves."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                yield str(address[0])


def _of_interface(name: str) -> Iterator[str]:
    """Yield the IPv4 address of an interface, if it has one and the system is Linux."""
    if sys.platform == "linux":
        from fcntl import ioctl

        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
            yield socket.inet_ntoa(found[20:24])


def _problem(rank: int, own: dict[str, Any], other: dict[str, Any], limit: float) -> str:
    """Return why this process does not reach a machine, an empty text if it does."""
    for address, port in other["ports"].items():
        why = "only processes of the same machine reach it" if ip_address(address).is_loopback else ""
        if not why:
            try:
                socket.create_connection((address, port), timeout=limit).close()
            except OSError as error:
                why = str(error)
        if why:
            return (
                f"Process {rank} on {own['host']} cannot reach {other['host']} at {address}, {other['source']}: {why}."
            )
    return ""
