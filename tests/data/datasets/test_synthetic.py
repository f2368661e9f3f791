"""FedProx's synthetic data: the statistics of the recipe, and the published test parts if available.

Set ``LIGHTNING_FED_DATA`` to a folder with ``fedprox_synthetic/synthetic_1_1/data/test/mytest.json`` and its like.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.data import Synthetic

VARIANCES = torch.arange(1, 61) ** -1.2


def parts(data):
    """Return each client's training and test tensors."""
    return [(data.client_dataset(k).tensors, data.client_val_dataset(k).tensors) for k in data.client_ids]


def whole(data):
    """Return each client's inputs and labels, training and test parts together."""
    return [tuple(torch.cat(pair) for pair in zip(*client, strict=True)) for client in parts(data)]


def centers(clients):
    """Return each client's mean input [N, 60]."""
    return torch.stack([x.mean(0) for x, _ in clients])


def within(clients):
    """Return the variance of each feature within clients, relative to the recipe's."""
    squares = sum((x - x.mean(0)).square().sum(0) for x, _ in clients)
    return squares / sum(len(x) - 1 for x, _ in clients) / VARIANCES


def num_classes(labels):
    """Return the mean number of classes that a client has."""
    return sum(len(y.unique()) for y in labels) / len(labels)


@pytest.fixture(scope="module")
def data():
    return Synthetic(alpha=1.0, beta=1.0)


def test_defaults_are_thirty_clients_sixty_features_and_ten_classes(data):
    assert data.num_clients == 30
    (x, y), _ = parts(data)[0]
    assert (x.shape[1], x.dtype, y.dtype) == (60, torch.float32, torch.int64)
    labels = torch.cat([y for _, y in whole(data)])
    assert labels.unique().tolist() == list(range(10))
    assert data.client_batches(0).settings.batch_size == 10


def test_every_client_is_split_and_test_parts_are_pooled(data):
    for (x, y), (x_test, y_test) in parts(data):
        n = len(x) + len(x_test)
        assert n >= 50
        assert len(x) == len(y) == int(0.8 * n)
        assert len(y_test) == len(x_test)
        assert len(torch.cat([x, x_test]).unique(dim=0)) == n
    pooled = [torch.cat(tensors) for tensors in zip(*(test for _, test in parts(data)), strict=True)]
    for dataset in (data.val, data.test):
        assert all(torch.equal(*pair) for pair in zip(dataset.tensors, pooled, strict=True))
    assert sum(len(x) for x, _ in whole(Synthetic(test_fraction=0.1, num_clients=4))) == sum(
        len(x) for x, _ in whole(data)[:4]
    )


def test_sizes_are_fifty_plus_a_lognormal():
    sizes = torch.tensor([len(y) for seed in range(5) for _, y in whole(Synthetic(seed=seed))])
    tail = [(sizes - 50 > torch.exp(torch.tensor(4 + 2 * z))).float().mean().item() for z in (-1.0, 0.0, 1.0)]
    assert tail == pytest.approx([0.841, 0.5, 0.159], abs=4 * (0.25 / len(sizes)) ** 0.5)  # four standard errors


def test_inputs_follow_their_distribution(data):
    clients = whole(data)
    assert within(clients).sub(1).abs().max() < 0.1
    v = centers(clients)
    own = (v - v.mean(1, keepdim=True)).square().sum(1) / 59
    assert own.mean().item() == pytest.approx(1, abs=0.15)
    assert v.mean(1).std().item() == pytest.approx(1, abs=0.4)  # B_k, thirty of them


def test_beta_shifts_the_inputs_together():
    at_zero, at_one, at_four = (centers(whole(Synthetic(beta=beta, num_clients=8))) for beta in (0.0, 1.0, 4.0))
    shift = at_one - at_zero
    assert shift.std(dim=1).max() < 1e-5  # the same in all features of a client
    assert torch.allclose(at_four - at_zero, 4 * shift, rtol=0, atol=1e-5)
    variance = centers(whole(Synthetic(beta=4.0, num_clients=8, spread="variance")))
    assert torch.allclose(variance - at_zero, 2 * shift, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 0.5), (1.0, 1.0), (100.0, 1.0)])
def test_alpha_shifts_all_logits_equally_and_changes_no_label(alpha, beta):
    for (x, y), (x0, y0) in zip(whole(Synthetic(alpha, beta)), whole(Synthetic(0.0, beta)), strict=True):
        assert torch.equal(x, x0)
        assert torch.equal(y, y0)


def linear_accuracy(x, y):
    """Return the training accuracy of the best logistic regression."""
    inputs, weight = torch.cat([x, torch.ones(len(x), 1)], dim=1), torch.zeros(61, 10, requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=300, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        loss = torch.nn.functional.cross_entropy(inputs @ weight, y)
        loss.backward()
        return loss

    solver.step(closure)
    return ((inputs @ weight).argmax(1) == y).float().mean().item()


def test_labels_are_linear_in_the_inputs(data):
    x, y = (torch.cat(tensors) for tensors in zip(*whole(Synthetic(iid=True, num_clients=10)), strict=True))
    assert len(y.unique()) == 10
    assert linear_accuracy(x, y) > 0.99  # one labelling for all clients
    assert linear_accuracy(*max(whole(data), key=lambda client: len(client[1].unique()))) > 0.99


def test_each_client_has_its_own_labeling(data):
    assert len({int(y.mode().values) for _, y in whole(data)}) >= 6
    assert len({int(y.mode().values) for _, y in whole(Synthetic(iid=True))}) <= 3


def test_iid_clients_share_one_distribution():
    clients = whole(Synthetic(iid=True))
    sizes = torch.tensor([len(y) for _, y in clients])
    standard = centers(clients) * sizes.sqrt()[:, None] / VARIANCES.sqrt()
    assert standard.abs().max() < 5
    assert standard.std().item() == pytest.approx(1, abs=0.1)
    assert within(clients).sub(1).abs().max() < 0.1


def test_client_depends_only_on_the_seed_and_its_number(data):
    for other, same in (
        (Synthetic(1.0, 1.0, num_clients=5), True),
        (Synthetic(1.0, 1.0, num_clients=5, seed=1), False),
    ):
        for (x, y), (x_other, y_other) in zip(whole(data)[:5], whole(other), strict=True):
            assert (torch.equal(x, x_other) and torch.equal(y, y_other)) == same
    large = Synthetic(num_clients=1, seed=2**32)  # no bits of the seed are lost
    assert not torch.equal(whole(large)[0][0][:1], whole(Synthetic(num_clients=1))[0][0][:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, r"alpha=-1.0\): alpha must be a finite number in \[0, inf\)"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"alpha": 1.0, "iid": True}, "Leave alpha and beta at 0, or drop iid"),
        ({"spread": "deviation"}, "spread must be 'std' or 'variance'"),
        ({"test_fraction": 0.95}, r"must be a finite number in \(0, 0.9\)"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(FederatedError, match=message):
        Synthetic(**options)


SETS = {
    "synthetic_0_0": {},
    "synthetic_0.5_0.5": {"alpha": 0.5, "beta": 0.5},
    "synthetic_1_1": {"alpha": 1.0, "beta": 1.0},
    "synthetic_iid": {"iid": True},
}


def published(name):
    """Return the clients' inputs and labels of a published test part: a tenth of each client's examples."""
    folder = os.environ.get("LIGHTNING_FED_DATA")
    if not folder:
        pytest.skip("LIGHTNING_FED_DATA does not name a folder of data sets")
    path = Path(folder) / "fedprox_synthetic" / name / "data" / "test" / "mytest.json"
    if not path.exists():
        pytest.skip(f"LIGHTNING_FED_DATA has no {path.relative_to(folder)}")
    content = json.loads(path.read_text())
    users = [content["user_data"][user] for user in content["users"]]
    return [(torch.tensor(user["x"]), torch.tensor(user["y"]).long()) for user in users]


@pytest.fixture(scope="module")
def drawn():
    """Return test parts of a tenth, drawn five times for every set. Skip without published ones."""
    published(next(iter(SETS)))
    return {
        name: [
            client
            for seed in range(5)
            for client in Synthetic(**options, test_fraction=0.1, seed=seed).client_val.values()
        ]
        for name, options in SETS.items()
    }


def test_sizes_match_the_published_ones(drawn):
    theirs = torch.cat([torch.tensor([len(y) for _, y in published(name)]) for name in SETS]).double()
    ours = torch.tensor([len(part) for part in drawn["synthetic_0_0"]]).double()
    grid = torch.cat([ours, theirs]).unique()[:, None]
    distance = ((ours <= grid).double().mean(1) - (theirs <= grid).double().mean(1)).abs().max().item()
    assert len(theirs) == 120
    assert distance < 1.63 * (1 / len(ours) + 1 / len(theirs)) ** 0.5  # Kolmogorov and Smirnov, at the 1 % level


@pytest.mark.parametrize("name", SETS)
def test_labels_and_inputs_match_the_published_ones(name, drawn):
    theirs, ours = published(name), [part.tensors for part in drawn[name]]
    # Three standard deviations between draws. One is 0.15 classes, and 0.8 if all clients share one W.
    bound = 2.4 if name == "synthetic_iid" else 0.45
    assert num_classes([y for _, y in ours]) == pytest.approx(num_classes([y for _, y in theirs]), abs=bound)
    assert within(theirs).sub(1).abs().max() < 0.2  # some 800 examples: a standard error of 0.05 per feature
    assert within(ours).sub(1).abs().max() < 0.2
    spreads = [(centers(c) - centers(c).mean(1, keepdim=True)).std().item() for c in (ours, theirs)]
    assert spreads[0] == pytest.approx(spreads[1], abs=0.1)  # v_k: 1, and 0 for the same clients
    shifts = [centers(c).mean(1).std().item() for c in (ours, theirs)]
    assert shifts[0] == pytest.approx(shifts[1], abs=0.3)  # B_k: beta, from thirty numbers
