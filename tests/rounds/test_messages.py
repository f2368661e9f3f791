"""Clients' replies are summed in a fixed order, independent of their arrival."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.rounds.messages import TRAIN, Reply, ReplyOrder
from tests.helpers.counting import Counted

ASKED = (7, 2, 9, 4)


def reply(*clients: int, **parts: Any) -> Reply:
    return Reply(3, TRAIN, clients, **parts)


@given(st.permutations(ASKED), st.integers(1, 4))
def test_replies_are_released_in_the_order_clients_were_asked(arrival: list[int], together: int) -> None:
    groups = [ASKED[i : i + together] for i in range(0, 4, together)]
    groups.sort(key=lambda group: arrival.index(group[0]))
    order, ready = ReplyOrder(ASKED), list[int]()
    for number, group in enumerate(groups):
        for one in order.arrive(reply(*group)):
            ready += one.clients
        assert order.missing() == [i for i in ASKED if not any(i in done for done in groups[: number + 1])]
    assert tuple(ready) == ASKED
    assert order.rest() == []


def test_reply_waits_for_earlier_clients_and_is_copied_meanwhile() -> None:
    order, send = ReplyOrder(ASKED), torch.ones(1, 3)
    waiting = reply(9, send={"delta": send, "again": send}, models=send, changes=send + 1, buffers=[{"b": send}])
    assert order.arrive(waiting) == []
    send.zero_()  # the engine reuses its memory
    first = reply(7, send={"delta": send})
    (found,) = order.arrive(first)
    assert found is first, "nothing is copied where replies come in order"
    _, copied = order.arrive(reply(2))
    assert copied.send["delta"].tolist() == [[1.0] * 3]
    assert copied.send["delta"] is copied.send["again"] is copied.models, "what is sent twice stays one"
    assert copied.changes is not None
    assert copied.changes.tolist() == [[2.0] * 3]
    assert copied.buffers[0]["b"].tolist() == [[1.0] * 3]


def test_messages_that_start_at_one_place_are_copied_each() -> None:
    order, numbers = ReplyOrder(ASKED), torch.arange(8.0)
    order.arrive(reply(9, send={"half": numbers[None, :4], "even": numbers[None, ::2]}))
    (copied,) = order.rest()
    assert copied.send["half"].tolist() == [[0, 1, 2, 3]]
    assert copied.send["even"].tolist() == [[0, 2, 4, 6]]


def test_replies_waiting_for_missing_clients_are_returned_in_order() -> None:
    order = ReplyOrder(ASKED)
    for client in (4, 9):
        assert order.arrive(reply(client)) == []
    assert order.missing() == [7, 2]
    assert [one.clients for one in order.rest()] == [(9,), (4,)]


def test_rows_follow_the_sum_order_without_failed_clients() -> None:
    order = ReplyOrder(ASKED)
    assert order.rows(reply(4, 9, 7)) == [2, 1, 0]
    assert order.rows(reply(4, 9, 7, 2, failed={9: ClientError("no", "c9")})) == [2, 3, 0]


def test_duplicate_reply_counts_once_and_unknown_client_is_rejected() -> None:
    order = ReplyOrder(ASKED)
    assert len(order.arrive(reply(7))) == 1
    assert order.arrive(reply(7)) == []
    assert order.arrive(reply()) == []
    with pytest.raises(FederatedError, match="'train' of round 3 is of the client with stored index 1, which was not"):
        order.arrive(reply(2, 1))
    with pytest.raises(FederatedError, match="some of them have answered before, such as the one with stored index 7"):
        order.arrive(reply(7, 2))
    assert order.missing() == [2, 9, 4]


def test_work_per_reply_does_not_grow_with_the_cohort() -> None:
    looks = []
    for count in (20, 200):
        order = ReplyOrder(map(Counted, range(count)))
        Counted.looks = 0
        for client in range(20):
            order.arrive(reply(Counted(client)))
        looks.append(Counted.looks)
    assert looks[1] < 1.5 * looks[0]
