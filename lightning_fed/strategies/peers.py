"""Connections between processes: tests before gloo uses them, and detection of processes that are gone.

With a wrong address, gloo fails on one machine, and waits on the other for half an hour or forever. So this module
first connects to every machine at the address that gloo would use.

Gloo reports a failed connection, but not the process at its other end. So every two processes keep an extra, idle
connection, which closes when one of them ends. The systems at both ends test it, even while the processes are busy. It
fails when a machine no longer responds. Gloo's connections are tested too, since it would wait for half an hour.
"""

import json
import os
import secrets
import socket
import stat
import struct
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_fed.core.errors import FederatedError

LIMIT = 15.0
"""Seconds without an answer after which a machine counts as gone."""

_SETTLE = 1.0  # seconds to wait for other processes that are lost in the same failure
_KEY = 16  # bytes of the key that confirms a connection


@dataclass(frozen=True)
class Endpoint:
    """A process's location, and the data for connecting to it."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    port: int = 0
    addresses: tuple[str, ...] = ()  # known addresses of its machine; some may not be valid elsewhere
    key: bytes = b""  # a caller sends the other process's key, and gets its own back


class Peers:
    """The other processes of a run, and a connection to each reachable one. Empty for a single process."""

    def __init__(
        self,
        rank: int = 0,
        endpoints: Sequence[Endpoint] = (),
        lines: Mapping[int, socket.socket] | None = None,
        limit: float = LIMIT,
    ) -> None:
        self.rank, self.endpoints, self.limit = rank, endpoints, limit
        self._lines = dict(lines or {})
        self._gone: set[int] = set()
        if self._lines:
            weakref.finalize(self, _close, self._lines)
        for line in self._lines.values():
            line.setblocking(False)
            _test(line, limit)

    @staticmethod
    def meet(rank: int, size: int, limit: float = LIMIT) -> "Peers":
        """Connect all pairs of processes in the default process group; all must call it."""
        if size == 1:
            return Peers(rank, [Endpoint()], limit=limit)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual) as listener:
            own = Endpoint(port=listener.getsockname()[1], addresses=_addresses(), key=secrets.token_bytes(_KEY))
            endpoints = [own] * size
            dist.all_gather_object(endpoints, own)
            calls = {other: _call(endpoint, own, rank, limit) for other, endpoint in enumerate(endpoints[:rank])}
            lines = {other: line for other, line in calls.items() if line is not None}
            lines |= _called(listener, endpoints, rank, limit)
        if missing := set(range(size)) - {rank, *lines}:
            warnings.warn(
                f"Process {rank} on {own.host} has no connection to {_named(missing, endpoints)}. If one of them is"
                " killed, it may take ClientsStrategy(timeout=...) to notice, and it is not named. Machines must reach"
                " each other at any port, at the address that they use for MASTER_ADDR, or by host name.",
                stacklevel=2,
            )
        return Peers(rank, endpoints, lines, limit)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Raise an error that names gone processes if an exchange inside fails because of them."""
        try:
            yield
        except RuntimeError as error:
            deadline = time.monotonic() + self.limit
            while not self.gone():
                if not self._lines or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            raise self._error() from error

    def gone(self) -> set[int]:
        """Return the processes that have ended, or whose machines do not respond.

        If a process reported others as gone before it ended, this returns the others and not the reporter.
        """
        for rank, line in list(self._lines.items()):
            try:
                said = line.recv(len(self.endpoints))
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            line.close()
            del self._lines[rank]
            self._gone |= {other for other, is_gone in enumerate(said) if is_gone} if said else {rank}
        return self._gone

    def _error(self) -> FederatedError:
        """Return the error for gone processes, and notify the others before this process ends too."""
        time.sleep(_SETTLE)
        gone = self.gone()
        for line in self._lines.values():
            with suppress(OSError):
                line.send(bytes(rank in gone for rank in range(len(self.endpoints))))
        first = " Process 0, which writes logs and checkpoints, is among them." if 0 in gone else ""
        return FederatedError(
            f"Process {self.rank} on {self.endpoints[self.rank].host} has lost {_named(gone, self.endpoints)}. They"
            f" have ended, or their machine has not answered for {self.limit:g} s.{first} See the last lines printed"
            " there for the reason. The run can resume from a checkpoint, with any number of processes."
        )


NO_PEERS = Peers()
"""The peers of a single process."""


@contextmanager
def monitored_connections(limit: float = LIMIT) -> Iterator[None]:
    """Make the system test connections that are opened inside, since gloo does not request that."""
    before = _sockets()
    yield
    for node, number in _sockets().items():
        if node not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
                if line.type == socket.SOCK_STREAM and line.family in (socket.AF_INET, socket.AF_INET6):
                    _test(line, limit)


def _sockets() -> dict[int, int]:
    """Return the file descriptors of this process's open sockets, by inode."""
    found = {}
    with suppress(OSError):  # the folder may not exist
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):
                about = os.fstat(int(name))
                if stat.S_ISSOCK(about.st_mode):
                    found[about.st_ino] = int(name)
    return found


def _named(ranks: Iterable[int], endpoints: Sequence[Endpoint]) -> str:
    """Return a text that names processes by machine."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        hosts.setdefault(endpoints[rank].host, []).append(rank)
    return ", ".join(
        f"process{'es' if len(of) > 1 else ''} {', '.join(f'{r} (pid {endpoints[r].pid})' for r in of)} on {host}"
        for host, of in hosts.items()
    )


def _addresses() -> tuple[str, ...]:
    """Return the addresses that other machines may use to reach this one, the most likely first."""
    main, name = os.environ.get("MASTER_ADDR", "localhost"), socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(main, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return (name,)
    # If the main machine resolves its own name to its loopback interface, others use MASTER_ADDR.
    return (own, main, name) if own.startswith("127.") or own == "::1" else (own, name)


def _call(endpoint: Endpoint, own: Endpoint, rank: int, limit: float) -> socket.socket | None:
    """Connect to a process, and send it this one's rank; return None if it cannot be reached."""
    for address in endpoint.addresses:
        with suppress(OSError):
            line = socket.create_connection((address, endpoint.port), timeout=limit)
            with suppress(OSError):
                line.sendall(endpoint.key + rank.to_bytes(4, "little"))
                if line.recv(_KEY, socket.MSG_WAITALL) == own.key:
                    return line
            line.close()
    return None


def _called(
    listener: socket.socket, endpoints: Sequence[Endpoint], rank: int, limit: float
) -> dict[int, socket.socket]:
    """Wait for the processes of higher rank to connect, and return their connections by rank."""
    lines: dict[int, socket.socket] = {}
    deadline = time.monotonic() + limit
    while len(lines) < len(endpoints) - rank - 1 and (remaining := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining)
        with suppress(OSError):
            line, _ = listener.accept()
            line.settimeout(remaining)
            said = line.recv(_KEY + 4, socket.MSG_WAITALL)
            caller = int.from_bytes(said[_KEY:], "little")
            if said[:_KEY] == endpoints[rank].key and rank < caller < len(endpoints):
                line.sendall(endpoints[caller].key)
                lines[caller] = line
            else:
                line.close()
    return lines


def _close(lines: Mapping[int, socket.socket]) -> None:
    for line in lines.values():
        line.close()


def _test(line: socket.socket, limit: float) -> None:
    """Make the system test a connection, and close it after ``limit`` seconds without a response."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(limit / 5))
    options = {"TCP_KEEPIDLE": seconds, "TCP_KEEPINTVL": seconds, "TCP_KEEPCNT": 4}
    for name, value in {**options, "TCP_USER_TIMEOUT": int(1000 * limit)}.items():
        if hasattr(socket, name):  # Linux has all
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux
_KEYS = "lightning_fed/addresses"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_addresses(store: Any, rank: int, size: int, limit: float = LIMIT) -> None:
    """Connect every process to one process on each other machine; all raise the same error if one cannot.

    All must call it, with the store of their process group. ``limit`` is the time for each connection, in seconds.
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
        if rank == 0:  # the end of process 0 may end the store
            with suppress(RuntimeError):
                store.wait([f"{_KEYS}/read/{other}" for other in range(size)], timedelta(seconds=limit))
        raise FederatedError(
            f"{problems[0]} Set GLOO_SOCKET_IFNAME on that machine to the interface that the others reach, such as"
            " GLOO_SOCKET_IFNAME=eth0; `ip -brief address` lists them."
        )


def _endpoint(listening: ExitStack) -> dict[str, Any]:
    """Describe this machine, gloo's addresses on it with a listening port for each, and the source of these."""
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
    """Return the reason that this process cannot reach a machine, or an empty text if it can."""
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
