"""Two processes with an aggregator or compression get the result of one process."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, FedDyn, Mime, Scaffold, ServerOnly, SGDm
from lightning_fed.server import (
    QSGD,
    BernoulliSampler,
    ClientPrivacy,
    CoordinateMedian,
    DifferentialPrivacy,
    GeometricMedian,
    MultiKrum,
    NoiseAttack,
    NormClipping,
    OptimalClientSampling,
    TopK,
    TrimmedMean,
)
from lightning_fed.strategies.processes import Ranks
from tests.behaviour.test_processes import TWO, assert_one_result, end, in_two, parts_of
from tests.helpers.optional import needs_opacus
from tests.helpers.selection import few

METHODS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "Scaffold": Scaffold(),
    "FedDyn": FedDyn(1.0),
    "Mime": Mime(SGDm()),
    "FedDane": FedDane(0.1),
    "ServerOnly": ServerOnly(),
}
RULES = {"median": CoordinateMedian(), "trimmed": TrimmedMean(0.3), "geometric": GeometricMedian()}


def of(method: str, **options: Any) -> dict[str, Any]:
    local = {"local_epochs": 1} if METHODS[method].local_work else {"local_epochs": None}
    return end(algorithm=METHODS[method], limit_val_batches=0, **local, **options)


CASES: dict[str, Any] = {
    **{f"{m} {name}": partial(of, m, aggregator=rule) for m in METHODS for name, rule in RULES.items()},
    "vectorized": partial(of, "Scaffold", aggregator=GeometricMedian(), engine="vectorized"),
    "weighted": partial(of, "FedAvg", aggregator=GeometricMedian(), weighting="steps"),
    "clipping": partial(of, "Scaffold", aggregator=NormClipping({"delta": 0.1, "delta_c": 1.0})),
    "compressed": partial(of, "Scaffold", compression=TopK(0.2)),
    "compressed without state": partial(of, "FedAvg", compression=TopK(0.2), max_rounds=5),
    "quantized": partial(of, "FedAvg", compression=QSGD(7), engine="vectorized"),
    "quantized and robust": partial(of, "FedAvg", compression=QSGD(7), aggregator=CoordinateMedian()),
    "pairwise and attacked": partial(
        of, "Scaffold", aggregator=MultiKrum(1), attack=NoiseAttack(0.4, 0.1), clients_per_round=1.0
    ),
    "few send": partial(of, "FedAvg", aggregator=OptimalClientSampling(1), weighting="steps"),
    "one process idle": partial(of, "FedAvg", aggregator=CoordinateMedian(), clients_per_round=1),
}
FEW = ("Mime geometric", "clipping")  # a rule that gathers all messages, and one that sums them
EVERYBODY: dict[str, Any] = {"sampler": BernoulliSampler(1.0), "clients_per_round": None, "max_rounds": 2}
RECORDS = partial(of, "Scaffold", client_privacy=ClientPrivacy(0.8, 0.3, 1e-3))
QUIETLY = partial(of, "FedAvg", aggregator=DifferentialPrivacy(0.5, 1e-15, 1e-5), **EVERYBODY)
LOUDLY = partial(
    of,
    "FedAvg",
    aggregator=DifferentialPrivacy(0.5, 1.0, 1e-5),
    sampler=BernoulliSampler(0.5),
    clients_per_round=None,
    max_rounds=4,
)


def noisy_mean() -> torch.Tensor:
    """Return the noise of a round without clients, divided by the 5 expected clients."""
    aggregator = DifferentialPrivacy(3.0, 0.7, 1e-5).for_run(FedAvg(), None, BernoulliSampler(0.5))
    aggregation = aggregator.of_round({"delta": "weighting"}, "uniform", [], 10)
    ranks, x = Ranks(int(torch.distributed.get_rank()), 2, torch.device("cpu")), torch.zeros(200_000)
    aggregation.merge(ranks.gather(aggregation.partial()), ranks, x)
    return aggregation.compute(x)[0]["delta"]


def columns() -> list[torch.Tensor]:
    """Return the columns that a process gets if the processes hold different numbers of rows."""
    ranks = Ranks(int(torch.distributed.get_rank()), 2, torch.device("cpu"))
    found = []
    for counts in ((1, 2), (3, 0), (0, 1)):
        start = ranks.rank * counts[0]
        whole = torch.arange(sum(counts) * 7, dtype=torch.float64).view(-1, 7)
        found.append(ranks.columns(whole[start : start + counts[ranks.rank]], counts))
    return found


def work() -> dict[str, Any]:
    found = {name: CASES[name](**TWO) for name in FEW}
    if find_spec("opacus") is not None:
        found |= {"records": RECORDS(**TWO), "quietly": QUIETLY(**TWO), "loudly": LOUDLY(**TWO), "noise": noisy_mean()}
    return {**found, "columns": columns()}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return in_two(work, tmp_path_factory.mktemp("aggregators"))


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    others = [name for name in CASES if name not in FEW]
    return in_two(lambda: {name: CASES[name](**TWO) for name in others}, tmp_path_factory.mktemp("others"))


@pytest.mark.parametrize("name", few(CASES, FEW))
def test_two_processes_match_one(name: str, request: pytest.FixtureRequest) -> None:
    assert_one_result(CASES[name](), parts_of(request, name in FEW), name)


def test_each_process_gets_its_columns_of_all_rows(together: Any) -> None:
    for i, count in enumerate((3, 3, 1)):
        whole = torch.arange(count * 7, dtype=torch.float64).view(-1, 7)
        assert torch.equal(together[0]["columns"][i], whole[:, :4])
        assert torch.equal(together[1]["columns"][i], whole[:, 4:])


@pytest.mark.thorough
@needs_opacus
def test_client_noise_matches_one_process(together: Any) -> None:
    assert_one_result(RECORDS(), together, "records")


@needs_opacus
def test_noise_is_added_once(together: Any) -> None:
    first, second = (part["noise"] for part in together)
    assert torch.equal(first, second)
    assert float(first.std() * 5) == pytest.approx(3.0 * 0.7, rel=0.01)


@needs_opacus
def test_processes_stay_in_sync_with_noise(together: Any) -> None:
    assert_one_result(QUIETLY(), together, "quietly", rtol=1e-9)
    assert torch.equal(together[0]["loudly"]["state"]["x"], together[1]["loudly"]["state"]["x"])
    first, second = ([report["cohort"] for report in part["loudly"]["rounds"]] for part in together)
    assert first == second
