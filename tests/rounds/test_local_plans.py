"""BatchNorm in training mode and batches of one example: rejected before any client works, if they would fail."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import ClientError, FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedDane, Mime, Scaffold
from lightning_fed.rounds.local_plans import limited
from tests.helpers.training import FEATURES, Net, classification, data, fit, parameters, seeded, trainer


class Normed(Net):
    """Has a layer that normalizes over the batch, and an attribute that only a step changes."""

    def __init__(self, layer: Any = nn.BatchNorm1d, **options: Any) -> None:
        super().__init__(dropout=0.0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), layer(8, **options), nn.Tanh())
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


class Pictures(Normed):
    def __init__(self, layer: Any = nn.BatchNorm2d, side: int = 3) -> None:
        super().__init__()
        self.side = side
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Unflatten(1, (8, 1, 1)), nn.Upsample(side), layer(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Grouped(Normed):
    def __init__(self) -> None:
        super().__init__(lambda n: nn.GroupNorm(2, n))


NINE = (8, 9, 12)  # with batches of four, the second client's last batch has one example


def refused(model: Any, sizes: Any = NINE, match: str = "", datamodule: Any = None, **options: Any) -> None:
    before = parameters(model).clone()
    with pytest.raises(FederatedError, match=match) as caught:
        fit(model, data(sizes) if datamodule is None else datamodule, clients_per_round=1, **options)
    assert not isinstance(caught.value, ClientError)
    assert model.seen == []  # the trial has no side effects
    assert torch.equal(parameters(model), before)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d) and layer.track_running_stats:
            assert int(layer.num_batches_tracked) == 0


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_single_example_last_batch_is_rejected_before_training(engine: Any) -> None:
    says = (
        r"Client 1 has 9 examples, and batch_size=4 makes a batch of one at the end\. body\.1 \(BatchNorm1d\).*Set"
        r" drop_last=True.*GroupNorm.*on_client_error='drop'"
    )
    refused(seeded(Normed), match=says, engine=engine)
    refused(seeded(Normed), match="Client 1 has 9 examples", engine=engine, sizes=(8, 9, 13), local_steps=3)
    refused(seeded(Normed), match=r"9 examples.*\(1 other clients have", engine=engine, sizes=(8, 9, 13))


class Watching(pl.Callback):
    """Observes finished batches, as progress bars and monitors do."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Do nothing."""


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a client of one": (Normed, {"sizes": (8, 1)}, r"1 example, and batch_size=4 makes a batch of one\. .*Merge it"),
    "even with drop_last": (Normed, {"datamodule": lambda: data((8, 1), drop_last=True)}, "1 has 1 example,.*Merge"),
    "batches of one": (Normed, {"datamodule": lambda: data((8, 4), batch_size=1)}, "Raise batch_size"),
    "no running statistics": (partial(Normed, track_running_stats=False), {}, "Client 1 has 9"),
    "and in eval mode": (lambda: seeded(partial(Normed, track_running_stats=False)).eval(), {}, "Client 1 has 9"),
    "with callbacks": (Normed, {"callbacks": Watching(), "enable_progress_bar": True}, "Client 1 has 9"),
    "accumulation": (Normed, {"accumulate_grad_batches": 2}, "Client 1 has 9"),
    "synchronised": (partial(Normed, nn.SyncBatchNorm), {}, r"body\.1 \(SyncBatchNorm\)"),
    "pictures of one pixel": (partial(Pictures, side=1), {}, r"body\.3 \(BatchNorm2d\)"),
    "a full-batch gradient": (
        Normed,
        {"algorithm": Mime(), "datamodule": lambda: data((10, 15, 25), batch_size=5, full_batch_size=6)},
        "Client 2 has 25 examples, and full_batch_size=6 makes a batch of one at the end.*Set another full_batch_size",
    ),
    "the gradients of another cohort": (
        Normed,
        {"algorithm": FedDane(mu=0.1), "datamodule": lambda: data((10, 25), batch_size=5, full_batch_size=12)},
        "Client 1 has 25 examples, and full_batch_size=12",
    ),
    "shapes that differ by client": (Normed, {"datamodule": lambda: OnDemand()}, "Client 1 has 9"),
}  # fmt: skip


class OnDemand(FederatedDataModule):
    """Builds clients on demand, and reports no sizes in advance."""

    def __init__(self, loader: bool = False) -> None:
        super().__init__(batch_size=4)
        self.num_clients = 2
        if loader:
            self.client_dataloader = self.loader  # type: ignore[method-assign]

    def client_dataset(self, client_id: Any) -> Any:
        return classification((9, 9)[client_id], client_id)

    def loader(self, client_id: Any, generator: Any) -> Any:
        return DataLoader(self.client_dataset(client_id), batch_size=4, generator=generator, shuffle=True)


@pytest.mark.parametrize("name", CASES)
def test_other_single_example_batches_are_rejected(name: str) -> None:
    make, options, match = CASES[name]
    options = {key: value() if key == "datamodule" else value for key, value in options.items()}
    if name == "shapes that differ by client":
        match = "has 9 examples"
    refused(seeded(make) if isinstance(make, (type, partial)) else make(), match=match, **options)


class EvalMode(FederatedCallback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, pl_module, *_: pl_module.body[1].eval())


class SetsEval(Normed):
    def on_train_epoch_start(self) -> None:
        self.body[1].eval()


class SetsEvalLate(Normed):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body[1].eval()


WORKS: dict[str, Any] = {
    "drop_last": lambda: fit(seeded(Normed), data(NINE, drop_last=True)),
    "group norm": lambda: fit(seeded(Grouped), data(NINE)),
    "eval mode": lambda: fit(seeded(Normed).eval(), data(NINE)),
    "set to eval mode by a hook": lambda: fit(seeded(SetsEval), data(NINE)),
    "set to eval mode by a later hook": lambda: fit(seeded(SetsEvalLate), data(NINE)),
    "set to eval mode for a client": lambda: fit(seeded(Normed), data(NINE), callbacks=EvalMode("on_client_start")),
    "several pixels": lambda: fit(seeded(Pictures), data(NINE)),
    "instance norm of several pixels": lambda: fit(seeded(partial(Pictures, nn.InstanceNorm2d)), data(NINE)),
    "the last batch is not reached": lambda: fit(seeded(Normed), data(NINE), limit_train_batches=2),
    "too few local steps": lambda: fit(seeded(Normed), data(NINE), local_steps=2),
    "an empty client": lambda: fit(seeded(Normed), data((8, 0, 12)), clients_per_round=2),
    "full batches are of no use": lambda: fit(
        seeded(Normed), data((8, 12, 16), full_batch_size=5), algorithm=Scaffold()
    ),
    "a sampler that never draws it": lambda: fit(
        seeded(Normed), data(NINE), clients_per_round=None, sampler=lambda seed, round: [0, 2]
    ),
}


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_single_example_batch_is_rejected_by_other_engines(engine: Any) -> None:
    model = seeded()
    model.body.insert(1, nn.BatchNorm1d(8, track_running_stats=False))
    with pytest.raises(FederatedError, match=r"Client 1 has 9 examples.*body\.1 \(BatchNorm1d\)") as caught:
        fit(model, data(NINE), engine=engine)
    assert not isinstance(caught.value, ClientError)


@pytest.mark.parametrize("name", WORKS)
def test_working_configurations_are_not_rejected(name: str) -> None:
    assert WORKS[name]().isfinite().all()


def test_failing_clients_are_dropped_with_on_client_error_drop() -> None:
    with pytest.warns(UserWarning, match="Client 1"):
        fit(seeded(Normed), data(NINE), on_client_error="drop", max_failed_share=0.5)


def test_custom_loader_error_suggests_remedies() -> None:
    class Own(OnDemand):
        def client_dataloader(self, client_id: Any, generator: Any) -> Any:
            return self.loader(client_id, generator)

    with pytest.raises(ClientError, match=r"Expected more than 1 value per channel.*drop_last=True.*GroupNorm"):
        fit(seeded(Normed), Own(), clients_per_round=1)


def test_successful_trial_has_no_side_effects() -> None:
    class Counting(Pictures):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.last = batch[1]
            return super().training_step(batch, batch_idx) + 0 * torch.rand(())

    fitted = []
    for sizes in (NINE, (8, 9, 12, 1)):  # the same cohorts: the last client is left out
        model = seeded(Counting)
        options = {"clients_per_round": None, "sampler": lambda seed, round: [0, 1, 2]}
        fit(model, data(sizes), **options)
        fitted.append(model)
    assert fitted[0].seen == fitted[1].seen
    assert len(fitted[0].seen) == 3 * (2 + 3 + 3)
    trial_free = seeded(Counting)
    fit(trial_free, data(NINE), on_client_error="drop", clients_per_round=None, sampler=lambda seed, round: [0, 1, 2])
    assert torch.equal(parameters(trial_free), parameters(fitted[0]))


def test_resumed_run_is_checked(tmp_path: Any) -> None:
    t = trainer(max_rounds=1)
    t.fit(seeded(Normed), data((8, 8, 12)))
    t.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(FederatedError, match="Client 1 has 9 examples"), pytest.warns(UserWarning, match="numbers of"):
        fit(seeded(Normed), data(NINE), ckpt_path=tmp_path / "a.ckpt", clients_per_round=1)


def test_many_clients_with_few_sizes_need_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fed.rounds import local_plans

    tried: list[Any] = []
    real = local_plans._failing_layer
    monkeypatch.setattr(local_plans, "_failing_layer", lambda *given: tried.append(given) or real(*given))
    data_set = TensorDataset(*classification(9000, 0).tensors)
    many = FederatedDataModule(train=data_set, partition=lambda labels: torch.arange(9000).split(9), batch_size=4)
    fit(seeded(Pictures), many, max_rounds=2, local_steps=3, clients_per_round=1)
    assert len(tried) == 1


def test_share_of_batches_is_rounded_down_but_is_at_least_one() -> None:
    assert [limited(count, 0.5) for count in (0, 1, 3, 4)] == [0, 1, 1, 2]
    assert [limited(count, 2) for count in (0, 1, 3)] == [0, 1, 2]


class DropsLast(FederatedDataModule):
    def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
        return DataLoader(self.client_dataset(client_id), batch_size=4, drop_last=True)


class Dropping(FederatedDataModule):
    """Clients of 3 and 8 examples, whose own loaders drop batches of fewer than 4."""

    num_clients = 2

    def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
        return DataLoader(
            classification((3, 8)[client_id], client_id), 4, shuffle=True, generator=generator, drop_last=True
        )


def test_client_whose_loader_drops_its_only_batch_is_named() -> None:
    steps: list[int] = []

    class Steps(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            steps.append(client_report.steps)

    with pytest.warns(UserWarning, match="Client 0 has 3 examples.*no batch of them: it takes no local step"):
        fit(Net(), Dropping(), callbacks=[Steps()], clients_per_round=2, max_rounds=1)
    assert steps == [0, 2]
