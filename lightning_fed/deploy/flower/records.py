"""Messages in Flower's records, as bytes; Flower itself cuts them into pieces of 5 MB on the way. No PyTorch here."""

from collections.abc import Mapping, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_MESSAGES, _REFUSED, _WHO, _CLIENTS = "messages", "refused", "who", "clients"
_FORMAT = "lightning_fed.deploy.Message"


def packed(messages: Mapping[str, bytes], refused: Mapping[str, str] | None = None) -> RecordDict:
    """Return the bytes of messages as a record, and why others are missing; a reply has the keys of its tasks."""
    arrays = {key: Array("uint8", (len(content),), _FORMAT, content) for key, content in messages.items()}
    return RecordDict({_MESSAGES: ArrayRecord(arrays), _REFUSED: ConfigRecord(dict(refused or {}))})


def unpacked(record: RecordDict) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the messages of a record, and why others are missing. A record of something else has neither."""
    arrays = record.array_records.get(_MESSAGES) or ArrayRecord()
    refused = record.config_records.get(_REFUSED) or ConfigRecord()
    return {str(key): array.data for key, array in arrays.items()}, {str(k): str(why) for k, why in refused.items()}


def clients_record(clients: Sequence[int | str]) -> RecordDict:
    """Return a record of a node's clients."""
    return RecordDict({_WHO: ConfigRecord({_CLIENTS: [str(client) for client in clients]})})


def clients_in(record: RecordDict) -> list[str]:
    """Return the clients in a node's record, as text."""
    said = (record.config_records.get(_WHO) or ConfigRecord()).get(_CLIENTS)
    return [str(client) for client in said] if isinstance(said, list) else []
