"""Every argument of every public constructor and function refuses junk by name, at once."""

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import datasets
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fed
from lightning_fed import FederatedError, FederatedTrainer, algorithms, callbacks, data, metrics, models, server
from tests.helpers.selection import few
from tests.helpers.training import QUIET

FACES = (lightning_fed, algorithms, server, data, models, callbacks, metrics)
MADE_BY_THE_PACKAGE = {  # results and parts that users only receive
    *("ClientError", "ClientReport", "FederatedError", "FederatedLoop", "FederatedOptimizer", "RoundReport"),
    *("Eigenvalue", "GradientDissimilarities", "SkewTable", "Spread"),
}
TENSORS = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
PARAMETER = nn.Parameter(torch.zeros(2))
REQUIRED: dict[str, dict[str, Any]] = {
    "FederatedDataset": {"clients": [TENSORS]},
    "FederatedDataModule": {"clients": [TENSORS]},
    "FederatedTrainer": {"local_epochs": 1, **QUIET},
    "CMime": {"base": algorithms.SGDm()},
    "FedCM": {"alpha": 0.1},
    "Scaffnew": {"prob": 0.1},
    "ScaffoldM": {"beta": 0.2},
    "FedDane": {"mu": 1.0},
    "FedDyn": {"alpha": 0.1},
    "FedProx": {"mu": 1.0},
    "FedProxVR": {"mu": 1.0},
    "FedSAM": {"rho": 0.1},
    "FedSpeed": {"lam": 1.0, "rho": 0.1},
    "MoFedSAM": {"rho": 0.1, "alpha": 0.1},
    "MimeMVR": {"a": 0.1},
    **{name: {"clients": 0.1} for name in ("Attack", "SignFlipAttack")},
    "LabelFlipAttack": {"clients": 0.1, "num_classes": 2},
    "NoiseAttack": {"clients": 0.1, "std": 1.0},
    "ClientPrivacy": {"noise_multiplier": 1.0, "max_grad_norm": 1.0},
    **{name: {"num_bad": 1} for name in ("Bulyan", "Krum", "MultiKrum")},
    **{name: {"clients_per_round": 2} for name in ("OortSampler", "UpdateNormSampler")},
    "PowerOfChoiceSampler": {"clients_per_round": 2, "candidates": 3},
    "AvailabilitySampler": {"clients_per_round": 2},
    "BernoulliSampler": {"probability": 0.5},
    "RoundRobinSampler": {"clients_per_round": 2},
    "WeightedSampler": {"clients_per_round": 2},
    **{name: {"params": [PARAMETER]} for name in ("FedAdagrad", "FedAdam", "FedAvgM", "FedRMSProp", "FedYogi")},
    "NormClipping": {"max_norm": 1.0},
    "OptimalClientSampling": {"expected_clients": 2},
    "TrimmedMean": {"beta": 0.1},
    "FedAsync": {"concurrency": 10},
    **{name: {"personal": ["head.*"]} for name in ("FedPer", "FedRep", "LGFedAvg")},
    "APFL": {"alpha": 0.5},
    "Ditto": {"lam": 0.1},
    "PFedMe": {"lam": 1.0},
    "FedBuff": {"size": 4, "concurrency": 10},
    "DifferentialPrivacy": {"max_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
    "TopK": {"share": 0.1},
    "BalancedDirichlet": {"num_clients": 2, "alpha": 1.0},
    "ByKey": {"keys": [1, 2]},
    "ClassesPerClient": {"num_clients": 2, "classes_per_client": 1},
    "ClientFolder": {"root": "folder"},
    "ClientImages": {"root": "folder", "classes": ["a", "b"]},
    "ClientTable": {"path": "table.csv", "client": "a", "target": "b"},
    "Dirichlet": {"num_clients": 2, "alpha": 1.0},
    "FeatureShift": {"partition": data.Iid(2)},
    "Iid": {"num_clients": 2},
    "LeafDataModule": {"train_path": "folder"},
    "LogNormalSizes": {"num_clients": 2, "sigma": 1.0},
    "Normalize": {"mean": [0.5], "std": [0.5]},
    "PowerLaw": {"num_clients": 2},
    "QuantitySkew": {"num_clients": 2, "alpha": 1.0},
    "Shards": {"num_clients": 2},
    "Similarity": {"num_clients": 2, "similarity": 0.5},
    "Shrink": {"factor": 2},
    "skew_table": {"split": [torch.arange(3)]},
    "split_figure": {"split": [torch.arange(3)]},
    "Classifier": {"net": nn.Linear(2, 2), "num_classes": 2},
    "LinearRegression": {"in_features": 2},
    "ResNet": {"depth": 20},  # the small one
    "SentimentLSTM": {"vocab_size": 10},
    "TargetMetric": {"monitor": "val_acc", "target": 1.0},
    "extreme_eigenvalue": {"product": lambda v: v, "start": torch.ones(2)},
    "gradient_dissimilarity": {"gradients": [(torch.ones(2), 1.0)]},
    "hessian_dissimilarity": {"products": [lambda v: v], "start": torch.ones(2)},
    "spread": {"values": [1.0]},
}
ALSO_KNOWN_AS = {"clients": "client"}  # a message may use this instead of the argument's name
ANY_SIGN = {  # negative numbers are legal here
    *(("FederatedTrainer", name) for name in ("max_rounds", "max_epochs")),
    ("ClientTable", "missing"),
    *(("FeatureShift", "rotation"), ("Quadratic", "x0"), ("Quadratic", "optimum"), ("TargetMetric", "target")),
}
NO_LIMIT = {("FederatedTrainer", "max_update_ratio"), ("spread", "values")}  # infinity is legal here
NAMES_OF_MESSAGES = {("NormClipping", "max_norm")}  # a mapping, checked once the method is known
LISTS_OF_EXAMPLES = {"val", "test", "predict", "keys"}  # any list may be a data set
HUGE = 10**400
SOON = 20.0  # seconds of CPU time: enough on any machine, while counting to 10**15 takes days


class Odd:
    """A value that is invalid for any argument."""


JUNK = (
    *(None, True, "x", "", b"x", -1, 0, 1.5, math.nan, math.inf, -math.inf, 1j, HUGE, 10**15),
    *(Odd(), Odd, [], {}, [None], ["x"], [Odd()], {"a": None}, {None: 1}, (1, "x")),
)


def public() -> dict[str, Callable[..., Any]]:
    """Return everything public that users make or call, by name."""
    found = {name: getattr(face, name) for face in FACES for name in face.__all__ if not name.startswith("_")}
    return {
        name: value
        for name, value in found.items()
        if name not in MADE_BY_THE_PACKAGE and callable(value) and parameters(value) and not inspect.isabstract(value)
    }


def parameters(value: Callable[..., Any]) -> list[str]:
    if inspect.isclass(value) and value.__init__ is object.__init__:
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in inspect.signature(value).parameters.values() if p.kind not in kinds]


def hint_of(name: str, parameter: str) -> Any:
    return hints_of(name)[parameter]


@cache
def hints_of(name: str) -> dict[str, Any]:
    value = PUBLIC[name]
    names = {"Figure": Any, "Axes": Any}
    return get_type_hints(value.__init__ if inspect.isclass(value) else value, localns=names)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the annotated type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if hint is float:
        return is_number(value)
    if hint is int:
        return is_number(value) and isinstance(value, int)
    if origin is Callable or hint is Callable:
        return callable(value)
    if origin in (Sequence, Iterable, list):
        return isinstance(value, list | tuple) and all(fits(part, inner[0]) for part in value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin is tuple:
        return False
    return isinstance(value, origin or hint)


def is_junk(name: str, parameter: str, value: Any) -> bool:
    """Return whether an argument must be refused: of the wrong type, negative, not finite or far too large."""
    hint = hint_of(name, parameter)
    if isinstance(value, Mapping) and (name, parameter) in NAMES_OF_MESSAGES:
        return False
    if not fits(value, hint):
        return not (parameter in LISTS_OF_EXAMPLES and isinstance(value, list | tuple))
    if not is_number(value) or callable(hint):
        return is_number(value) and not fits(0.5, hint) and (value < 0 and (name, parameter) not in ANY_SIGN)
    if not math.isfinite(min(value, 1e300)):
        return (name, parameter) not in NO_LIMIT
    limited = (name, parameter) not in NO_LIMIT
    return (value < 0 and (name, parameter) not in ANY_SIGN) or (value == HUGE and limited)


PUBLIC = public()
PARAMETERS = [(name, parameter) for name, value in PUBLIC.items() for parameter in parameters(value)]
CASES = {
    place: [value for value in JUNK if is_junk(*place, value)]
    for place in PARAMETERS
    if hint_of(*place) is not Any and place[0] != "FederatedCallback"
}


@pytest.fixture(autouse=True)
def _no_talk(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="pytorch_lightning")


@pytest.fixture(autouse=True, scope="module")
def _digits_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", cache(datasets.load_digits))
        yield


def attempt(name: str, parameter: str, value: Any) -> FederatedError | None:
    """Pass one value and return the refusal, if any. Other errors and refusals without the name fail the test."""
    started = time.process_time()
    shown = "10**400" if value == HUGE else repr(value)
    refusal = None
    try:
        PUBLIC[name](**{**REQUIRED.get(name, {}), parameter: value})
    except FederatedError as error:
        refusal = error
    except Exception as error:
        pytest.fail(f"{name}({parameter}={shown}) ends in {type(error).__name__}: {error}")
    assert time.process_time() - started < SOON, f"{name}({parameter}={shown}) takes too long"
    named = {parameter, ALSO_KNOWN_AS.get(parameter, parameter)}
    if refusal is not None and not any(word in str(refusal).lower() or word in str(refusal) for word in named):
        pytest.fail(f"{name}({parameter}={shown}) is refused without its name: {refusal}")
    return refusal


PACKAGES = {"split_figure": "matplotlib", "ClientTable": "pyarrow"}
MISSING = {name for name, package in PACKAGES.items() if find_spec(package) is None}


def test_required_arguments_are_sufficient() -> None:
    for name, make in PUBLIC.items():
        if name not in MISSING:
            make(**REQUIRED.get(name, {}))


NAMES = list(dict.fromkeys(name for name, _ in CASES))
LARGE = ("CifarCNN", "EmnistCNN", "MnistCNN")  # ConvNet checks their arguments, after a network is made


@pytest.mark.parametrize("name", few(NAMES, [name for name in NAMES if name not in LARGE]))
def test_error_for_junk_names_the_argument(name: str) -> None:
    if name in MISSING:
        pytest.skip(f"no {PACKAGES[name]}")
    for place, values in CASES.items():
        if place[0] == name:
            for value in values:
                assert attempt(*place, value) is not None, f"{place} takes {value!r}"


def test_every_argument_has_junk_cases() -> None:
    assert sum(map(len, CASES.values())) > 4000
    assert not [place for place, values in CASES.items() if not values]


numbers = st.one_of(
    st.integers(max_value=3), st.sampled_from([10**15, 2**63, 2**200, HUGE]), st.floats(allow_nan=True), st.booleans()
)
simple = st.one_of(st.none(), numbers, st.text("a1 _é\x00", max_size=5), st.binary(max_size=3), st.complex_numbers())
anything = st.one_of(
    simple, st.lists(simple, max_size=3), st.dictionaries(st.one_of(st.text("a1_", max_size=3), st.integers()), simple)
)


@given(place=st.sampled_from(list(CASES)), value=anything)
def test_arbitrary_values_are_accepted_or_rejected(place: tuple[str, str], value: Any) -> None:
    if attempt(*place, value) is None:
        assert not is_junk(*place, value)


OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "FederatedTrainer": {
        "clients_per_round": [0, 0.0, 1.5, -0.5],
        "local_epochs": [0],
        "local_steps": [0, 3],  # local_epochs is already given
        "engine": ["warp"],
        "buffers": ["mean"],
        "weighting": ["sizes"],
        "local_optimizer_state": ["fresh"],
        "gradient_clip_on": ["both"],
        "chunk_size": [0, 4],  # the sequential engine does not use it
        "max_rounds": [-2],
        "sampler": [server.UniformSampler],
        "algorithm": [algorithms.FedAvg, "FedAvg"],
        "callbacks": [callbacks.RunSummary, [callbacks.RunSummary]],
    },
    "FedCM": {"alpha": [0, 1.1], "eta_g": [0], "eta_g_mode": ["absolute"]},
    "FedDyn": {"alpha": [0], "evaluate": ["x"]},
    "MimeMVR": {"a": [1.1], "anchor": ["eq14"]},
    "FedProx": {"adaptive": [{"step": 0}, {"patience": 0}, {"pace": 1}]},
    "SGDm": {"beta": [1, 1.5], "momentum_form": ["nesterov"]},
    "Adam": {"beta1": [1], "beta2": [1], "eps": [0], "v0": ["zeros"], "stats": ["both"]},
    "FedAdam": {"tau": [0], "beta1": [1]},
    "BernoulliSampler": {"probability": [0, 1.1, {"a": 2.0}, "missing.csv"]},
    "WeightedSampler": {"weights": [{"a": -1.0}, {"a": math.nan}, "missing.json"], "clients_per_round": [0]},
    "AvailabilitySampler": {"low": [0.95], "high": [0.05, 1.1], "rounds_per_day": [0]},
    "SystemsHeterogeneity": {"stragglers": [1.1], "dropout": [1], "deadline": [0], "policy": ["wait"]},
    "Dirichlet": {"num_clients": [0], "alpha": [0]},
    "Similarity": {"similarity": [1.1]},
    "Normalize": {"std": [[0.0], [-1.0], [1.0, 1.0]], "mean": [[math.nan], []]},
    "Shrink": {"factor": [0]},
    "FeatureShift": {"angles": ["random"], "rotation": [[]]},
    "Digits": {"test_fraction": [0, 0.9]},
    "Concrete": {"num_clients": [0], "test_fraction": [1.0]},
    "MNIST": {"val_fraction": [1.0]},
    "EMNIST": {"split": ["capitals"]},
    "ClientTable": {"path": ["table.xls"], "target": ["a"], "features": [["a"], []], "targets": ["labels"]},
    "ClientImages": {"classes": [["a", "a"], "a"]},
    "LeafDataModule": {"shape": [[0]], "num_classes": [0]},
    "MLPClassifier": {"num_classes": [1], "hidden": [[0]], "dropout": [1.0]},
    "ConvNet": {"image_size": [2], "padding": ["full"], "pool": ["none"]},
    "ResNet": {"depth": [17], "groups": [3], "norm": ["layer"]},
    "ClientAccuracy": {"mode": ["best"], "on": ["test"], "every_n_rounds": [0]},
    "spread": {"mode": ["best"], "values": [[]]},
}


def test_out_of_range_values_are_rejected() -> None:
    for name, rows in OUT_OF_RANGE.items():
        if name in MISSING:
            continue
        for parameter, values in rows.items():
            for value in values:
                assert attempt(name, parameter, value) is not None, f"{name}({parameter}={value!r})"


OF_LIGHTNING = {
    name: hint
    for name, hint in get_type_hints(pl.Trainer.__init__).items()
    if name not in {"return", "callbacks", "max_epochs"}
}
BEYOND = {
    **{f"limit_{stage}_batches": [-1, 1.5] for stage in ("train", "val", "test", "predict")},
    "accelerator": ["warp", ""],
    "strategy": ["warp", "fsdp", 3],
    "devices": [0, -2, "many", []],
    "precision": ["8-bit", 8],
    "max_steps": [-2],
    "min_steps": [-1],
    "max_time": ["soon", {"weeks": "x"}],
    "accumulate_grad_batches": [0, -1],
    "check_val_every_n_epoch": [0, -1],
    "gradient_clip_val": [-1.0],
    "gradient_clip_algorithm": ["sign"],
    "profiler": ["stopwatch"],
    "fast_dev_run": [-1],
    "num_nodes": [0],
}


def test_invalid_lightning_arguments_are_rejected_up_front() -> None:
    for parameter, hint in OF_LIGHTNING.items():
        wrong = [v for v in JUNK if not fits(v, hint) and not (v is None and parameter in {"max_steps", "strategy"})]
        wrong += [v for v in (math.nan, HUGE) if fits(v, hint)]
        for value in [*wrong, *BEYOND.get(parameter, [])]:
            with pytest.raises(FederatedError) as refused:
                FederatedTrainer(**{**REQUIRED["FederatedTrainer"], parameter: value})
            assert parameter in str(refused.value) or "Lightning's Trainer refuses" in str(refused.value), parameter


def test_unknown_argument_error_suggests_the_closest_match() -> None:
    with pytest.raises(FederatedError, match="no argument 'max_round'. Did you mean max_rounds?"):
        FederatedTrainer(local_epochs=1, max_round=3)
    with pytest.raises(FederatedError, match="no argument 'qqq'"):
        FederatedTrainer(local_epochs=1, qqq=3)


@pytest.mark.parametrize("path", [Path("gone"), "gone"])
def test_paths_may_be_strings_or_path_objects(path: Any) -> None:
    for name, parameter in (("MNIST", "root"), ("ClientFolder", "root"), ("Shakespeare", "root")):
        assert attempt(name, parameter, path) is None
