"""Strict reading of YAML files: no key twice, no unknown key, and 1e-3 is a number."""

from pathlib import Path

import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.yaml_files import read_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "'a' comes twice"),
        ("- 1\n", "must hold a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("a: &a {x: 1, x: 2}\nb: {<<: *a}\n", "'x' comes twice"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}\n", "'<<' comes twice"),
        ("a: {<<: 3}\n", "for merging"),
        ("? [a, b]\n: 1\n", "a key has parts"),
    ],
)
def test_ambiguous_yaml_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(FederatedError, match=message):
        read_yaml(tmp_path / "bad.yaml")


def test_merge_keys_are_overridden_by_explicit_keys(tmp_path: Path) -> None:
    (tmp_path / "merged.yaml").write_text(
        "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, x: 4}\nd: {<<: [*b, *a], z: 5}\n"
    )
    found = read_yaml(tmp_path / "merged.yaml")
    assert found == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 4, "y": 3}, "d": {"x": 1, "y": 3, "z": 5}}


def test_numbers_without_a_decimal_point_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("a: 1e-3\nb: 2E5\nc: 1e3x\n")
    assert read_yaml(tmp_path / "good.yaml") == {"a": 0.001, "b": 2e5, "c": "1e3x"}
