"""The contract that all methods keep: one table of them all, tested through the real trainer.

To add a method, add a line to :data:`METHODS`. The first test fails until it has one.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations as combinations_of
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_fed.algorithms
from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import (
    APFL,
    SGD,
    Adagrad,
    Adam,
    Algorithm,
    BaseOptimizer,
    CMime,
    Ditto,
    FedACG,
    FedAvg,
    FedBN,
    FedCM,
    FedDane,
    FedDyn,
    FedExP,
    FedNova,
    FedPer,
    FedProx,
    FedProxVR,
    FedRep,
    FedSAM,
    FedSpeed,
    LGFedAvg,
    Mime,
    MimeLite,
    MimeMVR,
    MoFedSAM,
    PFedMe,
    RMSProp,
    Scaffold,
    ScaffoldM,
    ServerOnly,
    SGDm,
    Yogi,
)
from lightning_fed.server import (
    AvailabilitySampler,
    BernoulliSampler,
    FedAdam,
    FedAvgM,
    FedYogi,
    RoundRobinSampler,
    SystemsHeterogeneity,
    UniformSampler,
    WeightedSampler,
)
from tests.helpers import least_squares
from tests.helpers.least_squares import LeastSquares
from tests.helpers.selection import few
from tests.helpers.training import QUIET, Net, Trajectory, data, parameters, same
from tests.helpers.training import trainer as local_trainer

LR = 0.2
sgd, adam = partial(torch.optim.SGD, lr=LR), partial(torch.optim.Adam, lr=LR, betas=(0.5, 0.9), eps=0.1)
heavy, ema = partial(sgd, momentum=0.3), partial(FedAvgM, lr=LR, momentum=0.3, momentum_form="ema")

Optimizer = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """One line of the table.

    Attributes:
        algorithm: The method with its options.
        central: The centralized optimizer that it equals when every client takes part with one full-batch local step.
        reaches: When several local steps reach the joint optimum of dissimilar least-squares clients: with "partial"
            participation, with "full" participation, with full participation and full local "batches", or "never".
        optimizer: The local optimizer.
    """

    algorithm: Algorithm
    central: Optimizer | None = None
    reaches: Literal["partial", "full", "batches", "never"] | None = None
    optimizer: Optimizer = sgd


BASES: dict[str, tuple[BaseOptimizer, Optimizer | None]] = {
    "SGD": (SGD(), sgd),
    "SGDm": (SGDm(0.3), ema),
    "SGDm heavy ball": (SGDm(0.3, "heavy_ball"), heavy),
    "RMSProp": (RMSProp(0.9, eps=0.1), partial(torch.optim.RMSprop, lr=LR, alpha=0.9, eps=0.1)),
    "Adam": (Adam(0.5, 0.9, eps=0.1), adam),
    "Adam old": (Adam(0.5, 0.9, eps=0.1, v0="grad", stats="old"), None),
    "Adagrad": (Adagrad(eps=0.1), partial(torch.optim.Adagrad, lr=LR, eps=0.1)),
    "Yogi": (Yogi(0.5, 0.9, eps=0.1), partial(FedYogi, lr=LR, beta1=0.5, beta2=0.9, tau=0.1, v0=0.0)),
}
"""Base optimizers, each with its centralized equivalent (torch's own if there is one) or None."""

METHODS: dict[str, Method] = {
    "ServerOnly": Method(ServerOnly(), partial(torch.optim.SGD, lr=1.0), "batches"),
    "FedAvg": Method(FedAvg(), sgd, "never"),
    "FedAvg normalized": Method(FedAvg("normalized"), partial(torch.optim.SGD, lr=1.0), "never"),
    "FedProx": Method(FedProx(0.1), sgd, "never"),
    "FedProx adaptive": Method(FedProx(0.1, adaptive={"step": 0.1, "patience": 1}), sgd, "never"),
    "FedDane own": Method(FedDane(0.1), sgd, "batches"),
    "FedDane same": Method(FedDane(0.1, "same"), sgd, "batches"),
    "Scaffold i": Method(Scaffold("i"), sgd, "partial"),
    "Scaffold ii": Method(Scaffold(), sgd, "partial"),
    "Scaffold i gradient": Method(Scaffold("i", initial="gradient"), sgd, "partial"),
    "Scaffold ii gradient": Method(Scaffold(initial="gradient"), sgd, "partial"),
    "FedCM": Method(FedCM(0.7, eta_g=0.5), partial(ema, lr=0.5 * LR), "never"),
    "FedCM paper": Method(FedCM(0.7, eta_g=0.1, eta_g_mode="paper"), partial(ema, lr=0.1), "never"),
    "FedDyn": Method(FedDyn(2.0), None, "partial"),
    "FedDyn mean": Method(FedDyn(2.0, evaluate="mean"), None, "partial"),
    "FedDyn inverse": Method(FedDyn(2.0, "inverse_size"), None, "partial"),
    "FedDyn inverse mean": Method(FedDyn(2.0, "inverse_size", "mean"), None, "partial"),
    "FedNova": Method(FedNova(), sgd, "never"),
    "FedExP": Method(FedExP(), None, "never"),
    "FedExP cohort": Method(FedExP(0.1, "cohort", 0.9), None, "never"),
    "FedACG": Method(FedACG(0.5, 0.1), None, "never"),
    "FedPer": Method(FedPer(["head.*"])),
    "FedRep": Method(FedRep(["head.*"], head_epochs=2)),
    "Ditto": Method(Ditto(0.5), None, "never"),
    "Ditto own": Method(Ditto(0.5, 0.7, 1, "own"), None, "never"),
    "APFL": Method(APFL(0.4), None, "never"),
    "PFedMe": Method(PFedMe(2.0, 2), None, "never"),
    "LGFedAvg": Method(LGFedAvg(["body.*"])),
    "ScaffoldM": Method(ScaffoldM(0.7, gamma=0.9), None, "partial"),
    "ScaffoldM paper": Method(ScaffoldM(0.7, gamma=0.5, gamma_mode="paper"), None, "partial"),
    "FedSAM": Method(FedSAM(0.1), None, "never"),
    "MoFedSAM": Method(MoFedSAM(0.1, 0.7, eta_g=0.5), None, "never"),
    "MoFedSAM paper": Method(MoFedSAM(0.1, 0.7, 0.1, "paper", eps=0.01), None, "never"),
    "FedSpeed": Method(FedSpeed(0.5, 0.1)),
    "FedSpeed unit all": Method(FedSpeed(0.5, 0.1, 0.7, "unit", 0.01, "all")),
    "FedProxVR": Method(FedProxVR(0.1), None, "never"),
    "FedProxVR sarah": Method(FedProxVR(0.1, "sarah"), None, "never"),
    "MimeMVR eq15": Method(MimeMVR(0.5), None, "full"),
    "MimeMVR lemma9": Method(MimeMVR(0.5, "lemma9"), None, "full"),
    "MimeMVR current": Method(MimeMVR(0.5, "current"), None, "full"),
    "MimeMVR zeros": Method(MimeMVR(0.5, "current", "zeros"), None, "full"),
    "Mime of the user's SGDm": Method(Mime(), heavy, "full", heavy),
    "Mime of the user's Adam": Method(Mime(), adam, None, adam),
    "MimeLite of the user's SGDm": Method(MimeLite(), heavy, "never", heavy),
    "MimeLite of the user's Adam": Method(MimeLite(), None, None, adam),
    **{
        f"{cls.__name__} {name}": Method(
            cls(base),
            # the mean of the clients' nonlinear directions is not the direction of their mean gradient
            central if cls is not MimeLite or isinstance(base, SGD | SGDm) else None,
            # unknown or slow for the others
            ("never" if cls is MimeLite else "full") if name in ("SGD", "SGDm") else None,
        )
        for cls in (Mime, MimeLite, CMime)
        for name, (base, central) in BASES.items()
    },
}  # fmt: skip

USUAL = [
    "ServerOnly",
    "FedAvg",
    "FedProx adaptive",
    "FedDane own",
    "Scaffold i gradient",
    "Scaffold ii",
    "FedCM paper",
    "FedDyn inverse mean",
    "FedNova",
    "FedExP",
    "FedACG",
    "FedPer",
    "FedRep",
    "LGFedAvg",
    "Ditto own",
    "APFL",
    "PFedMe",
    "ScaffoldM",
    "FedSAM",
    "MoFedSAM",
    "FedSpeed unit all",
    "FedProxVR sarah",
    "MimeMVR eq15",
    "MimeMVR zeros",
    "Mime of the user's Adam",
    "Mime SGD",
    "MimeLite SGDm",
    "CMime Adam old",
    "MimeLite Yogi",
]
"""The methods of the default run. They take different code paths, and every class is among them."""


def where(condition: Callable[[Method], bool], usual: Collection[str] = USUAL) -> Any:
    """Parametrize over the methods that meet a condition. The default run takes the usual ones."""
    names = [name for name, method in METHODS.items() if condition(method)]
    return pytest.mark.parametrize("name", few(names, [name for name in usual if name in names]))


ALL = where(lambda method: True)


class Classifier(Net):
    """The shared classifier with dropout, under a method's local optimizer."""

    build: Optimizer = staticmethod(sgd)

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())


def classifier(method: Method) -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    model.build = method.optimizer
    return model


def trainer(method: Method, **kwargs: Any) -> FederatedTrainer:
    """Return a quiet trainer of a method, without validation, and without local work if the method has none."""
    if method.algorithm.local_work:
        return local_trainer(algorithm=method.algorithm, limit_val_batches=0, **kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("local_steps", "local_epochs")}
    return FederatedTrainer(**QUIET, seed=0, algorithm=method.algorithm, limit_val_batches=0, **kwargs)


def fit(method: Method, model: pl.LightningModule, datamodule: FederatedDataModule, **kwargs: Any) -> Tensor:
    """Fit in float64 and return the server parameters."""
    trainer(method, **{"clients_per_round": 1.0, "precision": "64-true", **kwargs}).fit(model, datamodule)
    return parameters(model)


def close(a: Tensor, b: Tensor, rtol: float = 1e-10, atol: float = 1e-13) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# ---------------------------------------------------------------------- the table


def public(kind: type) -> list[type]:
    found = vars(lightning_fed.algorithms).values()
    return [c for c in found if inspect.isclass(c) and issubclass(c, kind) and c is not kind]


@pytest.mark.parametrize("cls", public(Algorithm))
def test_methods_table_covers_every_method_and_option(cls: type[Algorithm]) -> None:
    if cls.needs_everyone:
        pytest.skip("most tests here have cohorts, which it refuses: see tests/algorithms/test_scaffnew.py")
    if cls is FedBN:
        pytest.skip("the model here has no layer that it keeps with the clients: see tests/engines/test_prepared.py")
    rows = [method.algorithm for method in METHODS.values() if type(method.algorithm) is cls]
    assert rows, f"{cls.__name__} has no line in METHODS"
    for argument, hint in get_type_hints(cls.__init__).items():
        if get_origin(hint) is Literal:
            assert {getattr(row, argument) for row in rows} == set(get_args(hint)), f"{cls.__name__}({argument}=...)"
        elif hint == BaseOptimizer | None:
            assert {type(row.base) for row in rows} >= set(public(BaseOptimizer))


# ---------------------------------------------------------------------- identities

K = 3
NEUTRAL: dict[str, tuple[Method, dict[str, Any], bool]] = {
    "FedProx(0)": (Method(FedProx(0.0)), {}, True),
    "FedCM(1)": (Method(FedCM(1.0)), {}, True),
    "FedCM(1) paper": (Method(FedCM(1.0, K * LR, "paper")), {"weighting": "uniform"}, False),
    "MimeLite": (Method(MimeLite()), {}, True),
    "MimeLite SGD": (Method(MimeLite(SGD())), {}, True),
    "MimeLite SGDm(0)": (Method(MimeLite(SGDm(0.0))), {}, True),
    "FedNova": (Method(FedNova()), {}, False),
    "FedACG(0, 0)": (Method(FedACG(0.0, 0.0)), {}, True),
    "FedSAM(0)": (Method(FedSAM(0.0)), {}, True),
    "MoFedSAM(0, 1)": (Method(MoFedSAM(0.0, 1.0)), {}, True),
    "FedExP of large eps, at first": (Method(FedExP(1e9)), {"max_rounds": 1}, True),
    "ScaffoldM(1) at first": (Method(ScaffoldM(1.0)), {"max_rounds": 1, "weighting": None}, True),
    "FedAvg normalized": (Method(FedAvg("normalized")), {"server_optimizer": partial(sgd, lr=K * LR)}, False),
    "Scaffold i at first": (Method(Scaffold("i")), {"max_rounds": 1, "weighting": None}, True),
    "Scaffold ii at first": (Method(Scaffold()), {"max_rounds": 1, "weighting": None}, True),
    "FedDyn's mean at first": (
        Method(FedDyn(2.0, evaluate="mean")), {"max_rounds": 1, "local_steps": 1, "weighting": None}, False,
    ),
}  # fmt: skip
"""Methods equal to FedAvg, their changes to the common settings, and whether they are equal to the bit."""


NOT_IN_TEST_ROUNDS = [name for name in NEUTRAL if name not in ("FedProx(0)", "FedCM(1)", "MimeLite", "MimeLite SGD")]


@cache
def fedavg(**settings: Any) -> Tensor:
    return fit(METHODS["FedAvg"], classifier(METHODS["FedAvg"]), data(), **settings)


@pytest.mark.parametrize("name", few(NEUTRAL, NOT_IN_TEST_ROUNDS))
def test_neutral_settings_match_fedavg(name: str) -> None:
    method, changes, exact = NEUTRAL[name]
    settings = {"local_steps": K, "clients_per_round": 3, "weighting": "uniform", "precision": "32-true"}
    settings |= {} if exact else {"precision": "64-true"}
    got = fit(method, classifier(method), data(), **{**settings, **changes})
    changes = {k: v for k, v in changes.items() if k in ("max_rounds", "local_steps")}
    want = fedavg(**{**settings, **changes})
    if exact:
        assert torch.equal(got, want)
    else:
        close(got, want)


PAIRS = {
    "MimeMVR(1) is Mime over SGD": (Method(MimeMVR(1.0, "current")), METHODS["Mime SGD"]),
    "C-Mime over SGD is Mime": (METHODS["CMime SGD"], METHODS["Mime SGD"]),
    "Mime of torch's SGD is Mime over SGDm": (METHODS["Mime of the user's SGDm"], METHODS["Mime SGDm heavy ball"]),
    "Mime of torch's Adam is Mime over Adam": (METHODS["Mime of the user's Adam"], METHODS["Mime Adam"]),
    "FedACG without momentum is FedProx": (Method(FedACG(0.0, 0.2)), Method(FedProx(0.2))),
    "MoFedSAM without a radius is FedCM": (Method(MoFedSAM(0.0, 0.3)), Method(FedCM(0.3))),
    "MoFedSAM without momentum is FedSAM": (Method(MoFedSAM(0.2, 1.0, eps=0.1)), Method(FedSAM(0.2, 0.1))),
    "FedSpeed without a radius is FedDyn": (Method(FedSpeed(0.5, 0.0, dual_average="all")), Method(FedDyn(2.0))),
    "FedSpeed without the second gradient is FedDyn": (
        Method(FedSpeed(0.5, 0.3, 0.0, dual_average="all")), Method(FedDyn(2.0)),
    ),
    "MimeLite of torch's Adam is the same": (METHODS["MimeLite of the user's Adam"], METHODS["MimeLite Adam"]),
}  # fmt: skip


@pytest.mark.parametrize("name", few(PAIRS, ["MimeMVR(1) is Mime over SGD", "Mime of torch's Adam is Mime over Adam"]))
def test_equivalent_methods_match(name: str) -> None:
    settings = {"clients_per_round": 3, "weighting": "uniform"} if "FedProx" in name else {"clients_per_round": 3}
    one, other = (fit(method, classifier(method), data(), **settings) for method in PAIRS[name])
    close(one, other)


ONE_CLIENT = [
    FedAvg(),
    FedProx(0.0),
    FedDane(0.0),
    Scaffold("i"),
    Scaffold("ii"),
    FedCM(1.0),
    FedSAM(0.0),
    FedNova(),
    MimeLite(SGD()),
]


@pytest.mark.parametrize(
    "algorithm", few(ONE_CLIENT, [a for a in ONE_CLIENT if isinstance(a, FedDane | Scaffold | FedNova)]), ids=repr
)
def test_single_client_matches_sgd(algorithm: Algorithm) -> None:
    (client,) = least_squares.clients((10,))
    w = nn.Parameter(torch.zeros(least_squares.WIDTH, dtype=torch.float64))
    optimizer = sgd([w])
    for _ in range(4):
        for batch in zip(*(tensor.split(3) for tensor in client.tensors), strict=True):
            w.grad = least_squares.gradient(w.detach(), [TensorDataset(*batch)], [1.0])
            optimizer.step()
    datamodule = least_squares.data((10,), batch_size=3, shuffle=False)
    got = fit(Method(algorithm), LeastSquares(sgd), datamodule, local_epochs=2, max_rounds=2)
    close(got, w.detach())


@where(lambda method: method.central is not None, [*USUAL, *(f"Mime {name}" for name in BASES if name != "Adam old")])
def test_full_batch_step_of_all_clients_matches_centralized_step(name: str) -> None:
    method, sizes, recorder = METHODS[name], (4, 7, 5), Trajectory()
    rule = method.algorithm.reduces.get("delta", "weighting")
    rule = method.algorithm.default_weighting if rule == "weighting" else rule
    clients, weights = least_squares.clients(sizes), sizes if rule == "examples" else (1,) * len(sizes)
    w = nn.Parameter(torch.zeros(least_squares.WIDTH, dtype=torch.float64))
    optimizer, want = method.central([w]), []
    for _ in range(4):
        w.grad = least_squares.gradient(w.detach(), clients, weights)
        optimizer.step()
        want.append(w.detach().clone())
    model, datamodule = LeastSquares(method.optimizer), least_squares.data(sizes)
    fit(method, model, datamodule, local_steps=1, max_rounds=4, callbacks=recorder)
    close(torch.stack(recorder.models), torch.stack(want))


# ---------------------------------------------------------------------- convergence

SIZES = (24, 36, 30, 42)


def distance(
    method: Method, sizes: tuple[int, ...] = SIZES, lr: float = LR, batch_size: int = 100, **kwargs: Any
) -> float:
    """Return the distance from the joint optimum after a run with several local steps a round."""
    fair = "population" in method.algorithm.reduces.values() and not method.algorithm.uses_mean_examples
    fair = fair or method.algorithm.default_weighting == "uniform"
    target = least_squares.optimum(least_squares.clients(sizes), (1,) * len(sizes) if fair else sizes)
    model = LeastSquares(partial(method.optimizer, lr=lr))
    end = fit(method, model, least_squares.data(sizes, batch_size=batch_size), **kwargs)
    return float(torch.linalg.vector_norm(end - target))


@where(lambda method: method.reaches == "partial", ["Scaffold ii"])
def test_reaches_joint_optimum_with_partial_participation(name: str) -> None:
    assert distance(METHODS[name], clients_per_round=2, local_steps=4, max_rounds=90) < 1e-10


@pytest.mark.thorough
@where(lambda method: method.reaches == "full", ["Mime SGD"])
def test_reaches_joint_optimum_with_full_participation(name: str) -> None:
    assert distance(METHODS[name], SIZES[:3], 0.15, batch_size=12, local_steps=3, max_rounds=80) < 1e-10


@pytest.mark.thorough
@where(lambda method: method.reaches == "batches", ["FedDane own"])
def test_reaches_joint_optimum_with_full_local_batches(name: str) -> None:
    assert distance(METHODS[name], local_steps=4, max_rounds=30) < 1e-10


@where(lambda method: method.reaches == "never", ["FedNova", "MimeLite SGD"])
def test_does_not_reach_joint_optimum(name: str) -> None:
    assert distance(METHODS[name], local_steps=4, max_rounds=15) > 1e-3


class Quadratic(pl.LightningModule):
    """Rows (a, b) with loss a x^2 / 2 + b x, from x = 1."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.x, self.build = nn.Parameter(torch.ones(1)), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = batch
        return (0.5 * a * self.x**2 + b * self.x).mean()

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())


def scalar_path(method: Method, a: tuple[float, float], dissimilarity: float) -> Tensor:
    """Return x after each of three rounds on a_1 x^2 / 2 + G x and a_2 x^2 / 2 - G x (Mime's section 6.1)."""
    rows = [[[a[0]], [dissimilarity]], [[a[1]], [-dissimilarity]]]
    clients = [TensorDataset(*torch.tensor(row, dtype=torch.float64).unsqueeze(1)) for row in rows]
    recorder, model = Trajectory(), Quadratic(partial(method.optimizer, lr=0.05))
    datamodule = FederatedDataModule(clients=clients, batch_size=1)
    fit(method, model, datamodule, local_steps=3, max_rounds=3, callbacks=recorder)
    return torch.cat(recorder.models)


@pytest.mark.parametrize("a", few([(2.0, 0.0), (3.0, 1.0)], [(3.0, 1.0)]))
@where(
    lambda method: (
        "x" in method.algorithm.full_grad_at
        and method.algorithm.full_grad_for != "client"
        and (method.algorithm.anchor_at is not None or isinstance(method.algorithm, FedDane))
    ),
    ["FedDane own", "MimeMVR eq15"],
)
def test_dissimilar_gradients_do_not_affect_corrected_steps(name: str, a: tuple[float, float]) -> None:
    alike = scalar_path(METHODS[name], a, 1.0)
    assert abs(float(alike[-1])) < 0.9  # from 1 towards the optimum at 0
    for dissimilarity in (10.0, 100.0):
        close(scalar_path(METHODS[name], a, dissimilarity), alike, rtol=0, atol=1e-11)


@pytest.mark.parametrize("a", few([(2.0, 0.0), (3.0, 1.0)], [(3.0, 1.0)]))
@where(lambda method: method.reaches == "never", ["FedAvg", "FedCM paper", "FedNova"])
def test_dissimilar_gradients_affect_uncorrected_steps(name: str, a: tuple[float, float]) -> None:
    paths = [scalar_path(METHODS[name], a, dissimilarity) for dissimilarity in (1.0, 10.0, 100.0)]
    apart = [float((path - paths[0]).abs().max()) for path in paths[1:]]
    assert 0.01 < apart[0] < apart[1]


# ---------------------------------------------------------------------- checkpoints

SMALL = (9, 6, 12, 5)
SERVERS = [None, partial(torch.optim.SGD, lr=0.5), partial(FedAdam, lr=0.05)]


class SaveAfter(FederatedCallback):
    """Write a checkpoint after some rounds."""

    def __init__(self, rounds: int, path: Path) -> None:
        self.rounds, self.path = rounds, path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.round == self.rounds:
            trainer.save_checkpoint(self.path)


@ALL
def test_resume_is_exact(name: str, tmp_path: Path) -> None:
    settings = {"clients_per_round": 2, "local_epochs": 1, "server_optimizer": SERVERS[list(METHODS).index(name) % 3]}

    def run(model: Classifier, *callbacks: Any, **kwargs: Any) -> tuple[Any, Trajectory]:
        recorder = Trajectory()
        made = trainer(METHODS[name], max_rounds=3, callbacks=[recorder, *callbacks], **settings)
        made.fit(model, data(SMALL), **kwargs)
        return made, recorder

    straight, resumed = classifier(METHODS[name]), Classifier()
    resumed.build = METHODS[name].optimizer
    whole, seen = run(straight, SaveAfter(2, tmp_path / "half.ckpt"))
    torch.manual_seed(123)  # the state of the global generators must not matter
    rest, seen_after = run(resumed, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert seen_after.cohorts == seen.cohorts[2:]
    assert same(seen_after.models, seen.models[2:])
    assert same(rest.fit_loop.state.state_dict(), whole.fit_loop.state.state_dict())
    assert torch.equal(parameters(resumed), parameters(straight))
    state = whole.fit_loop.state.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), state), "the state loads without running code"


# ---------------------------------------------------------------------- composition

SAMPLERS = [
    UniformSampler(2),
    RoundRobinSampler(2),
    WeightedSampler(3),
    BernoulliSampler(0.7),
    AvailabilitySampler(2, low=0.4),
]
PRECISIONS = ["32-true", "64-true", "bf16-mixed"]
SLOW = [None, SystemsHeterogeneity(stragglers=0.5)]


def combinations() -> list[Any]:
    """Return the combinations of methods and parts to test.

    Every method is combined with every part, and any two parts are combined in some method. A method with a base
    optimizer gets two parts of a kind per base, and so all of them. The default run still combines any two parts.
    """
    found, met = [], set()
    for number, (name, method) in enumerate(METHODS.items()):
        for turn in range(number, number + (5 if getattr(method.algorithm, "base", None) is None else 2)):
            parts = {
                "sampler": SAMPLERS[turn % 5],
                "server_optimizer": SERVERS[(number + turn) % 3],
                "precision": PRECISIONS[(number // 3 + 2 * turn) % 3],
                "heterogeneity": SLOW[(number // 2 + turn) % 2] if method.algorithm.local_work else None,
            }
            pairs = set(combinations_of(((kind, repr(part)) for kind, part in parts.items()), 2))
            chosen = name in USUAL and not pairs <= met
            met |= pairs if chosen else set()
            marks = () if chosen else pytest.mark.thorough
            found.append(pytest.param(name, parts, id=f"{name}-{turn - number}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "parts"), combinations())
def test_method_composes_with_other_parts(name: str, parts: dict[str, Any]) -> None:
    method = METHODS[name]
    model, seen = classifier(method), Trajectory()
    before = parameters(model).clone()
    trainer(method, max_rounds=2, local_steps=3, callbacks=seen, **parts).fit(model, data(SMALL))
    after = parameters(model)
    assert len(seen.models) == 2
    assert any(seen.cohorts)
    assert after.isfinite().all()
    assert not torch.equal(after, before.to(after))
