"""Random states that data sets own: seeded by (seed, round, client, worker), so that runs repeat and rounds differ."""

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.data import Iid
from lightning_fed.data.batches.batches import LoaderBatches, TensorBatches
from lightning_fed.data.batches.custom_batches import CustomBatches
from lightning_fed.data.batches.random_states import RandomStates
from lightning_fed.data.batches.settings import BatchSettings
from tests.helpers.training import Net, fit, seeded


class Randomizable:
    """A transform with its own random state, as in MONAI."""

    def __init__(self):
        self.R = np.random.RandomState()

    def set_random_state(self, seed=None):
        self.R = np.random.RandomState(seed)

    def __call__(self, x):
        return x + self.R.uniform()


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Holder:
    """A transform with a generator of one of the usual kinds."""

    def __init__(self, state, draw):
        self.state, self.draw = state, draw

    def __call__(self, x):
        return x + self.draw(self.state)


def closing_over(state):
    return lambda x: x + state.random()


class Slotted:
    __slots__ = ("kept",)

    def __init__(self):
        self.kept = {"draw": (random.Random(),)}

    def __call__(self, x):
        return x + self.kept["draw"][0].random()


def with_default():
    def draw(x, state=random.Random()):  # noqa: B008 - each call of with_default has its own
        return x + state.random()

    return draw


class Augmented(Dataset):
    def __init__(self, transform, n=6):
        self.transform, self.n = transform, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.transform(torch.zeros(())), index


MAKERS = {
    "set_random_state": Randomizable,
    "nested": lambda: Compose(Compose(Randomizable())),
    "RandomState": lambda: Holder(np.random.RandomState(), lambda state: state.uniform()),
    "Generator": lambda: Holder(np.random.default_rng(), lambda state: state.uniform()),
    "random.Random": lambda: Holder(random.Random(), lambda state: state.random()),
    "torch.Generator": lambda: Holder(torch.Generator(), lambda state: torch.rand((), generator=state)),
    "closure": lambda: closing_over(random.Random()),
    "slots and mappings": Slotted,
    "default argument": with_default,
    "partial": lambda: functools.partial(lambda state, x: x + state.random(), random.Random()),
}


def draws(batches, seed):
    stream = torch.Generator().manual_seed(seed)
    return torch.cat([batch[0] for batch, _ in batches.epoch(stream, shuffle=False)]).tolist()


def own_loader(dataset, settings):
    def make(stream):
        return DataLoader(dataset, batch_size=settings.batch_size, num_workers=settings.num_workers)

    return CustomBatches(make, 0, settings)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", [LoaderBatches, own_loader])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_owned_random_states_follow_the_generator(maker, kind, workers):
    settings = BatchSettings(batch_size=4, num_workers=workers)
    dataset = Subset(ConcatDataset([Augmented(maker(), 3), Augmented(maker(), 3)]), range(6))
    first = draws(kind(dataset, settings), 1)
    again, other = draws(kind(dataset, settings), 1), draws(kind(dataset, settings), 2)
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == 6


class SeedsItself(Augmented):
    """Draws from its own state, and from its transform's. It can seed only its own."""

    def set_random_state(self, seed):
        self.own = random.Random(seed)

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return torch.stack([x, torch.tensor(self.own.random())]), index


def test_transforms_of_a_self_seeding_dataset_are_seeded():
    def epoch():
        return draws(LoaderBatches(SeedsItself(Compose(Randomizable())), BatchSettings(batch_size=4)), 1)

    assert epoch() == epoch()


@pytest.mark.parametrize("kind", [LoaderBatches, own_loader])
def test_epochs_with_workers_differ_and_are_deterministic(kind):
    batches = kind(Augmented(Randomizable()), BatchSettings(batch_size=3, num_workers=1))

    def two_epochs():
        stream = torch.Generator().manual_seed(1)
        epochs = [torch.cat([batch[0] for batch, _ in batches.epoch(stream)]) for _ in range(2)]
        return torch.cat(epochs)

    first = two_epochs()
    assert len(first.unique()) == 12
    assert torch.equal(first, two_epochs())


@pytest.mark.parametrize("kind", [LoaderBatches, own_loader])
def test_clients_alternating_on_one_dataset_do_not_interfere(kind):
    dataset, settings = Augmented(Randomizable()), BatchSettings(batch_size=2)
    alone = draws(kind(dataset, settings), 1)
    pair = [kind(dataset, settings).epoch(torch.Generator().manual_seed(seed), shuffle=False) for seed in (1, 2)]
    taken = [batch[0] for (batch, _), _ in zip(*pair, strict=True)]
    assert torch.cat(taken).tolist() == alone


def test_local_epochs_of_a_fixed_loader_differ():
    batches, stream = own_loader(Augmented(Randomizable()), BatchSettings(batch_size=6)), torch.Generator()
    first, second = (next(batch[0] for batch, _ in batches.epoch(stream)) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_local_epochs_of_a_single_example_differ(workers):
    batches, stream = LoaderBatches(Augmented(Randomizable(), 1), BatchSettings(num_workers=workers)), torch.Generator()
    seen = torch.cat([next(batches.epoch(stream))[0][0] for _ in range(4)])
    assert len(seen.unique()) == 4


def test_single_example_augmentation_does_not_depend_on_loading():
    def augment(batch, stream):
        return [batch[0] + torch.rand((), generator=stream), *batch[1:]]

    def epochs(kind, dataset):
        batches, stream = kind(dataset, BatchSettings(augment=augment)), torch.Generator().manual_seed(1)
        return [float(next(batches.epoch(stream))[0][0]) for _ in range(3)]

    drawn = torch.Generator().manual_seed(1)
    streams = [torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (), generator=drawn))) for _ in range(3)]
    expected = [float(torch.rand((), generator=stream)) for stream in streams]
    single = TensorDataset(torch.zeros(1))
    assert epochs(LoaderBatches, single) == epochs(TensorBatches.of, single) == expected


class Noisy(Dataset):
    """Rows of a table, with noise from their own random state."""

    def __init__(self, rows):
        self.rows, self.noise = rows, Randomizable()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return self.noise(x).float(), y


class Remembers(Net):
    """Records its batches in each round."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["sequential", pytest.param("vectorized", marks=pytest.mark.thorough)])
def test_run_repeats_and_resumes_with_identical_bits(engine, tmp_path):
    rows = TensorDataset(torch.ones(12, 6), torch.arange(12) % 3)

    def run(**options):
        data = FederatedDataModule(train=Noisy(rows), partition=Iid(2), batch_size=6, shuffle=False)
        model = seeded(Remembers) if engine == "sequential" else seeded(Net, dropout=0.0)
        return fit(model, data, clients_per_round=2, engine=engine, **options), model

    first, model = run(max_rounds=3)
    if engine == "sequential":
        assert len(set(model.seen)) == 6  # two clients in three rounds
    again, _ = run(max_rounds=3)
    assert torch.equal(first, again)
    run(max_rounds=1, enable_checkpointing=True, default_root_dir=tmp_path)
    (path,) = tmp_path.rglob("*.ckpt")
    resumed, _ = run(max_rounds=3, ckpt_path=path)
    assert torch.equal(first, resumed)


def test_both_engines_see_the_same_examples():
    rows = TensorDataset(torch.ones(12, 6), torch.arange(12) % 3)

    def run(engine):
        data = FederatedDataModule(train=Noisy(rows), partition=Iid(2), batch_size=3)
        return fit(seeded(Net, dropout=0.0), data, clients_per_round=2, engine=engine, precision="64-true")

    torch.testing.assert_close(run("sequential"), run("vectorized"), rtol=1e-12, atol=1e-12)


def test_global_and_run_generators_are_left_alone():
    stream = torch.Generator().manual_seed(3)
    owner = Compose(np.random.mtrand._rand, random._inst, torch.default_generator, stream)
    assert not RandomStates(owner, besides=(stream,))


def test_examples_and_frameworks_are_not_searched():
    class Rows(Dataset):
        def __init__(self):
            self.rows = [{"path": str(i)} for i in range(100_000)]
            self.module = Net()
            self.module.state = random.Random()

    assert not RandomStates(Rows())


def test_state_that_cannot_be_seeded_warns():
    class Refuses:
        def set_random_state(self, seed):
            raise RuntimeError("no seeds here")

    with pytest.warns(UserWarning, match=r"cannot be seeded: Augmented\.transform \(random\.SystemRandom"):
        RandomStates(Augmented(random.SystemRandom()))
    states = RandomStates(Augmented(Refuses()))
    with pytest.warns(UserWarning, match=r"Augmented\.transform\.set_random_state \(RuntimeError: no seeds here"):
        states.seed(1)
    endless = functools.reduce(lambda inner, _: Compose(inner), range(10_001), None)
    with pytest.warns(UserWarning, match="10,000 objects were searched"):
        RandomStates(endless)


def note(worker_id):
    np.random.seed(5)


class Drawn(Augmented):
    def __getitem__(self, index):
        return torch.tensor(np.random.rand()), index


def make_loader(**options):
    return DataLoader(Drawn(None), batch_size=6, num_workers=1, **options)


def test_custom_loader_keeps_its_worker_init_fn():
    batches = CustomBatches(lambda _: make_loader(worker_init_fn=note, persistent_workers=True), 0, BatchSettings())
    with pytest.warns(UserWarning, match="persistent_workers=True"):
        [(batch, _)] = batches.epoch(torch.Generator())
    assert batch[0].tolist() == pytest.approx(np.random.RandomState(5).rand(6).tolist())
    [(batch, _)] = batches.full(torch.Generator())
    assert batch[0].tolist() == pytest.approx(np.random.RandomState(5).rand(6).tolist())


def test_loader_with_custom_worker_startup_warns():
    loader = Own(Augmented(Randomizable()), batch_size=6, num_workers=1)
    with pytest.warns(UserWarning, match="of an Own are not seeded in its workers.*worker_init_fn"):
        list(CustomBatches(lambda _: loader, 0, BatchSettings()).epoch(torch.Generator()))


class Own(DataLoader):
    def __iter__(self):
        return super().__iter__()
