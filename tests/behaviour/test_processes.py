"""Several processes that each train their own clients get the result of one process."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fed import ClientError, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedDane, FedDyn, FedSAM, Mime, Scaffold, SGDm
from lightning_fed.rounds import assignment
from lightning_fed.server import RoundRobinSampler, SystemsHeterogeneity, TopK
from lightning_fed.server.client_states.store import MemoryClientStore
from lightning_fed.strategies import ClientsStrategy
from tests.behaviour.test_contract import METHODS
from tests.helpers.engines import Ordinary, Record, assert_close, assert_plain_agree, full_batches, results_of, run
from tests.helpers.processes import HANGS, Outcome, in_processes
from tests.helpers.selection import few
from tests.helpers.training import FEATURES, classification, clients, data, parameters, same, seeded, trainer

TWO: dict[str, Any] = {"strategy": "clients", "devices": 2}
ROOT = Path(__file__).parent.parent.parent
ENGINES = ("sequential", "vectorized")
Case = Callable[..., dict[str, Any]]


def end(engine: str = "sequential", make: Any = Ordinary, **options: Any) -> dict[str, Any]:
    """Return the results of a run in any number of processes."""
    record = Record()
    options["callbacks"] = [*options.pop("callbacks", []), record]
    return results_of(run(engine, make, **options), record)


def of_method(name: str, engine: str, **options: Any) -> dict[str, Any]:
    method = METHODS[name]
    local = {"local_epochs": 1} if method.algorithm.local_work else {"local_epochs": None}
    options = {**local, "limit_val_batches": 0, "algorithm": method.algorithm, "datamodule": full_batches, **options}
    return end(engine, partial(Ordinary, method.optimizer), **options)


# Modules and data


class Logs(Ordinary):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("mean", loss, sync_dist=True)
        self.log("stepwise", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("step_only", loss, on_step=True, on_epoch=False, prog_bar=True, sync_dist=True)
        self.log("largest", loss, reduce_fx="max", sync_dist=True)
        self.log("least", loss, reduce_fx="min")
        self.log("sum", loss, reduce_fx="sum", sync_dist=True)
        self.log("weighted", loss, batch_size=2, rank_zero_only=True)
        self.log("number", 3.0)
        if len(batch[0]) == 1:
            self.log("rare", loss)
        return loss


class WithMetric(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("metric", self.mean)
        return loss


class Computes(WithMetric):
    """Computes a metric object in the middle of a local step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.mean.reset()
        self.mean.update(loss)
        self.log("mean", self.mean.compute())
        return loss


class WithBatchNorm(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())


class Slowing(Ordinary):
    """Counts its local steps in a buffer that determines their length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx) / (1 + 0.1 * float(self.steps))


def one_to_four_steps(seed: int, round: int, clients: Sequence[int], epochs: Any, steps: Any) -> list[int]:
    return [1 + (client + round) % 4 for client in clients]


class Fails(Ordinary):
    """Fails on the data of one client."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if bool((batch[0] > 90).any()):
            raise RuntimeError("these examples are bad")
        return super().training_step(batch, batch_idx)


def with_invalid(sizes: Sequence[int] = (13, 8, 21, 5, 16, 9), bad: int = 3) -> FederatedDataModule:
    parts = clients(sizes)
    parts[bad].tensors[0][0] = 99.0
    return FederatedDataModule(parts, batch_size=4)


class OnDemand(FederatedDataModule):
    num_clients = 1000

    def client_dataset(self, client_id: Any) -> Any:
        return classification(3 + client_id % 11, client_id)


def named() -> FederatedDataModule:
    return FederatedDataModule(
        dict(zip(("ann", "bob", "cy", "dee"), clients((9, 5, 14, 7)), strict=True)), batch_size=4
    )


UNEVEN: dict[str, Any] = {  # the first process keeps all large clients
    "datamodule": partial(data, (60, 8, 64, 8, 60, 8)),
    "clients_per_round": 5,
    "max_rounds": 4,
}

CASES: dict[str, Case] = {
    "logs": partial(end, make=Logs, local_epochs=2),
    "metric objects in a step": partial(end, make=Computes),
    "one client a round": partial(end, clients_per_round=1, max_rounds=4),
    "one client a round, at once": partial(
        end, "vectorized", datamodule=full_batches, clients_per_round=1, algorithm=Scaffold(), max_rounds=4
    ),
    "stragglers": partial(end, heterogeneity=SystemsHeterogeneity(0.6), local_epochs=3, algorithm=Scaffold()),
    "lost clients": partial(end, heterogeneity=SystemsHeterogeneity(0.5, policy="drop", dropout=0.4), max_rounds=5),
    "on demand": partial(end, datamodule=partial(OnDemand, batch_size=4), clients_per_round=7, algorithm=Scaffold()),
    "on demand, at once": partial(
        end, "vectorized", datamodule=partial(OnDemand, batch_size=4), clients_per_round=7, algorithm=Scaffold()
    ),
    "names as ids": partial(end, datamodule=named, algorithm=FedDyn(1.0), clients_per_round=3),
    "BatchNorm": partial(end, make=WithBatchNorm, datamodule=partial(data, (12, 8, 20, 6, 16, 10))),
    "BatchNorm of each client": partial(
        end, make=WithBatchNorm, datamodule=partial(data, (12, 8, 20, 6, 16, 10)), buffers="local"
    ),
    "integer buffers of equally large clients": partial(
        end,
        make=Slowing,
        datamodule=partial(data, (8,) * 6),
        clients_per_round=6,
        local_steps=4,
        heterogeneity=one_to_four_steps,
    ),
    "kept local optimizers": partial(
        end,
        make=partial(Ordinary, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        local_optimizer_state="keep",
        max_rounds=4,
    ),
    "a gradient cohort of its own": partial(end, algorithm=FedDane(0.1), gradient_sampler=RoundRobinSampler(3)),
    "moved": partial(end, algorithm=Scaffold(), **UNEVEN),
    "moved, at once": partial(end, "vectorized", algorithm=FedDyn(1.0), **UNEVEN),
    "moved, with local optimizers and residuals": partial(
        end,
        algorithm=Scaffold(),
        make=partial(Ordinary, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        local_optimizer_state="keep",
        compression=TopK(0.2),
        **UNEVEN,
    ),
    "moved, with BatchNorm of each client": partial(
        end, make=WithBatchNorm, buffers="local", **{**UNEVEN, "datamodule": partial(data, (60, 6, 64, 8, 58, 4))}
    ),
    "moved, of which one fails": partial(
        end,
        algorithm=Scaffold(),
        make=Fails,
        on_client_error="drop",
        **{**UNEVEN, "datamodule": partial(with_invalid, (60, 5, 64, 6, 58, 7), 2)},
    ),
    "clients drawn twice": partial(end, sampler=lambda seed, round: [0, 1, 0, 4], clients_per_round=None),
    "dropout": partial(end, make=partial(Ordinary, dropout=0.5), algorithm=Mime(base=SGDm())),
    "dropout, looking ahead": partial(end, make=partial(Ordinary, dropout=0.5), algorithm=FedSAM(0.2)),
}
SINGLES = {
    f"float32 {a!r}": partial(end, algorithm=a, precision="32-true") for a in (FedAvg(), Scaffold(), Mime(SGDm()))
}


def checkpointed(folder: Path, engine: str, algorithm: Any, **options: Any) -> str:
    saver = ModelCheckpoint(folder, save_last=True)
    run(engine, algorithm=algorithm, callbacks=saver, enable_checkpointing=True, **options)
    return saver.last_model_path


RESUMED: dict[str, tuple[str, Any]] = {
    "Scaffold": ("sequential", Scaffold()),
    "Scaffold at once": ("vectorized", Scaffold()),
    "Mime": ("sequential", Mime(base=SGDm())),
    "FedDyn at once": ("vectorized", FedDyn(1.0)),
}


def decided(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the decisions of callbacks that monitor a metric."""
    best = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, mode="max")
    stop = EarlyStopping("train_loss", patience=1, mode="max")
    t = run("sequential", callbacks=[best, stop], enable_checkpointing=True, max_rounds=8, **options)
    return {"best": Path(best.best_model_path).name, "rounds": t.fit_loop.round, "stopped": stop.stopped_epoch}


FEW = (  # one per kind: by its states, inputs and messages, and by the clients of its gradients
    "FedAvg", "Scaffold ii", "MimeMVR eq15",
)  # fmt: skip
FEW_CASES = [
    *("logs", "BatchNorm", "a gradient cohort of its own", "moved", "moved, at once"),
    *("moved, with local optimizers and residuals", "moved, of which one fails", "dropout"),
]
FEW_SINGLES = [name for name in SINGLES if "Scaffold" in name]
FEW_RESUMED = ("Scaffold",)
RUNS = [(name, engine) for name in METHODS for engine in ENGINES]
FEW_RUNS = [(name, "sequential") for name in FEW]  # two of the cases cover the vectorized engine


def resumed(folder: Path, name: str) -> dict[str, Any]:
    engine, algorithm = RESUMED[name]
    path = checkpointed(folder / name, engine, algorithm, max_rounds=2, **TWO)
    return {
        f"whole {name}": end(engine, algorithm=algorithm, max_rounds=4, **TWO),
        f"resumed {name}": end(engine, algorithm=algorithm, max_rounds=4, ckpt_path=path, **TWO),
    }


def work(folder: Path, cases: Sequence[str], runs: Sequence[tuple[str, str]], resumes: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: {**CASES, **SINGLES}[name](**TWO) for name in cases}
    found |= {f"{name} {engine}": of_method(name, engine, **TWO) for name, engine in runs}
    for name in resumes:
        found |= resumed(folder, name)
    return found


def work_of_most(folder: Path) -> dict[str, Any]:
    found = work(folder, [*FEW_CASES, *FEW_SINGLES], FEW_RUNS, FEW_RESUMED)
    on_disk = {"client_states": "disk", "client_states_dir": folder / "states"}
    found["moved, on disk"] = CASES["moved"](**on_disk, **TWO)
    found["dropout again"] = CASES["dropout"](**TWO)
    found["decided"] = decided(folder / "decided", **TWO)
    return found


def work_of_others(folder: Path) -> dict[str, Any]:
    cases = [name for name in (*CASES, *SINGLES) if name not in (*FEW_CASES, *FEW_SINGLES)]
    resumes = [name for name in RESUMED if name not in FEW_RESUMED]
    found = work(folder, cases, [run for run in RUNS if run not in FEW_RUNS], resumes)
    for again in ("", " again"):
        found[f"at once{again}"] = of_method("Scaffold ii", "vectorized", **TWO)
    return found


@pytest.fixture(scope="module", autouse=True)
def moves_pay() -> Iterator[None]:
    """Make moves of clients pay, as with a larger model. With this small one, no client would move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "_TRIP", assignment._MOVE)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


def in_two(work: Callable[[], dict[str, Any]], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = in_processes(work, folder, timeout=2 * HANGS)  # they train 150 models one after another
    assert not first.error, first.trace
    assert not second.error, second.trace
    return first.value, second.value


@pytest.fixture(scope="module")
def together(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of each of two processes in the cases of the default run."""
    return in_two(partial(work_of_most, folder), folder)


@pytest.fixture(scope="module")
def of_others(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of each of two processes in the other cases."""
    return in_two(partial(work_of_others, folder), folder)


def parts_of(request: pytest.FixtureRequest, is_default: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    parts: tuple[dict[str, Any], dict[str, Any]] = request.getfixturevalue("together" if is_default else "of_others")
    return parts


def assert_one_result(alone: dict[str, Any], parts: Any, name: str, rtol: float = 1e-12) -> None:
    first, second = (part[name] for part in parts)
    assert same(first["state"], second["state"])
    assert first["metrics"] == second["metrics"]
    assert_close(alone["state"], first["state"], rtol)
    assert_plain_agree(alone["metrics"], first["metrics"], rel=max(1e-6, rtol))
    for part in (first, second):
        for one, other in zip(alone["rounds"], part["rounds"], strict=True):
            assert_plain_agree(one["metrics"], other["metrics"], rel=max(1e-6, rtol))  # metrics are kept in float32
            assert_plain_agree(*({**r, "metrics": None} for r in (one, other)), rel=max(1e-9, rtol * 10))
    assert sorted(map(str, first["trained"] + second["trained"])) == sorted(map(str, alone["trained"]))


@pytest.mark.parametrize(
    ("name", "engine"), few([pytest.param(*run, id=" ".join(run)) for run in RUNS], [" ".join(run) for run in FEW_RUNS])
)
def test_two_processes_match_one_for_every_method(name: str, engine: str, request: pytest.FixtureRequest) -> None:
    parts = parts_of(request, (name, engine) in FEW_RUNS)
    assert_one_result(of_method(name, "sequential"), parts, f"{name} {engine}")


@pytest.mark.parametrize("name", few(CASES, FEW_CASES))
def test_two_processes_match_one(name: str, request: pytest.FixtureRequest) -> None:
    assert_one_result(CASES[name](), parts_of(request, name in FEW_CASES), name)


@pytest.mark.parametrize("name", few(SINGLES, FEW_SINGLES))
def test_float32_matches_up_to_rounding(name: str, request: pytest.FixtureRequest) -> None:
    assert_one_result(SINGLES[name](), parts_of(request, name in FEW_SINGLES), name, rtol=1e-5)


def test_both_processes_train_clients(together: Any) -> None:
    counts = [len(part["FedAvg sequential"]["trained"]) for part in together]
    assert sum(counts) == 12
    assert min(counts) >= 5


def test_states_on_disk_move_between_processes(together: Any) -> None:
    for part in together:
        assert same(part["moved, on disk"]["state"], part["moved"]["state"])


def test_clients_move_to_the_less_loaded_process(together: Any) -> None:
    for name in ("moved", "moved, at once"):
        first, second = (part[name]["trained"] for part in together)
        assert any(client % 2 == 0 for client in second), "a large client that the first process keeps"
        assert first


def test_moved_clients_are_trained_last(together: Any) -> None:
    assert together[1]["moved"]["trained"] == [1, 3, 5, 1, 3, 5, 1, 3, 2, 3, 5, 2]  # in rounds of three clients


@pytest.mark.parametrize("name", few(["dropout", "at once"], ["dropout"]))
def test_repeated_run_has_identical_bits(name: str, request: pytest.FixtureRequest) -> None:
    for part in parts_of(request, name == "dropout"):
        assert same(part[name]["state"], part[f"{name} again"]["state"])


@pytest.mark.parametrize("name", few(RESUMED, FEW_RESUMED))
def test_resumed_run_has_identical_bits(name: str, request: pytest.FixtureRequest) -> None:
    for part in parts_of(request, name in FEW_RESUMED):
        assert same(part[f"whole {name}"]["state"], part[f"resumed {name}"]["state"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_may_change_the_number_of_processes(
    name: str, folder: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engine, algorithm = RESUMED[name]
    whole = parts_of(request, name in FEW_RESUMED)[0][f"whole {name}"]["state"]
    path = checkpointed(tmp_path, engine, algorithm, max_rounds=3, ckpt_path=folder / name / "last.ckpt")
    go_on = partial(end, engine, algorithm=algorithm, max_rounds=4, ckpt_path=path, **TWO)
    for outcome in in_processes(go_on, tmp_path):
        assert_close(whole, value_of(outcome)["state"])


def value_of(outcome: Outcome) -> Any:
    assert not outcome.error, outcome.trace
    return outcome.value


def test_metric_callbacks_decide_the_same_in_all_processes(together: Any, tmp_path: Path) -> None:
    alone = decided(tmp_path)
    assert alone["rounds"] < 8
    assert [part["decided"] for part in together] == [alone, alone]


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_time_limit_ends_all_processes_after_the_same_round(engine: str, tmp_path: Path) -> None:
    limited = partial(end, engine, max_time={"microseconds": 1}, clients_per_round=5)
    alone = limited()
    assert len(alone["rounds"]) == 1
    for outcome in in_processes(partial(limited, **TWO), tmp_path):
        assert_close(alone["state"], value_of(outcome)["state"])


# Failures


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold()], ids=repr)
def test_error_in_one_process_ends_both_and_names_the_client(algorithm: Any, tmp_path: Path) -> None:
    case = partial(end, make=Fails, datamodule=with_invalid, clients_per_round=6, algorithm=algorithm)
    texts = [outcome.error for outcome in in_processes(lambda: case(**TWO), tmp_path)]
    assert all(re.search(r"Client 3 failed in .* in round 0.*these examples are bad", text) for text in texts), texts
    assert sum("Process" in text for text in texts) == 1


def unreadable(with_memory: bool) -> dict[str, Any]:
    """Fit while the first process cannot read the client states that it keeps for the second one."""

    def get(self: MemoryClientStore, index: int) -> Any:
        raise FederatedError(f"What client {index} keeps cannot be read.")

    if os.environ["RANK"] == "0":
        MemoryClientStore.get = get  # type: ignore[method-assign]
    strategy = ClientsStrategy(share_memory=with_memory)
    return end(algorithm=Scaffold(), on_client_error="drop", strategy=strategy, devices=2, **UNEVEN)


@pytest.mark.parametrize("with_memory", [True, False])
def test_unreadable_client_state_ends_both_processes(with_memory: bool, tmp_path: Path) -> None:
    first, second = (outcome.error for outcome in in_processes(partial(unreadable, with_memory), tmp_path))
    assert "FederatedError: What client 2 keeps cannot be read." in first
    assert "Process 0 failed: What client 2 keeps cannot be read." in second


@pytest.mark.thorough
def test_error_in_a_full_gradient_ends_both_processes(tmp_path: Path) -> None:
    case = partial(end, make=Fails, datamodule=with_invalid, clients_per_round=6, algorithm=Mime(base=SGDm()))
    for outcome in in_processes(lambda: case(**TWO), tmp_path):
        assert re.search(r"Client 3 failed in its full-batch gradient in round 0", outcome.error)


def test_metric_objects_in_local_steps_are_rejected(tmp_path: Path) -> None:
    for outcome in in_processes(lambda: end(make=WithMetric, **TWO), tmp_path):
        assert "self.log('metric', ...) of a metric object in training_step" in outcome.error


class KeepsUnannounced(FedAvg):
    """Keeps a client state without defining its initial value."""

    def finish(self, y: Any, run: Any) -> Any:
        update = super().finish(y, run)
        update.keep["last"] = y.clone()
        return update

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not copied, and so not rehearsed")


@pytest.mark.parametrize("engine", few(ENGINES, ["sequential"]))
def test_client_states_without_an_initial_value_are_rejected(engine: str, tmp_path: Path) -> None:
    run = partial(end, engine, algorithm=KeepsUnannounced(), clients_per_round=6, **TWO)
    for outcome in in_processes(run, tmp_path):
        assert "its init_client returns no state" in outcome.error


def test_error_in_forked_processes_names_the_client() -> None:
    with pytest.raises(ClientError, match=r"Client 3 failed in .* in round 0"):
        end(make=Fails, datamodule=with_invalid, clients_per_round=6, strategy="clients_fork", devices=2)


# Starting processes


@pytest.mark.thorough
def test_forked_processes_match_one() -> None:
    models = []
    for options in ({}, {"strategy": "clients_fork", "devices": 2}):
        model = seeded(Ordinary)
        trainer(**options).fit(model, data())
        models.append(dict(model.state_dict()))
    assert_close(*models, rtol=1e-5)


def started(*command: str) -> str:
    """Run a user's program, and return its output."""
    environment = {k: v for k, v in os.environ.items() if "RANK" not in k and not k.startswith("MASTER_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=HANGS, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


SCRIPT = """
import lightning_fed
from tests.helpers.engines import Ordinary
from tests.helpers.training import data, parameters, seeded, trainer

if __name__ == "__main__":
    model = seeded(Ordinary)
    trainer(strategy="STRATEGY", devices=2).fit(model, data())
    print("sum of parameters:", float(parameters(model).sum()))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["clients", "clients_spawn", "ddp"])
def test_script_starts_processes(strategy: str) -> None:
    Path("script.py").write_text(SCRIPT.replace("STRATEGY", strategy))
    found = re.findall(r"sum of parameters: (.*)", started("script.py"))
    model = seeded(Ordinary)
    trainer().fit(model, data())
    assert [float(value) for value in found] == [pytest.approx(float(parameters(model).sum()), abs=1e-4)] * len(found)
    assert found


@pytest.mark.thorough
def test_command_line_starts_processes() -> None:
    command = ["-m", "lightning_fed", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml")]
    common = ["--trainer.max_rounds", "2", "--trainer.accelerator", "cpu"]
    started(*command, *common)
    shown = started(*command, *common, "--trainer.strategy", "clients", "--trainer.devices", "2")
    assert shown.count("Federated run finished") == 1
    assert "sync_dist" not in shown
    one, two = (
        torch.load(f"lightning_logs/version_{n}_Scaffold/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for n in range(2)
    )
    assert_close(dict(one), dict(two), rtol=1e-4)


WRITES_THREADS = """
    # to a file each, since both processes write to one output, at any time
    import os, pathlib, torch
    pathlib.Path("threads-" + os.environ.get("LOCAL_RANK", "0")).write_text(str(torch.get_num_threads()))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("given", [None, 2])
def test_threads_are_split_unless_their_number_is_given(
    given: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", str(given))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("STRATEGY", "clients") + WRITES_THREADS)
    started(str(script))
    share = given or max(1, len(os.sched_getaffinity(0)) // 2)
    assert [Path(f"threads-{rank}").read_text() for rank in "01"] == [str(share)] * 2


def test_strategy_may_be_an_object() -> None:
    assert isinstance(trainer(strategy=ClientsStrategy(), devices=2).strategy, ClientsStrategy)
