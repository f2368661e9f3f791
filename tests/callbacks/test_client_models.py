"""Clients' models as files: the selection, the values in both engines and several processes, and errors."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, FedBN
from lightning_fed.callbacks import ClientModels
from tests.helpers.processes import in_processes
from tests.helpers.training import Net, Trajectory, clients, data, parameters, same, seeded, trainer


class Plain(Net):
    """Without dropout, so that both engines agree."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def run(folder: Path, models: Any = "local", datamodule: Any = None, **options: Any) -> Any:
    saver = ClientModels(models, folder=folder, **options.pop("saver", {}))
    callbacks, make = [*options.pop("callbacks", []), saver], options.pop("make", Plain)
    ckpt_path = options.pop("ckpt_path", None)
    fitted = trainer(callbacks=callbacks, **{"precision": "64-true", "limit_val_batches": 0, **options})
    fitted.fit(seeded(make), data() if datamodule is None else datamodule, ckpt_path=ckpt_path)
    return fitted


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_saved_local_models_match_the_end_of_local_training(engine: Any, tmp_path: Path) -> None:
    seen = Trajectory()
    run(tmp_path, callbacks=[seen], engine=engine, saver={"every_n_rounds": 2}, max_rounds=4)
    cohorts = {2: seen.cohorts[1], 4: seen.cohorts[3]}
    assert files(tmp_path) == sorted(f"round_00000{r}/client_{i}.safetensors" for r in cohorts for i in cohorts[r])
    model, mean, examples = Plain().double(), torch.zeros_like(seen.models[0]), 0
    for i in cohorts[4]:
        model.load_state_dict(ClientModels.load(tmp_path, round=4, client_id=i))
        assert torch.equal(parameters(model), seen.ends[3][i])
        size = len(clients()[i])
        mean, examples = mean + size * parameters(model), examples + size
    torch.testing.assert_close(mean / examples, seen.models[3], rtol=1e-12, atol=1e-14)


class Shown(FederatedCallback):
    """Records clients' personal models after each round."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, Any], dict[str, Tensor]] = {}

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        for i in trainer.fit_loop.population:
            with trainer.fit_loop.showing_client_model(i):
                state = {name: value.clone() for name, value in pl_module.state_dict().items()}
                self.found[trainer.fit_loop.round, i] = state


class Normalised(Plain):
    """With BatchNorm. Under FedBN, its parameters and statistics stay with the clients."""

    def __init__(self) -> None:
        super().__init__()
        self.body.insert(1, nn.BatchNorm1d(8))


PERSONAL: dict[str, dict[str, Any]] = {
    "personal parameters": {"personal": ["head.*"]},
    "at once": {"personal": ["head.*"], "engine": "vectorized"},
    "Ditto": {"algorithm": Ditto(0.5)},
    "buffers": {"algorithm": FedBN(), "make": Normalised},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PERSONAL)
def test_saved_personal_models_match_the_evaluated_ones(name: str, tmp_path: Path) -> None:
    options = {"max_rounds": 2, **PERSONAL[name], "datamodule": data((12, 8, 20, 4, 16, 8))}
    shown, others, seen = Shown(), tmp_path / "others", Trajectory()
    chosen = ClientModels("personal", folder=others, clients=[0, 5])  # in the round or not
    run(tmp_path / "cohort", "personal", callbacks=[shown, chosen, seen], **options)
    cohorts = {1: seen.cohorts[0], 2: seen.cohorts[1]}
    assert len(files(tmp_path / "cohort")) == 2 * 3
    for r, cohort in cohorts.items():
        for i in cohort:
            assert same(ClientModels.load(tmp_path / "cohort", r, i), shown.found[r, i])
        for i in (0, 5):
            assert same(ClientModels.load(others, r, i), shown.found[r, i])
    assert len(files(others)) == 4
    first, second, *_ = cohorts[2]
    assert not same(shown.found[2, first], shown.found[2, second])


def test_resumed_run_writes_the_same_files(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", max_rounds=3)
    part = run(tmp_path / "part", max_rounds=1)
    part.save_checkpoint(tmp_path / "1.ckpt")
    run(tmp_path / "part", max_rounds=3, ckpt_path=tmp_path / "1.ckpt")
    assert files(tmp_path / "part") == files(tmp_path / "whole")
    for file in files(tmp_path / "whole"):
        assert (tmp_path / "part" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert whole.fit_loop.round == 3


@pytest.mark.parametrize(("other", "saver", "saved"), [(77, {}, (0, 1, 2, 4, 5)), (3, {"clients": [3]}, ())])
def test_round_has_no_files_of_clients_that_did_not_complete_it(
    other: int, saver: dict[str, Any], saved: tuple[int, ...], tmp_path: Path
) -> None:
    left = ClientModels.path(tmp_path, 1, other)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of an earlier run")
    sets = clients()
    sets[3].tensors[0][:] = float("nan")
    drops = {"on_client_error": "drop", "clients_per_round": 1.0, "max_rounds": 1, "saver": saver}
    run(tmp_path, datamodule=FederatedDataModule(clients=sets, batch_size=4), **drops)
    assert files(tmp_path) == [f"round_000001/client_{i}.safetensors" for i in saved]


def test_files_of_earlier_and_killed_runs_are_removed(tmp_path: Path) -> None:
    for name in ("client_77.safetensors", ".client_3.safetensors.123.part"):
        left = ClientModels.path(tmp_path, 1, 0).with_name(name)
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"of an earlier run")
    run(tmp_path, "personal", personal=["head.*"], max_rounds=1, saver={"clients": [0, 3]})
    assert files(tmp_path) == [f"round_000001/client_{i}.safetensors" for i in (0, 3)]


def test_two_callbacks_sharing_a_folder_are_rejected(tmp_path: Path) -> None:
    pair = [ClientModels(), ClientModels("personal")]
    options: dict[str, Any] = {"personal": ["head.*"], "default_root_dir": tmp_path, "max_rounds": 1}
    with pytest.raises(FederatedError, match=r"Two ClientModels write into .*client_models, and would replace"):
        trainer(callbacks=pair, **options).fit(seeded(Plain), data())
    assert files(tmp_path) == []
    pair[1] = ClientModels("personal", folder=tmp_path / "own")
    trainer(callbacks=pair, **options).fit(seeded(Plain), data())
    assert len(files(tmp_path / "own")) == len(files(tmp_path / "client_models")) == 3


def test_each_trainer_has_its_own_folder(tmp_path: Path) -> None:
    saver = ClientModels()
    for name in ("one", "other"):
        options = {"max_rounds": 1, "clients_per_round": 1, "limit_val_batches": 0, "callbacks": [saver]}
        trainer(default_root_dir=tmp_path / name, **options).fit(seeded(Plain), data())
        assert len(files(tmp_path / name / "client_models")) == 1


def test_failed_write_keeps_files_and_truncated_file_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own = tmp_path / "local", tmp_path / "own"
    run(folder, max_rounds=1, clients_per_round=1)
    (file,) = files(folder)
    before = (folder / file).read_bytes()
    chosen: dict[str, Any] = {"personal": ["head.*"], "max_rounds": 1, "saver": {"clients": [0, 3, 5]}}
    run(own, "personal", **chosen)
    there = files(own)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    no_space = r"client_\d.safetensors could not be written: No space left.*another folder"
    with pytest.raises(FederatedError, match=no_space):
        run(folder, max_rounds=1, clients_per_round=1, local_epochs=2)
    assert files(folder) == [file]
    assert (folder / file).read_bytes() == before
    with pytest.raises(FederatedError, match=no_space):
        run(own, "personal", **chosen)
    assert files(own) == there
    assert len(there) == 3
    (folder / file).write_bytes(before[:-9])
    with pytest.raises(FederatedError, match="cannot be read as a client's model"):
        ClientModels.load(folder, 1, int(file[len("round_000001/client_")]))


def work_of_two(folder: Path) -> None:
    two = {"strategy": "clients", "devices": 2}
    run(folder / "local", **two)
    run(folder / "own", "personal", personal=["head.*"], **two)


@pytest.mark.thorough
def test_two_processes_write_the_same_files_as_one(tmp_path: Path) -> None:
    for part in in_processes(partial(work_of_two, tmp_path / "two"), tmp_path):
        assert not part.error, part.trace
    run(tmp_path / "one" / "local")
    run(tmp_path / "one" / "own", "personal", personal=["head.*"])
    assert files(tmp_path / "one") == files(tmp_path / "two")
    for file in (tmp_path / "one").rglob("*.safetensors"):
        i, number = int(file.stem.split("_")[1]), int(file.parent.name.split("_")[1])
        for name, value in ClientModels.load(file.parents[1], number, i).items():
            other = ClientModels.load(tmp_path / "two" / file.parents[1].name, number, i)[name]
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-14)


class Extra(Plain):
    """With extra state that is not a tensor."""

    def get_extra_state(self) -> Any:
        return {"words": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class Complex(Plain):
    """With a type that safetensors files do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))


@pytest.mark.parametrize(
    ("algorithm", "make", "saver", "message"),
    [
        (FedAvg(), Plain, ClientModels("personal"), r"clients of FedAvg have no personal models. Pass personal=\["),
        (FedAvg(), Plain, ClientModels(clients=[1, 9]), "there is no client 9; ids are such as 0"),
        (FedAvg(), Extra, ClientModels(), "the state_dict of Extra has a dict at '_extra_state'"),
        (FedAvg(), Complex, ClientModels(), r"have no type torch.complex128; Complex has it in \['phases'\]"),
    ],
    ids=["personal", "unknown", "extra state", "type"],
)
def test_models_that_cannot_be_saved_are_rejected(
    algorithm: Algorithm, make: Any, saver: ClientModels, message: str, tmp_path: Path
) -> None:
    run_of = trainer(algorithm=algorithm, callbacks=[saver], default_root_dir=tmp_path)
    with pytest.raises(FederatedError, match=message):
        run_of.fit(seeded(make), data())
    assert saver.folder in (None, tmp_path / "client_models")
    assert not files(tmp_path)


def test_error_names_the_invalid_argument_or_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="ClientModels.models='all'"):
        ClientModels("all")  # type: ignore[arg-type]
    with pytest.raises(FederatedError, match="clients must be a list of ids, which are .* found a str"):
        ClientModels(clients="clinic")
    for i, name in (
        (3, "client_3"),
        ("3", "client_'3'"),
        ("a/b", "client_a%2Fb"),
        ("-1", "client_'-1'"),
        ("'3'", "client_%273%27"),
    ):
        assert ClientModels.path(tmp_path, 1, i).stem == name
    run(tmp_path, max_rounds=1, clients_per_round=1.0, saver={"clients": [2, 4]})
    with pytest.raises(
        FederatedError, match=r"no model of client 0 after round 1: in round_000001 there are \['2', '4'\]"
    ):
        ClientModels.load(tmp_path, 1, 0)
    with pytest.raises(FederatedError, match=r"no model of client 2 after round 9: the rounds are \['round_000001'\]"):
        ClientModels.load(tmp_path, 9, 2)
