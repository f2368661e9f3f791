"""Modules, optimizers and data that rounds do not support."""

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Adam, FedAvg, FedSAM, MimeLite
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.changes import attribute_tensors, own_tensors, parts_of
from lightning_fed.engines.gradients import buffer_owners
from lightning_fed.server import CoordinateMedian
from lightning_fed.settings.module_checks import (
    check_batch_statistics,
    check_buffers,
    check_memory,
    check_module,
    check_optimization,
    check_schedules,
    no_federated_data,
)
from tests.helpers import training
from tests.helpers.training import clients


def fit_of(module: Any, datamodule: Any = None, **more: Any) -> Any:
    """Return a stand-in for the parts of a trainer that checks read."""
    data = FederatedDataModule(clients=clients((8,))) if datamodule is None else datamodule
    none = dict.fromkeys(("client_privacy", "local_schedule", "sampler", "engine"))
    loop = SimpleNamespace(settings=SimpleNamespace(algorithm=FedAvg(), **none), corrected_clip=None)
    return SimpleNamespace(lightning_module=module, datamodule=data, callbacks=[], fit_loop=loop, **more)


class Net(pl.LightningModule):
    """A module that rounds support."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()


def test_inference_mode_is_rejected() -> None:
    with torch.inference_mode():
        made = Net()
        with pytest.raises(FederatedError, match=r"called within torch\.inference_mode"):
            check_module(fit_of(Net()))
    with pytest.raises(FederatedError, match=r"'layer\.weight' of Net was made within torch\.inference_mode"):
        check_module(fit_of(made))


def test_fit_within_autocast_is_rejected() -> None:
    """It keeps converted weights until it is left, so gradients would be those of the first model."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(FederatedError, match=r"called within torch\.autocast"):
        check_module(fit_of(Net()))


def test_data_not_split_among_clients_is_rejected_with_advice() -> None:
    assert "found no datamodule. Pass trainer.fit(model, FederatedDataModule(" in str(no_federated_data(None))
    assert "found a list. Pass" in str(no_federated_data([]))
    assert "found a DataLoader. Say how" in str(no_federated_data(DataLoader([1])))
    with pytest.raises(FederatedError, match="found a LightningDataModule"):
        check_module(fit_of(Net(), pl.LightningDataModule()))


def test_unsupported_modules_and_data_are_rejected() -> None:
    class Central(FederatedDataModule):
        def train_dataloader(self) -> Any:
            return []

    class Iterates(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    manual, lazy, graph, rows, ragged = Net(), Net(), Net(), Net(), Net()
    manual.automatic_optimization = False
    lazy.layer = nn.LazyLinear(2)  # type: ignore[assignment]
    graph.register_buffer("adjacency", torch.eye(3).to_sparse())
    rows.weight = nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False)
    ragged.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    check_module(fit_of(Net()))
    steps = {"gradient_clip_val": None, "accumulate_grad_batches": 1, "strategy": None}
    check_module(fit_of(manual, **steps))
    for trainer, message in (
        (fit_of(Net(), Central(clients=clients((8,)))), "Central overrides train_dataloader, which no round calls"),
        (fit_of(manual, **steps | {"gradient_clip_val": 1.0}), "gradient_clip_val. Leave it unset, and call self.clip"),
        (fit_of(manual, **steps | {"accumulate_grad_batches": 2}), "accumulate_grad_batches. Leave it at 1"),
        (fit_of(Iterates()), "Iterates.training_step.dataloader_iter. is not supported"),
        (fit_of(lazy), "Net.layer.weight has no shape yet"),
        (fit_of(graph), r"Net.adjacency is a sparse tensor \(torch.sparse_coo\).* Call to_dense"),
        (fit_of(rows), r"Net.weight is a sparse tensor \(torch.sparse_csr\)"),
        (fit_of(ragged), r"Net.ragged is a nested tensor .* Call to_padded_tensor"),
    ):
        with pytest.raises(FederatedError, match=message):
            check_module(trainer)


def test_single_compatible_local_optimizer_is_returned() -> None:
    def optimized(optimizer: Any) -> Any:
        return fit_of(Net(), optimizers=[optimizer], lr_scheduler_configs=[])

    plain = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    momentum = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    assert check_optimization(optimized(plain), MimeLite(base=Adam())) is plain
    assert check_optimization(optimized(momentum), FedAvg()) is momentum
    mock = type("_MockOptimizer", (), {})()
    for trainer, algorithm, message in (
        (optimized(mock), FedAvg(), r"Net.configure_optimizers\(\) returned None"),
        (optimized(torch.optim.Rprop([nn.Parameter(torch.ones(1))])), FedAvg(), "the local optimizer Rprop is not"),
        (
            optimized(momentum),
            MimeLite(base=Adam()),
            r"MimeLite\(base=Adam\) .* returned SGD, which would do so once more",
        ),
    ):
        with pytest.raises(FederatedError, match=message):
            check_optimization(trainer, algorithm)


def test_per_step_schedules_require_local_schedule() -> None:
    sgd = SGD([nn.Parameter(torch.ones(1))], 0.1)

    def scheduled(*intervals: str, reduce_on_plateau: bool = False) -> Any:
        plain = {"scheduler": StepLR(sgd, 1), "reduce_on_plateau": reduce_on_plateau}
        return fit_of(Net(), lr_scheduler_configs=[SimpleNamespace(interval=each, **plain) for each in intervals])

    for trainer, chosen in ((scheduled(), None), (scheduled("epoch"), None), (scheduled("step", "step"), "total")):
        check_schedules(trainer, chosen)
    for trainer, chosen, message in (
        (scheduled("step"), None, "StepLR has interval='step'.*'restart'.*'continue'.*'total'.*interval='epoch'"),
        (scheduled("epoch"), "total", "local_schedule='total' is for schedules.*StepLR, which steps once a round"),
        (scheduled(), "restart", "returns no schedule. Leave local_schedule unset"),
        (scheduled("step", "epoch"), "restart", "StepLR steps by local step and StepLR by round"),
        (scheduled("step", reduce_on_plateau=True), "total", "StepLR follows a metric"),
    ):
        with pytest.raises(FederatedError, match=message):
            check_schedules(trainer, chosen)


def test_batch_norm_layers_are_rejected_with_split_batches() -> None:
    module = Net()
    module.norm = nn.BatchNorm1d(2)
    with pytest.raises(FederatedError, match=r"norm \(BatchNorm1d\) normalises by the statistics of a batch"):
        check_batch_statistics(module)
    module.norm.eval()
    check_batch_statistics(module)
    module.norm = nn.BatchNorm1d(2, track_running_stats=False).eval()
    with pytest.raises(FederatedError, match="normalises by the statistics"):
        check_batch_statistics(module)


def test_buffers_that_bypass_an_aggregator_are_rejected() -> None:
    module = nn.BatchNorm1d(2)
    for mode in ("average", "local", "server"):
        buffers = Buffers(buffer_owners(module), mode)
        if mode == "server":
            check_buffers(CoordinateMedian(), buffers)
        else:
            with pytest.raises(FederatedError, match=f"cannot be combined with buffers='{mode}'.*'running_mean'"):
                check_buffers(CoordinateMedian(), buffers)
    check_buffers(CoordinateMedian(), Buffers({}, "average"))


class Clips(training.Net):
    """Clips in its own way."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


def test_custom_clipping_is_rejected_if_it_misses_the_gradient() -> None:
    own = training.fit(training.seeded(Clips), max_rounds=1)
    assert torch.equal(own, training.fit(max_rounds=1, gradient_clip_val=0.01))
    corrected = {"gradient_clip_val": 1.0, "gradient_clip_on": "corrected"}
    with pytest.raises(FederatedError, match=r"gradient_clip_on='corrected' cannot be combined with Clips.configure_"):
        training.fit(Clips(), **corrected)
    with pytest.raises(
        FederatedError, match=r"Clips.configure_gradient_clipping would clip the first gradient of FedSAM"
    ):
        training.fit(Clips(), algorithm=FedSAM(0.1))


class InOneMemory(training.Net):
    """Has tensors that share memory with each other or with the head's weight, or lie side by side."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        weight, columns = self.head.weight, torch.randn(6, 5)
        if kind == "transposed":
            self.decoder = nn.Parameter(weight.t())
        elif kind == "frozen":
            self.teacher = nn.Parameter(weight[1], requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("last", weight.detach())
        elif kind == "attribute":
            self.anchor = weight.detach()
        elif kind == "in a list":
            self.kept = {"weights": [weight.data.t()]}
        elif kind == "hidden":
            self.hidden = [nn.Linear(weight.shape[1], weight.shape[0])]
            self.hidden[0].weight.data = weight.data
        elif kind == "the same":
            self.kept = [weight]
        elif kind == "spectral":
            nn.utils.spectral_norm(self.head)
        else:
            end = {"columns that overlap": 3, "columns": 2}[kind]
            self.first, self.second = nn.Parameter(columns[:, :end]), nn.Parameter(columns[:, 2:])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("transposed", ("decoder", "head.weight")),
        ("frozen", ("teacher", "head.weight")),
        ("buffer", ("last", "head.weight")),
        ("columns that overlap", ("second", "first")),
        ("columns", None),
        ("attribute", ("anchor", "head.weight")),
        ("in a list", ("kept", "head.weight")),
        ("hidden", ("hidden.0.weight", "head.weight")),
        ("the same", None),
        ("spectral", None),
    ],
)
def test_tensors_sharing_trained_parameter_memory_are_rejected(kind: str, names: tuple[str, str] | None) -> None:
    """A plain optimizer moves both, but the run's vector would separate them."""
    model = InOneMemory(kind)
    names_of_trained = ("first", "second", "head.weight", "head.weight_orig")
    trained = {name: p for name, p in model.named_parameters() if name in names_of_trained}
    parts = list(parts_of(model))
    others = [(name, value) for (_, name), value in (*own_tensors(parts), *attribute_tensors(parts))]
    if names is None:
        check_memory(model, trained, others)
        return
    with pytest.raises(FederatedError, match="'{}' in the memory of '{}'".format(*names)):
        check_memory(model, trained, others)


@pytest.mark.parametrize(("kind", "name"), [("transposed", "decoder"), ("attribute", "anchor")])
def test_fit_rejects_shared_memory(kind: str, name: str) -> None:
    with pytest.raises(FederatedError, match=f"InOneMemory has {name!r} in the memory of 'head.weight'"):
        training.fit(InOneMemory(kind))


@pytest.mark.parametrize("base", [None, Adam()], ids=["without", "with"])
def test_base_optimizer_property_is_checked_like_an_attribute(base: Any) -> None:
    class Computes(FedAvg):
        @property
        def base(self) -> Any:
            return base

    module = training.seeded()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    own = SimpleNamespace(lightning_module=module, optimizers=[optimizer])
    if base is None:
        check_optimization(own, Computes(), keeps_state=False)
        return
    with pytest.raises(FederatedError, match=r"Computes\(base=Adam\) preconditions the gradient itself"):
        check_optimization(own, Computes(), keeps_state=False)
