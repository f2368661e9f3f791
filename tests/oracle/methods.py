"""Translation of a case's method and hyper-parameters to arguments of the trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

import lightning_fed.algorithms
import lightning_fed.server

from .arrivals import ReplayedFedBuff
from .cases import ASYNCHRONOUS, WEIGHTINGS, Case, CaseError, check_keys

_LOCAL = (("client_lr",), ("client_lr_decay",))
"""What every method with local steps must and may say."""

_BASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sgd": ((), ()),
    "sgdm": (("beta", "momentum_form"), ()),
    "rmsprop": (("beta", "eps", "stats"), ("v0", "bias_correction")),
    "adam": (("beta1", "beta2", "eps", "stats"), ("v0", "bias_correction")),
    "adagrad": (("beta1", "eps", "stats"), ("beta2", "v0", "bias_correction")),
    "yogi": (("beta1", "beta2", "eps", "stats"), ("v0", "bias_correction")),
}
"""The options that every base optimizer must and may have."""

_DEFAULTS = {name: {"v0": 0.0, "bias_correction": False} for name in ("rmsprop", "adam", "adagrad", "yogi")}
"""The format's defaults, which are not always those of the package."""

_BASE_CLASSES = {
    "sgd": "SGD",
    "sgdm": "SGDm",
    "rmsprop": "RMSProp",
    "adam": "Adam",
    "adagrad": "Adagrad",
    "yogi": "Yogi",
}
_SERVER_CLASSES = {
    "sgdm": "FedAvgM",
    "rmsprop": "FedRMSProp",
    "adam": "FedAdam",
    "adagrad": "FedAdagrad",
    "yogi": "FedYogi",
}
_SERVER_OPTIONS = {"sgdm": {"beta": "momentum"}, **{name: {"eps": "tau"} for name in _DEFAULTS}}
"""Options that have another name there."""

_WITHOUT_EFFECT = {"rmsprop": ("bias_correction",), "adagrad": ("beta2", "bias_correction")}
"""What a base optimizer's formulas do not contain, by the format's own words, and its server class does not take."""


@dataclass(frozen=True)
class Method:
    """The package's name and options of one of the format's methods.

    Attributes:
        name: Its class in :mod:`lightning_fed.algorithms`.
        required: The hyper-parameters without a default in the format.
        optional: The hyper-parameters with a default.
        options: The hyper-parameters that are arguments of the class.
        base: The use of the base optimizer: "server" (as the server optimizer), "method" (as an argument) or None.
        local_work: Whether clients take local steps.
        decays: Whether their rate may decay from round to round.
        states: The place and name of each state that a case may store. Places are "server", "clients", "own" (personal
            models), "optimizer" (the server's), "shown" (validated parameters), and "computed" (from the others).
        renamed: The class's names of options with other names in the format.
        is_shown: Whether a case expects the validated parameters instead of the run's x.
        own: The client state that a case expects as the personal model; by default, the personal model itself.
    """

    name: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    base: str | None = None
    local_work: bool = True
    decays: bool = True
    states: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    is_shown: bool = False
    own: str = ""


_OF_SERVER = {"m": ("server", "m"), "v": ("server", "v")}
_OF_OPTIMIZER = {"m": ("optimizer", "m"), "v": ("optimizer", "v")}
_MIME = Method("", ("base",), ("server_lr", "weighting"), base="method", states=_OF_SERVER)

METHODS = {
    "server_only": Method(
        "ServerOnly", ("base",), ("server_lr", "weighting"), base="server", local_work=False, states=_OF_OPTIMIZER
    ),
    "fedavg": Method(
        "FedAvg",
        ("base",),
        ("server_lr", "pseudo_grad", "weighting"),
        ("pseudo_grad",),
        base="server",
        states=_OF_OPTIMIZER,
    ),
    "fedprox": Method(
        "FedProx", ("mu",), ("adaptive", "weighting"), ("mu", "adaptive"), states={"mu": ("server", "mu")}
    ),
    "feddane": Method("FedDane", ("mu",), ("weighting",), ("mu",)),
    "scaffold": Method(
        "Scaffold",
        ("option",),
        ("server_lr", "initial"),
        ("option", "initial"),
        states={"c": ("server", "c"), "c_clients": ("clients", "c_i")},
    ),
    "mime": replace(_MIME, name="Mime"),
    "mimelite": replace(_MIME, name="MimeLite"),
    "c-mime": replace(_MIME, name="CMime"),
    "mime_mvr": Method(
        "MimeMVR", ("a", "anchor", "m0"), ("weighting",), ("a", "anchor", "m0"), states={"m": ("server", "m")}
    ),
    "fedcm": Method(
        "FedCM",
        ("alpha", "eta_g", "eta_g_mode"),
        ("weighting",),
        ("alpha", "eta_g", "eta_g_mode"),
        states={"delta": ("server", "delta")},
    ),
    "fedexp": Method(
        "FedExP",
        ("eps",),
        ("eps_scaling", "eps_decay", "weighting"),
        ("eps", "eps_scaling", "eps_decay"),
        states={"eval": ("shown", ""), "eta_g": ("server", "eta_g")},
    ),
    "fedavg_m": Method(  # the same as FedCM
        "FedCM",
        ("beta", "gamma", "gamma_mode"),
        options=("beta", "gamma", "gamma_mode"),
        renamed={"beta": "alpha", "gamma": "eta_g", "gamma_mode": "eta_g_mode"},
        states={"g": ("server", "delta")},
    ),
    "scaffold_m": Method(
        "ScaffoldM",
        ("beta", "gamma", "gamma_mode"),
        options=("beta", "gamma", "gamma_mode"),
        states={"c": ("server", "c"), "c_clients": ("clients", "c_i"), "g": ("server", "g")},
    ),
    "scaffnew": Method("Scaffnew", ("prob",), options=("prob",), states={"h_clients": ("computed", "h_clients")}),
    "fedbuff": Method("FedAvg", optional=("server_lr", "staleness_exponent"), decays=False),
    "fedacg": Method(
        "FedACG", ("lam", "beta"), ("weighting",), ("lam", "beta"), is_shown=True, states={"m": ("server", "m")}
    ),
    "fedsam": Method("FedSAM", ("rho",), ("eps", "server_lr", "weighting"), ("rho", "eps")),
    "mofedsam": Method(
        "MoFedSAM",
        ("rho", "alpha", "eta_g", "eta_g_mode"),
        ("eps", "weighting"),
        ("rho", "eps", "alpha", "eta_g", "eta_g_mode"),
        states={"delta": ("server", "delta")},
    ),
    "fedspeed": Method(
        "FedSpeed",
        ("lam", "rho", "alpha", "perturb", "dual_average"),
        ("eps",),
        ("lam", "rho", "alpha", "perturb", "eps", "dual_average"),
        states={"dual": ("clients", "d_i")},
    ),
    "fedproxvr": Method("FedProxVR", ("mu", "estimator"), ("weighting",), ("mu", "estimator")),
    "fedper": Method("FedPer", ("shared",), ("weighting", "personal_lr"), ("shared",), renamed={"shared": "personal"}),
    "lg_fedavg": Method(
        "LGFedAvg", ("shared",), ("weighting", "personal_lr"), ("shared",), renamed={"shared": "personal"}
    ),
    "fedrep": Method("FedRep", ("shared",), ("weighting", "personal_lr"), ("shared",), renamed={"shared": "personal"}),
    "ditto": Method(
        "Ditto",
        ("lam", "personal_lr"),
        ("weighting", "server_lr"),
        ("lam", "personal_lr"),
        renamed={"personal_lr": "personal_rate"},
    ),
    "pfedme": Method(
        "PFedMe",
        ("lam", "personal_lr", "inner_steps"),
        ("beta", "weight_decay", "weighting"),
        ("lam", "personal_lr", "inner_steps"),
        renamed={"personal_lr": "personal_rate"},
    ),
    "apfl": Method("APFL", ("alpha",), ("weighting",), ("alpha",), own="v", states={"mixed": ("own", "")}),
    "feddyn": Method(
        "FedDyn",
        ("alpha",),
        ("alpha_scaling",),
        ("alpha", "alpha_scaling"),
        states={"dual": ("clients", "d_i"), "avg": ("computed", "avg")},
    ),
}
"""The methods by their names in the format. SCAFFOLD and FedDyn have no ``weighting``; for the others it is uniform
where a case does not say."""


@dataclass(frozen=True)
class Setup:
    """A case's requirements for the trainer.

    Attributes:
        algorithm: Creates the method, for each trainer again.
        arguments: The other arguments of the trainer that depend on the method.
        states: The places of the stored states; see :class:`Method`.
        is_shown: Whether the case expects the validated parameters.
        own: The client state that it expects as the personal model; see :class:`Method`.
    """

    algorithm: Callable[[], Any]
    arguments: dict[str, Any]
    states: Mapping[str, tuple[str, str]]
    is_shown: bool
    own: str = ""


def takes_full_batches(algorithm: str, hp: Mapping[str, Any]) -> bool:
    """Return whether a method needs full passes over clients, for gradients or for the population loss."""
    full_gradients = ("server_only", "feddane", "mime", "mimelite", "c-mime", "mime_mvr", "fedproxvr")
    return algorithm in full_gradients or hp.get("option") == "i" or takes_population_loss(hp)


def takes_population_loss(hp: Mapping[str, Any]) -> bool:
    """Return whether a method uses the loss itself. The loss must then contain the l2 term."""
    return hp.get("adaptive") is not None


def translate(case: Case) -> Setup:
    """Return a case's method and trainer arguments.

    Raises:
        CaseError: If the case has a method, hyper-parameter or option that is not in the format.
        pytest.skip.Exception: If the package does not have the method yet.
    """
    if case.algorithm not in METHODS:
        raise CaseError(f"{case.id}: unknown algorithm {case.algorithm!r}; known are {sorted(METHODS)}.")
    method = METHODS[case.algorithm]
    local_required, local_optional = _LOCAL if method.local_work else ((), ())
    local_optional = local_optional if method.decays else ()
    optional = {*method.optional, *local_optional, "server_lr"}  # all methods have the server's rate
    check_keys(f"{case.id}, hp", case.hp, method.required + local_required, tuple(sorted(optional)))
    if case.hp.get("server_lr", 1.0) != 1.0 and "server_lr" not in method.optional:
        raise CaseError(f"{case.id}: {case.algorithm} has no server_lr in the format, found {case.hp['server_lr']!r}.")
    options = {name: case.hp[name] for name in method.options if name in case.hp}
    if "shared" in options:  # the package takes the personal ones
        options["shared"] = [f"*{name}" for name in case.initial() if name not in options["shared"]]
    if case.algorithm == "fedrep":
        options["head_epochs"] = 1  # all minibatches are one epoch here
    if case.algorithm in ("ditto", "pfedme"):  # their rate is a multiple of the local one
        options["personal_lr"] /= case.hp["client_lr"]
    if options.get("pseudo_grad", "raw") not in ("raw", "normalized"):
        raise CaseError(f"{case.id}: unknown pseudo_grad {options['pseudo_grad']!r}; known are 'raw', 'normalized'.")
    if options.get("adaptive") is not None:
        check_keys(f"{case.id}, hp.adaptive", options["adaptive"], ("step", "patience"))

    arguments: dict[str, Any] = {"local_epochs": 1} if method.local_work else {}
    if "weighting" in method.optional:
        arguments["weighting"] = weighting = case.hp.get("weighting", "uniform")
        if weighting not in WEIGHTINGS:
            raise CaseError(f"{case.id}: unknown weighting {weighting!r}; known are {WEIGHTINGS}.")
    if case.algorithm in ASYNCHRONOUS:
        arguments["asynchronous"] = ReplayedFedBuff(case)
    if "base" in case.hp:
        check_base(case.id, case.hp["base"])
    server_base = case.hp["base"] if method.base == "server" else {"name": "sgd"}
    if "beta" in case.hp and case.algorithm == "pfedme":  # the server's rate
        arguments["server_optimizer"] = server_optimizer(server_base, case.hp["beta"])
    if server_base["name"] != "sgd" or "server_lr" in case.hp:
        arguments["server_optimizer"] = server_optimizer(server_base, case.hp.get("server_lr", 1.0))
    states = {name: place for name, place in method.states.items() if name in case.states()}
    algorithm = built(lightning_fed.algorithms, method.name)
    options = {method.renamed.get(name, name): value for name, value in options.items()}
    if method.base == "method":
        return Setup(lambda: algorithm(base=base_optimizer(case.hp["base"]), **options), arguments, states, False)
    return Setup(lambda: algorithm(**options), arguments, states, method.is_shown, method.own)


def built(module: Any, name: str) -> Any:
    """Return a class of the package by name, or skip the test that needs it."""
    if not hasattr(module, name):
        pytest.skip(f"not built yet: {name}")
    return getattr(module, name)


def check_base(case_id: str, base: Mapping[str, Any]) -> None:
    """Raise unless a base optimizer and all its options are in the format."""
    if base.get("name") not in _BASES:
        raise CaseError(f"{case_id}: unknown base {base.get('name')!r}; known are {sorted(_BASES)}.")
    required, optional = _BASES[base["name"]]
    check_keys(f"{case_id}, hp.base {base['name']}", base, ("name", *required), optional)


def base_optimizer(base: Mapping[str, Any]) -> Any:
    """Return a base optimizer of Mime. Its arguments have the format's names."""
    options = {**_DEFAULTS.get(base["name"], {}), **base}
    cls = built(lightning_fed.algorithms, _BASE_CLASSES[options.pop("name")])
    return cls(**options)


def server_optimizer(base: Mapping[str, Any], lr: float) -> partial[torch.optim.Optimizer]:
    """Return a function from parameters to the server optimizer that equals a base optimizer.

    Raises:
        CaseError: If Adagrad is asked for a bias correction: its v is a sum.
    """
    options = {**_DEFAULTS.get(base["name"], {}), **base}
    name = options.pop("name")
    if name == "sgd":
        return partial(torch.optim.SGD, lr=lr)
    if name == "adagrad" and options["bias_correction"]:
        raise CaseError("hp.base adagrad: bias_correction=True is not defined for Adagrad.")
    for unused in _WITHOUT_EFFECT.get(name, ()):
        options.pop(unused, None)
    renamed = {_SERVER_OPTIONS[name].get(option, option): value for option, value in options.items()}
    return partial(built(lightning_fed.server, _SERVER_CLASSES[name]), lr=lr, **renamed)
