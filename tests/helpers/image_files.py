"""Small files in the format of MNIST and EMNIST."""

import gzip

import numpy as np
import torch

SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


def idx(values):
    """Return an array as an IDX file of bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def write_idx(path, values, packed):
    content = idx(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".gz" * packed).write_bytes(gzip.compress(content) if packed else content)


def write_part(folder, prefix, n, num_classes, packed=False, first_label=0, side=28):
    """Write n images whose labels include all classes, and return both."""
    random = np.random.RandomState(n)
    images, labels = random.randint(256, size=(n, side, side)), np.arange(n) % num_classes
    write_idx(folder / f"{prefix}-images-idx3-ubyte", images, packed)
    write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels + first_label, packed)
    return torch.tensor(images, dtype=torch.uint8), torch.tensor(labels)


def write_mnist(root, packed=False, train=60, test=20):
    folder = root / "MNIST" / "raw"
    return write_part(folder, "train", train, 10, packed), write_part(folder, "t10k", test, 10, packed)


def write_emnist(root, split, packed=False, train=130, test=70):
    folder, first = root / "EMNIST" / "raw", int(split == "letters")
    return tuple(
        write_part(folder, f"emnist-{split}-{part}", n, SPLITS[split], packed, first)
        for part, n in (("train", train), ("test", test))
    )
