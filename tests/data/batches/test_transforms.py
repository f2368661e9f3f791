"""Functions of whole batches of images, compared with naive ones that process single images."""

from collections import namedtuple

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from torchvision import transforms

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import FedProx, Mime, MimeLite
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import FederatedDataModule, Flatten, Iid, Normalize, RandomCrop, RandomFlip, Shrink, ToFloat


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n, channels=3, height=5, width=7, dtype=torch.uint8):
    return torch.randint(256, (n, channels, height, width), generator=generator(n)).to(dtype)


def crop_one_by_one(batch, padding, stream):
    rows, columns = torch.randint(2 * padding + 1, (2, len(batch)), generator=stream).tolist()
    out = torch.empty_like(batch)
    for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
        _, height, width = batch[i].shape
        out[i] = F.pad(batch[i], [padding] * 4)[:, row : row + height, column : column + width]
    return out


@given(
    n=st.integers(0, 9),
    channels=st.integers(1, 3),
    padding=st.integers(0, 8),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    seed=st.integers(0, 2**40),
)
def test_random_crop_matches_a_loop_over_the_images(n, channels, padding, dtype, seed):
    batch = images(n, channels, dtype=dtype)
    kept = batch.clone()
    changed = RandomCrop(padding)(batch, generator(seed))
    assert changed.dtype == dtype
    assert changed.equal(crop_one_by_one(batch, padding, generator(seed)))
    assert batch.equal(kept)


def test_crop_offsets_are_uniform_and_independent_per_image():
    lit = torch.zeros(9000, 1, 3, 3)
    lit[:, :, 1, 1] = 1
    places = RandomCrop(padding=1)(lit, generator()).flatten(1).argmax(1)
    assert torch.bincount(places, minlength=9).sub(1000).abs().max() < 150  # 5 standard deviations
    assert RandomCrop(padding=2)(lit, generator()).flatten(1).sum(1).mean() == pytest.approx(9 / 25, abs=0.03)


def test_random_flip_mirrors_half_of_the_images_horizontally():
    batch = images(4000)
    flipped = RandomFlip()(batch, generator())
    mirrored = torch.stack([transforms.functional.hflip(image) for image in batch])
    is_mirrored = (flipped == mirrored).flatten(1).all(1)
    assert ((flipped == batch).flatten(1).all(1) ^ is_mirrored).all()
    assert is_mirrored.float().mean() == pytest.approx(0.5, abs=0.04)


def test_normalize_matches_torchvision_with_identical_bits():
    batch = images(6, height=32, width=32)
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    one_by_one = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    expected = torch.stack([one_by_one(image.permute(1, 2, 0).numpy()) for image in batch])
    assert Normalize(mean, std)(batch).equal(expected)
    floats = ToFloat()(batch)
    assert floats.equal(torch.stack([transforms.functional.to_tensor(i.permute(1, 2, 0).numpy()) for i in batch]))
    kept = floats.clone()
    assert Normalize(mean, std)(floats).equal(expected)
    assert floats.equal(kept)
    assert Normalize([0.5], [0.5])(batch).equal((floats - 0.5) / 0.5)  # one for all channels
    assert Normalize([0.5], [0.5])(floats.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_shrink_averages_each_square(dtype):
    batch = images(3, height=4, width=6, dtype=dtype)
    kept = batch.clone()
    small = Shrink(2)(batch)
    pixels = batch / 255 if dtype == torch.uint8 else batch
    expected = pixels.reshape(3, 3, 2, 2, 3, 2).mean(dim=(3, 5))
    assert small.dtype == expected.dtype
    torch.testing.assert_close(small, expected)
    assert batch.equal(kept)
    assert Shrink(1)(batch).equal(pixels)


Pair = namedtuple("Pair", "images labels")


@pytest.mark.parametrize("kind", [list, tuple, Pair._make])
def test_images_are_the_first_part_of_a_batch(kind):
    labels = torch.tensor([3, 1])
    batch = kind([images(2), labels])
    changed = ToFloat()(batch)
    assert type(changed) is type(batch)
    assert changed[0].equal(images(2) / 255)
    assert changed[1] is labels
    assert ToFloat()(images(2)).equal(images(2) / 255)


@pytest.mark.parametrize(
    "function", [RandomCrop(2), RandomFlip(), ToFloat(), Normalize([0.5], [0.2]), Flatten(), Shrink(1)]
)
def test_images_stay_on_their_device(function):
    stream = [generator()] if isinstance(function, (RandomCrop, RandomFlip)) else []
    assert function(images(3).to("meta"), *stream).device.type == "meta"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Normalize([0.5], [0.5, 0.5]), "one finite number per channel"),
        (lambda: Normalize([], []), "one finite number per channel"),
        (lambda: Normalize([float("nan")], [1.0]), "mean must be a finite number"),
        (lambda: Normalize([0.5], [0.0]), "must be positive"),
        (lambda: RandomCrop(padding=-1), r"RandomCrop\(padding=-1\)"),
        (lambda: Normalize([0.5] * 3, [1.0] * 3)(images(2, channels=2)), "for 3 channels, and the images have 2"),
        (lambda: Shrink(0), r"Shrink.* factor"),
        (lambda: Shrink(2)(images(2)), r"Shrink\(factor=2\) cannot cut images of 5 x 7 pixels"),
        (lambda: ToFloat()({"x": images(2)}), "ToFloat found dict where"),
        (lambda: ToFloat()([]), "ToFloat found list where"),
        (lambda: Flatten()(torch.zeros(2, 3)), r"Flatten found shape \[2, 3\] where"),
        (lambda: ToFloat()(images(2).long()), "found torch.int64"),
        (lambda: RandomFlip()(images(2)), "RandomFlip belongs in augment="),
        (lambda: ToFloat()(images(2), generator()), "ToFloat belongs in transform=.*not random"),
    ],
)
def test_invalid_transform_inputs_are_rejected(call, message):
    with pytest.raises(FederatedError, match=message):
        call()


# In a run


class Watching(pl.LightningModule):
    """A linear model that keeps the batches it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12, 2)
        self.seen, self.measured = [], []

    def training_step(self, batch, batch_idx):
        (self.seen if self.training else self.measured).append(batch[0].clone())
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(algorithm, seed=0, **options):
    """Return the module after two rounds of one client with two batches."""
    torch.manual_seed(0)
    train = TensorDataset(images(6, 1, 3, 4), torch.arange(6) % 2)
    data = FederatedDataModule(
        train=train,
        partition=Iid(1),
        batch_size=3,
        augment=[RandomFlip(), RandomCrop(1)],
        transform=[ToFloat(), Flatten()],
    )
    trainer = FederatedTrainer(
        algorithm=algorithm, max_rounds=2, seed=seed, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model := Watching(), data)
    return model


def test_both_mime_gradients_see_the_same_augmented_batch():
    seen = trained(Mime(), local_epochs=1).seen
    assert [len(batch) for batch in seen] == [6, 3, 3, 3, 3] * 2
    for full, *steps in (seen[:5], seen[5:]):
        assert steps[0].equal(steps[1])
        assert steps[2].equal(steps[3])
        assert not full.equal(torch.cat([steps[0], steps[2]]))


def test_augmentation_is_deterministic_and_varies_by_seed_and_epoch():
    first, again, other = (trained(MimeLite(), seed, local_epochs=2) for seed in (0, 0, 1))
    assert all(a.equal(b) for a, b in zip(first.seen, again.seen, strict=True))
    assert not any(a.equal(b) for a, b in zip(first.seen, other.seen, strict=True))
    epochs = [sorted(torch.cat(first.seen[i : i + 2]).tolist()) for i in (1, 3, 6, 8)]
    assert all(a != b for i, a in enumerate(epochs) for b in epochs[:i])


def test_loss_of_all_clients_is_measured_without_augmentation():
    model = trained(FedProx(mu=1.0, adaptive=True), local_epochs=1)
    stored = images(6, 1, 3, 4).flatten(1) / 255
    assert model.measured
    assert all(batch.equal(stored) for batch in model.measured)
    assert len(model.seen) == 4
