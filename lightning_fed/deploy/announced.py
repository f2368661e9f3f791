"""What sites have said of their clients' data, and which clients no site has spoken for yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId

__all__ = ["Announced", "Announcements"]


@dataclass(frozen=True, slots=True)
class Announced:
    """The sizes of a client's data: examples, batches in a local epoch, examples in a full batch and for validation."""

    size: int
    batches: int
    batch_size: int | None
    val_size: int = 0


class Announcements:
    """What is known of each client of a run.

    A client that has not said hello in time is absent. It counts as one of N and may be drawn, as if it had as many
    examples as the others have in the mean; in a round for which it is drawn, it has failed. It may say hello later.
    """

    def __init__(self, client_ids: Sequence[ClientId]) -> None:
        self._ids = client_ids
        self.known: dict[ClientId, Announced] = {}  # in the order of the ids once :meth:`close` was called
        self.absent: set[ClientId] = set()
        self._late: dict[ClientId, Announced] = {}

    def take(self, client_id: ClientId, header: Mapping[str, Any]) -> None:
        """Take in a client's hello; one that was absent counts from :meth:`admit` on."""
        counts = {}
        for name in ("size", "batches", "val_size"):
            value = header.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise FederatedError(f"The reply of client {client_id!r} says that its {name} is {value!r}.")
            counts[name] = value
        batch_size = header.get("batch_size")
        found = Announced(**counts, batch_size=batch_size if isinstance(batch_size, int) else None)
        (self._late if client_id in self.absent else self.known)[client_id] = found

    def close(self) -> None:
        """Mark the clients that have not said hello as absent."""
        sizes = [known.size for known in self.known.values() if known.size]
        typical = Announced(max(1, round(sum(sizes) / max(1, len(sizes)))), 0, None)
        self.absent = set(self._ids) - self.known.keys()
        self.known = {client_id: self.known.get(client_id, typical) for client_id in self._ids}

    def silent(self) -> list[ClientId]:
        """Return the absent clients that have not said hello yet."""
        return [client_id for client_id in self._ids if client_id in self.absent and client_id not in self._late]

    def admit(self) -> bool:
        """Let the late clients take part; return whether there are any."""
        late, self._late = self._late, {}
        self.known |= late
        self.absent -= late.keys()
        return bool(late)
