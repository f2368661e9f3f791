"""Every method and option, compared with plain NumPy loops on random problems."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from lightning_fed.algorithms import (
    SGD,
    Adagrad,
    Adam,
    CMime,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedNova,
    FedProx,
    Mime,
    MimeLite,
    MimeMVR,
    RMSProp,
    Scaffold,
    ServerOnly,
    SGDm,
    Yogi,
)
from lightning_fed.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedRMSProp, FedYogi
from tests.helpers import Round, play
from tests.helpers.reference import Case, Problem, make_case, run_reference
from tests.helpers.selection import covering

BASES = {"sgd": SGD, "sgdm": SGDm, "rmsprop": RMSProp, "adam": Adam, "adagrad": Adagrad, "yogi": Yogi}
SERVERS = {"sgdm": FedAvgM, "rmsprop": FedRMSProp, "adam": FedAdam, "adagrad": FedAdagrad, "yogi": FedYogi}
EMA, HEAVY = ({"name": "sgdm", "beta": 0.7, "momentum_form": form} for form in ("ema", "heavy_ball"))
RMS = {"name": "rmsprop", "beta": 0.8, "eps": 0.1}
ADAM = {"name": "adam", "beta1": 0.7, "beta2": 0.9, "eps": 0.1}
ADAGRAD = {"name": "adagrad", "beta1": 0.5, "eps": 0.1}
YOGI = {**ADAM, "name": "yogi"}
ALL_BASES = [
    {"name": "sgd"},
    EMA,
    HEAVY,
    *({**base, "stats": stats, "v0": v0} for base in (RMS, ADAGRAD) for stats, v0 in (("new", 0.0), ("old", 0.2))),
    *(
        {**base, "stats": stats, "v0": v0, "bias_correction": corrected}
        for base in (ADAM, YOGI)
        for stats, v0, corrected in (("new", 0.0, True), ("new", 0.1, True), ("new", 0.2, False), ("old", 0.2, False))
    ),
]
LOCAL = {"client_lr": 0.1, "client_lr_decay": 0.9, "weighting": "examples"}
UNWEIGHTED = {"client_lr": 0.1}


def run(case: Case, algorithm, server_optimizer=None) -> np.ndarray:
    p = Problem(case)

    def grad(x, i, batch):
        return torch.from_numpy(p.grad(x.numpy(), i, batch))

    rounds = [
        Round(
            {i: p.batches(r, i) for i in p.cohort(r)},
            p.cohort(r, "grad_cohort") if "grad_cohort" in case.arrays else None,
        )
        for r in p.rounds
    ]
    played = play(
        algorithm,
        grad,
        case.sizes,
        torch.from_numpy(p.x0),
        rounds,
        lr=p.lr if algorithm.local_work else 0.0,
        weighting=case.hp.get("weighting"),
        server_optimizer=server_optimizer,
        loss=lambda x: torch.tensor(p.loss(x.numpy()), dtype=torch.float64),
    )
    return torch.stack(played.x).numpy()


def agree(algorithm, name: str, hp: dict, server_optimizer=None, **options) -> None:
    case = make_case(name, hp, **options)
    want = run_reference(case)
    np.testing.assert_allclose(run(case, algorithm, server_optimizer), want, rtol=1e-10, atol=1e-13)


def server(base: dict, lr: float):
    options = {{"eps": "tau"}.get(k, k): v for k, v in base.items() if k != "name"}
    if base["name"] == "sgd":
        return partial(torch.optim.SGD, lr=lr)
    if base["name"] == "sgdm":
        options["momentum"] = options.pop("beta")
    return partial(SERVERS[base["name"]], lr=lr, **options)


def rule(base: dict):
    return BASES[base["name"]](**{k: v for k, v in base.items() if k != "name"})


def label(base: dict) -> str:
    return "-".join(str(v) for v in base.values())


@pytest.mark.parametrize("base", ALL_BASES, ids=label)
def test_server_optimizers_match_reference(base):
    hp = {"base": base, "server_lr": 0.3, "weighting": "examples"}
    agree(ServerOnly(), "server_only", hp, server(base, 0.3), kind="least_squares", l2=0.1)
    for pseudo_grad in ("raw", "normalized"):
        hp = {**LOCAL, "base": base, "server_lr": 0.3, "pseudo_grad": pseudo_grad}
        agree(FedAvg(pseudo_grad), "fedavg", hp, server(base, 0.3))


@pytest.mark.parametrize(
    ("base", "method"),
    covering(ALL_BASES, [(Mime, "mime"), (MimeLite, "mimelite"), (CMime, "c-mime")]),
    ids=lambda value: label(value) if isinstance(value, dict) else value[1],
)
def test_mime_variants_match_reference(base, method):
    cls, name = method
    agree(cls(rule(base)), name, {**LOCAL, "base": base}, l2=0.05)
    uniform = {**LOCAL, "weighting": "uniform", "server_lr": 0.5, "base": base}
    agree(cls(rule(base)), name, uniform, partial(torch.optim.SGD, lr=0.5), kind="quadratic", seed=1)


@pytest.mark.parametrize(
    ("kind", "weighting"), covering(["softmax", "least_squares", "quadratic"], ["examples", "uniform"])
)
def test_weighted_methods_match_reference(kind, weighting):
    hp = {**LOCAL, "weighting": weighting}
    agree(FedProx(0.7), "fedprox", {**hp, "mu": 0.7}, kind=kind)
    agree(FedDane(0.7), "feddane", {**hp, "mu": 0.7}, kind=kind)
    agree(FedNova(), "fednova", hp, kind=kind)
    for mode in ("relative", "paper"):
        algorithm = FedCM(0.3, eta_g=0.5, eta_g_mode=mode)
        agree(algorithm, "fedcm", {**hp, "alpha": 0.3, "eta_g": 0.5, "eta_g_mode": mode}, kind=kind)
    for anchor in ("eq15", "lemma9", "current"):
        for m0 in ("grad", "zeros"):
            agree(MimeMVR(0.3, anchor, m0), "mime_mvr", {**hp, "a": 0.3, "anchor": anchor, "m0": m0}, kind=kind)


@pytest.mark.parametrize("kind", ["softmax", "least_squares", "quadratic"])
def test_unweighted_methods_match_reference(kind):
    for option, initial in product(("i", "ii"), ("zero", "gradient")):
        hp = {**UNWEIGHTED, "option": option, "initial": initial, "server_lr": 0.8}
        agree(Scaffold(option, initial), "scaffold", hp, partial(torch.optim.SGD, lr=0.8), kind=kind, n_clients=6)
    for scaling in ("none", "inverse_size"):
        hp = {**UNWEIGHTED, "alpha": 0.4, "alpha_scaling": scaling}
        agree(FedDyn(0.4, scaling), "feddyn", hp, kind=kind, n_clients=6)


@pytest.mark.parametrize("client_lr", [0.1, 1.5])
def test_adaptive_mu_matches_reference(client_lr):
    # at the large rate, the loss both rises and falls
    adaptive = {"step": 0.2, "patience": 2}
    hp = {"client_lr": client_lr, "weighting": "examples", "mu": 0.3, "adaptive": adaptive}
    agree(FedProx(0.3, adaptive), "fedprox", hp, n_rounds=12)
