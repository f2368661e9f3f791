"""Local work that does not start at x: updates stay ``y - x``, and paths contain only the steps."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.algorithms import Algorithm, FedAvg
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run, Update
from tests.helpers.engines import Ordinary, Record, assert_agree, full_batches, run
from tests.helpers.training import Net, data, trainer

LR = 0.1
SGD, ADAM = partial(torch.optim.SGD, lr=LR), partial(torch.optim.Adam, lr=0.01)


class Elsewhere(Algorithm):
    """Starts at a point given by a full-batch step and the states. Sends the mean gradient of its path."""

    reduces = {"delta": "weighting", "path": "weighting"}
    full_grad_at, full_grad_for = ("x",), "client"

    def init_server(self, x: Tensor) -> Any:
        return {"path": torch.zeros_like(x)}

    def init_client(self, x: Tensor) -> Any:
        return {"v": torch.zeros_like(x)}

    def start(self, x: Tensor, step: Any) -> Tensor:
        return x - step.lr * (step.full_grad["x"] + step.server["path"]) + 0.1 * step.client["v"]

    def finish(self, y: Tensor, run: Run) -> Update:
        return Update({"delta": run.delta, "path": run.path_gradient}, {"v": run.delta})

    def update_server(self, x: Tensor, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"], {"path": mean["path"]}


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("build", [SGD, ADAM], ids=["SGD", "Adam"])
def test_engines_agree(build: Any, chunk_size: int) -> None:
    records = Record(), Record()
    options = {"make": partial(Ordinary, build), "datamodule": full_batches, "algorithm": Elsewhere()}
    one = run("sequential", callbacks=records[0], **options)
    many = run("vectorized", chunk_size=chunk_size, callbacks=records[1], **options)
    assert_agree(one, many)
    assert [r.bytes_down for r in records[0].rounds] == [r.bytes_down for r in records[1].rounds]
    assert records[0].rounds[0].bytes_down == records[0].rounds[0].bytes_up  # x, and the state that start reads


class Shifted(Elsewhere):
    full_grad_at = ()

    def start(self, x: Tensor, step: Any) -> Tensor:
        return x + 1

    def update_server(self, x: Tensor, server: Any, mean: Any, cohort: Any) -> Any:
        return mean["delta"], {"path": mean["path"], "delta": mean["delta"]}

    def init_server(self, x: Tensor) -> Any:
        return {"path": torch.zeros_like(x), "delta": torch.zeros_like(x)}


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_path_starts_at_the_start_of_local_work(engine: str) -> None:
    options = {"algorithm": Shifted(), "local_epochs": None, "local_steps": 3, "max_rounds": 1}
    state = run(engine, partial(Ordinary, SGD), **options).fit_loop.state.state
    torch.testing.assert_close(state["delta"], 1 - 3 * LR * state["path"], rtol=1e-12, atol=1e-14)


def test_start_at_x_equals_fedavg() -> None:
    class AtX(FedAvg):
        def start(self, x: Tensor, step: Any) -> Tensor:
            return x

    one, other = (run("sequential", algorithm=algorithm) for algorithm in (FedAvg(), AtX()))
    assert torch.equal(one.fit_loop.state.x, other.fit_loop.state.x)


def test_start_with_wrong_shape_is_rejected() -> None:
    class Short(FedAvg):
        def start(self, x: Tensor, step: Any) -> Tensor:
            return x.mean()

    with pytest.raises(FederatedError, match=r"Short.start\(\) must return a point.*found shape \(\)"):
        trainer(algorithm=Short()).fit(Net(), data())
