"""The axes of a grid in an experiment's file."""

from typing import Any

import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.axes import check_overrides, read_axis, revise
from tests.helpers.lab import Write, check_mistakes

LR = {"key": "model.init_args.lr", "values": [0.1, 0.2]}

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"methods": {"FedAvg": {"modl.lr": 1}}}, "methods.FedAvg.*Did you mean 'model'"),
    ({"methods": {}}, "methods must be labels"),
    ({"methods": {True: {}}}, "put it in quotes"),
    ({"axes": {"lr": {"key": "model.init_args.lr"}}}, "lacks values"),
    ({"axes": {"lr": {"key": "model.init_args.lr", "values": 3}}}, "must be a list"),
    ({"axes": {"lr": {"key": "model.init_args.lr", "values": [1, 1]}}}, "comes twice"),
    ({"axes": {"z": {"key": ["trainer.a", "trainer.b"], "values": [[1]]}}}, "a list of 2"),
    ({"axes": {"lr": {"key": "model.init_args.lr", "values": []}}}, "a list of at least one value"),
    ({"axes": {"z": {"key": ["trainer.a", "trainer.a"], "values": [[1, 2]]}}}, "a key comes twice"),
    ({"axes": {"seed": LR}}, "axes.seed: .* use the name 'seed'. Give the axis another one"),
    ({"axes": {"metric": LR}}, "axes.metric: .* use the name 'metric'"),
    ({"axes": {"method": LR}}, "methods' own axis"),
    ({"methods": {"a < b": {}}}, "methods: a claim cannot name the label 'a < b'"),
    ({"methods": {"a ~": {}}}, "cannot name the label 'a ~'"),
    ({"methods": {"2 * a": {}}}, "cannot name the label '2 \\* a'"),
    ({"methods": {"a ": {}}}, "cannot name the label 'a '"),
    ({"methods": {"": {}}}, "cannot name the label ''"),
    ({"axes": {"x": {"key": "trainer.x", "values": ["a >= b"]}}}, "axes.x: a claim cannot name the label"),
]


def test_invalid_axes_are_rejected(write: Write) -> None:
    check_mistakes(write, MISTAKES)


def test_axis_is_labels_with_overrides_or_a_key_with_values() -> None:
    assert read_axis("axes.x", "x", LR).choices == {
        "0.1": {"model.init_args.lr": 0.1},
        "0.2": {"model.init_args.lr": 0.2},
    }
    pairs = {"key": ["trainer.a", "trainer.b"], "values": [[1, 2], [3, 4]]}
    assert read_axis("axes.x", "x", pairs).choices["3, 4"] == {"trainer.a": 3, "trainer.b": 4}
    found = read_axis("axes.x", "x", {"small": {"trainer.max_rounds": 5, "tune": {"lr": [1.0]}}})
    assert (found.choices, found.tune) == ({"small": {"trainer.max_rounds": 5}}, {"small": {"lr": [1.0]}})
    with pytest.raises(FederatedError, match="must be labels with overrides, .* or a key with"):
        read_axis("axes.x", "x", [1, 2])


def test_tuning_changes_update_values_or_replace_the_entry() -> None:
    tuned = {"lr": LR, "mu": {"key": "trainer.mu", "values": [1]}}
    changed = revise(tuned, {"lr": [5], "mu": LR, "new": [1]})
    assert changed == {"lr": {**LR, "values": [5]}, "mu": LR, "new": [1]}
    assert tuned["lr"] == LR


def test_runner_settings_cannot_be_overridden() -> None:
    for overrides in ({"trainer.logger": False}, {"trainer": {"enable_progress_bar": True}}):
        with pytest.raises(FederatedError, match="x: trainer.* is the runner's to set"):
            check_overrides("x", overrides)


def test_seed_axis_is_rejected() -> None:
    with pytest.raises(FederatedError, match="axes.seed: 1: seed_everything .* Write seeds: N"):
        read_axis("axes.seed", "seed", {"key": "seed_everything", "values": [1, 2, 3]})
