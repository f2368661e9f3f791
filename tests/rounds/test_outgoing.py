"""What leaves a chunk of trained clients: its messages, in one reply or one each, and states that are kept."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.algorithms import FedAvg
from lightning_fed.core.errors import ClientError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.engines.base import ChunkResult
from lightning_fed.rounds.outgoing import Outgoing
from lightning_fed.server import TopK
from lightning_fed.server.client_states.state import ClientState
from lightning_fed.server.participation import Participant


class States:
    """Notes what clients keep, and has residuals of one message left."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.at_once: list[Sequence[int]] = []

    def stage(self, index: int, state: dict[str, Tensor]) -> None:
        self.kept[index] = state

    def stage_all(self, indices: Sequence[int], states: dict[str, Tensor]) -> None:
        self.at_once.append(indices)
        for row, index in enumerate(indices):
            self.kept[index] = {name: value[row] for name, value in states.items()}

    def residuals(self, index: int, send: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"delta": torch.full((4,), 0.5)} if index == 20 else {}


def outgoing(compression: Any = None, kept_buffers: Sequence[str] = ()) -> Outgoing:
    engine = SimpleNamespace(algorithm=FedAvg(), buffers=SimpleNamespace(kept=kept_buffers), seed=0)
    return Outgoing(engine, SimpleNamespace(compression=compression, attack=None))  # type: ignore[arg-type]


def chunk(steps: Sequence[int] = (2, 2, 2), **options: Any) -> ChunkResult:
    """Return a result of clients with the stored indices 20, 10 and 30, which were asked for as 10, 20, 30."""
    members = [Participant(f"c{i}", i, 5, 1, 2) for i in (20, 10, 30)]
    reports = [ClientReport(m.client_id, 5, n, 0.5, {}, 1.0, 0.0) for m, n in zip(members, steps, strict=True)]
    y = torch.arange(12.0).view(3, 4)
    given = {"send": {"delta": y}, "keep": {"c": y + 100}, "sends_delta": True, "implied": ("delta_c",), **options}
    return ChunkResult(participants=members, y=y, delta=y, reports=reports, asked=[1, 0, 2], **given)


def replies(out: Outgoing, result: ChunkResult, states: States) -> list[tuple[slice, dict[str, Any]]]:
    before = [{"c": torch.full((4,), float(i))} for i in range(3)]
    return list(out.of(result, before, 0, states))  # type: ignore[arg-type]


def test_clients_answer_together_and_keep_their_states_at_once() -> None:
    states, result = States(), chunk()
    ((at, sent),) = replies(outgoing(), result, states)
    assert at == slice(None)
    assert sent["send"] is result.send
    assert sent["changes"] is result.delta
    assert torch.equal(sent["models"], result.shared)
    assert sent["implied"] == ("delta_c",)
    assert states.at_once == [[20, 10, 30]]
    assert torch.equal(states.kept[10]["c"], torch.arange(4.0, 8.0) + 100)


def test_models_are_not_sent_where_a_message_is_no_plain_change() -> None:
    ((_, sent),) = replies(outgoing(), chunk(sends_delta=False), States())
    assert sent["models"] is None


@pytest.mark.parametrize("keep", [{"c": torch.zeros(3, 4)}, {}], ids=["new states", "old states"])
def test_clients_at_fault_and_without_a_step_keep_nothing_new(keep: dict[str, Tensor]) -> None:
    states = States()
    replies(
        outgoing(), chunk(steps=(2, 0, 2), keep=keep, faults={2: ClientError("no", "c30")}, buffers=[{}] * 3), states
    )
    assert states.kept.keys() == {20}
    assert states.kept[20]["c"].tolist() == ([0.0] * 4 if keep else [1.0] * 4), "as it was, of the second one asked"


def test_optimizers_and_buffers_that_stay_with_a_client_are_kept_beside_its_state() -> None:
    states = States()
    solver = [{"0.momentum": torch.full((1,), float(i))} for i in range(3)]
    buffers = [{"mean": torch.full((1,), float(i)), "shared": torch.zeros(1)} for i in range(3)]
    replies(outgoing(kept_buffers=["mean"]), chunk(solver=solver, buffers=buffers), states)
    assert not states.at_once
    expected = ClientState({"c": torch.arange(8.0, 12.0) + 100}, {"mean": torch.tensor([2.0])}, solver[2]).joined()
    assert states.kept[30].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in states.kept[30].items())


def test_compressed_messages_are_sent_one_by_one_with_their_bytes_and_what_is_left_is_kept() -> None:
    states, result = States(), chunk(faults={2: ClientError("no", "c30")})
    found = replies(outgoing(TopK(0.25)), result, states)
    assert [at for at, _ in found] == [slice(1, 2), slice(0, 1)], "in the order asked, without the one at fault"
    (_, first), (_, second) = found
    assert first["send"]["delta"].tolist() == [[0.0, 0.0, 0.0, 7.0]]
    assert second["send"]["delta"].tolist() == [[0.0, 0.0, 0.0, 3.5]], "what was left out before is added"
    assert first["message_bytes"] == second["message_bytes"] > 0
    assert torch.equal(second["changes"], result.delta[:1]), "the change itself, for the drift"
    residuals = {name: value for name, value in states.kept[20].items() if "delta" in name}
    assert [value.tolist() for value in residuals.values()] == [[0.5, 1.5, 2.5, 0.0]]
    assert result.send["delta"][0].tolist() == [0.0, 1.0, 2.0, 3.0], "messages are not changed in place"


def test_a_client_without_a_step_sends_no_compressed_message() -> None:
    states = States()
    found = replies(outgoing(TopK(0.25)), chunk(steps=(0, 2, 2)), states)
    sent = {at.start: parts for at, parts in found}
    assert (sent[0]["send"], sent[0]["message_bytes"]) == ({}, 0)
    assert 20 not in states.kept
