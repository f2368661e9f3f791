"""One number per client, from a mapping, from a file, or from the sizes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.core.client_weights import ClientWeights
from lightning_fed.core.errors import FederatedError
from lightning_fed.server.participation import Population


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_mapping_is_read_in_population_order() -> None:
    weights = ClientWeights({"a": 1, "b": 0.5, 7: 0, "unused": 9.0}).of(["b", 7, "a"])
    assert weights.dtype == torch.float64
    assert weights.tolist() == [0.5, 0.0, 1.0]


def test_mapping_distinguishes_numbers_from_text() -> None:
    with pytest.raises(FederatedError, match=r"1 clients have no weight in \{'1': 2\.0\}, such as 1\."):
        ClientWeights({"1": 2.0}).of([1])


def test_later_changes_to_the_mapping_are_ignored() -> None:
    source = {"a": 1.0, "b": 2.0}
    weights = ClientWeights(source)
    source["a"] = -5.0
    assert weights.of(["a", "b"]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("suffix", [".json", ".JSON", ".csv", ".txt"])
def test_files_compare_ids_as_text(suffix: str, tmp_path: Path) -> None:
    json_text, csv_text = '{"0": 1.5, "10": 2, "a": 0}', "weight,client,note\n1.5,0,x\n2,10,\n0,a,z\n"
    path = written(tmp_path / f"w{suffix}", json_text if suffix.lower() == ".json" else csv_text)
    assert ClientWeights(path).of(["a", 10, 0]).tolist() == [0.0, 2.0, 1.5]
    assert ClientWeights(path).of(["10", "0"]).tolist() == [2.0, 1.5]


def test_csv_file_supports_quoted_names(tmp_path: Path) -> None:
    path = written(tmp_path / "w.csv", 'client,weight\r\n"Smith, J.",3\r\n')
    assert ClientWeights(path).of(["Smith, J."]).tolist() == [3.0]


@pytest.mark.parametrize(("name", "text"), [("w.csv", "client,weight\né,2\n"), ("w.json", '{"é": 2}')])
def test_files_are_utf_8_with_or_without_a_byte_order_mark(name: str, text: str, tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(text, encoding=encoding)
        assert ClientWeights(str(tmp_path / name)).of(["é"]).tolist() == [2]


def test_example_weights_equal_the_population_sizes() -> None:
    sizes = {"a": 3, "b": 0, "c": 5}
    population = Population(list(sizes), sizes.__getitem__, list(sizes.values()))
    assert ClientWeights("examples").of(population).tolist() == [3.0, 5.0]
    with pytest.raises(FederatedError, match="weights='examples' needs a population with its clients' sizes"):
        ClientWeights("examples").of(["a"])


def test_new_population_is_looked_up_again() -> None:
    weights, first = ClientWeights({"a": 1, "b": 2}), ["a", "b"]
    assert weights.of(first) is weights.of(first)  # a population of millions is looked up once
    assert weights.of(["b"]).tolist() == [2.0]
    assert weights.of(first).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [-1, -1e-9, math.nan, math.inf, -math.inf, True, "3", None])
def test_invalid_weights_are_rejected(value: Any) -> None:
    with pytest.raises(FederatedError, match=rf"weight of client 'b' must be a number finite.*, found {value!r}"):
        ClientWeights({"a": 1.0, "b": value})


@pytest.mark.parametrize("value", [1.1, 2, -0.1, math.nan, math.inf])
def test_maximum_weight_is_enforced(value: float) -> None:
    with pytest.raises(FederatedError, match=rf"client 3 must be a number in \[0, 1\], found {value!r}"):
        ClientWeights({3: value}, most=1.0)
    assert ClientWeights({3: 1.0}, most=1.0).of([3]).tolist() == [1.0]


@pytest.mark.parametrize("value", ["-1", "NaN", "Infinity", "true", '"3"', "null"])
def test_invalid_weights_in_json_are_rejected(value: str, tmp_path: Path) -> None:
    path = written(tmp_path / "w.json", f'{{"0": 1, "5": {value}}}')
    with pytest.raises(FederatedError, match=rf"weight of client '5' must be .*, found {json.loads(value)!r}"):
        ClientWeights(path)


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_invalid_weights_in_csv_are_rejected(value: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=rf"weight of client '5' must be .*, found {float(value)!r}"):
        ClientWeights(written(tmp_path / "w.csv", f"client,weight\n0,1\n5,{value}\n"))


def test_missing_weights_are_counted_and_one_is_named(tmp_path: Path) -> None:
    written(tmp_path / "w.json", '{"0": 1}')
    with pytest.raises(FederatedError, match=r"2 clients have no weight in 'w\.json', such as '1'"):
        ClientWeights("w.json").of([0, 1, 2])


def test_all_zero_weights_are_rejected() -> None:
    with pytest.raises(FederatedError, match="All clients have weight zero in .*: no client could take part"):
        ClientWeights({"a": 0, "b": 0.0, "c": 1.0}).of(["a", "b"])


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"There is no file '.*gone\.csv' with a weight for every client"):
        ClientWeights(str(tmp_path / "gone.csv"))
    with pytest.raises(FederatedError, match="There is no file"):
        ClientWeights(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.json", "[1, 2]"),
        ("w.json", "{"),
        ("w.json", ""),
        ("w.csv", "id,weight\na,1\n"),
        ("w.csv", "client,p\na,1\n"),
        ("w.csv", "client,weight\na,much\n"),
        ("w.csv", "client,weight\na\n"),
    ],
)
def test_invalid_file_formats_are_rejected(name: str, text: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, text)
    with pytest.raises(FederatedError, match=rf"{name}' must be a JSON object from client to weight, or a CSV file"):
        ClientWeights(path)


@pytest.mark.parametrize("source", [None, 3, [1.0, 2.0]])
def test_invalid_sources_are_rejected(source: Any) -> None:
    with pytest.raises(FederatedError, match="weights must be 'examples', a mapping or a path, found"):
        ClientWeights(source)


def test_long_sources_are_abbreviated() -> None:
    assert repr(ClientWeights({"a": 1})) == "{'a': 1}"
    text = repr(ClientWeights(dict.fromkeys(range(1000), 1.0)))
    assert len(text) == 60
    assert text.endswith("...")
