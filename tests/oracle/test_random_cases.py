"""Random cases with the real trainer, for options without stored cases.

:mod:`tests.helpers.reference` draws the cases, and computes their expected parameters with plain NumPy loops. The
server parameters after every round must agree as for stored cases.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.algorithms import FedCM, FedNova, FedProx
from tests.helpers import reference
from tests.helpers.selection import covering

from .cases import Case, load_case, load_index
from .methods import Setup, translate
from .runner import Variant, run, run_resumed
from .test_oracle import TOLERANCE, deviation

PLAIN = Variant()

DECAYED = {"client_lr": 0.1, "client_lr_decay": 0.8}
EXAMPLES, UNIFORM = ({**DECAYED, "weighting": weighting} for weighting in ("examples", "uniform"))

EMA, HEAVY = ({"name": "sgdm", "beta": 0.7, "momentum_form": form} for form in ("ema", "heavy_ball"))
RMS = {"name": "rmsprop", "beta": 0.8, "eps": 0.1}
ADAM = {"name": "adam", "beta1": 0.7, "beta2": 0.9, "eps": 0.1}
ADAGRAD = {"name": "adagrad", "beta1": 0.5, "eps": 0.1}
YOGI = {**ADAM, "name": "yogi"}
NEW, STARTED, OLD = {"stats": "new"}, {"stats": "new", "v0": 0.2}, {"stats": "old", "v0": 0.2}
CORRECTED = {**NEW, "bias_correction": True}
BASES: list[dict[str, Any]] = [
    {"name": "sgd"},
    EMA,
    HEAVY,
    *({**base, **stats} for base in (RMS, ADAM, ADAGRAD, YOGI) for stats in (STARTED, OLD)),
    *({**base, **CORRECTED} for base in (ADAM, YOGI)),
]
KINDS = ("softmax", "least_squares", "quadratic")


def label(value: Any) -> str:
    """Return a short text of hyper-parameters."""
    return "-".join(str(v) for v in value.values()) if isinstance(value, dict) else str(value)


def agree(algorithm: str, hp: dict[str, Any], variant: Variant = PLAIN, **options: Any) -> None:
    """Draw a case, run it, and compare the parameters after every round."""
    case = Case(**vars(reference.make_case(algorithm, hp, **options)))
    compare(case, translate(case), variant)


def compare(case: Case, setup: Setup, variant: Variant = PLAIN) -> None:
    by_round = deviation(run(case, setup, variant).parameters, case.expected())
    assert bool((by_round <= TOLERANCE).all()), f"{case.id}: off by {by_round.tolist()} by round"


ALGORITHMS = ("server_only", "fedavg", "fedavg normalized", "mime", "mimelite", "c-mime")


@pytest.mark.parametrize(("algorithm", "base"), covering(ALGORITHMS, BASES), ids=label)
def test_base_optimizers(algorithm: str, base: dict[str, Any]) -> None:
    name, _, pseudo_grad = algorithm.partition(" ")
    turn = BASES.index(base)
    local = {"weighting": "examples"} if name == "server_only" else EXAMPLES if turn % 2 else UNIFORM
    hp = {**local, "base": base, "server_lr": 0.5, **({"pseudo_grad": pseudo_grad} if pseudo_grad else {})}
    agree(name, hp, seed=turn, kind=KINDS[turn % 3], l2=0.1 * (turn % 2))


WEIGHTED: list[tuple[str, dict[str, Any]]] = [
    ("fedprox", {"mu": 0.7}),
    ("feddane", {"mu": 0.0}),
    ("feddane", {"mu": 0.7}),
    *(
        ("fedcm", {"alpha": 0.3, "eta_g": eta_g, "eta_g_mode": mode})
        for eta_g, mode in ((1.0, "relative"), (0.5, "relative"), (0.2, "paper"))
    ),
    *(
        ("mime_mvr", {"a": a, "anchor": anchor, "m0": m0})
        for a, anchor in ((0.3, "eq15"), (0.3, "lemma9"), (0.3, "current"), (0.0, "eq15"), (1.0, "lemma9"))
        for m0 in ("grad", "zeros")
    ),
]


def weighted() -> list[Any]:
    """Return the weighted methods with both weightings. The default run takes every second method with one of them."""
    found = []
    for n, (algorithm, hp) in enumerate(WEIGHTED):
        for weighting in (EXAMPLES, UNIFORM):
            chosen = n % 2 == 0 and (weighting is UNIFORM) == (n % 4 == 0)
            marks = () if chosen else pytest.mark.thorough
            found.append(pytest.param(algorithm, hp, weighting, marks=marks))
    return found


@pytest.mark.parametrize(("algorithm", "hp", "weighting"), weighted(), ids=label)
def test_weighted_methods(algorithm: str, hp: dict[str, Any], weighting: dict[str, Any]) -> None:
    seed = WEIGHTED.index((algorithm, hp))
    agree(algorithm, {**weighting, **hp}, seed=seed, kind=KINDS[seed % 3])
    agree(algorithm, {**weighting, **hp}, Variant(True, True), seed=seed, kind=KINDS[(seed + 1) % 3], l2=0.2)


WITH_STATES: list[tuple[str, dict[str, Any]]] = [
    ("scaffold", {"option": "i", "server_lr": 0.8}),
    ("scaffold", {"option": "ii", "server_lr": 0.8}),
    ("scaffold", {"option": "i", "initial": "gradient"}),
    ("scaffold", {"option": "ii", "initial": "gradient"}),
    ("feddyn", {"alpha": 0.4, "alpha_scaling": "none"}),
    ("feddyn", {"alpha": 0.4, "alpha_scaling": "inverse_size"}),
]


@pytest.mark.parametrize(
    ("method", "kind"), covering(WITH_STATES, KINDS), ids=lambda v: label(v[1]) if isinstance(v, tuple) else v
)
def test_methods_with_client_states(method: tuple[str, dict[str, Any]], kind: str) -> None:
    algorithm, hp = method[0], {**DECAYED, **method[1]}
    agree(algorithm, hp, kind=kind, n_clients=6)
    agree(algorithm, hp, Variant(decay_in_optimizer=True), seed=1, kind=kind, l2=0.2, equal_sizes=True)


@pytest.mark.parametrize(("option", "engine"), covering(["i", "ii"], ["sequential", "vectorized"]))
def test_first_gradients_are_kept_in_a_checkpoint(option: str, engine: str, tmp_path: Path) -> None:
    """Only the first round computes them. A resumed run has the parameters of an uninterrupted one."""
    hp = {**DECAYED, "option": option, "initial": "gradient"}
    case = Case(**vars(reference.make_case("scaffold", hp, seed=2, n_clients=6, n_rounds=6)))
    compare(case, translate(case), Variant(engine=engine))
    resumed = run_resumed(case, translate(case), tmp_path / "half.ckpt")
    assert bool((deviation(resumed.parameters, case.expected()) <= TOLERANCE).all())


@pytest.mark.parametrize(("patience", "client_lr"), covering([1, 2], [0.1, 1.5]))
def test_adaptive_mu(patience: int, client_lr: float) -> None:
    # at the large rate, the loss both rises and falls
    adaptive = {"step": 0.2, "patience": patience}
    hp = {"client_lr": client_lr, "weighting": "examples", "mu": 0.3, "adaptive": adaptive}
    agree("fedprox", hp, n_rounds=12, l2=0.05)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fednova(weighting: str) -> None:
    """The format of stored cases lacks FedNova."""
    hp = {**DECAYED, "weighting": weighting}
    case = Case(**vars(reference.make_case("fednova", hp, l2=0.2)))
    for variant in (PLAIN, Variant(decay_in_optimizer=True)):
        compare(case, Setup(FedNova, {"local_epochs": 1, "weighting": weighting}, {}, False), variant)


FEDBUFF: list[dict[str, Any]] = [
    {"client_lr": 0.1},
    {"client_lr": 0.05, "server_lr": 0.7, "staleness_exponent": 0.0},
    {"client_lr": 0.1, "server_lr": 1.2, "staleness_exponent": 1.3},
]


AT_ONCE = Variant(engine="vectorized", decay_in_optimizer=True)


@pytest.mark.parametrize(("hp", "kind", "variant"), covering(FEDBUFF, KINDS, [PLAIN, AT_ONCE]), ids=label)
def test_fedbuff(hp: dict[str, Any], kind: str, variant: Variant, tmp_path: Path) -> None:
    """Clients arrive twice, from one server model or several, and some models have no clients that start from them."""
    seed = FEDBUFF.index(hp)
    drawn = reference.make_case("fedbuff", hp, seed=seed, kind=kind, l2=0.2 * (seed % 2), n_rounds=8)
    reference.write_case(tmp_path, drawn)
    case = load_case(tmp_path, *load_index(tmp_path))
    compare(case, translate(case), variant)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "engine"), covering([(FedProx, {"mu": 0.6}), (FedCM, {"alpha": 0.3})], ["sequential", "vectorized"])
)
def test_fedbuff_with_other_methods(method: tuple[Any, dict[str, float]], engine: str) -> None:
    """FedBuff over methods that the format does not combine with it."""
    algorithm, options = method
    case = Case(**vars(reference.make_case("fedbuff", {"client_lr": 0.1, **options}, n_rounds=6)))
    setup = translate(replace(case, hp={"client_lr": 0.1}))
    compare(case, replace(setup, algorithm=lambda: algorithm(**options)), Variant(engine=engine))


@pytest.mark.thorough
def test_runner_of_stored_cases_supports_fedbuff(tmp_path: Path) -> None:
    """Runs the command on a folder with a case of FedBuff."""
    reference.write_case(tmp_path, reference.make_case("fedbuff", {"client_lr": 0.1}, l2=0.1, n_rounds=6))
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("test_oracle.py"))]
    options = ["--oracle-cases", str(tmp_path), "-m", "thorough or not thorough", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
