"""PyKEEN: its LightningModules for embeddings of knowledge graphs, with clients of unequal numbers of triples.

The modules change parameters (TransE keeps entities on the unit sphere) and reset a buffer (the regularization of
ComplEx) in ``on_before_zero_grad``, which Lightning calls after the forward pass and before the backward pass.
"""

# pip install: pykeen

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.public_modules.harness import SIZES, PublicCase, Published, needs

needs("pykeen")
from pykeen.contrib.lightning import LCWALitModule, SLCWALitModule
from pykeen.datasets.base import EagerDataset
from pykeen.triples import CoreTriplesFactory, LCWAInstances

ENTITIES, RELATIONS = 12, 3


def triples(n: int, seed: int) -> CoreTriplesFactory:
    """Return distinct triples of head, relation and tail, at least ``n`` pairs of head and relation."""
    stream = torch.Generator().manual_seed(seed)
    pairs = torch.randperm(ENTITIES * RELATIONS, generator=stream)[:n]
    tails = torch.randint(ENTITIES, (n,), generator=stream)
    found = torch.stack([pairs // RELATIONS, pairs % RELATIONS, tails], 1)
    return CoreTriplesFactory(found, num_entities=ENTITIES, num_relations=RELATIONS)


class Corrupted(Dataset):
    """Triples, each with two negative ones, drawn once."""

    def __init__(self, n: int, seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        self.positives = triples(n, seed).mapped_triples
        ranges = (ENTITIES, RELATIONS, ENTITIES)
        self.negatives = torch.stack([torch.randint(top, (n, 2), generator=stream) for top in ranges], -1)

    def __len__(self) -> int:
        return len(self.positives)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"positives": self.positives[index], "negatives": self.negatives[index]}


def tails(n: int, seed: int) -> LCWAInstances:
    """Return pairs of head and relation, each with all its tails."""
    return LCWAInstances.from_triples_factory(triples(n, seed))


def steps_hook(module: Any) -> None:
    """Call the hook where Lightning's automatic optimization does."""
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        module.on_before_zero_grad(None)
        return loss

    module.training_step = training_step


def case(name: str, kind: type, model: str, data: Any, **arguments: Any) -> PublicCase:
    def module() -> Any:
        dataset = EagerDataset(triples(20, 90), triples(8, 91))
        return kind(dataset=dataset, model=model, model_kwargs={"embedding_dim": 6}, **arguments)

    return PublicCase(
        name,
        module,
        lambda: [data(n, seed) for seed, n in enumerate(SIZES)],
        "sequential",
        "on_before_zero_grad",
        val=lambda: data(4, 9),
        logged=("train_loss",),
        prepare=steps_hook,
    )


CASES = [
    case("TransE", SLCWALitModule, "transe", Corrupted, optimizer="SGD", learning_rate=0.1),
    case("RotatE", SLCWALitModule, "rotate", Corrupted, optimizer="Adagrad", learning_rate=0.1),
    case("ComplEx", LCWALitModule, "complex", tails, optimizer="Adam", learning_rate=0.01),
]


class TestPublished(Published):
    cases = CASES
