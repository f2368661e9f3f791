"""What a node's configuration says: which clients it has, and where they keep what they keep. No PyTorch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["clients_of", "state_dir_of"]


def clients_of(node_config: Mapping[str, Any]) -> list[int | str]:
    """Return the ids of a node's clients: ``client-id=3``, ``client-id="clinic"``, or several, ``client-id="0,1,2"``.

    Args:
        node_config: The configuration, as ``flower-supernode --node-config`` gives it.

    Raises:
        ValueError: If it names none.

    Example:
        >>> clients_of({"client-id": "0, 12,north"})
        [0, 12, 'north']
    """
    said = node_config.get("client-id")
    words = [word.strip() for word in str(said).split(",")]
    if said is None or isinstance(said, bool) or not all(words):
        raise ValueError(
            f"This SuperNode's client-id is {said!r}. Start flower-supernode with --node-config 'client-id=\"clinic\"',"
            " or with several ids and commas between them."
        )
    return [int(word) if word.isdecimal() and word == str(int(word)) else word for word in words]


def state_dir_of(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of what a node's clients keep: ``state-dir``, or one of the user's own by their ids.

    Args:
        node_config: The configuration.
    """
    said = node_config.get("state-dir")
    if said is not None:
        return Path(str(said)).expanduser().absolute()
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in "-".join(map(str, clients_of(node_config))))
    return Path.home() / ".lightning_fed" / "sites" / safe[:100]
