"""Helpers to inspect and await processes."""

import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def pid_of(path: Path) -> int:
    """Return the id of the process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's lists of processes")
