"""Runs whose servers and sites end at any moment resume with the bits of an undisturbed run."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Message
from lightning_fed.server import OortSampler
from tests.deploy.site_models import model
from tests.deploy.wire import METHODS, EndedError, Wire, make_data, make_trainer, parameters, simulated
from tests.helpers.adapters import adapted, exact_trainer, stand_in
from tests.helpers.selection import few

STATEFUL = ["Scaffold i", "Scaffold ii", "FedDyn"]


@pytest.mark.parametrize("method", few(["FedAvg", "Mime", *STATEFUL], ["Scaffold i"]))
def test_run_resumes_from_server_checkpoint_and_site_folders(method: str, tmp_path: Path) -> None:
    make = partial(make_trainer, method)
    expected = simulated(make)
    wire, module, two = Wire(tmp_path, make), model(), tmp_path / "two.ckpt"
    wire.run(save={2: two}, trainer=make(max_rounds=3))  # the third is lost: the sites trained, the server did not save
    wire.kill()
    _, reports = wire.run(module, ckpt_path=two)
    assert [report.round for report in reports] == [2, 3, 4]
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


@pytest.mark.parametrize("method", few(["FedAvg", *STATEFUL], ["FedDyn"]))
def test_simulated_run_resumes_with_sites(method: str, tmp_path: Path) -> None:
    make = partial(make_trainer, method)
    expected = simulated(make)
    begun = make_trainer(method, max_rounds=2)
    begun.fit(model(), make_data())
    begun.save_checkpoint(tmp_path / "two.ckpt")
    wire, module = Wire(tmp_path / "sites", make), model()
    three = tmp_path / "three.ckpt"  # by now, some states are on sites and others are here
    wire.run(module, ckpt_path=tmp_path / "two.ckpt", save={3: three}, trainer=make(max_rounds=3))
    wire.kill()
    wire.run(module, ckpt_path=three)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))


def test_sampler_state_is_saved_in_the_server_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clients_per_round": None, "sampler": OortSampler(2, exploration=0.3)}
    make = partial(make_trainer, "FedAvg", **options)
    wire, module, two = Wire(tmp_path, make), model(), tmp_path / "two.ckpt"
    wire.run(save={2: two}, trainer=make(max_rounds=3))
    wire.kill()
    fitted, _ = wire.run(module, ckpt_path=two)
    expected = simulated(make)
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    learned, wanted = (t.fit_loop.settings.sampler.state_dict() for t in (fitted, expected))
    assert learned == wanted
    assert len(learned["clients"]) == 4


@pytest.mark.parametrize("method", ["Scaffold ii"])
def test_second_fit_continues_a_simulation_with_remote_clients(method: str, tmp_path: Path) -> None:
    make, module = partial(make_trainer, method), model()
    wire, trainer = Wire(tmp_path, make), make(max_rounds=1)
    trainer.fit(module, make_data())
    for rounds in (3, 5):
        trainer.max_rounds = rounds
        wire.run(module, trainer=trainer)
    assert len({site._run for site in wire.sites.values()}) == 1
    assert torch.equal(parameters(module), parameters(simulated(make).lightning_module))
    trainer.max_rounds = 6
    with pytest.raises(
        FederatedError, match="This trainer's earlier fit is of a run with real clients, and 4 of them keep"
    ):
        trainer.fit(module, make_data())


@pytest.mark.thorough
def test_run_resumes_in_simulation_unless_sites_keep_states(tmp_path: Path) -> None:
    for method in ("FedAvg", "Scaffold ii"):
        wire = Wire(tmp_path / method, partial(make_trainer, method, max_rounds=2))
        wire.run(save={2: tmp_path / f"{method}.ckpt"})
    fitted = simulated(partial(make_trainer, "FedAvg"), ckpt_path=tmp_path / "FedAvg.ckpt")
    expected = simulated(partial(make_trainer, "FedAvg"))
    assert torch.equal(parameters(fitted.lightning_module), parameters(expected.lightning_module))
    with pytest.raises(FederatedError, match="keep states on their sites.*RemoteClients"):
        simulated(partial(make_trainer, "Scaffold ii"), ckpt_path=tmp_path / "Scaffold ii.ckpt")


@pytest.mark.thorough
def test_second_copy_of_a_task_of_an_abandoned_attempt_changes_no_state(tmp_path: Path) -> None:
    """A client that fails makes the round begin again, and a transport may deliver the first task once more."""
    make = partial(make_trainer, "Scaffold ii gradient", clients_per_round=1.0, on_client_error="drop", max_rounds=2)
    ends = list[torch.Tensor]()
    for copies in (0, 1):
        wire, module, first = Wire(tmp_path / str(copies), make), model(), dict[Any, Message]()

        def comes(task: Message, copies: int = copies, first: Any = first, wire: Wire = wire) -> list[Message]:
            header = task.header
            is_first = (header["phase"], header["round"], header["attempt"]) == ("train", 0, 0)
            if is_first and task.client == 1:
                return []
            reply = wire.answer(task)
            if is_first:
                first[task.client] = task
            elif header["phase"] == "train" and header["round"] == 0:
                for old in [first[task.client]] * copies:
                    wire.answer(old)
            return [reply]

        wire.comes = comes
        _, reports = wire.run(module)
        assert list(reports[0].cohort) == [0, 2, 3]
        ends.append(parameters(module))
    assert torch.equal(*ends)


def disturbed(method: str, folder: Path, seed: int) -> tuple[Any, int]:
    """Run over sites, end servers and sites at random moments, and return the module and the number of ends."""
    chance, make, ends = random.Random(seed), partial(make_trainer, method), 0
    wire, checkpoint = Wire(folder, make, seed=seed), folder / "last.ckpt"

    def comes(task: Message) -> list[Message]:
        nonlocal ends
        reply = wire.answer(task)
        if chance.random() < 0.15:  # a site ends after it answers, and the reply is lost
            wire.kill(int(task.client))
            ends += 1
            reply = wire.answer(task)
        if chance.random() < 0.1:
            wire.kill(chance.choice(range(4)))
            ends += 1
        if task.client == wire.last and chance.random() < 0.1:  # the server ends when nearly all replies are in
            raise EndedError
        return [reply]

    wire.comes = comes
    while True:
        module = model()
        try:
            wire.run(module, ckpt_path=checkpoint if checkpoint.is_file() else None, save={None: checkpoint})
        except EndedError:
            ends += 1
            continue
        wire.kill()
        return module, ends


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(33))
def test_random_kills_yield_identical_bits(seed: int, tmp_path: Path) -> None:
    method = list(METHODS)[(5 * seed + 6) % len(METHODS)]
    module, ends = disturbed(method, tmp_path, seed)
    assert ends
    assert torch.equal(parameters(module), parameters(simulated(partial(make_trainer, method)).lightning_module))


@pytest.mark.parametrize("library", ["stand-in", pytest.param("peft", marks=pytest.mark.thorough)])
def test_adapter_base_weights_match_the_round_of_a_task(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Any = partial(exact_trainer, clients_per_round=3, engine="sequential", limit_val_batches=0)
    made: Any = adapted if library == "peft" else partial(stand_in, monkeypatch)
    expected = simulated(make, made)
    wire, module, two = Wire(tmp_path, make, made), made(), tmp_path / "two.ckpt"
    first: dict[int, tuple[Message, Message]] = {}

    def comes(task: Message) -> list[Message]:
        reply = wire.answer(task)
        if task.header["phase"] == "train":
            first.setdefault(int(task.client), (task, reply))
            assert any(name.startswith("base.") for name in task.tensors) == (task.header["round"] > 0)
        return [reply]

    wire.comes = comes
    wire.run(save={2: two}, trainer=make(max_rounds=3))  # the third is lost
    for client, (task, reply) in first.items():  # a task of an earlier round, while the site has later weights
        again = wire.answer(task)
        assert torch.equal(again.tensors["model"], reply.tensors["model"]), client
    wire.kill()
    wire.run(module, ckpt_path=two)
    state = expected.lightning_module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    start = made().state_dict()
    assert not torch.equal(*(own["net.base_model.model.one.base_layer.weight"] for own in (state, start)))
    task = next(task for task, _ in first.values() if task.client in wire.sites)
    for base, said in (
        ({"base.0": torch.zeros(8, 6)}, "has 1 base weights of adapters, and this site's module has 2 that change"),
        ({"base.0": torch.zeros(8, 6), "base.1": torch.zeros(7, 8)}, r"has 'base\.[01]' of torch.float32, where"),
    ):
        with pytest.raises(FederatedError, match=said):
            wire.answer(replace(task, tensors={**task.tensors, **base}))
    for site in wire.sites.values():
        site.close()
        own = site._model.state_dict().items()
        assert all(torch.equal(value, start[name]) for name, value in own if ".base_layer." in name)
