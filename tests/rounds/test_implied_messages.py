"""Messages that follow from others need not travel: the server works out the very bits that the client has."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.algorithms import Algorithm, FedCM, Scaffold
from lightning_fed.rounds.messages import Reply
from lightning_fed.rounds.totals import RoundTotals
from lightning_fed.server import TopK
from tests.helpers.engines import Ordinary, Record, run
from tests.helpers.training import parameters

METHODS = [Scaffold(), FedCM(alpha=0.3), FedCM(alpha=0.3, eta_g=0.5, eta_g_mode="paper")]
ENGINES = ["sequential", "vectorized"]
Outcome = tuple[list[torch.Tensor], list[int]]


class Fast(Ordinary):
    """Two parameter groups with rates of their own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, *rest = self.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest}], lr=0.1)


def outcome(engine: str, algorithm: Algorithm, make: Any = Ordinary, **options: Any) -> Outcome:
    record = Record()
    t = run(engine, make, algorithm=algorithm, callbacks=record, max_rounds=3, limit_val_batches=0, **options)
    return [parameters(t.lightning_module).clone(), *t.fit_loop.state.state.values()], [
        report.bytes_up for report in record.rounds
    ]


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_the_server_has_the_clients_bits(
    algorithm: Algorithm, engine: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = outcome(engine, algorithm, precision=precision)
    add, left_out = RoundTotals.update, list[str]()

    def without(self: RoundTotals, reply: Reply, *args: Any) -> Any:
        left_out.extend(reply.implied)
        return add(self, replace(reply, send={k: v for k, v in reply.send.items() if k not in reply.implied}), *args)

    monkeypatch.setattr(RoundTotals, "update", without)
    derived, _ = outcome(engine, algorithm, precision=precision)
    assert left_out
    assert all(torch.equal(a, b) for a, b in zip(plain, derived, strict=True))


def test_a_reply_without_either_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    add = RoundTotals.update

    def bare(self: RoundTotals, reply: Reply, *args: Any) -> Any:
        return add(self, replace(reply, send={"delta": reply.send["delta"]}), *args)

    monkeypatch.setattr(RoundTotals, "update", bare)
    with pytest.raises(FederatedError, match=r"leaves out \['delta_c'\], and 'lr_sum' as well, .* Scaffold would"):
        outcome("sequential", Scaffold())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", METHODS[:2], ids=repr)
def test_one_vector_and_a_number_travel_with_plain_sgd(algorithm: Algorithm, engine: str) -> None:
    (x, *_), sent = outcome(engine, algorithm, clients_per_round=3)
    vector = x.numel() * x.element_size()
    assert sent == [3 * (vector + x.element_size())] * 3
    (x, *_), sent = outcome(engine, algorithm, Fast, clients_per_round=3)
    assert sent == [3 * 2 * vector] * 3, "the sum of the rates is a vector there"


def test_compressed_messages_all_travel() -> None:
    """The control variate that the server follows would otherwise miss what compression leaves out."""
    (x, *_), sent = outcome("sequential", Scaffold(), compression=TopK(1.0), clients_per_round=3)
    assert min(sent) > 3 * 2 * x.numel() * x.element_size()
