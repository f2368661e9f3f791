"""Draw the pictures of docs/partitions.md: scikit-learn's digits, split by each partition, and shifted.

    python docs/partition_pictures.py          # a few seconds; needs matplotlib

Writes docs/images/partitions/*.png.
"""

import io
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from lightning_fed.data import (
    BalancedDirichlet,
    ClassesPerClient,
    Digits,
    Dirichlet,
    FeatureShift,
    Iid,
    LogNormalSizes,
    Partition,
    PowerLaw,
    QuantitySkew,
    Shards,
    Similarity,
    split_figure,
)

PARTITIONS: dict[str, Partition] = {
    "iid": Iid(num_clients=30),
    "dirichlet": Dirichlet(num_clients=30, alpha=0.3),
    "balanced_dirichlet": BalancedDirichlet(num_clients=30, alpha=0.3),
    "shards": Shards(num_clients=30, shards_per_client=2),
    "similarity": Similarity(num_clients=30, similarity=0.1),
    "classes_per_client": ClassesPerClient(num_clients=30, classes_per_client=3),
    "power_law": PowerLaw(num_clients=30),
    "log_normal_sizes": LogNormalSizes(num_clients=30, sigma=1.0),
    "quantity_skew": QuantitySkew(num_clients=30, alpha=0.5),
}
SHIFTS = {
    "rotation=360": FeatureShift(Iid(num_clients=4), rotation=360),
    "noise=0.5": FeatureShift(Iid(num_clients=4), noise=0.5),
    "rotation=[0, 30], noise=0.2": FeatureShift(Iid(num_clients=4), rotation=[0, 30], noise=0.2),
}
FOLDER = Path(__file__).parent / "images" / "partitions"


def main() -> None:
    """Draw every partition and the shifts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, partition in PARTITIONS.items():
        save(split_figure(Digits(partition=partition)), name)
    save(shift_figure(), "feature_shift")


def shift_figure() -> Figure:
    """Show the first digits of four clients, one row each, under every shift."""
    figure = Figure(figsize=(9, 1.7), layout="constrained")
    for axes, (name, shift) in zip(figure.subplots(1, len(SHIFTS)), SHIFTS.items(), strict=True):
        data = Digits(partition=shift)
        axes.imshow(torch.cat([row(data, client) for client in data.client_ids]), cmap="gray_r", vmin=0, vmax=1)
        axes.set(title=name, ylabel="client", xticks=[], yticks=[10 * i + 4.5 for i in range(4)], yticklabels=range(4))
    return figure


def row(data: Digits, client: int) -> Tensor:
    """Return a client's first eight digits side by side, with margins [10, 80]."""
    return torch.cat([F.pad(data.client_dataset(client)[k][0][0], (1, 1, 1, 1)) for k in range(8)], dim=1)


def save(figure: Figure, name: str) -> None:
    """Write a figure with few colors, at a third of the size."""
    path = FOLDER / f"{name}.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
