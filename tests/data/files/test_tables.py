"""Tables with a client column: the clients, the conversion to numbers, and refusals with the place of the fault."""

import logging
import re
import sys
import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import ClientTable
from lightning_fed.models import MLPClassifier
from tests.helpers.optional import needs_pyarrow

pytestmark = needs_pyarrow

TABLE = """\ufeffperson,age,height,note,label,part
ann,1,1.5,"so, so",yes,train
bob,2,2.5,ok,no,train
ann,3,-3.5e1,,maybe,val
007,4,4.5,ok,no,test
bob,5,5.5,ok,yes,train
"""


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def tensors(data, client):
    return [tensor.tolist() for tensor in data.client_dataset(client).tensors]


def test_rows_are_grouped_by_client(tmp_path):
    data = ClientTable(write(tmp_path, TABLE), "person", "label", features=["height", "age"], val_fraction=0)
    assert list(data.client_ids) == ["ann", "bob", "007"]
    assert tensors(data, "bob") == [[[2.5, 2], [5.5, 5]], [1, 2]]
    assert tensors(data, "007") == [[[4.5, 4]], [1]]
    assert data.classes == ["maybe", "no", "yes"]
    assert [tensor.dtype for tensor in data.client_dataset("ann").tensors] == [torch.float32, torch.int64]
    data.setup("fit")
    assert data.val is None


def test_split_column_selects_the_validation_rows(tmp_path):
    data = ClientTable(write(tmp_path, TABLE), "person", "label", ["age"], split="part")
    data.setup("fit")
    assert list(data.client_ids) == ["ann", "bob"]
    assert tensors(data, "ann") == [[[1.0]], [2]]
    assert [tensor.tolist() for tensor in data.val.tensors] == [[[3.0]], [0]]
    assert [tensor.tolist() for tensor in data.test.tensors] == [[[4.0]], [1]]  # 007 is only in the test part
    assert list(data.client_val) == ["ann"]


def test_numeric_columns_are_features_and_a_warning_names_the_rest(tmp_path):
    data = ClientTable(write(tmp_path, TABLE), "person", "label", val_fraction=0)
    with pytest.warns(UserWarning, match=r"'note' \(line 2 holds 'so, so'\), 'part' .*\['age', 'height'\]"):
        assert tensors(data, "ann")[0] == [[1, 1.5], [3, -35]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors(ClientTable(write(tmp_path, TABLE), "person", "label", features=["age"], val_fraction=0), "ann")


def test_quoted_field_can_hold_commas_quotes_and_newlines(tmp_path):
    path = write(tmp_path, 'who,note,x\r\n"a, ""b""","two\nlines",1\r\n\r\n\u00e9,,2\r\n')
    with pytest.raises(FederatedError, match="line 5: column 'note' has no value"):
        ClientTable(path, "who", "note").setup("fit")
    path = write(tmp_path, 'who,note,x\r\n"a, ""b""","two\nlines",1\r\n\r\n\u00e9,-,2')
    data = ClientTable(path, "who", "note", val_fraction=0)
    assert list(data.client_ids) == ['a, "b"', "\u00e9"]
    assert data.classes == ["-", "two\nlines"]


def test_booleans_are_numbers(tmp_path):
    path = write(tmp_path, "who,x,y\na,True,FALSE\na,false,true\n")
    data = ClientTable(path, "who", "y", targets="values", val_fraction=0)
    assert tensors(data, "a") == [[[1.0], [0.0]], [[0.0], [1.0]]]
    for one, other in (("True", "2"), ("2", "True"), ("True", "maybe")):
        path = write(tmp_path, f"who,y,z,x\na,1,1,{one}\na,2,3,{other}\n")
        with pytest.warns(UserWarning, match=f"do not hold numbers: 'x' \\(line 3 holds '{other}'"):
            assert tensors(ClientTable(path, "who", "y", val_fraction=0), "a")[0] == [[1], [3]]
    with pytest.raises(FederatedError, match="line 3: column 'x' has no value"):
        ClientTable(write(tmp_path, "who,x,y\na,True,0\na,,1\n"), "who", "y").setup("fit")


@pytest.mark.parametrize("number", ["1,5", "-0,25", ",5", "1.234,5", "1,5e-3", "1,000", "12,345,678.9"])
@pytest.mark.parametrize("features", [None, ["x"]])
def test_numbers_with_commas_are_rejected(tmp_path, number, features):
    path = write(tmp_path, f'who,x,y,z\na,1,0,3\na,"{number}",1,4\n')
    with pytest.raises(
        FederatedError, match=f"line 3: column 'x' holds '{re.escape(number)}'.*decimal point.*features"
    ):
        ClientTable(path, "who", "y", features=features).setup("fit")
    assert tensors(ClientTable(path, "who", "y", features=["z"], val_fraction=0), "a")[0] == [[3], [4]]


def test_values_are_float32_columns(tmp_path):
    data = ClientTable(write(tmp_path, TABLE), "person", "height", ["age"], targets="values", val_fraction=0)
    assert tensors(data, "bob") == [[[2], [5]], [[2.5], [5.5]]]
    assert data.client_dataset("bob").tensors[1].dtype == torch.float32


def test_classes_that_differ_only_in_case_warn(tmp_path, recwarn):
    path = write(tmp_path, "who,x,y\na,1,True\na,2,TRUE\nb,3,False\nb,4,true\n")
    with pytest.warns(UserWarning, match="column 'y' holds 'TRUE' and 'True', which are two of its 4 classes.*declare"):
        assert len(ClientTable(path, "who", "y", val_fraction=0).client_ids) == 2
    recwarn.clear()
    for classes, text in ((["TRUE", "True", "False", "true"], None), (None, "who,x,y\na,1,True\nb,3,False\n")):
        path = path if text is None else write(tmp_path, text)
        ClientTable(path, "who", "y", val_fraction=0, classes=classes).setup()
    assert not [warning for warning in recwarn if "which are two of" in str(warning.message)]


def test_numeric_classes_sort_as_numbers(tmp_path):
    path = write(tmp_path, "who,x,y\na,1,10\na,2,9\na,3,10\n")
    data = ClientTable(path, "who", "y", val_fraction=0)
    assert tensors(data, "a")[1] == [1, 0, 1]
    assert data.classes == [9, 10]


BIG = 10**16


def test_classes_are_distinguished_by_all_digits(tmp_path):
    path = write(tmp_path, f"who,x,y\na,1,{BIG + 1}\na,2,{BIG}\na,3,5.0\na,4,5\na,5,0.5\n")
    data = ClientTable(path, "who", "y", val_fraction=0)
    assert tensors(data, "a")[1] == [3, 2, 1, 1, 0]
    assert data.classes == [0.5, 5, BIG, BIG + 1]


def test_parquet_classes_are_distinguished_by_all_digits(tmp_path):
    path = write_parquet(tmp_path, who=["a"] * 3, x=[1, 2, 3], y=[BIG + 1, BIG, 5])
    assert tensors(ClientTable(path, "who", "y", val_fraction=0), "a")[1] == [2, 1, 0]


@pytest.mark.parametrize("word", ["NA", "nan", " null", "None"])
def test_missing_value_word_among_numbers_is_not_a_class(tmp_path, word):
    text = f"who,x,y\na,1,0\n\na,2,{word}\nb,3,1\n"
    with pytest.raises(FederatedError, match=f"line 4: column 'y' has no value.*{word}"):
        ClientTable(write(tmp_path, text), "who", "y").setup("fit")
    path = write_parquet(tmp_path, who=["a", "a"], x=[1, 2], y=["0", word])
    with pytest.raises(FederatedError, match=f"row 2: column 'y' has no value.*{word}"):
        ClientTable(path, "who", "y").setup("fit")


def test_missing_value_word_among_words_is_a_name(tmp_path):
    path = write(tmp_path, "who,x,y\nNA,1,yes\nb,2, yes\nb,3,NA\n")
    data = ClientTable(path, "who", "y", val_fraction=0)
    assert list(data.client_ids) == ["NA", "b"]
    assert tensors(data, "b")[1] == [1, 0]
    assert data.classes == ["NA", "yes"]


def test_empty_parquet_texts_are_rejected_with_the_row(tmp_path):
    path = write_parquet(tmp_path, who=["a", " ", "b"], x=[1, 2, 3], y=["u", "v", ""])
    for client, target, message in (("who", "x", "row 2: column 'who'"), ("x", "y", "row 3: column 'y'")):
        with pytest.raises(FederatedError, match=f"{message} has no value"):
            ClientTable(path, client, target).setup("fit")


def test_row_index_is_not_a_feature_unless_listed(tmp_path, caplog):
    path = write(tmp_path, ",who,x,y\n0,a,1,0\n1,a,2,1\n")
    with caplog.at_level(logging.INFO):
        assert tensors(ClientTable(path, "who", "y", val_fraction=0), "a")[0] == [[1], [2]]
        assert "leaves out [''] of" in caplog.text
    assert tensors(ClientTable(path, "who", "y", ["", "x"], val_fraction=0), "a")[0] == [[0, 1], [1, 2]]
    path = write_parquet(tmp_path, who=["a", "a"], x=[1, 2], y=[0, 1], __index_level_0__=[5, 7])
    assert tensors(ClientTable(path, "who", "y", val_fraction=0), "a")[0] == [[1], [2]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.sampled_from([0.0, 0.2, 0.5, 0.9]), st.integers(0, 3))
def test_every_row_is_in_one_part_of_its_own_client(tmp_path_factory, owners, fraction, seed):
    lines = "".join(f"c{owner},{number},{owner}\n" for number, owner in enumerate(owners))
    path = write(tmp_path_factory.mktemp("table"), "who,x,y\n" + lines)
    data = ClientTable(path, "who", "y", val_fraction=fraction, seed=seed)
    data.setup("fit")
    for owner in set(owners):
        rows = {number for number, other in enumerate(owners) if other == owner}
        train = {int(x) for x in data.client_dataset(f"c{owner}").tensors[0]}
        val = {int(x) for x in data.client_val[f"c{owner}"].tensors[0]} if f"c{owner}" in data.client_val else set()
        assert train | val == rows
        assert not train & val
        assert len(val) == min(round(fraction * len(rows)), len(rows) - 1)
    assert (0 if data.val is None else len(data.val)) == sum(map(len, data.client_val.values()))


def test_validation_rows_depend_on_the_seed(tmp_path):
    path = write(tmp_path, "who,x,y\n" + "".join(f"c,{n},0\n" for n in range(50)))

    def drawn(seed):
        data = ClientTable(path, "who", "y", seed=seed)
        data.setup("fit")
        return data.val.tensors[0].flatten().tolist()

    data = ClientTable(path, "who", "y")
    data.setup("fit")
    assert data.test is data.val  # the only one
    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1) != list(range(10))


DAMAGED = [
    ("who,x,y\na,1,0\na,2\n", "line 3: 2 fields under a heading of 3"),
    ("who,x,y\na,1,0\n\na,,0\n", "line 4: column 'x' has no value"),
    ("who,x,y\na,NA,0\n", "line 2: column 'x' has no value"),
    ("who,x,y\na,nan,0\n", "line 2: column 'x' has no value"),
    ("who,x,y\n,1,0\n", "line 2: column 'who' has no value"),
    ("who,x,y\na,1,\n", "line 2: column 'y' has no value"),
    ("who,x,y\na,1,0\na,inf,0\n", "column 'x' must hold finite numbers; line 3 holds 'inf'"),
    ("who,x,y\na,1,0\n\na,1e39,0\n", "line 4: column 'x' must hold finite numbers that float32 can represent"),
    ("who,x,y\na,1_0,0\n", "column 'x' must hold finite numbers; line 2 holds '1_0'. Correct the row, or declare"),
    ("who,x,y\na,true,0\na,7,0\n", "line 3 holds '7' next to true or false. Correct the row, or declare the words"),
    ("who,z,y\na,1,0\n", r"has no column 'x'; its columns are \['who', 'z', 'y'\]"),
    ("who,x,x,y\na,1,1,0\n", "more than one column 'x'"),
    ("who,x,y\n", "has no rows"),
    ("who,x,y", "has no rows"),
    ("", "has no column 'who'"),
    (b"who,x,y\n\xff,1,0\n", "is not utf-8-sig text"),
    ("who,x,y\na,1,0\nb,1,0\na ,2,1\n", "line 4: column 'who' holds 'a ', and elsewhere 'a'"),
    (
        'who,x,y\na,1,0\nb,2,"1\nb,3,0\nb,4,1\n',
        "line 3 is not CSV .the row that begins there has a quote that is not closed",
    ),
]


@pytest.mark.parametrize(("text", "message"), DAMAGED)
def test_corrupt_tables_are_rejected_with_the_location(tmp_path, text, message):
    with pytest.raises(FederatedError, match=message) as caught:
        ClientTable(write(tmp_path, text), "who", "y", features=["x"]).setup("fit")
    assert "table.csv" in str(caught.value)


def test_missing_number_raises_instead_of_dropping_the_column(tmp_path):
    path = write(tmp_path, "who,x,y\na,1,0\na,,0\n")
    with pytest.raises(FederatedError, match="line 3: column 'x' has no value"):
        ClientTable(path, "who", "y").setup("fit")


def test_numbers_out_of_float32_range_are_rejected_in_any_column(tmp_path):
    path = write(tmp_path, "who,x,y\na,3.4028235e38,0\na,0,-1e39\n")
    with pytest.raises(FederatedError, match="line 3: column 'y' must hold finite numbers"):
        ClientTable(path, "who", "y", targets="values").setup("fit")
    with pytest.raises(FederatedError, match="line 3: column 'y' must hold finite numbers"):
        ClientTable(path, "who", "x").setup("fit")
    data = ClientTable(path, "who", "y", features=["x"], val_fraction=0)
    assert tensors(data, "a")[0] == [[float(np.finfo(np.float32).max)], [0]]


def test_unknown_word_in_the_split_column_is_rejected(tmp_path):
    path = write(tmp_path, TABLE.replace("test", "dev"))
    with pytest.raises(FederatedError, match=r"column 'part' must hold \['train', 'val', 'test'\]; found 'dev'"):
        ClientTable(path, "person", "label", ["age"], split="part").setup("fit")


def test_split_without_training_rows_is_rejected(tmp_path):
    path = write(tmp_path, TABLE.replace("train", "val"))
    with pytest.raises(FederatedError, match="column 'part' leaves no row for training"):
        ClientTable(path, "person", "label", ["age"], split="part").setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "table.xlsx"}, "path must end in .csv or .parquet"),
        ({"client": "y"}, r"\['y'\] is named more than once"),
        ({"features": ["x", "x"]}, r"\['x'\] is named more than once"),
        ({"features": []}, "features must be a list of columns, or None"),
        ({"features": "x"}, "features must be a list of columns, or None"),
        ({"targets": "labels"}, "targets must be 'classes' or 'values'"),
        ({"split": "part", "val_fraction": 0.1}, "give one of them"),
        ({"val_fraction": 1}, "val_fraction must be a finite number in"),
        ({"seed": -1}, "seed=-1"),
        ({"classes": ["a", "a"]}, r"classes names a word twice, found \['a', 'a'\]"),
        ({"classes": "ab"}, "classes must be a list of words"),
        ({"classes": ["a"], "targets": "values"}, "values have no classes"),
        ({"categories": ["x"]}, "categories must map columns to lists of words"),
        ({"categories": {"x": []}}, r"categories\['x'\] must be a list of words"),
        ({"categories": {"x": [False, True]}}, r"categories\['x'\] must be a list of words .*in quotes"),
        ({"categories": {"x": 0}}, r"categories\['x'\] must be an integer of at least 1"),
        ({"categories": {"x": True}}, r"categories\['x'\] must be an integer of at least 1"),
        ({"unknown": ["x"]}, r"unknown=\['x'\]\): unknown must be a list of columns of categories"),
        ({"unknown": "x", "categories": {"x": 3}}, "unknown must be a list of columns of categories"),
        ({"ordered": {"x": 3}}, r"ordered\['x'\] must be a list of words"),
        ({"categories": {"y": ["a"]}}, "'y' is the target column, and rules are for inputs"),
        ({"ordered": {"x": ["a"]}, "categories": {"x": ["a"]}}, "'x' is in categories and in ordered"),
        ({"ordered": {"z": ["a"]}, "features": ["x"]}, r"'z' has a rule, and is not among features=\['x'\]"),
        ({"missing": "mean"}, "a rule is a number, 'client_mean', 'indicator' or 'refuse', found 'mean'"),
        ({"missing": {"x": True}}, "a rule is a number, .*, found True"),
        ({"missing": {"x": 0}, "ordered": {"x": ["a"]}}, "'x' holds words, and the rule for words is 'indicator'"),
        ({"missing": {"who": 0}}, "'who' is the client column"),
        ({"decimal": ";"}, "decimal must be '.' or ','"),
        ({"missing": 1e300}, r"missing=1e\+300\): inputs are float32, which cannot represent 1e\+300"),
        ({"missing": {"x": -(10**39)}}, "inputs are float32"),
        ({"delimiter": ""}, "delimiter must be one character"),
        ({"delimiter": "→"}, "delimiter must be one character of ASCII"),
        ({"delimiter": "\0"}, "delimiter must be one character of ASCII"),
        ({"delimiter": ";", "path": "table.parquet"}, "a Parquet file has neither"),
    ],
)
def test_invalid_options_are_rejected_at_construction(options, message):
    with pytest.raises(FederatedError, match=message):
        ClientTable(**({"path": "table.csv", "client": "who", "target": "y"} | options))


def test_quote_inside_a_text_is_literal(tmp_path):
    path = write(tmp_path, 'who,x,size,y\na,1,5",0\na,2,"5""",1\na,3,"6"th,1\n')
    assert tensors(ClientTable(path, "who", "y", features=["x"], val_fraction=0), "a") == [[[1], [2], [3]], [0, 1, 1]]


def test_leading_zeros_do_not_count_as_digits(tmp_path):
    path = write(tmp_path, f"who,x,y\na,{'0' * 5000}7,-{'0' * 5000}\na,-007,+1\n")
    data = ClientTable(path, "who", "y", val_fraction=0)
    assert tensors(data, "a") == [[[7], [-7]], [0, 1]]
    assert data.classes == [0, 1]
    assert [type(value) for value in data.classes] == [int, int]


def test_duplicate_input_names_are_rejected(tmp_path):
    path = write(tmp_path, "who,sex,sex=f,y\na,f,3,0\nb,m,4,1\n")
    with pytest.raises(FederatedError, match="two inputs would be called 'sex=f'"):
        ClientTable(path, "who", "y", categories={"sex": ["f", "m"]}).setup("fit")


def test_missing_table_is_rejected(tmp_path):
    with pytest.raises(FederatedError, match=r"there is no .*none.csv.*Or correct path"):
        ClientTable(str(tmp_path / "none.csv"), "who", "y").setup("fit")


def test_run_trains_on_a_table(tmp_path):
    lines = "".join(f"c{n % 3},{n},{-n},{n % 2}\n" for n in range(30))
    data = ClientTable(write(tmp_path, "who,a,b,y\n" + lines), "who", "y", batch_size=4)
    trainer = FederatedTrainer(max_rounds=2, local_epochs=1, seed=0, logger=False, enable_progress_bar=False)
    trainer.fit(MLPClassifier(in_features=2, num_classes=2, hidden=[], lr=0.01), data)
    assert 0 <= trainer.callback_metrics["val_acc"] <= 1


def write_parquet(tmp_path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_parquet_keeps_numeric_client_ids(tmp_path):
    path = write_parquet(
        tmp_path,
        who=[7, 3, 7],
        x=np.array([1.5, 2.5, 3.5]),
        n=[1, 2, 3],
        on=[True, False, True],
        exact=[Decimal("0.5"), Decimal("1"), Decimal("2.25")],
        text=["1,5", "2", "3"],
        y=["b", "a", "a"],
    )
    data = ClientTable(path, "who", "y", val_fraction=0)
    with pytest.warns(UserWarning, match=r"'text' \(its type is string\)"):
        assert tensors(data, 7) == [[[1.5, 1, 1, 0.5], [3.5, 3, 1, 2.25]], [1, 0]]
    assert list(data.client_ids) == [7, 3]


def test_corrupt_parquet_is_rejected_with_the_row(tmp_path):
    path = write_parquet(
        tmp_path, who=["a", "b", None], x=[1.0, None, 2.0], y=[0, 1, 0], s=["1", "2", "3"], i=[1, 2, np.inf]
    )
    for options, message in (
        ({"features": ["x"], "client": "y", "target": "s"}, "row 2: column 'x' has no value"),
        ({"features": ["y"], "client": "who", "target": "s"}, "row 3: column 'who' has no value"),
        ({"features": ["s"], "client": "y", "target": "i"}, "column 's' must hold finite numbers; its type is string"),
        ({"features": ["i"], "client": "y", "target": "s"}, "row 3: column 'i' must hold finite numbers"),
        ({"features": ["q"], "client": "y", "target": "s"}, "has no column 'q'"),
    ):
        with pytest.raises(FederatedError, match=message):
            ClientTable(path, **options).setup("fit")
    with pytest.raises(FederatedError, match="cannot be read as a Parquet file"):
        ClientTable(write(tmp_path, "who,x\n", "bad.parquet"), "who", "y").setup("fit")


def test_parquet_lists_are_rejected_as_clients_or_classes(tmp_path):
    path = write_parquet(tmp_path, who=["a", "b"], x=[1, 2], y=[[1], [2]])
    for client, target in (("who", "y"), ("y", "who")):
        with pytest.raises(FederatedError, match="column 'y' must hold texts or numbers; its type is list"):
            ClientTable(path, client, target).setup("fit")


def test_folder_is_not_a_table(tmp_path):
    (tmp_path / "table.csv").mkdir()
    with pytest.raises(FederatedError, match=r"table.csv is not a file"):
        ClientTable(str(tmp_path / "table.csv"), "who", "y").setup("fit")


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
def test_missing_pyarrow_raises_at_construction_and_names_the_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FederatedError, match=rf"{name}: .*pip install 'lightning_fed\[tables\]'"):
        ClientTable(name, "who", "y")


# ---------------------------------------------------------------------- tables like those of hospitals

HOSPITAL = """\
ward;age;sex;stage;weight;smoker;day;outcome
north;61;f;II;70,5;yes;01.02.2026;well
north;48;m;I;;no;02.02.2026;ill
north;;m;IV;80;no;03.02.2026;ill
south;70;;III;1,5e2;;04.02.2026;well
south;33;f;I;64,25;yes;05.02.2026;well
"""
RULES = {
    "categories": {"sex": ["m", "f"]},
    "ordered": {"stage": ["I", "II", "III", "IV"], "smoker": ["no", "yes"]},
    "missing": {"age": -1, "weight": "client_mean", "sex": "indicator", "smoker": "indicator"},
    "decimal": ",",
    "delimiter": ";",
}


def test_rules_cover_words_missing_values_and_decimal_commas(tmp_path):
    path = write(tmp_path, HOSPITAL)
    data = ClientTable(path, "ward", "outcome", classes=["well", "ill"], val_fraction=0, **RULES)
    with pytest.warns(UserWarning, match=r"leaves out columns .*'day' \(line 2 holds '01.02.2026'\)"):
        north, labels = tensors(data, "north")
    assert data.feature_names == [
        "age", "sex=m", "sex=f", "sex missing", "stage", "weight", "smoker", "smoker missing"
    ]  # fmt: skip
    assert north == [
        [61, 0, 1, 0, 1, 70.5, 1, 0],
        [48, 1, 0, 0, 0, 75.25, 0, 0],  # the mean of this client
        [-1, 1, 0, 0, 3, 80, 0, 0],
    ]
    assert labels == [0, 1, 1]
    assert tensors(data, "south") == [[[70, 0, 0, 1, 2, 150, 0, 1], [33, 0, 1, 0, 0, 64.25, 1, 0]], [0, 0]]
    assert data.classes == ["well", "ill"]
    own = ClientTable(path, "ward", "outcome", ["weight", "sex"], val_fraction=0, **{
        **RULES, "ordered": None, "missing": {"weight": 0.5, "sex": "indicator"}
    })  # fmt: skip
    assert tensors(own, "north")[0] == [[70.5, 0, 1, 0], [0.5, 1, 0, 0], [80, 1, 0, 0]]


def test_parquet_supports_the_same_rules(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({
        "ward": ["a", "a", "b"], "age": pa.array([1, None, 2**60], pa.int64()),
        "sex": pa.array(["f", None, "m"]).dictionary_encode(), "is_old": pa.array([True, None, False]), "y": [0, 1, 0],
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "t.parquet")
    rules = {"categories": {"sex": ["f", "m"]}, "missing": {"age": "client_mean", "sex": "indicator", "is_old": 0.5}}
    data = ClientTable(str(tmp_path / "t.parquet"), "ward", "y", val_fraction=0, **rules)
    assert tensors(data, "a")[0] == [[1, 1, 0, 0, 1], [1, 0, 0, 1, 0.5]]
    assert tensors(data, "b")[0] == [[2**60, 0, 1, 0, 0]]


def test_client_mean_uses_only_its_own_training_rows(tmp_path):
    text = "who,x,z,y,part\na,1,1,0,train\na,3,1,0,train\na,,1,1,val\na,100,1,0,val\nb,9,1,1,train\nb,,1,0,test\n"
    data = ClientTable(write(tmp_path, text), "who", "y", ["x", "z"], split="part", missing="client_mean")
    data.setup("fit")
    assert data.val.tensors[0].tolist() == [[2, 1], [100, 1]]
    assert data.test.tensors[0].tolist() == [[9, 1]]
    text = text.replace("b,9", "b,")
    data = ClientTable(write(tmp_path, text), "who", "y", ["x", "z"], split="part", missing="client_mean")
    with pytest.raises(FederatedError, match=r"table.csv: client 'b' has no value of column 'x' in its training rows"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("old", "new", "rules", "message"),
    [
        ("61;f", "61;w", {}, r"line 2: column 'sex' holds 'w', and its words are \['m', 'f'\]"),
        ("II;70", ";70", {}, "line 2: column 'stage' has no value"),
        ("70,5", "70.5", {}, "line 2: column 'weight' holds '70.5'.*decimal comma and without points"),
        ("70,5", "1.070,5", {}, "line 2: column 'weight' holds '1.070,5'.*decimal comma and without points"),
        ("70,5", "much", {}, "column 'weight' must hold finite numbers; line 2 holds 'much'"),
        (";well", ";dead", {"classes": ["well", "ill"]}, "line 2: column 'outcome' holds 'dead', and its words are"),
        ("ward;", "ward;", {"delimiter": ","}, "seem to be separated by ';': set delimiter"),
        ("ward;", "ward;", {"decimal": "."}, "line 2: column 'weight' holds '70,5'.*set decimal=','"),
        ("ward;", "ward;", {"missing": {"age": 0, "weight": 0}}, "line 5: column 'sex' has no value"),
    ],
)
def test_value_without_a_rule_is_rejected_with_line_and_column(tmp_path, old, new, rules, message):
    data = ClientTable(write(tmp_path, HOSPITAL.replace(old, new, 1)), "ward", "outcome", **{**RULES, **rules})
    with pytest.raises(FederatedError, match=message) as caught:
        data.setup("fit")
    assert "table.csv" in str(caught.value)


def test_single_rule_applies_to_all_numeric_columns_only(tmp_path):
    path = write(tmp_path, "who,x,z,sex,y\na,,2,f,0\na,1,,m,1\n")
    data = ClientTable(path, "who", "y", val_fraction=0, categories={"sex": ["f", "m"]}, missing="indicator")
    assert tensors(data, "a")[0] == [[0, 1, 2, 0, 1, 0], [1, 0, 0, 1, 0, 1]]
    path = write(tmp_path, "who,x,z,sex,y\na,,2,f,0\na,1,,,1\n")
    with pytest.raises(FederatedError, match="line 3: column 'sex' has no value"):
        ClientTable(path, "who", "y", categories={"sex": ["f", "m"]}, missing=0.0).setup("fit")
    with pytest.raises(FederatedError, match="column 'y' has no value"):
        ClientTable(write(tmp_path, "who,x,y\na,1,\n"), "who", "y", targets="values", missing=0.0).setup("fit")


def test_reserved_word_columns_use_words_of_the_file_or_agreed_ones(tmp_path):
    path = write(tmp_path, "who,ward,no,y\na, eye ,10,0\na,Eye,9,1\na,,9,1\n")
    rules = {"categories": {"ward": 3, "no": 2}, "missing": {"ward": "indicator"}, "val_fraction": 0}
    data = ClientTable(path, "who", "y", classes=["0", "1"], **rules)
    assert data.column_words(["no", "ward"]) == {"no": ["9", "10"], "ward": ["Eye", "eye"]}
    own = [[0, 1, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 0]]
    assert tensors(data, "a")[0] == own
    assert data.feature_names == ["ward=Eye", "ward=eye", "ward unused 3", "ward missing", "no=9", "no=10"]
    with pytest.raises(FederatedError, match=r"words of column 'ward' come from the rows.*agree_on=\['ward'\]"):
        data.describe_columns()
    agreed = {"ward": ["Eye", "arm", "eye"], "no": ["9", "10"]}
    data.use_words(agreed)
    agreed["ward"].reverse()  # the table has its own copy
    assert tensors(data, "a")[0] == [[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 0]]
    assert data.describe_columns()[:3] == ["ward=Eye", "ward=arm", "ward=eye"]
    data.use_words({})
    assert tensors(data, "a")[0] == own
    for words, message in (
        ({"ward": ["eye"]}, r"line 3: column 'ward' holds 'Eye', and its words are \['eye'\]"),
        ({"no": ["8", "9", "10"]}, r"column 'no' has 3 words, and categories=\{'no': 2\} is room for 2"),
    ):
        data.use_words(words)
        with pytest.raises(FederatedError, match=message):
            data.setup("fit")
    data = ClientTable(path, "who", "y", classes=["0", "1"], **rules, unknown=["ward"])
    assert tensors(data, "a")[0] == [[*row[:3], 0, *row[3:]] for row in own]
    data.use_words({"ward": ["eye"]})
    assert tensors(data, "a")[0] == [[1, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0]]
    assert data.feature_names[:5] == ["ward=eye", "ward unused 2", "ward unused 3", "ward unknown", "ward missing"]
    with pytest.raises(FederatedError, match="the table has no room for them.*categories="):
        data.column_words(["y"])
    for call in (FederatedDataModule.column_words, FederatedDataModule.use_words):
        with pytest.raises(FederatedError, match="FederatedDataModule has no words to agree on.*agree_on unset"):
            call(FederatedDataModule(clients={"a": [(1.0, 0)]}), {"ward": ["eye"]})
