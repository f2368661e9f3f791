"""Long runs and large cohorts: memory does not grow with the number of rounds or with the cohort."""

import gc
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_fed import FederatedCallback, algorithms
from tests.helpers.training import Net, data, seeded, trainer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
METHODS = {
    "FedAvg": algorithms.FedAvg,
    "Scaffold": algorithms.Scaffold,
    "Mime": lambda: algorithms.Mime(base=algorithms.SGDm()),
}


@pytest.fixture(autouse=True)
def _others_objects_are_left_alone():
    """Exclude all earlier objects from garbage collection for good. conftest.py has already frozen most of them."""
    gc.collect()
    gc.freeze()


def bytes_of_storage(tensor):
    """Return the address and the size of a tensor's memory, or zeros if it owns none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return 0, 0


class Held(FederatedCallback):
    """Measure the live tensors of at least the model's size, in model sizes, when a round's last client has ended."""

    def __init__(self, cohort):
        self.left, self.vectors = cohort, 0.0

    def on_client_end(self, trainer, pl_module, client_report):
        self.left -= 1
        if not self.left:
            gc.collect()
            alive = dict(bytes_of_storage(o) for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
            size = 4 * sum(p.numel() for p in pl_module.parameters())
            self.vectors = sum(n for n in alive.values() if n >= size) / size


def vectors_held(method, engine, cohort):
    held = Held(cohort)
    options = {"chunk_size": 2} if engine == "vectorized" else {}
    run = trainer(
        algorithm=METHODS[method](), engine=engine, max_rounds=1, clients_per_round=cohort, callbacks=held, **options
    )
    run.fit(seeded(Net, dropout=0.0), data(sizes=(8,) * cohort))
    kept = sum(len(run.fit_loop.state.client_state(i)) for i in range(cohort))
    return held.vectors - kept


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "engine"),
    [pytest.param(m, e, id=f"{m}-{e}") for m in METHODS for e in ("sequential", "vectorized")],
)
def test_round_memory_does_not_grow_with_cohort_size(method, engine):
    vectors_held(method, engine, cohort=4)  # the first run clears leftovers of other tests
    assert vectors_held(method, engine, cohort=12) == pytest.approx(vectors_held(method, engine, cohort=4), abs=0.5)


@pytest.fixture
def soak(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    module = importlib.import_module("soak")
    level = module.logging.getLogger("pytorch_lightning").level

    def run(*arguments):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            return module.soak(module._parser().parse_args(arguments), Path(folder))

    yield run
    module.logging.getLogger("pytorch_lightning").setLevel(level)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]


def assert_flat(found, bytes_per_round):
    assert found["open_files_end"] == found["open_files_settled"]
    assert found["objects_end"] - found["objects_settled"] < max(100, found["rounds"] / 100)
    assert found["rss_bytes_per_round"] < bytes_per_round
    assert found["rss_mb_end"] - found["rss_mb_settled"] < 10  # the allocator grows in steps
    assert found["tensorboard_bytes_per_round"] < 1000


RUNS = [("sequential", "disk"), ("vectorized", "memory")]


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "states"), RUNS)
def test_memory_stays_flat_over_hundreds_of_rounds(soak, engine, states):
    small = ("--rounds", "200", "--population", "20", "--cohort", "5", "--every", "4")
    found = soak(*small, "--engine", engine, "--client-states", states)
    assert found["engine"] == engine
    assert_flat(found, bytes_per_round=50_000)  # the allocator's pools still change in a short run


@pytest.mark.parametrize("cohort", [100, pytest.param(1000, marks=pytest.mark.thorough)])
def test_rounds_sample_large_cohorts_from_a_million_clients(soak, cohort):
    found = soak("--rounds", "3", "--population", "1000000", "--cohort", str(cohort), "--engine", "vectorized")
    assert 2.9 * cohort < found["clients_seen"] <= 3 * cohort


@pytest.mark.thorough
@pytest.mark.timeout(3600)  # a busy machine needs more than the ten minutes of the other tests
@pytest.mark.parametrize(("engine", "states"), RUNS)
def test_memory_stays_flat_over_twenty_thousand_rounds(engine, states):
    command = [sys.executable, BENCHMARKS / "soak.py", "--rounds", "20000", "--json"]
    command += ["--engine", engine, "--client-states", states]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert_flat(json.loads(done.stdout.splitlines()[-1]), bytes_per_round=200)
