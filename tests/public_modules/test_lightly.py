"""lightly: its benchmark's classifiers, and modules around its losses and heads as in its examples."""

# pip install: lightly

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs, refusal, thin

needs("lightly")
from lightning_fed import FederatedError
from lightly.loss import BarlowTwinsLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.benchmarking import LinearClassifier


def views(n: int, seed: int) -> TensorDataset:
    """Return two views of pictures, with labels."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 8, 8, generator=stream)
    other = x + 0.2 * torch.randn(n, 1, 8, 8, generator=stream)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long(), other)


def clients() -> list[TensorDataset]:
    return [views(n, seed) for seed, n in enumerate(SIZES)]


def backbone() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8))


def linear() -> LinearClassifier:
    """Return the benchmark's classifier, whose rate follows a cosine over all local steps."""
    return LinearClassifier(backbone(), batch_size_per_device=4, lr=6.4, feature_dim=8, num_classes=2, topk=(1, 2))


def simclr() -> Any:
    net, loss = nn.Sequential(backbone(), SimCLRProjectionHead(8, 8, 4, batch_norm=False)), NTXentLoss(temperature=0.5)
    return thin(net, lambda net, batch: loss(net(batch[0]), net(batch[2])))


def barlow() -> Any:
    net, loss = nn.Sequential(backbone(), nn.Linear(8, 4)), BarlowTwinsLoss()
    return thin(net, lambda net, batch: loss(net(batch[0]), net(batch[2])))


class BYOL(nn.Module):
    """A student and a teacher that follows it in every step, as in lightly's example."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(backbone(), BYOLProjectionHead(8, 8, 4))
        self.predictor = BYOLPredictionHead(4, 8, 4)
        self.teacher = copy.deepcopy(self.student)
        deactivate_requires_grad(self.teacher)

    def loss(self, batch: list[Tensor]) -> Tensor:
        update_momentum(self.student, self.teacher, m=0.99)
        far = [self.teacher(batch[i]).detach() for i in (0, 2)]
        near = [self.predictor(self.student(batch[i])) for i in (0, 2)]
        loss = NegativeCosineSimilarity()
        return 0.5 * (loss(near[0], far[1]) + loss(near[1], far[0]))


def byol() -> Any:
    return thin(BYOL(), lambda net, batch: net.loss(batch))


LOGGED = {"logged": ("train_loss",), "val": lambda: views(4, 9)}
TEACHER = {"as_buffers": ["network.teacher.*"]}
CASES = [
    PublicCase("LinearClassifier", linear, clients, "vectorized", AGREED, **LOGGED, local_schedule="continue"),
    PublicCase("NTXentLoss", simclr, clients, "vectorized", AGREED, **LOGGED),
    PublicCase("BarlowTwinsLoss", barlow, clients, "vectorized", AGREED, **LOGGED),
    PublicCase("BYOL", byol, clients, "sequential", "BatchNorm1d", logged=("train_loss",), kwargs=TEACHER),
]


class TestPublished(Published):
    cases = CASES


def test_schedule_that_counts_steps_is_rejected() -> None:
    assert "interval" in refusal(PublicCase("LinearClassifier", linear, clients, "sequential", ""))


def test_teacher_changes_do_not_leak_between_clients() -> None:
    """The teacher is a frozen parameter that changes in every step: start clients from the server's, or refuse it."""
    from lightning_fed import FederatedDataModule, FederatedTrainer
    from lightning_fed.compat.package import pl

    class Teachers(pl.Callback):
        def __init__(self) -> None:
            self.first: list[Tensor] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.first.append(pl_module.network.teacher[0][0].weight.clone())

    seen = Teachers()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = FederatedTrainer(max_rounds=1, local_epochs=1, callbacks=seen, enable_model_summary=False, **quiet)
    with suppress(FederatedError):
        trainer.fit(byol(), FederatedDataModule(clients(), batch_size=4))
    assert all(torch.equal(other, seen.first[0]) for other in seen.first)
