"""Feature shift: only inputs change, each client's as documented and independent of the others; refusals by name."""

import copy
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import ByKey, Digits, Dirichlet, FeatureShift, FederatedDataset, Iid, Shards, skew_table
from lightning_fed.data.batches.batches import LoaderBatches, TensorBatches
from lightning_fed.data.feature_shift import ShiftedClients, _interpolated, rotate
from lightning_fed.models import MLPClassifier
from tests.data.test_datamodule import from_configuration

LABELS = torch.arange(24) % 4
IMAGES = TensorDataset(torch.rand(24, 1, 5, 5, generator=torch.Generator().manual_seed(0)), LABELS)
BYTES = TensorDataset((255 * IMAGES.tensors[0]).to(torch.uint8), LABELS)

rotations = st.one_of(st.floats(-720, 720), st.lists(st.sampled_from([0.0, 45.0, 90.0, -90.0, 180.0]), min_size=1))
shifts = st.builds(
    FeatureShift,
    partition=st.builds(Dirichlet, st.integers(1, 6), st.just(0.5), st.just(0), st.integers(0, 5)),
    rotation=rotations,
    noise=st.sampled_from([0.0, 0.1, 3.0]),
    angles=st.sampled_from(["spaced", "drawn"]),
    seed=st.integers(0, 2**63),
)


def cut(shift, dataset=IMAGES):
    return FederatedDataset.from_partition(dataset, shift)


def inputs(clients, client):
    return torch.stack([example[0] for example in clients.dataset(client)])


class Listed(Dataset):
    """The images one by one. ``make`` makes an example of input and label."""

    targets = LABELS.tolist()

    def __init__(self, make=lambda x, y: (x, y), source=IMAGES):
        self.make, self.source = make, source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.make(*self.source[index])


@given(shift=shifts)
def test_indices_and_labels_do_not_change(shift):
    plain, shifted = cut(shift.partition), cut(shift)
    assert all(torch.equal(a, b) for a, b in zip(shift(LABELS), shift.partition(LABELS), strict=True))
    assert plain.known_sizes == shifted.known_sizes
    assert vars(skew_table(plain)) == vars(skew_table(shifted))  # dictionaries take nan for itself
    for client in plain.ids:
        assert [int(y) for _, y in shifted.dataset(client)] == [int(y) for _, y in plain.dataset(client)]


@pytest.mark.thorough
@given(shift=shifts)
def test_client_data_depend_only_on_seed_and_client(shift):
    first, second = cut(shift), cut(copy.deepcopy(shift))
    kept = {client: first.dataset(client) for client in first.ids}
    for client in reversed(second.ids):  # in another order, and twice
        torch.rand(1)
        np.random.rand()
        for dataset in (second.dataset(client), second.dataset(client)):
            assert all(torch.equal(a, b) for a, b in zip(dataset.tensors, kept[client].tensors, strict=True))


@pytest.mark.thorough
@given(shift=shifts)
def test_examples_read_one_by_one_match_the_tensors(shift):
    tensors, listed, nested = cut(shift), cut(shift, Listed()), cut(shift, Subset(IMAGES, range(24)))
    for client in tensors.ids:
        if tensors.size(client):
            assert torch.equal(inputs(tensors, client), inputs(listed, client))
            assert torch.equal(inputs(tensors, client), inputs(nested, client))


def test_noise_depends_on_example_client_and_seed():
    def noise(partition, client, seed=0):
        blank = TensorDataset(torch.zeros(24, 50, dtype=torch.float64), LABELS)
        data = cut(FeatureShift(partition, noise=2.0, seed=seed), blank)
        indices = partition(LABELS)[client].tolist()
        return dict(zip(indices, inputs(data, client).tolist(), strict=True))

    one, other = noise(Iid(2, seed=1), 0), noise(Iid(2, seed=2), 0)
    common = set(one) & set(other)
    assert len(common) >= 3
    assert all(one[index] == other[index] for index in common)  # independent of the client's other examples
    assert len({tuple(row) for row in one.values()}) == len(one)
    assert noise(Iid(2, seed=1), 0, seed=7) != one
    assert noise(Iid(2, seed=1), 0, seed=2**32) != one

    def everyone(labels):
        return [torch.arange(24)] * 2

    a, b = (torch.tensor(list(noise(everyone, client).values())) for client in range(2))
    correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
    assert abs(correlation) < 5 / 1200**0.5


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_noise_has_the_expected_deviation(noise):
    num_clients = 5
    data = cut(FeatureShift(Iid(num_clients), noise=noise), TensorDataset(torch.ones(100, 40, 25), torch.arange(100)))
    for client in range(num_clients):
        drawn = inputs(data, client) - 1
        expected = noise * (client + 1) / num_clients
        assert drawn.std().item() == pytest.approx(expected, rel=5 / (2 * drawn.numel()) ** 0.5)
        assert abs(drawn.mean().item()) < 5 * expected / drawn.numel() ** 0.5


def test_seed_gives_the_same_noise_on_every_machine():
    shift = FeatureShift(Iid(2), rotation=360.0, noise=1.0, angles="drawn")
    dataset = shift.shifted(TensorDataset(torch.zeros(3, 1, 2, dtype=torch.float64)), client=1, num_clients=2)
    expected = [
        -1.8457218809964,
        -0.5932614227355,
        -0.1155735389661,
        1.5074834731779,
        -0.5239009044795,
        -0.1786523050223,
    ]
    assert dataset.tensors[0].flatten().tolist() == pytest.approx(expected, abs=1e-12)
    assert [shift.angle(client, 2) for client in range(2)] == pytest.approx([129.2097596784, 63.3538757631])


def test_zero_rotation_and_noise_leave_inputs_unchanged():
    for dataset in (IMAGES, BYTES):
        data = cut(FeatureShift(Iid(3), rotation=[0, 360], noise=0), dataset)
        plain = cut(Iid(3), dataset)
        assert all(torch.equal(inputs(data, client), inputs(plain, client)) for client in range(3))


def test_source_dataset_is_not_modified():
    before = IMAGES.tensors[0].clone()
    data = cut(FeatureShift(Iid(1), rotation=0.0, noise=1.0))
    data.dataset(0).tensors[0].zero_()
    inputs(cut(FeatureShift(Iid(1))), 0).zero_()
    cut(FeatureShift(Iid(1))).dataset(0).tensors[0].zero_()
    assert torch.equal(IMAGES.tensors[0], before)


def test_spaced_and_listed_angles():
    assert [FeatureShift(Iid(4), rotation=360).angle(i, 4) for i in range(4)] == [0, 90, 180, 270]
    assert [FeatureShift(Iid(5), rotation=[0, 90, 45]).angle(i, 5) for i in range(5)] == [0, 90, 45, 0, 90]


@pytest.mark.thorough
def test_drawn_angles_are_uniform():
    shift = FeatureShift(Iid(1), rotation=90.0, angles="drawn")
    angles = torch.tensor([shift.angle(i, 1000) for i in range(1000)])
    assert 0 <= angles.min() < 1 < 89 < angles.max() < 90
    assert angles.mean().item() == pytest.approx(45, abs=5 * 90 / 12**0.5 / 1000**0.5)
    listed = FeatureShift(Iid(1), rotation=[0, 90, 180], angles="drawn")
    assert [listed.angle(i, 1000) for i in range(60)] == [90 * int(angle / 30) for angle in angles[:60]]


images = st.builds(
    lambda shape, seed: torch.rand(shape, generator=torch.Generator().manual_seed(seed)),
    st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    st.integers(0, 2**31),
)


@given(image=images, square=st.booleans())
def test_four_quarter_turns_are_the_identity(image, square):
    image = image[..., : min(image.shape[-2:]), : min(image.shape[-2:])] if square else image
    for degrees, times in ((180, 2), (90, 4) if square else (-180, 2), (-270, 4) if square else (360, 1)):
        turned = image
        for _ in range(times):
            turned = rotate(turned, degrees)
        assert torch.equal(turned, image)


def test_quarter_turn_is_counterclockwise():
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert rotate(image, 90).tolist() == [[2.0, 4.0], [1.0, 3.0]]
    assert rotate(image, -90).tolist() == [[3.0, 1.0], [4.0, 2.0]]


@given(image=images, quarters=st.integers(-5, 5))
def test_interpolated_rotations_match_exact_ones(image, quarters):
    side = min(image.shape[-2:])
    square = image[..., :side, :side]
    assert torch.allclose(_interpolated(square, 90 * quarters), rotate(square, 90 * quarters), atol=1e-5)
    assert torch.allclose(_interpolated(image, 180 * quarters), rotate(image, 180 * quarters), atol=1e-5)


def test_rotation_does_not_stretch_non_square_images():
    image = torch.zeros(3, 7)
    image[1, 2:5] = 1.0  # a bar of three pixels through the centre
    expected = torch.zeros(3, 7)
    expected[:, 3] = 1.0
    assert torch.allclose(rotate(image, 90), expected, atol=1e-5)


def test_rotation_by_45_degrees_keeps_center_and_clears_corners():
    turned = rotate(torch.ones(2, 1, 9, 9), 45)
    assert turned.shape == (2, 1, 9, 9)
    assert turned[:, 0, 4, 4].tolist() == pytest.approx([1.0, 1.0])
    assert turned[..., [0, 0, 8, 8], [0, 8, 0, 8]].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_rotation_keeps_the_dtype(dtype):
    image = (200 * torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(1))).to(dtype)
    for degrees in (0, 30, 90, 180):
        assert rotate(image, degrees).dtype == dtype
    expected = rotate(image.double(), 30)
    tolerance = {torch.uint8: 0.501, torch.float16: 0.1}.get(dtype, 1e-3)
    assert (rotate(image, 30).double() - expected).abs().max() < tolerance


def test_byte_images_stay_bytes_when_rotated():
    data = cut(FeatureShift(Iid(4), rotation=[0, 90, 180, 270]), BYTES)
    plain = cut(Iid(4), BYTES)
    for client in range(4):
        assert data.dataset(client).tensors[0].dtype == torch.uint8
        turned = torch.rot90(inputs(plain, client), client, (-2, -1))
        assert torch.equal(inputs(data, client), turned)


def test_noise_converts_bytes_to_floats_without_clipping():
    data = cut(FeatureShift(Iid(2), rotation=[90], noise=0.5), BYTES)
    floats = TensorDataset(BYTES.tensors[0] / 255, LABELS)
    expected = cut(FeatureShift(Iid(2), rotation=[90], noise=0.5), floats)
    for client in range(2):
        assert data.dataset(client).tensors[0].dtype == torch.float32
        assert torch.allclose(inputs(data, client), inputs(expected, client), atol=1e-6)
        assert inputs(data, client).min() < 0 < 1 < inputs(data, client).max()


def test_empty_client_has_inputs_of_the_same_dtype():
    for dataset in (IMAGES, BYTES):
        data = cut(FeatureShift(lambda labels: [torch.arange(24), torch.arange(0)], rotation=30, noise=0.5), dataset)
        x, y = data.dataset(1).tensors
        assert x.dtype == torch.float32
        assert list(x.shape) == [0, 1, 5, 5]
        assert len(y) == 0


def test_tensors_keep_the_fast_path_and_match_loader_batches():
    data = FederatedDataModule(train=IMAGES, partition=FeatureShift(Shards(3), rotation=360, noise=0.1), batch_size=4)
    for client in range(3):
        fast, slow = data.client_batches(client), LoaderBatches(data.client_dataset(client), data.batch_settings)
        assert isinstance(fast, TensorBatches)
        streams = [torch.Generator().manual_seed(5) for _ in range(2)]
        for (a, n), (b, m) in zip(fast.epoch(streams[0]), slow.epoch(streams[1]), strict=True):
            assert n == m
            assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))


def test_cache_keeps_only_the_most_recent_clients(monkeypatch):
    one = 6 * (25 * 4 + 8)
    monkeypatch.setattr("lightning_fed.data.feature_shift._CACHE_BYTES", 2 * one)
    clients = ShiftedClients(IMAGES, FeatureShift(Iid(4), noise=1.0), 4)
    parts = Iid(4)(LABELS)
    made = [clients.dataset(client, parts[client]) for client in (0, 1, 0, 2)]
    assert made[0] is made[2]
    assert list(clients._recent) == [0, 2]
    monkeypatch.setattr("lightning_fed.data.feature_shift._CACHE_BYTES", 0)
    clients.dataset(3, parts[3])
    assert list(clients._recent) == [3]


def test_attribute_keys_name_the_clients():
    source = Listed()
    source.writer = ["ann", "bob", "ann"] * 8
    data = FederatedDataModule(train=source, partition=FeatureShift(ByKey("writer"), rotation=[0, 90]))
    assert list(data.client_ids) == ["ann", "bob"]
    assert torch.equal(data.client_dataset("bob")[0][0], rotate(IMAGES[1][0], 90))
    assert torch.equal(data.client_dataset("ann")[1][0], IMAGES[2][0])


Example = namedtuple("Example", ["x", "y"])


@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: [x, y], Example, lambda x, y: x])
def test_shifted_example_keeps_its_type(make):
    shift = FeatureShift(Iid(2), rotation=[90], noise=0.0)
    before = Listed(make)[0]
    after = shift.shifted(Listed(make), client=1, num_clients=2)[0]
    assert type(after) is type(before)
    assert torch.equal(after if make(1, 2) == 1 else after[0], rotate(IMAGES[0][0], 90))


def test_shifted_dataset_pickles():
    dataset = cut(FeatureShift(Iid(3), noise=1.0), Listed(tuple_of)).dataset(1)
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[2][0], dataset[2][0])
    assert again.dataset.targets == LABELS.tolist()


def tuple_of(x, y):
    return x, y


def test_another_dataset_gets_the_shift_of_its_client():
    shift = FeatureShift(Iid(4), rotation=360, noise=0.5)
    val = shift.shifted(IMAGES, client=2, num_clients=4)
    assert len(val) == 24
    assert (val.tensors[0] - rotate(IMAGES.tensors[0], 180)).std().item() == pytest.approx(0.375, rel=0.15)
    assert torch.equal(val.tensors[1], LABELS)


def test_digits_train_with_feature_shift():
    shift = FeatureShift(Dirichlet(6, 1.0), rotation=360, noise=0.2)
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=2, local_steps=2, seed=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(MLPClassifier(), Digits(partition=shift))
    assert trainer.fit_loop.round == 1


def test_feature_shift_can_be_configured_by_class_path():
    iid = {"class_path": "lightning_fed.data.Iid", "init_args": {"num_clients": 7}}
    shift = {"partition": iid, "rotation": [0, 90], "noise": 0.1}
    made = from_configuration(
        "lightning_fed.data.Digits", partition={"class_path": "lightning_fed.data.FeatureShift", "init_args": shift}
    )
    assert repr(made.partition) == repr(FeatureShift(Iid(7), rotation=[0, 90], noise=0.1))
    assert vars(skew_table(made)) == vars(skew_table(Digits(partition=Iid(7))))


TOKENS = TensorDataset(torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
FLAT = TensorDataset(torch.zeros(4, 9), torch.zeros(4, dtype=torch.int64))
COLOURS_LAST = TensorDataset(torch.zeros(4, 8, 8, 3), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureShift(Iid), r"partition=Iid is a class: instantiate it, as in Iid\(num_clients=10\)"),
        (lambda: FeatureShift(None), r"partition=None"),
        (lambda: FeatureShift(FeatureShift(Iid(2))), r"rotation and noise to one of them"),
        (lambda: FeatureShift(Iid(2), rotation="90"), r"FeatureShift\(rotation='90'\)"),
        (lambda: FeatureShift(Iid(2), rotation=float("nan")), r"rotation=nan"),
        (lambda: FeatureShift(Iid(2), rotation=True), r"rotation=True"),
        (lambda: FeatureShift(Iid(2), rotation=[]), r"rotation=\[\].*at least one angle"),
        (lambda: FeatureShift(Iid(2), rotation=[0, None]), r"rotation=None"),
        (lambda: FeatureShift(Iid(2), noise=-0.1), r"noise=-0.1.*in \[0, inf\)"),
        (lambda: FeatureShift(Iid(2), noise=float("inf")), r"noise=inf"),
        (lambda: FeatureShift(Iid(2), angles="even"), r"angles='even'.*'spaced' or 'drawn'"),
        (lambda: FeatureShift(Iid(2), seed=-1), r"FeatureShift\(seed=-1\)"),
        (lambda: cut(FeatureShift(Iid(2), noise=0.1), TOKENS), r"float inputs or uint8 images.*torch.int64"),
        (lambda: cut(FeatureShift(Iid(2), rotation=90), TOKENS), r"float inputs or uint8 images.*torch.int64"),
        (lambda: cut(FeatureShift(Iid(2), rotation=90), FLAT), r"shape \[9\]. Do not flatten"),
        (lambda: cut(FeatureShift(Iid(2), rotation=90), COLOURS_LAST), r"\[8, 8, 3\] have their channels last"),
        (lambda: cut(FeatureShift(Iid(2)), Listed(lambda x, y: (x.numpy(), y))), r"is a ndarray and must be a tensor"),
        (lambda: cut(FeatureShift(Iid(2)), Listed(lambda x, y: {"x": x, "y": y})), r"is a dict and must be a tensor"),
    ],
)
def test_errors_name_the_argument_and_value(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


def test_labels_are_required_only_if_the_partition_requires_them():
    assert not FeatureShift(Iid(2)).needs_labels
    assert FeatureShift(Shards(2)).needs_labels
    assert FeatureShift(lambda labels: labels.chunk(2)).needs_labels
    blind = TensorDataset(torch.rand(6, 2))
    assert cut(FeatureShift(Iid(2), noise=1.0), blind).known_sizes == [3, 3]


def test_repr_shows_the_arguments():
    shown = (
        "FeatureShift(partition=Iid(num_clients=2, seed=0), rotation=[0.0, 90.0], noise=0.1, angles='spaced', seed=0)"
    )
    assert repr(FeatureShift(Iid(2), rotation=[0, 90], noise=0.1)) == shown
