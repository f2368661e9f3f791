"""Draw the pictures of docs/partitions.md: scikit-learn's digits, dealt out to 30 clients by each partition.

    python docs/partition_pictures.py          # a few seconds; needs matplotlib

Writes docs/images/partitions/*.png.
"""

import io
from pathlib import Path

from PIL import Image

from lightning_fed.data import (
    BalancedDirichlet,
    ClassesPerClient,
    Digits,
    Dirichlet,
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
FOLDER = Path(__file__).parent / "images" / "partitions"


def main() -> None:
    """Draw every partition."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, partition in PARTITIONS.items():
        path = FOLDER / f"{name}.png"
        drawn = io.BytesIO()
        split_figure(Digits(partition=partition)).savefig(drawn, dpi=90)
        Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the size
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
