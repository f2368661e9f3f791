"""What the image data sets have in common, by the example of MNIST."""

import numpy as np
import pytest
import torch
from torchvision import datasets

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import EMNIST, MNIST, Iid
from tests.helpers.image_files import write_emnist, write_idx, write_mnist, write_part


def test_validation_images_are_taken_from_the_clients_if_asked_for(tmp_path):
    (images, _), _ = write_mnist(tmp_path)
    splits = []
    for seed in (0, 1):
        data = MNIST(tmp_path, partition=Iid(3, seed=seed), val_fraction=0.25)
        assert sum(data.known_sizes) == 45
        clients = torch.cat([data.client_batches(i).pick(torch.arange(15))[0] for i in range(3)])
        splits.append(torch.cat([x for x, _ in data.val_dataloader()]))
        everything = torch.cat([clients / 255, splits[-1]])
        assert sorted(everything.flatten(1).sum(1).tolist()) == sorted((images / 255).flatten(1).sum(1).tolist())
        assert len(data.test) == 20
    assert splits[0].equal(splits[1])


def test_a_failed_download_says_what_else_to_do(tmp_path, monkeypatch):
    def fetch(root, **options):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(datasets, "MNIST", fetch)
    with pytest.raises(FederatedError, match="download to .* failed: Error downloading.* put train-"):
        MNIST(tmp_path, download=True).prepare_data()


def test_labels_that_do_not_fit_are_refused_by_file(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    write_idx(labels, np.arange(19) % 10, packed=False)
    with pytest.raises(FederatedError, match="t10k-labels-idx1.*20 images and 19 labels"):
        MNIST(tmp_path).setup("fit")
    write_idx(labels, np.arange(20), packed=False)
    with pytest.raises(FederatedError, match="t10k-labels-idx1.*labels run from 0 to 19.*10 classes"):
        MNIST(tmp_path).setup("fit")
    write_emnist(tmp_path, "letters")
    write_idx(tmp_path / "EMNIST" / "raw" / "emnist-letters-train-labels-idx1-ubyte", np.zeros(130), packed=False)
    with pytest.raises(FederatedError, match="emnist-letters-train-labels-idx1.*labels run from -1"):
        EMNIST(tmp_path, split="letters").setup("fit")


def test_images_of_another_size_are_refused(tmp_path):
    write_mnist(tmp_path)
    write_part(tmp_path / "MNIST" / "raw", "train", 10, 10, side=27)
    with pytest.raises(FederatedError, match=r"train-images-idx3-ubyte.*27x27.*28x28"):
        MNIST(tmp_path).setup("fit")
