"""The ClientApp of a site."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.app.message.recorddict import RecordDict as Inflated
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from lightning_fed.deploy import Message
from lightning_fed.deploy.flower.client import clients_in, packed, unpacked
from tests.deploy.task import DATA, NAMES

ROOT = Path(__file__).parents[3]


def test_importing_the_site_apps_does_not_import_pytorch() -> None:
    heavy = ("torch", "pytorch_lightning", "lightning", "safetensors", "sklearn")
    probe = f"""
import sys
from lightning_fed.deploy.flower import client_app
app = client_app({NAMES[0]!r}, {NAMES[1]!r}, {DATA!r})
print([name for name in sys.modules if name.split(".")[0] in {heavy}])
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_messages_round_trip_through_records() -> None:
    tensors = {"a": torch.randn(3, dtype=torch.float64), "b": torch.tensor(2.5), "c": torch.arange(4) > 1}
    content = Message({"client": "x", "round": 3}, tensors).to_bytes()
    messages = unpacked(packed({"0": content, "1": b"\0"}))
    assert messages == {"0": content, "1": b"\0"}
    assert Message.from_bytes(messages["0"]).tensors["a"].dtype == torch.float64
    assert unpacked(RecordDict()) == {}
    assert unpacked(RecordDict({"messages": ArrayRecord()})) == {}
    assert clients_in(RecordDict()) == []


def test_flower_splits_a_large_message_into_chunks() -> None:
    content = bytes(range(256)) * (FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE // 100)
    record = packed({"0": content})
    pieces = [part.deflate() for part in get_all_nested_objects(record).values()]
    assert len(pieces) > 3
    assert max(map(len, pieces)) < FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 1000
    inflated = Inflated.inflate(record.deflate(), record.children)
    assert unpacked(inflated) == {"0": content}
