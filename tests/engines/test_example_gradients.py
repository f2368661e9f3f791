"""Local steps with record-level privacy: comparison with a hand-written loop, noise, resuming, and rejections."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import MeanMetric

from lightning_fed import ClientError, FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedDyn, FedProx, Scaffold
from lightning_fed.callbacks import ClientAccuracy, ClientModels
from lightning_fed.core.seeds import KeyedStream, Purpose, generator
from lightning_fed.data import ClientTable
from lightning_fed.data.batches.batches import PoissonBatches
from lightning_fed.engines.example_gradients import ExampleGradients
from lightning_fed.server import BernoulliSampler, ClientPrivacy, DifferentialPrivacy, SignFlipAttack
from lightning_fed.server.privacy import gaussian_noise
from tests.helpers.engines import Ordinary, assert_close, run, state_of
from tests.helpers.optional import needs_opacus, needs_pyarrow
from tests.helpers.training import clients, data, fit, parameters, seeded, trainer

pytestmark = needs_opacus

OFF = ClientPrivacy(noise_multiplier=0.0, max_grad_norm=1e9, delta=1e-3, sampling="shuffle")
ON = ClientPrivacy(noise_multiplier=0.8, max_grad_norm=0.3, delta=1e-3)
QUICK: dict[str, Any] = {"limit_val_batches": 0, "max_rounds": 2}


# ------------------------------------------------------------------ without noise and clipping


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (Scaffold(), {}),
        (FedAvg(), {"local_optimizer_state": "keep"}),
        (FedProx(0.1), {"local_epochs": None, "local_steps": 3}),
        (FedDyn(1.0), {"personal": ["head.*"]}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("at_once", [None, 3, 1])
def test_run_without_noise_and_clipping_matches_an_ordinary_run(
    algorithm: Any, options: Any, at_once: int | None
) -> None:
    def make() -> Ordinary:
        return Ordinary(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.01))

    given = {"algorithm": algorithm, **QUICK, **options}
    private = ClientPrivacy(0.0, 1e9, 1e-3, "shuffle", at_once)
    plain, found = run("sequential", make, **given), run("sequential", make, client_privacy=private, **given)
    assert_close(state_of(plain), state_of(found), rtol=1e-12)


# ------------------------------------------------------------------ comparison with a hand-written loop


def by_hand(privacy: ClientPrivacy, seed: int = 0, rounds: int = 2) -> Tensor:
    """Return FedAvg's model after rounds of one local epoch of all clients, from loops over examples."""
    torch.manual_seed(3)
    model, source = Ordinary().double(), data()
    params = list(model.parameters())
    x = [p.detach().clone() for p in params]
    for number in range(rounds):
        total, weight = [torch.zeros_like(p) for p in x], 0
        for i in range(6):
            batches: Any = source.client_batches(i)
            if privacy.sampling == "poisson":
                batches = PoissonBatches(batches, seed, number, i)
            noise = KeyedStream(seed, Purpose.CLIENT_NOISE, number, i)
            with torch.no_grad():
                for p, value in zip(params, x, strict=True):
                    p.copy_(value)
            for batch, examples in batches.epoch(generator(seed, Purpose.BATCHES, number, i)):
                sums = [torch.zeros_like(p) for p in x]
                for j in range(examples):
                    loss = F.cross_entropy(model(batch[0][j : j + 1].double()), batch[1][j : j + 1])
                    grads = torch.autograd.grad(loss, params)
                    norm = float(torch.cat([g.flatten() for g in grads]).norm())
                    for own, g in zip(sums, grads, strict=True):
                        own += g / max(1.0, norm / privacy.max_grad_norm)
                divisor = examples if privacy.sampling == "shuffle" else batches.size / batches.num_batches()
                with torch.no_grad():
                    for p, own in zip(params, sums, strict=True):
                        if privacy.noise_multiplier:
                            std = privacy.noise_multiplier * privacy.max_grad_norm
                            own += gaussian_noise(own.numel(), std, noise).view(own.shape)
                        p -= 0.1 * (own / divisor + 0.01 * p)
            size = len(clients()[i])
            weight += size
            for own, p in zip(total, params, strict=True):
                own += size * p.detach()
        x = [own / weight for own in total]
    return torch.cat([p.flatten() for p in x])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "privacy",
    [
        ClientPrivacy(0.0, 0.3, 1e-3, "shuffle", examples_at_once=3),  # batches of 4: the last part has one example
        ON,
        ClientPrivacy(0.8, 0.3, 1e-3, "shuffle"),
        ClientPrivacy(0.8, 0.3, 1e-3, "poisson", examples_at_once=2),
    ],
    ids=repr,
)
def test_clipping_noise_and_samples_match_a_hand_written_loop(privacy: ClientPrivacy) -> None:
    found = run("sequential", client_privacy=privacy, clients_per_round=6, **QUICK)
    want = by_hand(privacy)
    torch.testing.assert_close(parameters(found.lightning_module), want, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
def test_noise_has_stated_size_and_differs_per_step_round_and_client() -> None:
    class Flat(Ordinary):
        """Has a loss with zero gradient, so that only noise moves the clients."""

        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.SGD(p, lr=1.0))
            self.body, self.head = nn.Linear(6, 2000), nn.Identity()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return 0.0 * self(batch[0]).sum()

    moved = []
    for number in (1, 2):
        t = run("sequential", Flat, client_privacy=ClientPrivacy(2.0, 0.5, 1e-3), max_rounds=number,
                clients_per_round=1.0, limit_val_batches=0)  # fmt: skip
        moved.append(parameters(t.lightning_module))
    torch.manual_seed(3)
    first, second = moved[0] - parameters(Flat().double()), moved[1] - moved[0]
    sizes = torch.tensor([float(len(own)) for own in clients()])
    steps = (sizes / 4).ceil()
    # each of a client's steps adds z C / B of noise, and the server averages by examples
    std = float((((sizes / sizes.sum()) * (1.0 / (sizes / steps))) ** 2 * steps).sum().sqrt())
    for part in (first, second):
        assert float(part.std()) == pytest.approx(std, rel=0.02)
        assert abs(float(part.mean())) < 4 * std / len(part) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.04


# ------------------------------------------------------------------ in a run


@pytest.mark.thorough
def test_only_noisy_values_and_privacy_are_logged() -> None:
    t = run("auto", client_privacy=ON, **QUICK)
    assert t.fit_loop.run_state.clients.engine_names == ["sequential"]
    names = set(t.callback_metrics)
    assert not names & {"train_loss", "client/loss"}
    spent = t.fit_loop.client_epsilons
    assert float(t.callback_metrics["privacy/record_epsilon"]) == pytest.approx(max(spent.values()))
    assert len(spent) == t.fit_loop.state.seen == 4
    assert all(0 < epsilon < 50 for epsilon in spent.values())


@pytest.mark.parametrize("at_once", [None, pytest.param(1, marks=pytest.mark.thorough)])
def test_resumed_run_yields_identical_bits_and_epsilons(at_once: int | None, tmp_path: Any) -> None:
    privacy = ClientPrivacy(0.8, 0.3, 1e-3, "poisson", at_once)
    whole = trainer(client_privacy=privacy, max_rounds=3)
    whole.fit(model := seeded(), data())  # with dropout
    first = trainer(client_privacy=privacy, max_rounds=2)
    first.fit(seeded(), data())
    first.save_checkpoint(tmp_path / "a.ckpt")
    again = trainer(client_privacy=privacy, max_rounds=3)
    again.fit(other := seeded(), data(), ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(parameters(model), parameters(other))
    assert again.fit_loop.client_epsilons == whole.fit_loop.client_epsilons != first.fit_loop.client_epsilons
    done = trainer(client_privacy=privacy, max_rounds=2)
    done.fit(seeded(), data(), ckpt_path=tmp_path / "a.ckpt")  # no rounds are left
    assert done.fit_loop.client_epsilons == first.fit_loop.client_epsilons
    first.max_rounds = 3
    first.fit(first.lightning_module, data())  # a second fit continues
    assert first.fit_loop.client_epsilons == whole.fit_loop.client_epsilons
    for change in (None, ClientPrivacy(0.9, 0.3, 1e-3)):
        with pytest.raises(FederatedError, match="client_privacy is ClientPrivacy"):
            fit(client_privacy=change, max_rounds=3, ckpt_path=tmp_path / "a.ckpt")


class Smaller(FederatedCallback):
    """Changes the batch size and the number of batches in the second round."""

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == 1:
            trainer.datamodule.batch_size = 8
            trainer.limit_train_batches = 1


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_batches_changed_by_a_hook_are_accounted_for(sampling: Any) -> None:
    privacy = ClientPrivacy(0.8, 0.3, 1e-3, sampling)
    t = run("sequential", client_privacy=privacy, callbacks=[Smaller()], local_epochs=None, local_steps=4,
            clients_per_round=1.0, **QUICK)  # fmt: skip
    spent = t.fit_loop.client_epsilons[2]  # of 21 examples: 4 steps with q = 1/6, and 4 with q = 1/3
    assert spent == privacy.epsilon({6: 4, 3: 4} if sampling == "poisson" else {1: 1 + 4})


@pytest.mark.thorough
def test_client_level_privacy_hides_per_client_epsilons() -> None:
    t = run("sequential", client_privacy=ON, aggregator=DifferentialPrivacy(0.5, 1.0, 1e-3),
            sampler=BernoulliSampler(0.9), clients_per_round=None, **QUICK)  # fmt: skip
    assert {"privacy/epsilon", "server/update_norm"} == set(t.callback_metrics)


class OneByOne(Dataset[Any]):
    """A data set that loads its examples one by one."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: int) -> Any:
        return self.own[index]


@pytest.mark.thorough
def test_loaders_and_attacked_clients_are_supported() -> None:
    def loaded() -> FederatedDataModule:
        return FederatedDataModule(clients=[OneByOne(own) for own in clients()], batch_size=4)

    options = {"client_privacy": ON, "attack": SignFlipAttack(0.5), **QUICK}
    assert_close(state_of(run("sequential", **options)), state_of(run("sequential", datamodule=loaded, **options)))


def test_guessable_seed_warns_and_secret_seed_is_not_logged(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"noise and samples follow from seed=0, which can be guessed.*randbits\(128\)"
    ):
        fit(client_privacy=ON, max_rounds=1)
    logger, secret = TensorBoardLogger(tmp_path), 2**127 + 12345
    with warnings.catch_warnings(record=True) as warned:
        fit(client_privacy=ON, max_rounds=1, seed=secret, logger=logger)
    assert not [one for one in warned if "guessed" in str(one.message)]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"noise_multiplier" in content for content in written)
    assert not any(str(secret).encode() in content for content in written)


@needs_pyarrow
def test_client_mean_imputation_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("who,x,y\na,1,0\na,,1\n")
    for rule in ("client_mean", {"x": "client_mean"}):
        table = ClientTable(tmp_path / "a.csv", client="who", target="y", missing=rule)
        with pytest.raises(FederatedError, match="missing='client_mean': the mean of a client's rows would put each"):
            fit(seeded(), table, client_privacy=ON, max_rounds=1)


def test_clipped_gradients_are_summed_without_matrix_products() -> None:
    called: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    gradients = ExampleGradients.__new__(ExampleGradients)
    gradients.privacy, gradients.skips_not_finite = ON, False
    sums, grads = [torch.zeros(4, 5), torch.zeros(3)], [torch.randn(7, 4, 5), torch.randn(7, 3)]
    norms = torch.cat([g.flatten(1) for g in grads], dim=1).norm(dim=1)
    factors = (ON.max_grad_norm / norms).clamp(max=1.0)
    want = [torch.stack([f * row for f, row in zip(factors, g, strict=True)]).sum(0) for g in grads]
    with Calls():
        gradients._add_clipped(sums, grads)
    torch.testing.assert_close(sums, want)
    assert not [name for name in called if "mm" in name or "mv" in name]


@pytest.mark.thorough
def test_large_delta_warns() -> None:
    with pytest.warns(UserWarning, match="delta=0.1, which is not below 1/n"):
        fit(client_privacy=ClientPrivacy(1.0, 1.0, delta=0.1), max_rounds=1)


# ------------------------------------------------------------------ rejections


class Normed(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.body, nn.BatchNorm1d(8))


class Counts(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps = self.steps + 1
        return super().training_step(batch, batch_idx)


class Skips(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Reads(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) > 0 else 2 * loss


class Hooked(Ordinary):
    def on_after_backward(self) -> None:
        pass


class Watches(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


class Infinite(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float("inf")


class Remembers(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses.append(super().training_step(batch, batch_idx))
        return self.losses[-1]


class RemembersLater(Remembers):
    """Remembers losses only from the second round on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if self.current_epoch else Ordinary.training_step(self, batch, 0)


class Measures(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.mean_loss = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean_loss.update(loss.detach())
        return loss


class StartsFromData(Ordinary):
    """Sets a bias from the first batch, as layers with data-dependent initialization do."""

    is_set = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.is_set:
            self.is_set = True
            self.head.bias.data.copy_(batch[0].mean() * torch.ones_like(self.head.bias))
        return super().training_step(batch, batch_idx)


class Detached(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class Fixed(Ordinary):
    """Adds noise that is the same for every example."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype))


class Masked(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(torch.zeros_like)


class Mixes(Ordinary):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [0.7 * batch[0] + 0.3 * batch[0].roll(1, 0), batch[1]]


class Decays(Ordinary):
    """Penalizes weights that it keeps outside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [p for p in self.parameters() if p.ndim > 1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-3 * sum(w.pow(2).sum() for w in self.weights)


def mixup(batch: Any, stream: torch.Generator) -> Any:
    order = torch.randperm(len(batch[0]), generator=stream)
    return [0.5 * (batch[0] + batch[0][order]), batch[1]]


def mixup_of_many(batch: Any, stream: torch.Generator) -> Any:
    return mixup(batch, stream) if len(batch[0]) > 8 else batch


def odd(batch: Any, stream: torch.Generator) -> Any:
    raise ValueError("an odd batch")


def twice(batch: Any, stream: torch.Generator) -> Any:
    return [torch.cat([part, part]) for part in batch]


class Later:
    """Gives each example two rows, but not in the first two batches."""

    calls = 0

    def __call__(self, batch: Any, stream: torch.Generator) -> Any:
        self.calls += 1
        return twice(batch, stream) if self.calls > 2 else batch


class MixedByTheData(Dataset):
    """Mixes the examples of one request."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Any:
        found = [self.rows[i] for i in indices]
        mean = torch.stack([x for x, _ in found]).mean(0)
        return [(x + mean, y) for x, y in found]


def jitter(batch: Any, stream: torch.Generator) -> Any:
    return [batch[0] + 0.1 * torch.randn(batch[0].shape, generator=stream), batch[1]]


def by_label(rows: list[Any]) -> Any:
    rows = sorted(rows, key=lambda row: (int(row[1]), float(row[0][0])))
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


class OwnLoader(FederatedDataModule):
    def client_dataloader(self, client_id: Any, generator: Any) -> Any:
        return DataLoader(self.client_dataset(client_id), batch_size=4)


def collate(rows: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in rows]), "name": "a"}


def with_(make: Callable[[], Any] = Ordinary, datamodule: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: fit(make(), datamodule and datamodule(), **{"client_privacy": OFF, "max_rounds": 1, **options})


REFUSED: list[tuple[Any, str]] = [
    (with_(accumulate_grad_batches=2), "cannot be combined with accumulate_grad_batches=2"),
    (with_(gradient_clip_val=1.0), "cannot be combined with gradient_clip_val.*max_grad_norm"),
    (with_(gradient_clip_val=1.0, gradient_clip_on="corrected"), "cannot be combined with gradient_clip_val"),
    (with_(precision="bf16-mixed"), "cannot be combined with precision='bf16-mixed'"),
    (with_(detect_anomaly=True), "cannot be combined with detect_anomaly=True"),
    (with_(profiler="simple"), "cannot be combined with profiler=SimpleProfiler"),
    (with_(callbacks=[ClientAccuracy()]), "the callback ClientAccuracy"),
    (
        with_(lambda: Ordinary().bfloat16(), limit_val_batches=0),
        r"the parameter '\S+' of type torch.bfloat16.*module.float\(\)",
    ),
    (with_(Normed), r"body.1 \(BatchNorm1d\).*GroupNorm"),
    (with_(StartsFromData), "StartsFromData.training_step changes trained parameters.*has no noise"),
    (with_(Counts), "training_step changes the buffer 'steps'"),
    (with_(Remembers), "training_step changes the attribute 'losses', which client_privacy does not cover"),
    (with_(RemembersLater, max_rounds=2), "training_step changes the attribute 'losses'"),
    (
        with_(Measures, client_privacy=ClientPrivacy(0.0, 1e9, 1e-3, "shuffle", 1)),
        "training_step changes the metric 'mean_loss'",
    ),
    (with_(Detached), "returns a loss that depends on no trained parameter.*noise alone"),
    (with_(Fixed), r"draws from a generator of its own, which gives examples at once .*examples_at_once=1\)"),
    (with_(Decays), r"uses the parameter 'body.0.weight' from elsewhere than its layer.*examples_at_once=1\)"),
    (with_(Masked), "the hook of the parameter 'head.weight'"),
    (with_(Mixes), "examples depend on each other.*without mixup"),
    (with_(datamodule=lambda: data(augment=mixup)), "examples depend on each other.*without mixup"),
    (with_(datamodule=lambda: data(batch_size=12, augment=mixup_of_many)), "examples depend on each other"),
    (
        with_(datamodule=lambda: FederatedDataModule(clients=[MixedByTheData(c) for c in clients()], batch_size=4)),
        "examples depend on each other.*differ",
    ),
    (with_(datamodule=lambda: data(augment=odd)), "a batch of 4 examples of client 0 twice.*ValueError: an odd batch"),
    (with_(datamodule=lambda: data(augment=twice)), "cannot be compared, for want of a row for each"),
    (
        with_(datamodule=lambda: data(augment=Later())),
        r"one row for each example, found tensors of lengths \[8\] for 4",
    ),
    (with_(Skips), "must return a loss for every example"),
    (with_(Reads), r"cannot be computed at once .*Pass ClientPrivacy\(examples_at_once=1\)"),
    (with_(Hooked), "cannot be combined with Hooked.on_after_backward"),
    (with_(callbacks=[Watches()]), "cannot be combined with Watches.on_before_optimizer_step"),
    (with_(datamodule=lambda: OwnLoader(clients=clients(), batch_size=4)), "OwnLoader.client_dataloader"),
    (
        with_(datamodule=lambda: FederatedDataModule(clients=clients(), batch_size=4, collate_fn=collate)),
        "a batch with str",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_options_not_covered_by_noise_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()


@pytest.mark.thorough
def test_batch_changes_per_example_are_accepted(tmp_path: Any) -> None:
    fit(
        client_privacy=ON,
        max_rounds=1,
        datamodule=data(augment=jitter),
        callbacks=[ClientModels("local", folder=tmp_path)],
    )
    fit(client_privacy=ON, max_rounds=1, datamodule=data(collate_fn=by_label))  # sorts each batch
    assert list(tmp_path.glob("**/*.safetensors"))  # allowed, since the clients' models include noise


def test_examples_loaded_one_by_one_are_separate_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_trial(*_: Any) -> bool:
        pytest.fail("a subset loads its examples as its data set does")

    monkeypatch.setattr("lightning_fed.rounds.local_plans._are_separate", no_trial)
    subsets = [Subset(OneByOne(own), range(len(own))) for own in clients()]
    fit(client_privacy=ON, max_rounds=1, datamodule=FederatedDataModule(clients=subsets, batch_size=4))


@pytest.mark.thorough
def test_fixed_random_numbers_match_single_example_batches() -> None:
    def single() -> FederatedDataModule:
        return data(batch_size=1)  # larger batches draw different numbers for each row

    private = ClientPrivacy(0.0, 1e9, 1e-3, "shuffle", 1)
    plain, found = (run("sequential", Fixed, single, client_privacy=p, **QUICK) for p in (None, private))
    assert_close(state_of(plain), state_of(found), rtol=1e-12)


def test_modules_that_read_values_run_one_example_at_a_time() -> None:
    found = run("sequential", Reads, client_privacy=ClientPrivacy(0.0, 1e9, 1e-3, "shuffle", 1), **QUICK)
    assert_close(state_of(run("sequential", Ordinary, **QUICK)), state_of(found), rtol=1e-12)


def test_example_without_a_finite_gradient_names_its_client() -> None:
    with pytest.raises(ClientError, match="Client .* the gradient of an example is not finite"):
        fit(Infinite(), client_privacy=OFF, max_rounds=1)


class Notes(Ordinary):
    """Overrides ``log_dict`` to note values outside Lightning's results."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, Any] = {}

    def log_dict(self, dictionary: Any, **_: Any) -> None:
        self.noted.update(dictionary)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss.detach()})
        return loss


def test_private_run_records_nothing_and_restores_the_module() -> None:
    model = Notes()
    fit(model, client_privacy=ClientPrivacy(0.8, 0.3, 1e-3, examples_at_once=1), max_rounds=1)
    assert model.noted == {}
    assert "log" not in vars(model)
    assert "log_dict" not in vars(model)
