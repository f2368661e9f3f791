"""What of the server's state counts as sent: the entries that clients read, and no others."""

import pytest

from lightning_fed.algorithms import Algorithm, FedAvg, FedCM, ScaffoldM
from tests.helpers.training import Net, data, trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("method", "vectors"), [(FedAvg(), 1), (FedCM(alpha=0.1), 2), (ScaffoldM(beta=0.2), 3)], ids=str
)
def test_a_vector_that_corrections_read_is_sent_beside_x(method: Algorithm, vectors: int, engine: str) -> None:
    model = Net()
    run = trainer(algorithm=method, max_rounds=1, clients_per_round=2, local_steps=2, local_epochs=None, engine=engine)
    run.fit(model, data(sizes=(5, 9, 14)))
    x = sum(p.nbytes for p in model.parameters())
    assert run.callback_metrics["comm/bytes_down"] == 2 * vectors * x
