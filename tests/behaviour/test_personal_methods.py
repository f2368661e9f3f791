"""Methods with personal models: engines agree, the averaged model is FedAvg's, gradients count."""

from typing import Any

import pytest
import torch

from lightning_fed.algorithms import APFL, Algorithm, Ditto, FedAvg, FedPer, FedRep, PFedMe
from tests.helpers.engines import Record
from tests.helpers.personal import close, kept, run
from tests.helpers.selection import few
from tests.helpers.training import data, seeded

HEAD = ["head.*"]


WAYS: dict[str, dict[str, Any]] = {
    "FedRep": {"algorithm": FedRep(HEAD, head_epochs=2)},
    "FedRep of steps": {"algorithm": FedRep(HEAD, head_epochs=1), "local_steps": 3},
    "Ditto": {"algorithm": Ditto(0.5)},
    "Ditto, own batches": {"algorithm": Ditto(0.5, 0.7, personal_epochs=2, batches="own"), "weight_decay": 0.01},
    "APFL": {"algorithm": APFL(0.4), "weight_decay": 0.01},
    "pFedMe": {"algorithm": PFedMe(2.0, inner_steps=3, personal_rate=0.5), "limit_train_batches": 2},
}


@pytest.mark.parametrize("way", few(WAYS, ["FedRep", "pFedMe"]))
def test_engines_agree(way: str) -> None:
    def fit(**options: Any) -> Any:
        chosen = {**WAYS[way], **options}
        algorithm, decay = chosen.pop("algorithm"), chosen.pop("weight_decay", 0.0)
        model = seeded(dropout=0.0, momentum=0.5, weight_decay=decay)
        sizes = (7, 4, 8) if isinstance(algorithm, Ditto) else (8, 4, 8)  # each batch size costs another trace
        return run(algorithm, data(sizes), model, max_rounds=2, **chosen)

    one, other = fit(), fit(engine="vectorized", chunk_size=2)
    close(one.fit_loop.state.x, other.fit_loop.state.x)
    ours, theirs = kept(one), kept(other)
    assert ours.keys() == theirs.keys()
    for i, state in ours.items():
        assert state.keys() == theirs[i].keys()
        for name, value in state.items():
            close(value, theirs[i][name])


def test_averaged_ditto_model_equals_fedavg() -> None:
    averaged = run(FedAvg(), weighting="uniform").fit_loop.state.x
    for algorithm in (Ditto(0.0), Ditto(3.0, batches="own")):
        assert torch.equal(run(algorithm, weighting="uniform").fit_loop.state.x, averaged), algorithm


@pytest.mark.thorough
def test_personal_solve_discards_logs_but_counts_gradients() -> None:
    def fit(algorithm: Algorithm, **options: Any) -> tuple[float, list[int]]:
        record = Record()
        fitted = run(algorithm, callbacks=[record], clients_per_round=6, weighting="uniform", max_rounds=1, **options)
        return float(fitted.callback_metrics["train_loss"]), [report.gradients for report in record.rounds]

    loss, gradients = fit(FedAvg())
    for engine in ("sequential", "vectorized"):
        other, counted = fit(Ditto(0.3, batches="own"), engine=engine)
        assert other == pytest.approx(loss, rel=1e-12)
        assert counted == [2 * n for n in gradients]
    assert fit(Ditto(0.3, personal_epochs=3))[1] == [4 * n for n in gradients]
    assert fit(APFL(0.3))[1] == [2 * n for n in gradients]
    assert fit(PFedMe(2.0, inner_steps=3))[1] == [3 * n for n in gradients]
    assert fit(FedRep(HEAD, head_epochs=2))[1] == [3 * n for n in gradients]
    assert fit(FedPer(HEAD))[1] == gradients
    few_steps = fit(FedRep(HEAD, head_epochs=2), local_steps=1)[1]
    assert few_steps == [2 * 72 + 6 * 4], "an epoch of the head is one, however few steps follow"
