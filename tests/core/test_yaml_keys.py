"""A duplicate key in YAML is found, with its line."""

import pytest
import yaml

from lightning_fed.core.yaml_keys import RepeatedKeyError, UniqueKeyLoader


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", 3),
        ("a:\n  - {x: 1, y: 2}\n  - {x: 1, x: 2}\n", "x", 3),
        ("1: a\n0x1: b\n", 1, 2),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a\n", "<<", 4),
    ],
)
def test_duplicate_key_is_reported_with_its_line(text: str, key: object, line: int) -> None:
    with pytest.raises(RepeatedKeyError, match="comes twice") as raised:
        yaml.compose(text, UniqueKeyLoader)
    assert (raised.value.key, raised.value.line) == (key, line)


def test_distinct_keys_are_read() -> None:
    text = "a: &a {x: 1, '1': 2, 1: 3}\nb: {<<: *a, x: 4}\n"
    assert yaml.load(text, UniqueKeyLoader)["b"] == {"x": 4, "1": 2, 1: 3}  # a SafeLoader


def test_nested_aliases_are_composed_once() -> None:
    lines = ["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)), "b: &b [*b]"]
    yaml.compose("\n".join(lines), UniqueKeyLoader)
