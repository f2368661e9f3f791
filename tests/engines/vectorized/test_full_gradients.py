"""Full-batch gradients through traces, and methods that use them, match the sequential engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedDane, Mime, MimeMVR, SGDm
from lightning_fed.engines.gradients import GradientPass
from lightning_fed.engines.vectorized.full_gradients import FullGradients
from tests.helpers.engines import Ordinary, assert_agree, run
from tests.helpers.selection import covering
from tests.helpers.training import CLASSES, FEATURES, clients, data

SIZES = (14, 7, 11, 6, 10, 8)  # batches of 4: the last ones have 2, 3 or 4 examples
UNEVEN = partial(data, SIZES)
FULL_STEPS = partial(data, SIZES, drop_last=True)  # local steps on full batches, full gradients on all examples
PLAIN = partial(torch.optim.SGD, lr=0.05)
DECAYED = partial(torch.optim.SGD, lr=0.05, weight_decay=0.01)


class Wide(Ordinary):
    """A network of linear layers."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.body, self.head = nn.Linear(FEATURES, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Flat(Wide):
    """Reshapes its input to pictures and back, with the number of examples in the shape."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), 1, 2, 3).flatten(1))


class BySize(Wide):
    """Scales its input by a factor that depends on the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + len(x) / 10))


class Words(Ordinary):
    """Passes each feature of each example to its layers as a separate example."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.body, self.head = nn.Linear(1, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.t().reshape(-1, 1)).tanh()
        return self.head(hidden.view(FEATURES, -1, 5).mean(0))


def both(make: Callable[..., Any] = Wide, datamodule: Any = FULL_STEPS, chunk_size: int = 1, **options: Any) -> None:
    """Run Mime in both engines, and compare all results."""
    options = {"algorithm": Mime(SGDm()), **options}
    vectorized = run("vectorized", partial(make, DECAYED), datamodule, chunk_size=chunk_size, **options)
    assert_agree(run("sequential", partial(make, DECAYED), datamodule, **options), vectorized)


@pytest.mark.parametrize(
    ("algorithm", "make", "chunk_size"),
    covering([Mime(), Mime(SGDm()), MimeMVR(a=0.5, anchor="lemma9")], [Wide, Flat, BySize, Words], [1, 4]),
)
def test_engines_agree_on_uneven_batches(algorithm: Any, make: Any, chunk_size: int) -> None:
    both(make, algorithm=algorithm, max_rounds=3, chunk_size=chunk_size)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"datamodule": UNEVEN}, id="last-batches"),
        pytest.param({"datamodule": UNEVEN, "limit_train_batches": 2}, id="some-batches"),
        pytest.param({"datamodule": UNEVEN, "local_epochs": 2, "chunk_size": 4}, id="second-epoch"),
        pytest.param({"local_epochs": None, "local_steps": 1}, id="one-step"),
        pytest.param({"datamodule": partial(data, (14, 5, 1, 9), full_batch_size=11)}, id="full-batches"),
    ],
)
def test_full_gradients_use_all_examples_regardless_of_local_steps(options: dict[str, Any]) -> None:
    both(**options)


class Centered(Ordinary):
    """Its loss is not a mean over examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        loss = F.cross_entropy(z - z.mean(0), y)
        self.log("train_loss", loss)
        return loss


class Larger(Ordinary):
    """Its loss differs for batches that are larger than those of local epochs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) * (2.0 if len(y) > 4 else 1.0)
        self.log("train_loss", loss)
        return loss


class Later(Larger):
    """Its loss changes from the third round on."""

    is_late = False

    def on_train_epoch_start(self) -> None:
        self.is_late = self.current_epoch > 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, 0) if self.is_late else Ordinary.training_step(self, batch, 0)


class Switching(Wide):
    """Uses linear layers in the first and third rounds, and a convolution in the second."""

    is_odd = False

    def on_train_epoch_start(self) -> None:
        self.is_odd = self.current_epoch % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_odd:
            return super().forward(x)
        return F.conv2d(x.view(-1, 1, 2, 3), self.body.weight[:4, :4].reshape(4, 1, 2, 2)).flatten(1)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Centered, Larger, Later, Switching])
@pytest.mark.filterwarnings("ignore:.*gives another loss than when it was traced")
def test_engines_agree_on_non_mean_and_changing_losses(make: Any) -> None:
    both(make, max_rounds=3)


def ignoring(share: float) -> FederatedDataModule:
    """Return clients with targets to ignore."""
    stream = torch.Generator().manual_seed(5)
    sets = []
    for size in SIZES:
        y = torch.randint(0, CLASSES, (size,), generator=stream)
        y[torch.rand(size, generator=stream) < share] = -100
        y[::4] = 0
        sets.append(TensorDataset(torch.randn(size, FEATURES, generator=stream), y))
    return FederatedDataModule(clients=sets, batch_size=4, shuffle=False, drop_last=True)


@pytest.mark.thorough
def test_ignored_targets_are_weighted_as_in_full_batches() -> None:
    both(Ordinary, partial(ignoring, 0.5))


class OfTheFirst(Ordinary):
    """Has the loss of all examples, but the gradient of only the first few."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        few = min(len(out), 8)
        return F.cross_entropy(torch.cat([out[:few], out[few:].detach()]), batch[1])


class Clamped(Ordinary):
    """Clamps its output's gradient, so the gradients of batches do not add up to the full-batch gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        if out.requires_grad:
            out.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return F.cross_entropy(out, batch[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "make", "chunk_size"),
    [
        pytest.param(method, make, n, id=f"{type(method).__name__}-{make.__name__}-{n}")
        for method in (Mime(base=SGDm()), MimeMVR(0.5), FedDane(0.1))
        for make in (OfTheFirst, Clamped)
        for n in (None, 1)
    ],
)
def test_engines_agree_when_gradient_differs_from_the_loss(method: Any, make: Any, chunk_size: int | None) -> None:
    options: dict[str, Any] = {"algorithm": method, "datamodule": FULL_STEPS}
    one = run("sequential", partial(make, PLAIN), **options)
    assert_agree(one, run("vectorized", partial(make, PLAIN), chunk_size=chunk_size, **options))


def test_single_example_last_batch_needs_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {"traced": 0, "untraced": 0}
    for what, owner in (("traced", FullGradients), ("untraced", GradientPass)):
        name = "_add" if what == "traced" else "add"
        own = getattr(owner, name)

        def counted(self: Any, *args: Any, own: Any = own, what: str = what, **options: Any) -> Any:
            passes[what] += 1
            return own(self, *args, **options)

        monkeypatch.setattr(owner, name, counted)
    uneven = partial(data, (13, 9), full_batch_size=4)
    run(
        "vectorized",
        partial(Ordinary, PLAIN),
        uneven,
        algorithm=Mime(base=SGDm()),
        chunk_size=1,
        max_rounds=1,
        local_steps=1,
        local_epochs=None,
        clients_per_round=2,
    )
    assert passes == {"traced": 0, "untraced": 7}


def first_is_nan() -> FederatedDataModule:
    parts = clients(SIZES)
    parts[0].tensors[0][:] = float("nan")
    return FederatedDataModule(parts, batch_size=4)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*is not finite")
def test_first_client_with_nan_gradient_is_dropped() -> None:
    both(datamodule=first_is_nan, clients_per_round=1.0, max_rounds=1, on_client_error="drop")
