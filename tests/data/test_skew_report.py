"""The picture and the table of a split match its contents, and so does the output of their command."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed import data
from lightning_fed.cli.data import picture
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import ByKey, Digits, Dirichlet, FederatedDataModule, FederatedDataset, Iid, Partition
from lightning_fed.data.skew_report import skew_table, split_figure
from tests.helpers.optional import needs_matplotlib

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SPLIT = {
    "ann": torch.tensor([3, 3, 5, 5]),
    "bob": torch.tensor([3, 3, 3, 3]),
    "eve": torch.tensor([], dtype=torch.long),
}


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def bubbles(figure):
    """Return (client's place, class's place) -> area."""
    (drawn,) = figure.axes[0].collections
    return {
        (int(x), int(y)): float(s) for (x, y), s in zip(drawn.get_offsets().tolist(), drawn.get_sizes(), strict=True)
    }


def test_skew_table_matches_hand_computed_values():
    table = skew_table(SPLIT)
    assert (table.clients, table.empty_clients, table.examples, table.classes) == (3, 1, 8, 2)
    assert (table.min_size, table.median_size, table.max_size) == (0, 4.0, 4)
    assert table.label_distance == pytest.approx(0.25)  # (1/2, 1/2) and (1, 0) to (3/4, 1/4), weights 1/2
    assert table.label_entropy == pytest.approx(0.5)  # one bit and none
    assert table.global_entropy == pytest.approx(2 - 0.75 * 1.584962500721156)
    assert table.size_gini == pytest.approx(1 / 3)  # sizes 0, 4, 4


@pytest.mark.parametrize(("sizes", "gini"), [((5, 5, 5), 0.0), ((0, 0, 0, 8), 0.75), ((1, 3), 0.25), ((7,), 0.0)])
def test_gini_of_sizes_matches_expected_values(sizes, gini):
    assert skew_table([torch.zeros(n, dtype=torch.int64) for n in sizes]).size_gini == pytest.approx(gini)


def test_skew_table_prints_labeled_rows():
    assert str(skew_table(SPLIT)).splitlines() == [
        "clients              3 (1 empty)",
        "examples             8 of 2 classes",
        "examples per client  min 0, median 4, max 4",
        "Gini of the sizes    0.333 (0: equal sizes)",
        "label distance       0.250 (total variation; 0: every client's labels are like all)",
        "label entropy        0.500 bits per client, 0.811 of all",
    ]


def test_label_distance_matches_the_summary():
    clients = Digits(num_clients=12, alpha=0.2).clients
    assert f"label skew     {skew_table(clients).label_distance:.2f}" in clients.summary()


class OnDemand(FederatedDataModule):
    num_clients = 3

    def client_dataset(self, client_id):
        return TensorDataset(torch.zeros(client_id + 1, 2), torch.full((client_id + 1,), client_id))


class Listed(Dataset):
    """Counts how often its labels are read."""

    reads = 0

    @property
    def targets(self):
        self.reads += 1
        return [0, 1, 1, 1]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


def test_skew_table_supports_every_kind_of_clients():
    labels = torch.arange(40) % 4
    source = TensorDataset(torch.zeros(40, 1), labels)
    for part in (Iid(4), Dirichlet(4, 0.5)):
        expected = vars(skew_table([labels[indices] for indices in part(labels)]))  # dictionaries take nan for itself
        built = FederatedDataset.from_partition(source, part)
        assert vars(skew_table(built)) == expected
        assert vars(skew_table(FederatedDataModule(train=source, partition=part))) == expected
        assert vars(skew_table(FederatedDataModule(clients=[built.dataset(i) for i in range(4)]))) == expected
        given = FederatedDataset.from_partition(TensorDataset(torch.zeros(40, 1)), part, labels=labels)
        assert vars(skew_table(given)) == expected
    own = [torch.tensor([0]), torch.tensor([1, 1]), torch.tensor([2, 2, 2])]
    assert vars(skew_table(OnDemand())) == vars(skew_table(own))
    named = {"a": torch.tensor([0, 0]), "b": torch.tensor([1])}
    assert vars(skew_table([[0, 0], [1]])) == vars(skew_table(named))


def test_shared_labels_are_read_once():
    source = Listed()
    table = skew_table(FederatedDataset([Subset(source, [0, 1]), Subset(source, [2, 3]), Subset(source, [])]))
    assert (table.examples, table.max_size, table.empty_clients) == (4, 2, 1)
    assert source.reads == 1


@needs_matplotlib
def test_figure_shows_class_counts_per_client():
    figure = split_figure(SPLIT)
    areas = bubbles(figure)
    assert set(areas) == {(0, 0), (0, 1), (1, 0)}  # eve has no examples
    assert areas[0, 0] == pytest.approx(areas[1, 0] / 2)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["ann", "bob", "eve"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["3", "5"]
    assert titles(figure) == ["examples by class, 3 clients", "sizes"]
    assert sum(bar.get_height() for bar in figure.axes[1].patches) == 3


@needs_matplotlib
def test_figure_samples_clients_evenly_and_counts_all_sizes():
    figure = split_figure([torch.tensor([client]) for client in range(101)], max_clients=5)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["0", "25", "50", "75", "100"]
    assert titles(figure)[0] == "examples by class, 5 of 101 clients"
    assert sum(bar.get_height() for bar in figure.axes[1].patches) == 101
    assert titles(split_figure(SPLIT, max_clients=1))[0] == "examples by class, 1 of 3 clients"


@needs_matplotlib
def test_figure_does_not_import_pyplot(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    split_figure(SPLIT).savefig(tmp_path / "split.png")
    assert ("matplotlib.pyplot" in sys.modules) == before
    assert (tmp_path / "split.png").read_bytes()[:4] == b"\x89PNG"


NUMBERS = [  # the mean of all is 3 with variance 4; the variance within clients is 1
    TensorDataset(torch.zeros(2, 3), torch.tensor([[0.0], [2.0]])),
    TensorDataset(torch.zeros(2, 3), torch.tensor([[4.0], [6.0]])),
    TensorDataset(torch.zeros(0, 3), torch.zeros(0, 1)),
]


def test_real_valued_targets_have_their_own_table():
    table = skew_table(FederatedDataset(NUMBERS))
    assert (table.clients, table.empty_clients, table.examples, table.classes) == (3, 1, 4, 0)
    assert table.target_share == pytest.approx(4 / 5)
    assert str(table).splitlines() == [
        "clients              3 (1 empty)",
        "examples             4",
        "examples per client  min 0, median 2, max 2",
        "Gini of the sizes    0.333 (0: equal sizes)",
        "targets              0.800 of their variance lies between clients",
    ]
    pooled = TensorDataset(torch.zeros(4, 3), torch.tensor([[0.0], [2.0], [4.0], [6.0]]))
    cut = FederatedDataset.from_partition(pooled, ByKey(["ann", "ann", "bob", "bob"]))
    assert vars(skew_table(cut)) == vars(skew_table(FederatedDataset(NUMBERS[:2])))
    assert skew_table(FederatedDataset([TensorDataset(torch.zeros(2, 1), torch.ones(2))])).target_share == 0.0


@needs_matplotlib
def test_figure_shows_the_range_of_real_valued_targets():
    figure = split_figure(FederatedDataset(NUMBERS))
    assert titles(figure) == ["examples by target, 3 clients", "sizes"]
    (medians,) = figure.axes[0].lines
    assert medians.get_xydata().tolist() == [[0, 1], [1, 5]]
    ranges, quartiles = (
        [segment[:, 1].tolist() for segment in lines.get_segments()] for lines in figure.axes[0].collections
    )
    assert ranges == [[0, 2], [4, 6]]
    assert quartiles == [[0.5, 1.5], [4.5, 5.5]]
    assert sum(bar.get_height() for bar in figure.axes[1].patches) == 3


def test_class_labels_take_precedence_over_trailing_numbers():
    weighted = TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]), torch.rand(2))
    assert skew_table(FederatedDataset([weighted])).classes == 2


def test_mixed_class_and_real_valued_targets_are_rejected():
    with pytest.raises(FederatedError, match="Some clients have classes to predict, and others real numbers"):
        skew_table(FederatedDataset([NUMBERS[0], TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]))]))


def test_missing_matplotlib_raises_an_install_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FederatedError, match="pip install matplotlib"):
        split_figure(SPLIT)
    assert skew_table(SPLIT).clients == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: skew_table([]), r"0 clients and 0 examples"),
        pytest.param(lambda: split_figure([torch.zeros(0)]), r"1 clients and 0 examples", marks=needs_matplotlib),
        (lambda: skew_table({"ann": torch.rand(3)}), r"Client 'ann' has labels of torch.float32 and shape \[3\]"),
        (lambda: skew_table([torch.zeros(2, 2).long()]), r"Client 0.*shape \[2, 2\]"),
        (lambda: skew_table("labels"), r"split=str: give each client's labels"),
        (lambda: skew_table(7), r"split=int"),
        (lambda: skew_table([TensorDataset(torch.zeros(2))]), r"Client 0 has a TensorDataset.*FederatedDataset"),
        pytest.param(
            lambda: split_figure(SPLIT, max_clients=0), r"split_figure\(max_clients=0\)", marks=needs_matplotlib
        ),
        (
            lambda: skew_table(FederatedDataset([TensorDataset(torch.rand(2, 2))])),
            r"Cannot find labels in TensorDataset",
        ),
    ],
)
def test_errors_say_what_was_found(make, message):
    with pytest.raises(FederatedError, match=message):
        make()


@needs_matplotlib
def test_command_saves_the_figure_and_prints_the_table(tmp_path, capsys):
    out = tmp_path / "new" / "split.png"
    picture(["--config", QUICKSTART, "--data.num_clients", "12", "--out", str(out)])
    shown = capsys.readouterr().out
    assert str(skew_table(Digits(num_clients=12, alpha=0.3))) in shown
    assert f"picture              {out}" in shown
    assert out.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.thorough
@needs_matplotlib
def test_command_supports_partitions_and_stacked_configurations(tmp_path, capsys):
    (tmp_path / "more.yaml").write_text(
        yaml.safe_dump(
            {
                "data": {
                    "class_path": "lightning_fed.data.Digits",
                    "init_args": {
                        "partition": {
                            "class_path": "lightning_fed.data.BalancedDirichlet",
                            "init_args": {"num_clients": 7, "alpha": 0.1, "concentration": "total"},
                        }
                    },
                },
                "model": {"class_path": "no.such.Model"},  # only the data are created
                "ckpt_path": None,
            }
        )
    )
    picture(["-c", QUICKSTART, "-c", str(tmp_path / "more.yaml"), "--out", str(tmp_path / "split.svg")])
    assert "min 179, median 180, max 180" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.alfa", "1"], "alfa"),
        (["--max_clients", "many"], "max_clients"),
        (["--max_clients", "0"], "max_clients=0"),
        (["--data", "Digitz"], "Digitz"),
        pytest.param(
            ["--config", QUICKSTART, "--out", "split.abc"],
            r"--out split.abc: matplotlib cannot write",
            marks=needs_matplotlib,
        ),
    ],
    ids=lambda a: " ".join(a)[-20:],
)
def test_command_names_invalid_arguments(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [] if "--config" in args else ["--config", QUICKSTART]
    with pytest.raises((SystemExit, FederatedError)) as error:
        picture([*base, *args])
    assert message in capsys.readouterr().err + str(error.value)


def test_docs_page_shows_every_partition():
    page = (ROOT / "docs" / "partitions.md").read_text()
    classes = {name: found for name, found in vars(data).items() if isinstance(found, type)}
    for name in {name for name, found in classes.items() if issubclass(found, Partition)} - {"Partition", "ByKey"}:
        assert f"\n## {name}\n" in page
    for path in (ROOT / "docs" / "images" / "partitions").glob("*.png"):
        assert f"(images/partitions/{path.name})" in page
        assert path.stat().st_size < 60_000
