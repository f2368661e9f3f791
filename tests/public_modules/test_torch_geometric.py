"""PyTorch Geometric: its networks over batches of graphs from its own loader."""

# pip install: torch-geometric

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.public_modules.harness import FLOAT32, SIZES, PublicCase, Published, needs, thin

needs("torch_geometric")
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GCN, GIN, global_mean_pool


def graph(stream: torch.Generator) -> Data:
    nodes = int(torch.randint(4, 9, (), generator=stream))
    x = torch.randn(nodes, 3, generator=stream)
    edges = torch.randint(0, nodes, (2, 2 * nodes), generator=stream)
    return Data(x=x, edge_index=edges, y=(x.mean() > 0).long().reshape(1))


def graphs(n: int, seed: int) -> list[Data]:
    stream = torch.Generator().manual_seed(seed)
    return [graph(stream) for _ in range(n)]


def clients() -> list[list[Data]]:
    return [graphs(n, seed) for seed, n in enumerate(SIZES)]


def loss(network: nn.Module, batch: Batch) -> Tensor:
    pooled = global_mean_pool(network(batch.x, batch.edge_index), batch.batch, len(batch.y))
    return F.cross_entropy(pooled, batch.y)


def loader(dataset: list[Data]) -> DataLoader:
    return DataLoader(dataset, batch_size=4)


def case(network: type[nn.Module], **options: Any) -> PublicCase:
    return PublicCase(
        network.__name__,
        lambda: thin(network(3, 8, num_layers=2, out_channels=2, **options), loss),
        clients,
        "sequential",
        "needs batches of tensors only, found a DataBatch",
        loader=loader,
        val=lambda: loader(graphs(4, 9)),
        logged=("train_loss",),
        **FLOAT32,
    )


CASES = [case(GCN), case(GIN, norm="batch_norm"), case(GAT)]


class TestPublished(Published):
    cases = CASES
