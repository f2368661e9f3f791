"""Simulated attacks: the choice of bad clients, their messages and data, and refusals."""

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, FedDyn, FedNova, Mime, Scaffold, ServerOnly, SGDm
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.batches import ChangedBatches, RepeatedBatches
from lightning_fed.server import QSGD, Attack, CoordinateMedian, LabelFlipAttack, NoiseAttack, SignFlipAttack, TopK
from lightning_fed.server.attacks import attacked
from lightning_fed.server.participation import Population
from tests.helpers.engines import Ordinary, assert_agree, run, state_of
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, clients, data, fit, seeded, trainer


def population(ids: Any = range(10)) -> Population:
    return Population(ids, [5] * len(ids))


# ------------------------------------------------------------------ the bad clients


def test_attackers_are_drawn_from_the_seed() -> None:
    attack = SignFlipAttack(0.3)
    assert len(attack.attackers(0, population())) == len(SignFlipAttack(0.25).attackers(0, population())) == 3
    assert attack.attackers(0, population()) == attack.attackers(0, population())
    assert len({attack.attackers(seed, population()) for seed in range(10)}) > 5
    assert attack.attackers(0, population()) == NoiseAttack(0.3, std=1.0).attackers(0, population())
    assert SignFlipAttack(0.0).attackers(0, population()) == frozenset()
    assert SignFlipAttack(1.0).attackers(0, population()) == frozenset(range(10))


def test_attackers_may_be_listed_by_id() -> None:
    assert SignFlipAttack(["c", "a"]).attackers(0, population(["a", "b", "c"])) == {0, 2}
    with pytest.raises(
        FederatedError, match=r"attack=SignFlipAttack.* has 'x', not ids of the data module's 3 clients"
    ):
        SignFlipAttack(["a", "x"]).attackers(0, population(["a", "b", "c"]))


# ------------------------------------------------------------------ their messages


class Sent(Algorithm):
    """FedAvg that keeps the mean messages of each round."""

    def __init__(self) -> None:
        self._means: list[Tensor] = []

    def update_server(self, x: Tensor, server: Any, mean: Any, cohort: Any) -> Any:
        self._means.append(mean["delta"].clone())
        return super().update_server(x, server, mean, cohort)


def mean_update(attack: Attack | None, engine: str = "sequential", **options: Any) -> Tensor:
    """Return the mean update of all clients in one round, as the server received it."""
    algorithm = Sent()
    given = {"weighting": "uniform", "clients_per_round": 6, "max_rounds": 1, "limit_val_batches": 0, **options}
    run(engine, algorithm=algorithm, attack=attack, **given)
    return algorithm._means[0]


class Changes(FederatedCallback):
    """Keeps each client's own update of one round."""

    def __init__(self) -> None:
        self.x: Tensor = torch.zeros(0)
        self.of: dict[ClientId, Tensor] = {}

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.x = trainer.fit_loop.state.x.clone()

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.of[client_report.client_id] = trainer.fit_loop.client_model[0].clone() - self.x


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_server_averages_the_flipped_messages(engine: str) -> None:
    seen = Changes()
    found = mean_update(SignFlipAttack([1, 4], scale=3.0), engine, callbacks=[seen])
    own = [-3.0 * change if i in (1, 4) else change for i, change in sorted(seen.of.items())]
    torch.testing.assert_close(found, torch.stack(own).mean(dim=0), rtol=1e-12, atol=1e-14)


def test_noise_replaces_the_message_and_differs_per_client() -> None:
    seen = Changes()
    found = mean_update(NoiseAttack([2], std=5.0), callbacks=[seen])
    honest = torch.stack([change for i, change in seen.of.items() if i != 2]).sum(dim=0)
    noise = 6 * found - honest
    assert float(noise.std()) == pytest.approx(5.0, rel=0.1)
    assert abs(float(noise.mean())) < 1.5
    assert torch.equal(found, mean_update(NoiseAttack([2], std=5.0)))
    other = 6 * mean_update(NoiseAttack([3], std=5.0), callbacks=[again := Changes()])
    other = other - torch.stack([change for i, change in again.of.items() if i != 3]).sum(dim=0)
    assert float((other - noise).abs().max()) > 1.0


def test_message_sent_under_two_names_is_attacked_once() -> None:
    both, noise = torch.ones(4), torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    stream = torch.Generator().manual_seed(0)
    sent = attacked(NoiseAttack(0.5, 1.0), {"a": both, "b": both, "c": torch.ones(4)}, stream)
    assert sent["a"] is sent["b"]
    assert torch.equal(torch.stack([sent["a"], sent["c"]]), noise)


def test_messages_that_start_at_one_place_are_attacked_each() -> None:
    numbers = torch.arange(8.0)
    send = {"half": numbers[:4], "even": numbers[::2]}
    sent = attacked(SignFlipAttack(0.5), send, torch.Generator())
    assert sent["half"].tolist() == [0, -1, -2, -3]
    assert sent["even"].tolist() == [0, -2, -4, -6]


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "as a NoneType"), (torch.ones(2), r"of shape \[2\], in place of 'a'")],
)
def test_custom_attack_with_an_invalid_result_is_rejected(returned: Any, message: str) -> None:
    class Own(Attack):
        def message(self, message: Tensor, stream: torch.Generator) -> Any:
            return returned

    with pytest.raises(
        FederatedError, match=f"Own.message returned a message {message}.* of shape .3.: it must be a tensor"
    ):
        attacked(Own(0.5), {"a": torch.ones(3)}, torch.Generator())


def test_attacked_view_of_another_message_keeps_its_shape() -> None:
    whole = torch.ones(4)
    sent = attacked(SignFlipAttack(0.5, 2.0), {"first": whole[:1], "whole": whole}, torch.Generator())
    assert sent["first"].tolist() == [-2]
    assert sent["whole"].tolist() == [-2] * 4


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "attack"),
    [
        (Scaffold(), SignFlipAttack(0.5, 2.0)),
        *(
            (algorithm, attack)
            for algorithm in (FedAvg(), Scaffold("i"), FedDyn(1.0), FedNova(), Mime(SGDm()), ServerOnly())
            for attack in (SignFlipAttack(0.5, 2.0), NoiseAttack([1, 4], 0.5), LabelFlipAttack(0.5, CLASSES))
        ),
    ],
    ids=repr,
)
def test_engines_and_chunk_sizes_agree(algorithm: Algorithm, attack: Attack) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "attack": attack, "limit_val_batches": 0, "clients_per_round": 6}
    if not algorithm.local_work:
        options["local_epochs"] = None
    one = run("sequential", **options)
    assert_agree(one, run("vectorized", chunk_size=4, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("compression", [TopK(0.2), QSGD(7)], ids=repr)
def test_messages_are_attacked_before_compression(compression: Any) -> None:
    options = {"attack": SignFlipAttack(0.5), "compression": compression, "aggregator": CoordinateMedian()}
    assert_agree(run("sequential", **options), run("vectorized", chunk_size=4, **options))


def test_full_batch_gradients_are_attacked() -> None:
    momenta = [
        run("sequential", algorithm=Mime(SGDm()), attack=attack, max_rounds=1).fit_loop.server["m"]
        for attack in (None, SignFlipAttack(1.0))
    ]
    torch.testing.assert_close(momenta[0], -momenta[1], rtol=1e-12, atol=0.0)
    noise = [
        run("sequential", algorithm=Mime(SGDm()), attack=NoiseAttack(1.0, 1.0), max_rounds=1, clients_per_round=None,
            sampler=lambda seed, round, population, i=i: [i]).fit_loop.server["m"]
        for i in (1, 4)
    ]  # fmt: skip
    assert not torch.equal(*noise), "every client has its own"


def test_attackers_train_on_their_true_gradients() -> None:
    # FedDane steps along the cohort's gradient, here the attacker's flipped one. The message is flipped again.
    options = {"algorithm": FedDane(0.1, "same"), "clients_per_round": 1, "max_rounds": 1, "local_epochs": None}
    honest, bad = (
        run("sequential", datamodule=lambda: data(batch_size=32), attack=attack, local_steps=1, **options)
        for attack in (None, SignFlipAttack(1.0))
    )
    torch.testing.assert_close(bad.fit_loop.state.x, honest.fit_loop.state.x, rtol=1e-12, atol=1e-14)


def test_attackers_keep_honest_client_states() -> None:
    honest, bad = (run("sequential", algorithm=Scaffold(), attack=a, max_rounds=1) for a in (None, SignFlipAttack(1.0)))
    mine, theirs = state_of(honest), state_of(bad)
    for name in mine:
        if name.startswith("client."):
            assert torch.equal(mine[name], theirs[name])


def test_attack_without_attackers_keeps_identical_bits() -> None:
    assert torch.equal(fit(attack=None), fit(attack=SignFlipAttack(0.0)))


@pytest.mark.parametrize("attack", [NoiseAttack(0.5, 0.1), LabelFlipAttack([1], CLASSES)], ids=repr)
def test_resumed_run_has_identical_bits(attack: Attack, tmp_path: Any) -> None:
    whole = fit(attack=attack, max_rounds=3)
    first = trainer(attack=attack, max_rounds=2)
    first.fit(seeded(), data())
    first.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(whole, fit(attack=attack, max_rounds=3, ckpt_path=tmp_path / "a.ckpt"))


def test_resuming_with_another_attack_warns(tmp_path: Any) -> None:
    first = trainer(attack=SignFlipAttack([1]), max_rounds=1)
    first.fit(seeded(), data())
    first.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=r"attack=SignFlipAttack\(clients=\[1\], scale=1.0\) \(this run has None\)"):
        fit(max_rounds=2, ckpt_path=tmp_path / "a.ckpt")


# ------------------------------------------------------------------ their data


@pytest.mark.parametrize("engine", few(["sequential", "vectorized"], ["sequential"]))
def test_label_flip_matches_data_with_flipped_labels(engine: str) -> None:
    sets = clients()
    for i in (1, 4):
        sets[i] = TensorDataset(sets[i].tensors[0], CLASSES - 1 - sets[i].tensors[1])
    options: dict[str, Any] = {"algorithm": Mime(SGDm()), "clients_per_round": 6, "max_rounds": 2}
    by_hand = run(engine, datamodule=lambda: FederatedDataModule(clients=sets, batch_size=4), **options)
    found = run(engine, datamodule=lambda: FederatedDataModule(clients=clients(), batch_size=4),
                attack=LabelFlipAttack([1, 4], CLASSES), **options)  # fmt: skip
    assert_agree(by_hand, found)


def test_labels_are_found_in_pairs_and_mappings() -> None:
    attack, y = LabelFlipAttack(0.5, 4), torch.tensor([0, 3, 1])
    x, flipped = torch.zeros(3, 2), torch.tensor([3, 0, 2])
    assert type(attack.batch((x, y))) is tuple
    assert torch.equal(attack.batch((x, y))[1], flipped)
    assert torch.equal(attack.batch([x, x, y])[2], flipped)
    found = attack.batch({"image": x, "label": y, "id": y})
    assert torch.equal(found["label"], flipped)
    assert torch.equal(found["id"], y)


@pytest.mark.parametrize(
    ("labels", "num_classes", "flipped"),
    [
        (torch.tensor([True, False]), 2, torch.tensor([False, True])),
        (torch.tensor([0, 9], dtype=torch.uint16), 10, torch.tensor([9, 0], dtype=torch.uint16)),
        (torch.tensor([0, 200], dtype=torch.uint8), 256, torch.tensor([255, 55], dtype=torch.uint8)),
    ],
)
def test_flipped_labels_keep_their_dtype(labels: Tensor, num_classes: int, flipped: Tensor) -> None:
    found = LabelFlipAttack(0.5, num_classes).batch([labels, labels])[1]
    assert found.dtype == labels.dtype
    assert found.tolist() == flipped.tolist()


def test_labels_that_overflow_their_dtype_are_rejected() -> None:
    for num_classes, kind in ((300, torch.uint8), (3, torch.bool)):
        with pytest.raises(FederatedError, match=f"makes the label {num_classes - 1}, which .* {kind} cannot hold"):
            LabelFlipAttack(0.5, num_classes).batch([None, torch.tensor([0, 1], dtype=kind)])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(3, 2), "finds no labels in a batch, a Tensor"),
        ({"image": torch.zeros(3)}, "finds no labels in a batch"),
        (namedtuple("Pair", "x y")(torch.zeros(1), torch.zeros(1)), "finds no labels"),
        ([torch.zeros(3, 2), torch.zeros(3)], "the labels of a batch are torch.float32"),
        ([torch.zeros(3, 2), [0, 1, 2]], "the labels of a batch are a list"),
        ([torch.zeros(3, 2), torch.tensor([0, 4, 1])], "found the labels 0 to 4 in a batch.*from 0 to 3"),
    ],
)
def test_batches_without_valid_labels_are_rejected(batch: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        LabelFlipAttack(0.5, 4).batch(batch)


def test_changed_batches_keep_the_original_counts() -> None:
    own = data().client_batches(0)
    changed = ChangedBatches(own, lambda batch: [batch[0] + 1, batch[1]])
    assert (changed.size, changed.num_batches(), changed.num_examples(2)) == (13, 4, 8)
    changed.check_counts()
    assert changed.for_own_solve() is changed
    for name in ("epoch", "full", "unaugmented", "one"):
        pairs = zip(getattr(changed, name)(torch.Generator()), getattr(own, name)(torch.Generator()), strict=True)
        for (batch, examples), (before, number) in pairs:
            assert examples == number
            assert torch.equal(batch[0], before[0] + 1)
    assert RepeatedBatches(changed, 2).num_batches() == 8


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SignFlipAttack(1.5), "clients must be a share in .0.0, 1.0., or a list of client ids"),
        (lambda: SignFlipAttack(2), r"clients must be a share .* Write \[2\] for the client 2"),
        (lambda: SignFlipAttack("abc"), "clients must be a share"),
        (lambda: SignFlipAttack(0.5, scale=0.0), r"scale must be a finite number in \(0, inf\)"),
        (lambda: NoiseAttack(0.5, std=-1.0), r"std must be a finite number in \(0, inf\)"),
        (lambda: LabelFlipAttack(0.5, num_classes=1), "num_classes must be an integer of at least 2"),
        (lambda: trainer(attack="flip"), "attack must be an Attack such as SignFlipAttack.*found 'flip'"),
        (lambda: fit(Ordinary(), attack=SignFlipAttack([77])), "has 77, not ids of the data module's 6 clients"),
    ],
)
def test_invalid_arguments_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()


class NoNumbers(Attack):
    """Sends NaN."""

    def message(self, message: Tensor, stream: torch.Generator) -> Tensor:
        return message * math.nan


@pytest.mark.parametrize(
    ("algorithm", "what"), [(FedAvg(), "message 'delta'"), (Mime(SGDm()), "full-batch gradient at x")]
)
def test_non_finite_means_are_attributed_to_the_attack(algorithm: Any, what: str) -> None:
    with pytest.raises(FederatedError, match=rf"mean of .* {what} is not finite in round 0, .*attack=NoNumbers.*drop"):
        run("sequential", algorithm=algorithm, attack=NoNumbers([1]), clients_per_round=6)
