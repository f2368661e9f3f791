"""The local socket between a site's resident process and the ClientApps of single messages; no PyTorch here."""

import hashlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

__all__ = ["NOT_MINE", "READY", "REFUSED", "REPLY", "SPEC", "TASK", "receive", "send", "socket_of"]

SPEC, READY, NOT_MINE = b"S", b"Y", b"N"
"""What a ClientApp asks first: is this the process of my app? And the two answers; after the second one it ends."""

TASK, REPLY, REFUSED = b"T", b"R", b"E"
"""A task, and its answers: a message, or why there is none."""

_HEAD = struct.Struct(">cQ")


def send(connection: socket.socket, kind: bytes, content: bytes = b"") -> None:
    """Send one frame.

    Args:
        connection: Where to.
        kind: One byte.
        content: What it holds.
    """
    connection.sendall(_HEAD.pack(kind, len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """Return the next frame as its kind and what it holds; None at the end of the connection.

    Args:
        connection: Where from.

    Raises:
        ConnectionError: If it ends in the middle of a frame.
    """
    head = connection.recv(_HEAD.size, socket.MSG_WAITALL)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise ConnectionError("The connection has ended in the middle of a message.")
    kind, length = _HEAD.unpack(head)
    content = bytearray(length)
    view, done = memoryview(content), 0
    while done < length:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("The connection has ended in the middle of a message.")
        done += count
    return kind, bytes(content)


def socket_of(state_dir: Path) -> Path:
    """Return the path of a site's socket, in a folder that only this user can open.

    It is not in the site's own folder, since the path of a socket may have about 100 characters.

    Args:
        state_dir: The site's folder.

    Raises:
        OSError: If somebody else can open the folder, or could have made it.
    """
    if os.name != "posix":
        raise OSError("Sites need the local sockets of Linux or macOS.")
    folder = Path(tempfile.gettempdir()) / f"lightning_fed-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} must be a folder of this user's with mode 0700, for the sockets of sites. Remove it.")
    return folder / f"{hashlib.blake2b(str(state_dir).encode(), digest_size=8).hexdigest()}.sock"
