"""Overrides have the effect that a reader of the file expects, and change nothing else."""

import re
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedError
from lightning_fed.lab.configurations import Configurations, key_of
from lightning_fed.lab.overlays import overlay

BASE: dict[str, Any] = {
    "trainer": {"algorithm": {"class_path": "a.Mime", "init_args": {"base": "SGD"}}, "callbacks": [1], "max_rounds": 5},
    "seed_everything": 0,
}


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        ({"trainer.max_rounds": 7}, ["trainer", "max_rounds"], 7),
        ({"trainer": {"max_rounds": 7}}, ["trainer", "algorithm", "class_path"], "a.Mime"),
        ({"trainer.algorithm.init_args.base": "Adam"}, ["trainer", "algorithm", "init_args"], {"base": "Adam"}),
        ({"trainer.algorithm": {"class_path": "Mime"}}, ["trainer", "algorithm", "init_args"], {"base": "SGD"}),
        ({"trainer.algorithm": {"class_path": "a.FedAvg"}}, ["trainer", "algorithm"], {"class_path": "a.FedAvg"}),
        ({"trainer.algorithm": "a.FedAvg"}, ["trainer", "algorithm"], "a.FedAvg"),
        ({"trainer.callbacks+": [2]}, ["trainer", "callbacks"], [1, 2]),
        ({"trainer.plugins+": [2]}, ["trainer", "plugins"], [2]),
        ({"trainer.callbacks": []}, ["trainer", "callbacks"], []),
        ({"data.init_args.root": "here"}, ["data"], {"init_args": {"root": "here"}}),
    ],
    ids=str,
)
def test_override_sets_its_value(overrides: Any, path: list[str], value: Any) -> None:
    before = deepcopy(BASE)
    found: Any = overlay(BASE, overrides)
    for part in path:
        found = found[part]
    assert found == value
    assert before == BASE


def test_class_given_by_name_accepts_arguments() -> None:
    config = overlay({"trainer": {"algorithm": "a.FedProx"}}, {"trainer.algorithm.init_args.mu": 1.0})
    assert config["trainer"]["algorithm"] == {"class_path": "a.FedProx", "init_args": {"mu": 1.0}}


@pytest.mark.parametrize("overrides", [{"seed_everything.x": 1}, {"": 1}, {"a..b": 1}, {1: 1}], ids=str)
def test_unknown_keys_are_rejected(overrides: Any) -> None:
    with pytest.raises(FederatedError):
        overlay(BASE, overrides)


keys = st.sampled_from(["a", "b", "a.c", "b.c", "b.c.d"])


nodes = st.dictionaries(
    st.sampled_from("abcd"), st.recursive(st.integers(), lambda s: st.dictionaries(st.sampled_from("cd"), s))
)


@given(nodes, nodes)
def test_later_override_wins_and_overlay_is_idempotent(first: Any, second: Any) -> None:
    once = overlay(first, second)
    assert overlay(once, second) == once
    assert {k: once[k] for k in first if k not in second} == {k: first[k] for k in first if k not in second}


@pytest.mark.parametrize("class_path", ["lightning_fed.data.ClientFolder", "mine.Folder", "mine.MNIST"])
def test_data_folder_is_part_of_the_cell_key(class_path: str) -> None:
    here, there = ({"data": {"class_path": class_path, "init_args": {"root": root}}} for root in "ab")
    assert key_of(here) != key_of(there)
    mnist = ({"data": {"class_path": "lightning_fed.data.MNIST", "init_args": {"root": root}}} for root in "ab")
    assert len({key_of(config) for config in mnist}) == 1


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"model": {"class_path": "MLPClassifier", "init_args": {"lrr": 1}}}, "Did you mean lr instead of lrr?"),
        ({"trainer": {"algorithm": "lightning_fed.algorithms.FedProxx"}}, "Did you mean FedProx instead of FedProxx?"),
        ({"trainer": {"max_round": 3}}, "Did you mean trainer.max_rounds instead of trainer.max_round?"),
    ],
)
def test_mistake_in_a_cell_suggests_the_intended_name(config: dict[str, Any], meant: str) -> None:
    with pytest.raises(FederatedError, match=re.escape(meant)):
        Configurations().complete("a cell", config)
