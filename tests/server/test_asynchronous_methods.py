"""Every asynchronous method has the same numbers in one process and in two, resumed or not."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedBN
from lightning_fed.core.rounds import Cohort
from lightning_fed.server import Asynchronous, ClientClock, FedAsync, FedBuff, TopK
from tests.behaviour.test_contract import METHODS, Classifier, Method, trainer
from tests.helpers.processes import in_processes
from tests.helpers.training import FEATURES, data, same

LATE = ClientClock(slow_share=0.4, slow_factor=5.0, spread=0.4, jitter=0.3)
BUFFERED, ONE_BY_ONE = FedBuff(2, 4, clock=LATE), FedAsync(4, clock=LATE)
COVERING = ["Scaffold ii", "FedCM", "FedDyn", "FedPer"]
ROUNDS = 5
SIZES = (14, 8, 22, 6, 16, 10)  # no batch has one example: BatchNorm refuses those

Ends = dict[str, dict[str, Any]]
"""Each method's results: x, the server's state, the states of this process's clients, and the messages in flight."""


class Normed(Classifier):
    """The shared classifier behind a layer that FedBN keeps with the clients."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body.insert(0, nn.BatchNorm1d(FEATURES))


ROWS: dict[str, tuple[Method, dict[str, Any]]] = {
    **{name: (method, {}) for name, method in METHODS.items()},
    "FedBN": (Method(FedBN()), {}),
    "Scaffold, TopK": (METHODS["Scaffold ii"], {"compression": TopK(0.3)}),
}


def is_accepted(name: str) -> bool:
    try:
        BUFFERED.for_run(ROWS[name][0].algorithm, None, BUFFERED)
    except FederatedError:
        return False
    return True


NAMES = list(filter(is_accepted, ROWS))
MODELS = [name for name in NAMES if getattr(ROWS[name][0].algorithm, "pseudo_grad", "raw") == "raw"]
"""Methods whose clients send model updates. FedAsync refuses methods that send gradients."""


@pytest.mark.parametrize("name", NAMES)
def test_server_step_is_linear_in_the_means(name: str) -> None:
    """The weights of messages do not sum to one, so the step must be linear."""
    algorithm, x = ROWS[name][0].algorithm, torch.linspace(0.5, 1, 6, dtype=torch.float64)

    def step(share: float) -> Tensor:
        mean = dict.fromkeys(algorithm.reduces, share * x**2)
        return algorithm.update_server(x, algorithm.init_server(x), mean, Cohort(3, 10, 0))[0]

    torch.testing.assert_close(step(0.5) - step(0.0), (step(1.0) - step(0.0)) / 2)


def run(
    names: Sequence[str], asynchronous: Asynchronous = BUFFERED, folder: Path | None = None, **options: Any
) -> Ends:
    """Run methods one after another. With a folder, resume from its checkpoints, and save new ones there.

    Args:
        names: The methods.
        asynchronous: How the server takes its steps.
        folder: Holds the checkpoints, if runs are saved and resumed.
        options: Options of the trainer.
    """
    ends, rounds = Ends(), options.pop("max_rounds", ROUNDS)
    options |= {"asynchronous": asynchronous, "clients_per_round": None, "precision": "64-true"}
    for name in names:
        method, own = ROWS[name]
        torch.manual_seed(0)
        model = (Normed if name == "FedBN" else Classifier)(dropout=0.0)
        model.build = method.optimizer
        done, path = trainer(method, max_rounds=rounds, **options, **own), None if folder is None else folder / name
        done.fit(model, data(SIZES), ckpt_path=path if path is not None and path.exists() else None)
        if path is not None:
            done.save_checkpoint(path)
        state, aggregator = done.fit_loop.state, done.fit_loop.settings.aggregator
        assert aggregator.state_dict()["messages"], "nothing is on its way, which tests less"
        ends[name] = {
            "x": state.x,
            "server": state.state,
            "clients": state.clients.state_dict(),
            "messages": {(began, client): sent for began, client, sent in aggregator.state_dict()["messages"]},
        }
    return ends


def in_two(place: Path, names: Sequence[str], *arguments: Any, **options: Any) -> Ends:
    """Run in two processes, check that they end alike with disjoint client states, and merge these."""
    work = partial(run, names, *arguments, strategy="clients", devices=2, **options)
    outcomes = in_processes(work, place)
    assert not any(outcome.error for outcome in outcomes), outcomes[0].trace + outcomes[1].trace
    (one, other), merged = (outcome.value for outcome in outcomes), Ends()
    for name in names:
        assert not one[name]["clients"].keys() & other[name]["clients"].keys()
        clients = {**one[name].pop("clients"), **other[name].pop("clients")}
        assert same(one[name], other[name]), name
        merged[name] = {**one[name], "clients": dict(sorted(clients.items()))}
    return merged


def differing(found: Ends, wanted: Ends) -> list[str]:
    """Return the methods whose results do not have the same bits."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not same(found[name], wanted[name])]


@pytest.mark.parametrize(
    ("asynchronous", "weights"),
    [
        (FedBuff(2, 4, staleness_exponent=0.5), {0: 1.0, 3: 1 / 2, 8: 1 / 3}),
        (FedBuff(2, 4, staleness_exponent=0.0), {0: 1.0, 8: 1.0}),
        (FedAsync(4, alpha=0.6, staleness="constant"), {0: 0.6, 8: 0.6}),
        (FedAsync(4, alpha=0.6, staleness="polynomial", a=2.0), {0: 0.6, 1: 0.6 / 4, 2: 0.6 / 9}),
        (FedAsync(4, alpha=0.6, staleness="hinge", a=2.0, b=3.0), {0: 0.6, 3: 0.6, 4: 0.6 / 3, 6: 0.6 / 7}),
    ],
    ids=repr,
)
def test_staleness_weights_match_a_hand_computation(asynchronous: Asynchronous, weights: dict[int, float]) -> None:
    assert {late: asynchronous.weight(late) for late in weights} == pytest.approx(weights)


def test_asynchronous_methods_are_those_with_independent_clients() -> None:
    def works_alone(method: Method) -> bool:
        algorithm = method.algorithm
        averages = algorithm.full_grad_at and algorithm.full_grad_for != "client"
        reads_others = averages or algorithm.population_loss or not algorithm.scales_with_means
        return algorithm.local_work and not reads_others

    assert [*(name for name, method in METHODS.items() if works_alone(method)), "FedBN", "Scaffold, TopK"] == NAMES


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "asynchronous"),
    [
        pytest.param(COVERING, BUFFERED, id="covering"),
        pytest.param(NAMES, BUFFERED, id="all"),
        pytest.param(MODELS, ONE_BY_ONE, id="all, FedAsync"),
    ],
)
def test_two_processes_match_one_with_identical_bits(
    names: Sequence[str], asynchronous: Asynchronous, tmp_path: Path
) -> None:
    assert not differing(in_two(tmp_path, names, asynchronous), run(names, asynchronous))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in NAMES if name != "FedBN"])  # the engine refuses its buffers
def test_two_processes_match_one_with_the_vectorized_engine(name: str, tmp_path: Path) -> None:
    def leaves(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        return [leaf for name in sorted(value) for leaf in leaves(value[name])]

    options = {"engine": "vectorized", "chunk_size": 3}
    found, wanted = in_two(tmp_path, [name], **options)[name], run([name], **options)[name]
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [pytest.param(n, id=str(n)) for n in ((1, 2, 1), (2, 1, 2), (2, 2, 2))])
@pytest.mark.parametrize(
    "names",
    [pytest.param(["Scaffold ii", "FedCM"], id="two"), pytest.param(NAMES, id="all")],
)
def test_run_resumes_with_another_number_of_processes(
    names: Sequence[str], processes: tuple[int, ...], tmp_path: Path
) -> None:
    ends = Ends()
    for number, rounds in zip(processes, (2, 4, ROUNDS), strict=True):
        place, options = tmp_path / str(rounds), {"folder": tmp_path, "max_rounds": rounds}
        place.mkdir()
        ends = run(names, **options) if number == 1 else in_two(place, names, **options)
    assert not differing(ends, run(names))
