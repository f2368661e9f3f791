import pytest

from lightning_fed.algorithms import (
    Adam,
    Algorithm,
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
    Scaffold,
    ServerOnly,
    SGDm,
)

METHODS = [
    (FedAvg(), {"pseudo_grad": "raw"}),
    (FedProx(mu=1), {"mu": 1.0, "adaptive": None}),
    (FedProx(mu=1, adaptive=True), {"mu": 1.0, "adaptive": {"step": 0.1, "patience": 5}}),
    (FedDane(mu=0.5, grad_cohort="same"), {"mu": 0.5, "grad_cohort": "same"}),
    (Scaffold(option="i"), {"option": "i"}),
    (Mime(), {"base": None}),
    (Mime(base=SGDm(0.5)), {"base": {"name": "SGDm", "beta": 0.5, "momentum_form": "ema"}}),
    (MimeLite(base=Adam(stats="old")), {"base": Adam(stats="old").options()}),
    (CMime(base=SGDm()), {"base": SGDm().options()}),
    (MimeMVR(a=0.1, anchor="lemma9"), {"a": 0.1, "anchor": "lemma9", "m0": "grad"}),
    (FedCM(alpha=0.1), {"alpha": 0.1, "eta_g": 1.0, "eta_g_mode": "relative"}),
    (FedDyn(alpha=0.1), {"alpha": 0.1, "alpha_scaling": "none", "evaluate": "theta"}),
    (FedNova(), {}),
    (ServerOnly(), {}),
]


@pytest.mark.parametrize(("algorithm", "options"), METHODS, ids=lambda v: repr(v) if isinstance(v, Algorithm) else "")
def test_options_contain_only_constructor_arguments(algorithm, options):
    assert algorithm.options() == options


@pytest.mark.parametrize("algorithm", [a for a, _ in METHODS], ids=repr)
def test_repr_round_trips(algorithm):
    names = {type(algorithm).__name__: type(algorithm), "SGDm": SGDm, "Adam": Adam}
    again = eval(repr(algorithm), names)
    assert again.options() == algorithm.options()


def test_subclass_options_exclude_declarations():
    class Anchored(Algorithm):
        def __init__(self, beta=0.5):
            self.beta, self.anchor_at, self._cache = beta, "x", 1

    assert Anchored().options() == {"beta": 0.5}
    assert repr(Anchored(2)) == "Anchored(beta=2)"


def test_default_weighting_per_method():
    mimes = (Mime(), MimeLite(), CMime(SGDm()), MimeMVR(1))
    for algorithm in (FedAvg(), FedProx(0), FedDane(0), FedNova(), ServerOnly(), *mimes):
        assert algorithm.default_weighting == "examples"
    assert FedCM(1).default_weighting == "uniform"
    for algorithm in (Scaffold(), FedDyn(1)):
        assert set(algorithm.reduces.values()) == {"uniform", "population"}
