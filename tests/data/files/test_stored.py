"""Common behavior of data modules that read files."""

import logging

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.files.stored import (
    StoredDataModule,
    find,
    inside,
    large_enough,
    listing,
    pool,
    read_rows,
    read_table,
)


def test_files_are_read_once_on_demand():
    class Stored(StoredDataModule):
        reads = 0

        def _load(self):
            self.reads += 1
            self.set_clients({"a": TensorDataset(torch.arange(3))})

    data = Stored()
    assert data.reads == 0
    assert (list(data.client_ids), data.known_sizes) == (["a"], [3])
    data.setup("fit")
    data.setup("test")
    assert data.reads == 1


def test_clients_are_views_into_one_pool():
    whole, views = pool(
        {
            "a": (torch.arange(3), torch.zeros(3)),
            "b": (torch.arange(0), torch.zeros(0)),
            7: (torch.tensor([9]), torch.ones(1)),
        }
    )
    assert whole.tensors[0].tolist() == [0, 1, 2, 9]
    assert {key: view.tensors[0].tolist() for key, view in views.items()} == {"a": [0, 1, 2], 7: [9]}
    whole.tensors[0][3] = 5
    assert views[7].tensors[0].tolist() == [5]
    assert pool({"a": (torch.arange(0),)}) == (None, {})


def test_missing_or_escaping_paths_are_rejected(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.csv").touch()
    (tmp_path / "in" / "a.csv").touch()
    assert find("D", tmp_path / "in", "", "") == tmp_path / "in"
    with pytest.raises(FederatedError, match="D: there is no .*out .looked in .*Get it. Put it"):
        find("D", tmp_path / "out", "Get it.", "Put it.")
    (tmp_path / "in" / "link.csv").symlink_to(tmp_path / "elsewhere")
    assert inside("D", tmp_path / "in", tmp_path / "in" / "a.csv").name == "a.csv"
    with pytest.raises(FederatedError, match="D: .*link.csv leads out of .*in, to .*elsewhere"):
        inside("D", tmp_path / "in", tmp_path / "in" / "link.csv")
    assert [path.name for path in listing("D", tmp_path / "in", ".csv")] == ["a.csv", "b.csv"]
    with pytest.raises(FederatedError, match="has no files named .*json"):
        listing("D", tmp_path / "in", ".json")
    with pytest.raises(FederatedError, match="out is not a folder"):
        listing("D", tmp_path / "out", ".csv")


def test_rows_keep_their_line_and_corrupt_files_are_rejected(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n\n1,'2\n")
    assert list(read_rows(path)) == [(1, ["a", "b"]), (3, ["1", "'2"])]
    path.write_bytes(b"a,b\n\xff,1\n")
    with pytest.raises(FederatedError, match="t.csv is not utf-8-sig text"):
        list(read_rows(path))
    path.write_text("a" * 200_000)
    with pytest.raises(FederatedError, match="t.csv, line 1 is not CSV"):
        list(read_rows(path))


def test_table_rows_must_match_the_heading(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n\n1,2\n3\n")
    rows = read_table(path)
    assert [next(rows), next(rows)] == [(1, ["a", "b"]), (3, ["1", "2"])]
    with pytest.raises(FederatedError, match="t.csv, line 4: 1 fields under a heading of 2"):
        next(rows)


def test_small_clients_are_left_out_and_logged(caplog):
    sizes = {"a": 3, "b": 1, "c": 2}
    with caplog.at_level(logging.INFO):
        assert large_enough("D", sizes, ("roles", "lines"), least=2) == {"a", "c"}
    assert "D leaves out 1 of 3 roles, with 1 of 6 lines: they have fewer than least=2" in caplog.text
    with pytest.raises(FederatedError, match="D: none of the 3 roles has least=9 lines"):
        large_enough("D", sizes, ("roles", "lines"), least=9)


@pytest.mark.parametrize("text", ['a,b\n"c,d', 'a,b\r\nc,"d\r\ne,f\r\n', '"'])
def test_unclosed_quote_is_rejected(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    with pytest.raises(
        FederatedError, match=r"t.csv, line \d is not CSV .the row that begins there has a quote that is not closed"
    ):
        list(read_rows(path))
    path.write_bytes(text.encode() + b'"')
    assert list(read_rows(path))[-1][1][-1].startswith(("c,d", "d\r\ne,f", ""))
