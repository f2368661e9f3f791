"""The reader of oracle cases: it accepts the format, and names any unknown entry."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .cases import ASYNCHRONOUS, PERSONAL, Case, CaseError, load_case, load_index
from .methods import METHODS, translate
from .problem import OracleBatches, build_module
from .runner import Variant, run
from .test_oracle import entries_of

HP: dict[str, dict[str, Any]] = {
    "server_only": {"base": {"name": "sgd"}, "weighting": "uniform"},
    "fedavg": {"client_lr": 0.1, "base": {"name": "sgd"}, "weighting": "uniform"},
    "fedprox": {"client_lr": 0.1, "mu": 0.5, "weighting": "uniform"},
    "feddane": {"client_lr": 0.1, "mu": 0.5, "weighting": "uniform"},
    "scaffold": {"client_lr": 0.1, "option": "ii"},
    "mime": {"client_lr": 0.1, "base": {"name": "sgd"}, "weighting": "uniform"},
    "mimelite": {"client_lr": 0.1, "base": {"name": "sgd"}, "weighting": "uniform"},
    "c-mime": {"client_lr": 0.1, "base": {"name": "sgd"}, "weighting": "uniform"},
    "mime_mvr": {"client_lr": 0.1, "a": 0.3, "anchor": "eq15", "m0": "grad", "weighting": "uniform"},
    "fedcm": {"client_lr": 0.1, "alpha": 0.1, "eta_g": 1.0, "eta_g_mode": "paper", "weighting": "uniform"},
    "feddyn": {"client_lr": 0.1, "alpha": 0.1},
    "fedexp": {"client_lr": 0.1, "eps": 0.001, "weighting": "uniform"},
    "fedavg_m": {"client_lr": 0.1, "beta": 0.2, "gamma": 1.0, "gamma_mode": "paper"},
    "scaffold_m": {"client_lr": 0.1, "beta": 0.2, "gamma": 1.0, "gamma_mode": "paper"},
    "scaffnew": {"client_lr": 0.1, "prob": 0.5},
    "fedacg": {"client_lr": 0.1, "lam": 0.5, "beta": 0.1, "weighting": "uniform"},
    "fedsam": {"client_lr": 0.1, "rho": 0.1, "weighting": "uniform"},
    "mofedsam": {"client_lr": 0.1, "rho": 0.1, "alpha": 0.1, "eta_g": 1.0, "eta_g_mode": "paper"},
    "fedspeed": {
        "client_lr": 0.1,
        "lam": 1.0,
        "rho": 0.1,
        "alpha": 1.0,
        "perturb": "plain",
        "dual_average": "cohort",
    },
    "fedproxvr": {"client_lr": 0.1, "mu": 0.5, "estimator": "svrg"},
    "fedper": {"client_lr": 0.1, "shared": [], "weighting": "uniform"},
    "lg_fedavg": {"client_lr": 0.1, "shared": [], "weighting": "uniform"},
    "fedrep": {"client_lr": 0.1, "shared": [], "weighting": "uniform"},
    "ditto": {"client_lr": 0.1, "lam": 0.5, "personal_lr": 0.1, "weighting": "uniform"},
    "pfedme": {"client_lr": 0.1, "lam": 0.5, "personal_lr": 0.1, "inner_steps": 2, "weighting": "uniform"},
    "apfl": {"client_lr": 0.1, "alpha": 0.5, "weighting": "uniform"},
    "fedbuff": {"client_lr": 0.1},
}
"""The fewest hyper-parameters that each method takes."""


def write(folder: Path, arrays: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Write a folder with one small quadratic case, with some changes, and return its entry.

    Two clients have f_1 = x^2 + 10 x and f_2 = -10 x. FedAvg takes one round of one step from x = 10 at rate 0.1.
    So y = 10 - 0.1 * 30 = 7 and 10 + 0.1 * 10 = 11, and x = 9.
    """
    meta = {
        "id": "tiny",
        "algorithm": "fedavg",
        "hp": HP["fedavg"],
        "problem": {"kind": "quadratic", "l2": 0.0},
        "n_clients": 2,
        "n_rounds": 1,
        "sizes": [1, 1],
        "reference": "",
        "note": "",
        "format": 1,
        **changes,
    }
    stored = {
        "a_0": np.array([2.0]),
        "a_1": np.array([0.0]),
        "b_0": np.array([10.0]),
        "b_1": np.array([-10.0]),
        "init_x": np.array([10.0]),
        "cohort": np.array([[0, 1]]),
        "batch_idx": np.zeros((1, 2, 1, 1), dtype=np.int64),
        "expected_x": np.array([[9.0]]),
        **(arrays or {}),
    }
    np.savez(folder / "tiny.npz", meta_json=np.array(json.dumps(meta)), **stored)
    entry = {**meta, "file": "tiny.npz"}
    (folder / "cases.json").write_text(json.dumps([entry]))
    return entry


def case_of(folder: Path, **changes: Any) -> Case:
    """Write a case with some changes, and load it."""
    return load_case(folder, write(folder, **changes))


def fedbuff(arrivals: list[Any], batches: int = 0) -> dict[str, Any]:
    """Return the changes that make a case of FedBuff."""
    stored = np.array(arrivals)
    own = {"arrivals": stored, "arrival_batch_idx": np.full((*stored.shape[:2], 1, 1), batches)}
    return {"algorithm": "fedbuff", "hp": HP["fedbuff"], "arrays": {**own, "batch_idx": np.zeros((1, 2, 0, 1), int)}}


def test_hand_computed_case_matches_exactly(tmp_path: Path) -> None:
    case = case_of(tmp_path)
    result = run(case, translate(case), Variant())
    torch.testing.assert_close(result.parameters, case.expected(), rtol=1e-15, atol=0)
    assert case.expected().tolist() == [[9.0]]


@pytest.mark.parametrize("algorithm", METHODS)
def test_minimal_hyper_parameters_are_sufficient(algorithm: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, algorithm=algorithm, hp=HP[algorithm], arrays=_own_arrays(algorithm))
    assert type(translate(case).algorithm()).__name__ == METHODS[algorithm].name


@pytest.mark.parametrize("algorithm", METHODS)
def test_unknown_hyper_parameter_is_rejected(algorithm: str, tmp_path: Path) -> None:
    hp = {**HP[algorithm], "nu": 1.0}
    case = case_of(tmp_path, algorithm=algorithm, hp=hp, arrays=_own_arrays(algorithm))
    with pytest.raises(CaseError, match=r"tiny, hp: unknown \['nu'\]"):
        translate(case)


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_methods_without_a_weighted_form_reject_weighting(algorithm: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, algorithm=algorithm, hp={**HP[algorithm], "weighting": "examples"})
    with pytest.raises(CaseError, match="weighting"):
        translate(case)


def test_weighting_defaults_to_uniform(tmp_path: Path) -> None:
    case = case_of(tmp_path, hp={"client_lr": 0.1, "base": {"name": "sgd"}})
    assert translate(case).arguments["weighting"] == "uniform"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithm": "fedsgd"}, "fedsgd"),
        ({"hp": {"weighting": "uniform", "base": {"name": "sgd"}}}, "client_lr"),
        ({"algorithm": "fedprox", "hp": {**HP["fedprox"], "server_lr": 0.5}}, "server_lr"),
        ({"hp": {**HP["fedavg"], "weighting": "steps"}}, "steps"),
        ({"hp": {**HP["fedavg"], "base": {"name": "lamb"}}}, "lamb"),
        ({"hp": {**HP["fedavg"], "base": {"name": "sgd", "beta": 0.9}}}, "beta"),
        ({"hp": {**HP["fedavg"], "base": {"name": "sgdm", "beta": 0.9}}}, "momentum_form"),
        ({"hp": {**HP["fedavg"], "pseudo_grad": "scaled"}}, "scaled"),
        ({"algorithm": "fedprox", "hp": {**HP["fedprox"], "adaptive": {"step": 0.1, "wait": 5}}}, "wait"),
    ],
)
def test_entries_unknown_to_the_format_are_rejected(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, **changes)
    with pytest.raises(CaseError, match=named):
        translate(case)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"problem": {"kind": "cubic", "l2": 0.0}}, "cubic"),
        ({"problem": {"kind": "quadratic", "l2": 0.0, "l1": 0.1}}, "l1"),
        ({"format": 2}, "format 2"),
        ({"compression": "topk"}, "compression"),
        ({"sizes": [1, 2]}, "sizes"),
        ({"n_rounds": 2}, "rounds"),
        ({"arrays": {"server_noise": np.zeros(1)}}, "server_noise"),
        ({"arrays": {"cohort": np.array([[1, 1]])}}, "twice"),
        ({"algorithm": "feddane", "hp": HP["feddane"]}, "grad_cohort"),
        ({"arrays": {"state_momentum": np.zeros((1, 1))}}, "state_momentum"),
        ({"arrays": {"state_c": np.zeros((2, 1))}}, "state_c has 2 rounds"),
        ({"arrays": {"arrivals": np.zeros((1, 2, 2))}}, r"unknown \['arrivals'\]"),
        ({"algorithm": "fedbuff", "hp": HP["fedbuff"]}, r"\['arrival_batch_idx', 'arrivals'\] missing"),
        (fedbuff([[[0, 0], [1, 1]]]), "began after 1 server steps"),
        (fedbuff([[[0, 0], [0, 0]]]), r"the cohort \[0, 1\] of round 0 is not that of its arrivals"),
        (fedbuff([[[0, 0], [1, 0]]], batches=-1), "client 0 in round 0 has no minibatch"),
    ],
)
def test_case_that_violates_the_format_is_rejected(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    entry = write(tmp_path, **changes)
    with pytest.raises(CaseError, match=named):
        load_case(tmp_path, entry)


def test_folder_without_an_index_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"cases\.json"):
        load_index(tmp_path)


def test_index_includes_cases_of_later_folders(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    write(tmp_path)
    write(tmp_path / "next", algorithm="fedsgd")
    assert [entry["algorithm"] for entry in entries_of(tmp_path)] == ["fedavg", "fedsgd"]


def test_two_arrivals_match_a_hand_computation(tmp_path: Path) -> None:
    """Clients 0 and 1 arrive from x^0 = 10 with D = 3 and -1. Client 0 arrives again one step later: sqrt(1/2) of 3."""
    arrivals = [[[0, 0], [1, 0]], [[0, 0], [0, 0]]]
    changes = fedbuff(arrivals)
    changes["arrays"] |= {
        "cohort": np.array([[0, 1], [0, -1]]),
        "batch_idx": np.zeros((2, 2, 0, 1), int),
        "expected_x": np.array([[9.0], [9 - 3 * 0.5**0.5]]),
    }
    case = case_of(tmp_path, **changes, n_rounds=2)
    assert (case.arrivals(1), case.arrival_batches(1, 0)) == ([(0, 0), (0, 0)], [[0]])
    torch.testing.assert_close(run(case, translate(case), Variant()).parameters, case.expected(), rtol=1e-15, atol=0)


def test_padding_ends_cohorts_and_batches(tmp_path: Path) -> None:
    arrays = {"cohort": np.array([[1, -1]]), "batch_idx": np.array([[[[-1], [-1]], [[0], [-1]]]])}
    case = case_of(tmp_path, arrays=arrays)
    assert case.cohort(0) == [1]
    assert [case.batches(0, i) for i in (0, 1)] == [[], [[0]]]


def test_l2_term_is_in_the_loss_or_in_the_optimizer(tmp_path: Path) -> None:
    case = case_of(tmp_path, problem={"kind": "quadratic", "l2": 0.5})
    batch = case.rows(0)
    for decay_in_optimizer, gradient in ((False, 2 * 10 + 10 + 0.5 * 10), (True, 2 * 10 + 10)):
        module = build_module(case, decay_in_optimizer).double()
        module.training_step(batch, 0).backward()
        (parameter,) = module.parameters()
        assert parameter.grad.item() == gradient
        assert module.configure_optimizers().defaults["weight_decay"] == (0.5 if decay_in_optimizer else 0)


def test_uneven_chunks_cover_every_row_once() -> None:
    rows = (torch.arange(8.0), torch.arange(8.0))
    batches = OracleBatches(rows, [[3, 1], [2]], uneven_chunks=True)
    chunks = [(batch[0].tolist(), n) for batch, n in batches.full(torch.Generator())]
    assert chunks == [([0.0], 1), ([1.0, 2.0], 2), ([3.0, 4.0, 5.0], 3), ([6.0, 7.0], 2)]
    assert [(batch[0].tolist(), n) for batch, n in batches.epoch(torch.Generator())] == [([3.0, 1.0], 2), ([2.0], 1)]
    assert batches.num_batches() == 2


def _own_arrays(algorithm: str) -> dict[str, Any]:
    """Return the additional arrays of a method's cases."""
    if algorithm == "feddane":
        return {"grad_cohort": np.array([[0, 1]])}
    if algorithm in ASYNCHRONOUS:
        return fedbuff([[[0, 0], [1, 0]]])["arrays"]
    shapes = {"personal_batch_idx": (1, 2, 1, 1), "personal_steps": (1, 2)}
    own = {name: np.zeros(shapes[name], np.int64) for name in PERSONAL.get(algorithm, ())}
    return own | ({"expected_personal_x": np.zeros((1, 2, 1))} if algorithm in PERSONAL else {})
