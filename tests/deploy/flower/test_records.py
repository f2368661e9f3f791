"""Messages in Flower's records."""

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from flwr.app import ArrayRecord, RecordDict
from flwr.app.message.recorddict import RecordDict as Inflated
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from lightning_fed.deploy import Message
from lightning_fed.deploy.flower.records import clients_in, clients_record, packed, unpacked


def test_messages_come_through_records_as_they_are() -> None:
    tensors = {"a": torch.randn(3, dtype=torch.float64), "b": torch.tensor(2.5), "c": torch.arange(4) > 1}
    content = Message({"client": "x", "round": 3}, tensors).to_bytes()
    messages, refused = unpacked(packed({"0": content, "1": b"\0"}, {"2": "ill"}))
    assert messages == {"0": content, "1": b"\0"}
    assert refused == {"2": "ill"}
    assert Message.from_bytes(messages["0"]).tensors["a"].dtype == torch.float64
    assert unpacked(RecordDict()) == ({}, {})
    assert unpacked(RecordDict({"messages": ArrayRecord()})) == ({}, {})
    assert clients_in(clients_record([3, "north"])) == ["3", "north"]
    assert clients_in(RecordDict()) == []


def test_flower_cuts_a_large_message_into_pieces() -> None:
    content = bytes(range(256)) * (FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE // 100)
    record = packed({"0": content})
    pieces = [part.deflate() for part in get_all_nested_objects(record).values()]
    assert len(pieces) > 3
    assert max(map(len, pieces)) < FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 1000
    inflated = Inflated.inflate(record.deflate(), record.children)
    assert unpacked(inflated)[0] == {"0": content}
