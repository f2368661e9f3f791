"""Awkward but ordinary modules and data: each works as its author would expect, or is refused with the reason."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import ClientError, FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedProx, FedSAM, Mime, MimeLite, PFedMe, Scaffold, SGDm
from tests.helpers.engines import Ordinary, assert_agree, run
from tests.helpers.ids import spelled
from tests.helpers.selection import covering, few
from tests.helpers.training import (
    CLASSES,
    FEATURES,
    Net,
    classification,
    clients,
    data,
    fit,
    parameters,
    rounds_in,
    seeded,
    trainer,
)


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())


class BuffersOf(FederatedCallback):
    """Keep every client's running means at the end of its local work."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.means.append(pl_module.body[1].running_mean.clone())


def test_batch_norm_buffers_are_averaged_by_examples() -> None:
    model, seen = seeded(WithBatchNorm), BuffersOf()
    fit(model, data(sizes=(12, 4)), max_rounds=1, clients_per_round=2, callbacks=seen, weighting="uniform")
    torch.testing.assert_close(model.body[1].running_mean, 0.75 * seen.means[0] + 0.25 * seen.means[1])
    assert int(model.body[1].num_batches_tracked) == 3  # the largest client's count


def test_buffers_of_client_drawn_twice_count_twice_in_the_mean() -> None:
    model, seen = seeded(WithBatchNorm), BuffersOf()
    fit(model, data(sizes=(12, 8)), max_rounds=1, sampler=lambda seed, round: [1, 0, 1], callbacks=seen)
    of_eight, of_twelve = seen.means
    torch.testing.assert_close(model.body[1].running_mean, (12 * of_twelve + 16 * of_eight) / 28)
    assert int(model.body[1].num_batches_tracked) == 3  # from the largest client, not the one drawn twice


def test_server_buffers_are_kept_with_buffers_server() -> None:
    model = seeded(WithBatchNorm)
    before = model.body[1].running_mean.clone()
    fit(model, data(sizes=(8, 12, 4)), buffers="server")
    assert torch.equal(model.body[1].running_mean, before)


def test_local_buffers_stay_with_their_client() -> None:
    kept: dict[Any, Tensor] = {}

    class Check(FederatedCallback):
        def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
            self.client = client_id

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0 and self.client in kept:
                assert torch.equal(pl_module.body[1].running_mean, kept.pop(self.client))

        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            kept[client_report.client_id] = pl_module.body[1].running_mean.clone()

    fit(seeded(WithBatchNorm), data(sizes=(8, 12, 4)), callbacks=Check(), buffers="local")
    assert len(kept) == 3


def test_server_buffers_in_local_mode_are_the_last_round_mean() -> None:
    model, seen = seeded(WithBatchNorm), BuffersOf()
    cohorts = [[2], [0, 1]]
    fit(
        model,
        data(sizes=(8, 12, 4)),
        max_rounds=2,
        sampler=lambda seed, round: cohorts[round],
        callbacks=seen,
        buffers="local",
    )
    _, of_eight, of_twelve = seen.means
    torch.testing.assert_close(model.body[1].running_mean, (8 * of_eight + 12 * of_twelve) / 20)


@pytest.mark.parametrize("method", [Mime(base=SGDm()), Scaffold(option="i")], ids=repr)
def test_extra_gradients_do_not_update_buffers(method: Any) -> None:
    class Count(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            start = int(self.start)
            assert int(pl_module.body[1].num_batches_tracked) == start + client_report.steps

        def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
            self.start = trainer.fit_loop.state.buffers["body.1.num_batches_tracked"]

    fit(seeded(WithBatchNorm), data(sizes=(8, 12, 4)), algorithm=method, callbacks=Count())


class FrozenBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_frozen_backbone_is_unchanged_and_not_sent() -> None:
    model = seeded(FrozenBackbone)
    before = parameters(model.body).clone()
    run = trainer(algorithm=Scaffold())
    run.fit(model, data())
    assert torch.equal(parameters(model.body), before)
    assert run.fit_loop.state.x.numel() == sum(p.numel() for p in model.head.parameters())


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.body = nn.Sequential(
            nn.Linear(FEATURES, FEATURES, bias=False), nn.Tanh(), nn.Linear(FEATURES, FEATURES, bias=False)
        )
        self.body[2].weight = self.body[0].weight
        self.head = nn.Linear(FEATURES, CLASSES)


@pytest.mark.parametrize("method", [Scaffold(), Mime(base=SGDm())], ids=repr)
def test_tied_weights_stay_tied(method: Any) -> None:
    model = seeded(Tied)
    run = trainer(algorithm=method)
    run.fit(model, data())
    assert model.body[2].weight is model.body[0].weight
    assert run.fit_loop.state.x.numel() == FEATURES * FEATURES + FEATURES * CLASSES + CLASSES
    state = model.state_dict()
    assert torch.equal(state["body.0.weight"], state["body.2.weight"])


class ManyParameters(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(FEATURES)) for _ in range(CLASSES)])
        self.unused = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        return {
            "loss": F.cross_entropy(torch.stack([x @ w for w in self.weights], dim=1), y),
            "extra": y.float().mean(),
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", [FedProx(mu=0.1), Mime(base=SGDm())], ids=repr)
def test_parameter_list_dict_output_and_unused_weight_work(method: Any) -> None:
    model = ManyParameters()
    fit(model, algorithm=method)
    assert torch.equal(model.unused, torch.ones(2))
    assert all(w.abs().sum() > 0 for w in model.weights)
    assert all(p.untyped_storage().size() == p.numel() * p.element_size() for p in model.parameters())


class WithMetrics(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.several = MetricCollection({"mean": MeanMetric()})
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.calls += 1
        self.accuracy(out, y)
        self.several(y.float())
        self.log("train_acc", self.accuracy)
        self.log_dict(self.several)
        loss = F.cross_entropy(out, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("method", [FedAvg(), Mime(base=SGDm()), Scaffold(option="i")], ids=repr)
def test_metric_objects_see_every_local_batch_once(method: Any) -> None:
    class Check(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            labels = torch.cat([trainer.datamodule.client_dataset(i).tensors[1] for i in round_report.cohort])
            assert round_report.metrics["mean"] == pytest.approx(float(labels.float().mean()))
            assert round_report.metrics["train_loss"] == pytest.approx(round_report.loss)
            assert round_report.metrics["train_loss_epoch"] == pytest.approx(round_report.loss)

    fit(seeded(WithMetrics), algorithm=method, callbacks=Check())


class SkipsSome(Net):
    """Skips every second batch by returning None."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


def test_skipped_batch_is_not_counted_as_a_local_step() -> None:
    class Check(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            assert dict(round_report.steps) == {0: 2, 1: 1}

    fit(seeded(SkipsSome), data(sizes=(13, 8)), algorithm=Scaffold(), clients_per_round=2, callbacks=Check())


class SkipsAll(Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


def test_error_names_the_client_without_any_step() -> None:
    with pytest.raises(
        ClientError, match=r"Client 0 failed in its local work in round 0.*returned None for every batch"
    ):
        fit(seeded(SkipsAll), data(sizes=(5,)), clients_per_round=1)


class Lists(Net):
    """Returns a loss of shape (length,) instead of a scalar."""

    def __init__(self, length: int = 1) -> None:
        super().__init__(dropout=0.0)
        self.length = length

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss.expand(self.length)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "engine"), covering([Mime(SGDm()), FedAvg()], ["sequential", "vectorized"]), ids=spelled
)
def test_single_element_loss_matches_scalar_loss(engine: str, algorithm: Any) -> None:
    models = [seeded(Lists), seeded(Net, dropout=0.0)]
    for model in models:
        model.configure_optimizers = lambda model=model: torch.optim.SGD(model.parameters(), lr=0.1)
        fit(model, data(), algorithm=algorithm, engine=engine)
    torch.testing.assert_close(*(parameters(model) for model in models))


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_loss_with_several_elements_is_rejected(engine: str) -> None:
    with pytest.raises(FederatedError, match=r"one number, found one of shape \[3\]. Return its mean"):
        fit(seeded(Lists, length=3), data(), engine=engine)


class Raises(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise RuntimeError("no such luck")
        return super().training_step(batch, batch_idx)


def test_user_exception_is_the_cause_of_the_client_error() -> None:
    with pytest.raises(
        ClientError, match=r"Client 'bob' failed .* round 0, local step 2: RuntimeError: no such luck"
    ) as error:
        fit(seeded(Raises), FederatedDataModule(clients={"bob": clients()[0]}, batch_size=4), clients_per_round=1)
    assert isinstance(error.value.__cause__, RuntimeError)


def test_module_holds_server_model_after_an_exception() -> None:
    class Later(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch == 1 and batch_idx == 1:
                raise RuntimeError("late")
            return super().training_step(batch, batch_idx)

    model, reference = seeded(Later), seeded()
    with pytest.raises(ClientError, match="round 1"):
        fit(model, max_rounds=3)
    fit(reference, max_rounds=1)
    assert torch.equal(parameters(model), parameters(reference))


def test_diverging_client_raises() -> None:
    with pytest.raises(ClientError, match="not finite in round 0, after"):
        fit(seeded(lr=1e30), max_rounds=5)


class Strings(Dataset):
    """Examples that need a collate function to become a batch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> str:
        return "ab"[index % 2] * 3


def collate(items: list[str]) -> list[Tensor]:
    y = torch.tensor([0 if item[0] == "a" else 1 for item in items])
    return [F.one_hot(y, FEATURES).float(), y]


@pytest.mark.parametrize("method", [FedAvg(), Mime(base=SGDm())], ids=repr)
def test_supports_custom_dataset_and_collate_function(method: Any) -> None:
    datamodule = FederatedDataModule(clients={"x": Strings(7), "y": Strings(3)}, batch_size=2, collate_fn=collate)
    model = seeded()
    before = parameters(model).clone()
    fit(model, datamodule, algorithm=method, clients_per_round=2)
    assert not torch.equal(parameters(model), before)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(2)])


def test_streaming_data_is_rejected() -> None:
    with pytest.raises(FederatedError, match=r"Client 0 has a Stream, whose examples cannot be counted.*map-style"):
        fit(datamodule=FederatedDataModule(clients=[Stream()]), clients_per_round=1)


def test_empty_client_warns_and_is_never_sampled() -> None:
    class Check(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            assert round_report.cohort == ("a", "c")

    empty = TensorDataset(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.long))
    datamodule = FederatedDataModule(clients={"a": clients()[0], "b": empty, "c": clients()[1]}, batch_size=4)
    with pytest.warns(UserWarning, match="1 of 3 clients are empty and never sampled: 'b'"):
        fit(datamodule=datamodule, clients_per_round=1.0, callbacks=Check())
    with pytest.raises(FederatedError, match="more clients than the 2 non-empty ones"):
        fit(datamodule=datamodule, clients_per_round=3)


def test_supports_client_smaller_than_a_batch() -> None:
    fit(datamodule=data(sizes=(2, 1), batch_size=16), clients_per_round=2, algorithm=Scaffold())


def test_sampling_more_clients_than_exist_is_rejected() -> None:
    with pytest.raises(FederatedError, match=r"clients_per_round=7 asks for more clients than the 6"):
        fit(clients_per_round=7)


class OnDemand(FederatedDataModule):
    """A population built client by client."""

    num_clients = 1_000_000

    def client_dataset(self, client_id: Any) -> Dataset:
        return classification(5 + client_id % 3, seed=client_id)


def test_supports_population_built_on_demand() -> None:
    run = trainer(algorithm=Scaffold(), clients_per_round=4)
    run.fit(seeded(), OnDemand(batch_size=4))
    assert len(run.fit_loop.state.clients) == 12


class OnlyBatch(Net):
    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("method", [FedAvg(), Mime(base=SGDm())], ids=repr)
def test_supports_training_step_without_batch_index(method: Any) -> None:
    fit(seeded(OnlyBatch), algorithm=method)


class Adaptive(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=0.01)


@pytest.mark.parametrize(
    ("method", "precision"),
    covering([FedAvg(), Scaffold(), FedProx(mu=0.1), Mime(), MimeLite()], ["32-true", "64-true", "bf16-mixed"]),
    ids=spelled,
)
def test_local_adam_trains_in_every_precision(method: Any, precision: str) -> None:
    model = seeded(Adaptive)
    before = parameters(model).clone()
    assert torch.isfinite(fit(model, algorithm=method, precision=precision)).all()
    assert not torch.equal(parameters(model).float(), before)


class Augments(Net):
    """Draws from every global generator inside ``training_step``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.randn_like(x) * random.random() * float(np.random.rand())
        return F.cross_entropy(self(x + noise), y)


def test_anchor_gradient_uses_the_same_masks_and_augmentation() -> None:
    class Check(FederatedCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            # at y = x both gradients of a batch have the same bits, so all clients take the same first step
            assert round_report.drift < 1e-7 * round_report.update_norm

    fit(seeded(Augments, dropout=0.5), algorithm=Mime(base=SGDm()), local_steps=1, callbacks=Check())


def as_dict(examples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = (torch.stack(list(column)) for column in zip(*examples, strict=True))
    return {"x": x, "y": y}


class WritesIntoItsBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"] += 1.0
        batch["x"] = 1.5 * batch["x"]
        return super().training_step((batch["x"], batch.pop("y")), batch_idx)


class LeavesItsBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((1.5 * (batch["x"] + 1.0), batch["y"]), batch_idx)


TWICE = [FedAvg(), Scaffold(option="i"), Mime(), Mime(base=SGDm()), FedSAM(rho=0.1), PFedMe(lam=1.0)]


@pytest.mark.parametrize("method", few(TWICE, [TWICE[2], TWICE[4]]), ids=repr)
def test_training_step_may_modify_its_batch(method: Any) -> None:
    found, expected = (
        fit(seeded(module), data(collate_fn=as_dict, val=None), algorithm=method, max_rounds=1, limit_val_batches=0)
        for module in (WritesIntoItsBatch, LeavesItsBatch)
    )
    assert torch.equal(found, expected)


class DividesByBatches(Net):
    """Weights a term by the number of batches, as variational modules do."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[tuple[str, Any]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append(("round", self.trainer.num_training_batches))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches, kind = self.trainer.num_training_batches, "eval" if not self.training else "pass"
        self.seen.append((kind, batches))
        norm = sum(p.square().sum() for p in self.parameters())
        return super().training_step(batch, batch_idx) + norm / batches


class Losses(FederatedCallback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.training_losses([0, 1])


def test_num_training_batches_is_per_client_in_every_pass(tmp_path: Path) -> None:
    sizes, batches, rounds = (12, 4), (3, 1), 2
    module, saves = seeded(DividesByBatches), ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, every_n_epochs=1)
    options = {"algorithm": Mime(), "max_rounds": rounds, "clients_per_round": 2, "limit_val_batches": 0}
    whole = fit(module, data(sizes=sizes), callbacks=[Losses(), saves], enable_checkpointing=True, **options)
    seen = {(kind, number) for kind, number in module.seen}
    assert seen == {("round", 1), *(("pass", number) for number in batches), *(("eval", number) for number in batches)}
    of_full_passes = module.seen[1:3]  # from round 0, with one batch per pass
    assert sorted(number for _, number in of_full_passes) == sorted(batches)
    first = min(tmp_path.iterdir(), key=rounds_in)
    assert torch.equal(fit(seeded(DividesByBatches), data(sizes=sizes), ckpt_path=first, **options), whole)


class Overflowing(MixedPrecision):
    """Half precision with a gradient scaler on a CPU. Lightning itself uses one on a GPU only."""

    def __init__(self, scale: float) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))


@pytest.mark.parametrize("method", [Scaffold(option="i"), Mime(base=SGDm())], ids=repr)
def test_gradient_scaler_skips_overflowing_steps(method: Any) -> None:
    class Count(FederatedCallback):
        steps: int = 0

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            self.steps += sum(round_report.steps.values())

    plain, small, large = Count(), Count(), Count()
    reference = fit(seeded(dropout=0.0), algorithm=method, callbacks=plain)
    close = fit(seeded(dropout=0.0), algorithm=method, plugins=Overflowing(2.0**8), callbacks=small)
    torch.testing.assert_close(close, reference, rtol=2e-2, atol=2e-3)
    assert small.steps == plain.steps
    skipping = fit(seeded(dropout=0.0), algorithm=method, plugins=Overflowing(2.0**24), callbacks=large)
    assert torch.isfinite(skipping).all()
    assert 0 < large.steps < plain.steps  # steps that the scaler skipped are not counted


def test_estimated_stepping_batches_counts_rounds() -> None:
    class OneCycle(Net):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 4
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)]

    fit(seeded(OneCycle), max_rounds=4)


def test_trainer_has_no_loader_over_all_clients() -> None:
    class Asks(Net):
        def configure_optimizers(self) -> Any:
            if self.trainer.train_dataloader is None:  # chemprop does this to make Lightning set up its loaders
                assert self.trainer.estimated_stepping_batches > 0
            return super().configure_optimizers()

        def on_train_start(self) -> None:
            assert getattr(self.trainer, "train_dataloader", None) is None
            len(self.trainer.train_dataloader)

    with pytest.raises(FederatedError, match="each client has its own loader.*num_training_batches"):
        fit(Asks(), data())

    class SetsUp(Net):
        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()  # Lightning's Trainer has a loader after this
            len(self.trainer.train_dataloader)
            return super().configure_optimizers()

    with pytest.raises(FederatedError, match="each client has its own loader.*estimated_stepping_batches"):
        fit(SetsUp(), data())


def test_hooks_set_on_an_instance_are_called() -> None:
    heard: list[str] = []
    names = ("on_train_batch_end", "on_after_backward", "on_train_epoch_end")
    listen = LambdaCallback(**{name: (lambda *_, name=name: heard.append(name)) for name in names})
    fit(callbacks=listen, max_rounds=1, clients_per_round=1)
    assert heard.count("on_train_batch_end") == heard.count("on_after_backward") > 0
    assert heard.count("on_train_epoch_end") == 1


def test_stop_request_waits_for_the_end_of_the_round() -> None:
    class Stop(FederatedCallback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            assert dict(round_report.steps) == {0: 4, 1: 2}

    run = trainer(callbacks=Stop(), max_rounds=50, clients_per_round=2)
    run.fit(seeded(), data(sizes=(13, 8)))
    assert run.fit_loop.round == 1


def test_time_limit_ends_run_after_its_round_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for limit, rounds in (({"days": 1}, 2), ({"microseconds": 1}, 1)):
        run = trainer(max_time=limit, max_rounds=2)
        with caplog.at_level("INFO"):
            run.fit(seeded(), data())
        assert run.fit_loop.round == rounds
    assert caplog.text.count("Time limit reached") == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_network_may_be_scripted_or_traced(kind: str, engine: str) -> None:
    class Scripted(Ordinary):
        def __init__(self) -> None:
            super().__init__()
            x = torch.zeros(2, FEATURES)
            self.body = torch.jit.script(self.body) if kind == "script" else torch.jit.trace(self.body, x)

    assert_agree(run("sequential", max_rounds=2), run(engine, Scripted, max_rounds=2))
