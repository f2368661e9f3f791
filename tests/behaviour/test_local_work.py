"""The local optimizer in a round: its state, its rates, clipping, and exact solutions."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedProx, Mime, Scaffold
from tests.helpers.training import Net, data, fit, seeded, trainer


class Line(pl.LightningModule):
    """Least squares in one dimension: F_i(x) = mean (x - b)^2 / 2, with gradient x - mean b."""

    def __init__(self, lr: float = 0.5, **sgd: Any) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.lr, self.sgd = lr, sgd

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.5 * F.mse_loss(self.x.expand_as(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, **self.sgd)


def points(*values: float) -> FederatedDataModule:
    """Return one client per value, each with a single example."""
    clients = [TensorDataset(torch.tensor([[v]], dtype=torch.float64)) for v in values]
    return FederatedDataModule(clients=clients, batch_size=1)


def line(datamodule: FederatedDataModule, model: Line | None = None, **kwargs: Any) -> float:
    model = model or Line()
    run = trainer(**{"clients_per_round": 1.0, "precision": "64-true", **kwargs})
    run.fit(model, datamodule)
    return float(model.x.detach())


def test_momentum_is_reset_every_round_or_kept() -> None:
    def run(**kwargs: Any) -> float:
        return line(points(1.0), Line(lr=0.1, momentum=0.5), local_steps=1, max_rounds=2, **kwargs)

    # round one: x = 0.1 * 1. Round two: g = 0.1 - 1, plus the buffer -1 * 0.5 if it is kept
    assert run() == pytest.approx(0.1 + 0.1 * 0.9)
    assert run(local_optimizer_state="keep") == pytest.approx(0.1 + 0.1 * (0.9 + 0.5))


@pytest.mark.thorough
@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=repr)
def test_kept_optimizer_state_resumes_exactly(method: Any, tmp_path: Any) -> None:
    class Adam(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    common = {"algorithm": method, "local_optimizer_state": "keep"}
    straight = fit(seeded(Adam), max_rounds=6, **common)
    assert not torch.equal(straight, fit(seeded(Adam), max_rounds=6, algorithm=method))
    half = trainer(max_rounds=3, **common)
    half.fit(seeded(Adam), data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    assert torch.equal(fit(Adam(), max_rounds=6, ckpt_path=tmp_path / "half.ckpt", **common), straight)


def test_mime_rejects_kept_local_optimizer_state() -> None:
    with pytest.raises(FederatedError, match="local_optimizer_state='keep' cannot be combined with Mime"):
        trainer(algorithm=Mime(), local_optimizer_state="keep")


def test_clipping_applies_to_raw_or_corrected_gradient() -> None:
    def two_steps(on: str) -> float:
        clip = {"gradient_clip_val": 1.0, "gradient_clip_on": on}
        return line(points(10.0), Line(lr=1.0), algorithm=FedProx(mu=1.0), local_steps=2, max_rounds=1, **clip)

    # step one: g = -10, clipped to -1, y = 1. Step two: g = -9. Clipped first: -1 + (1 - 0) = 0. Clipped last: -8 -> -1
    assert two_steps("gradient") == pytest.approx(1.0)
    assert two_steps("corrected") == pytest.approx(2.0)


def test_clipping_modes_match_without_a_correction() -> None:
    common = {"gradient_clip_val": 0.05, "algorithm": FedAvg()}
    reference = fit(**common)
    torch.testing.assert_close(fit(gradient_clip_on="corrected", **common), reference)
    assert not torch.equal(fit(algorithm=FedAvg()), reference)


def test_scaffold_control_variates_account_for_the_round_rate() -> None:
    class Decaying(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]

    run = trainer(algorithm=Scaffold(), clients_per_round=1.0, local_steps=3, max_rounds=2, precision="64-true")
    model = Decaying()
    run.fit(model, points(1.0, 3.0))
    # with one example each, c_i is the mean gradient along the client's own path, whatever the rate
    c = {i: float(run.fit_loop.state.clients.get(i)["c_i"]) for i in (0, 1)}
    assert float(run.fit_loop.server["c"]) == pytest.approx((c[0] + c[1]) / 2)
    assert c[1] - c[0] == pytest.approx(1.0 - 3.0, rel=0.2)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_scaffold_averages_corrected_gradients_for_any_optimizer(optimizer: Any) -> None:
    seen: list[Tensor] = []

    class Look(Scaffold):
        def correct(self, g: Tensor, y: Tensor, step: Any) -> Tensor:
            direction = super().correct(g, y, step)
            seen.extend([direction] if g.numel() == 1 else [])  # skips the trial step before the first round
            return direction

    class Custom(Line):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1)

    run = trainer(algorithm=Look(), clients_per_round=1.0, local_steps=4, max_rounds=1, precision="64-true")
    run.fit(Custom(), points(2.0))
    assert float(run.fit_loop.server["c"]) == pytest.approx(float(torch.cat(seen).mean()))


def test_zero_rate_keeps_model_and_finite_control_variates() -> None:
    run = trainer(algorithm=Scaffold(), clients_per_round=1.0, local_steps=2, max_rounds=2, precision="64-true")
    model = Line(lr=0.0)
    run.fit(model, points(1.0, 3.0))
    assert float(model.x) == 0.0
    assert float(run.fit_loop.server["c"]) == pytest.approx(-2.0)  # the mean gradient at x = 0


def test_server_rate_follows_its_schedule_per_round() -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5)

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    # a client solves its problem exactly in one step of rate one, so x moves by rate * (1 - x)
    x = line(points(1.0), Line(lr=1.0), local_steps=1, max_rounds=2, server_optimizer=build, server_lr_scheduler=halve)
    assert x == pytest.approx(0.5 + 0.25 * 0.5)
