"""Embeddings with sparse=True: every method and engine gets the results of dense gradients."""

import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer, algorithms
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.server import FedBuff
from tests.helpers.selection import few
from tests.helpers.training import QUIET, parameters

WORDS = 11


class Words(pl.LightningModule):
    """A bag of words, as a mean of embeddings or as an EmbeddingBag, under a linear layer."""

    def __init__(self, sparse: bool, bag: bool = False, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = (nn.EmbeddingBag if bag else nn.Embedding)(WORDS, 5, sparse=sparse)
        self.head = nn.Linear(5, 3)
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.1)

    def embedded(self, x: Tensor) -> Tensor:
        return self.words(x) if isinstance(self.words, nn.EmbeddingBag) else self.words(x).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.embedded(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Watched(Words):
    """Records whether the gradients that a step reads are sparse."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.is_sparse = self.words.weight.grad.is_sparse


class Functional(Words):
    def embedded(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.words.weight, sparse=True).mean(1)


def texts(size: int, seed: int) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(WORDS, (size, 4), generator=stream), torch.randint(3, (size,), generator=stream))


def run(module: Words, algorithm: Any = None, **options: Any) -> Tensor:
    algorithm = algorithm or algorithms.FedAvg()
    if algorithm.local_work and "local_steps" not in options:
        options["local_epochs"] = 1
    made = FederatedTrainer(algorithm=algorithm, **{**QUIET, "max_rounds": 2, "precision": "64-true", **options})
    made.fit(module, FederatedDataModule(clients=[texts(n, n) for n in (12, 8, 4)], batch_size=4))
    return parameters(module)


def agree(algorithm: Any = None, bag: bool = False, optimizer: Any = None, **options: Any) -> None:
    dense, sparse = (run(Words(kind, bag, optimizer), algorithm, **options) for kind in (False, True))
    torch.testing.assert_close(sparse, dense, rtol=1e-14, atol=1e-14)


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg": (algorithms.FedAvg(), {}),
    "FedProx": (algorithms.FedProx(mu=0.1), {}),
    "Scaffold": (algorithms.Scaffold(), {}),
    "FedCM": (algorithms.FedCM(alpha=0.3), {}),
    "Mime": (algorithms.Mime(), {}),
    "FedSAM": (algorithms.FedSAM(rho=0.1), {}),
    "adaptive FedProx": (algorithms.FedProx(mu=0.1, adaptive={"step": 0.1, "patience": 2}), {}),
    "FedDANE": (algorithms.FedDane(mu=0.1), {}),
    "Scaffold, i": (algorithms.Scaffold(option="i"), {}),
    "Mime, base": (algorithms.Mime(base=algorithms.SGDm()), {}),
    "MimeLite": (algorithms.MimeLite(), {}),
    "C-Mime": (algorithms.CMime(base=algorithms.SGDm()), {}),
    "MimeMVR": (algorithms.MimeMVR(a=0.3), {}),
    "FedDyn": (algorithms.FedDyn(alpha=0.1), {}),
    "FedNova": (algorithms.FedNova(), {}),
    "ServerOnly": (algorithms.ServerOnly(), {}),
    "FedExP": (algorithms.FedExP(), {}),
    "Scaffold-M": (algorithms.ScaffoldM(beta=0.3), {}),
    "Scaffnew": (algorithms.Scaffnew(prob=0.5), {"local_steps": 3}),
    "FedACG": (algorithms.FedACG(), {}),
    "MoFedSAM": (algorithms.MoFedSAM(rho=0.1, alpha=0.3), {}),
    "FedSpeed": (algorithms.FedSpeed(lam=5.0, rho=0.1), {}),
    "FedProxVR": (algorithms.FedProxVR(mu=0.1), {}),
    "FedProxVR, sarah": (algorithms.FedProxVR(mu=0.1, estimator="sarah"), {}),
    "Ditto": (algorithms.Ditto(lam=0.1), {}),
    "FedPer": (algorithms.FedPer(personal=["words*"]), {}),
    "FedRep": (algorithms.FedRep(personal=["words*"]), {}),
    "pFedMe": (algorithms.PFedMe(lam=1.0), {}),
    "APFL": (algorithms.APFL(alpha=0.5), {}),
}
ENGINES = ("sequential", "vectorized")


@pytest.mark.parametrize(
    ("name", "engine"),
    few(
        [pytest.param(name, engine, id=f"{name}-{engine}") for name in METHODS for engine in ENGINES],
        ["Scaffold-vectorized", "Mime-sequential"],
    ),
)
def test_every_method_matches_dense_gradients(name: str, engine: str) -> None:
    algorithm, options = METHODS[name]
    agree(algorithm, engine=engine, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.1, "gradient_clip_on": "corrected"},
        {"accumulate_grad_batches": 2},
        {"optimizer": torch.optim.Adam},
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)},
        {"asynchronous": FedBuff(2, 3)},
        {"bag": True},
        pytest.param(
            {"bag": True, "algorithm": algorithms.Scaffold(), "engine": "vectorized"}, marks=pytest.mark.thorough
        ),
        {"engine": "auto"},
    ],
    ids=str,
)
def test_options_that_read_gradients_match_dense_gradients(options: dict[str, Any]) -> None:
    agree(**options)


def test_sparse_layer_warns_and_is_restored_after_fit() -> None:
    module = Watched(sparse=True)
    with pytest.warns(UserWarning, match=r"^'words': sparse=True has no effect in this run\. Gradients are dense"):
        run(module, algorithms.Scaffold())
    assert (module.is_sparse, module.words.sparse) == (False, True)


def test_rejected_run_restores_the_module() -> None:
    module = Words(sparse=True, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    with pytest.raises(FederatedError, match="SGD"):
        run(module, algorithms.Mime(base=algorithms.SGDm()))
    assert module.words.sparse


def test_plain_sgd_keeps_sparse_gradients_without_warning() -> None:
    module = Watched(sparse=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(module)
    assert module.is_sparse
    assert not [w for w in told if "sparse" in str(w.message)]


def test_functional_sparse_embedding_is_rejected() -> None:
    run(Functional(sparse=False))
    with pytest.raises(ClientError, match=r"local step 1: .*leave out sparse=True in torch\.nn\.functional\.embedding"):
        run(Functional(sparse=False), algorithms.Scaffold())
