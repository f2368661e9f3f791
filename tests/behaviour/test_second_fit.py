"""A second fit of a trainer continues the run, with the checks of a resume from a checkpoint."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Algorithm, FedAvg, FedDyn, FedProx, Scaffold
from lightning_fed.server import FedAdam, FedBuff, TopK
from tests.helpers.processes import in_processes
from tests.helpers.training import Net, clients, data, parameters, seeded, trainer

SIZES = (13, 8, 21, 5, 16, 9)
NAMES = [f"hospital {n:03}" for n in range(20)]


class Changing(Net):
    """The shared classifier with a frozen layer, under any local optimizer."""

    build: Any = partial(torch.optim.SGD, lr=0.1)

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(8, 8)
        self.more.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.more(self.body(x)))

    def configure_optimizers(self) -> Any:
        built = self.build(filter(lambda p: p.requires_grad, self.parameters()))
        return built if isinstance(built, torch.optim.Optimizer) else list(built)


def named(names: list[str]) -> FederatedDataModule:
    return FederatedDataModule(clients=dict(zip(names, clients([8] * len(names)), strict=True)), batch_size=4)


@dataclass(frozen=True)
class Change:
    """A change between the first and the second fit of a run.

    Attributes:
        message: The refusal's text after the name of the run so far.
        edit: Changes the model and the trainer.
        first: The data of the first rounds.
        then: The data of the later rounds.
        algorithm: The method.
        resumed: The refusal's text for a resume from a checkpoint if it differs, or None if the resume is accepted.
    """

    message: str
    edit: Callable[[Any, Any], None] = lambda model, run: None
    first: Callable[[], FederatedDataModule] = data
    then: Callable[[], FederatedDataModule] = data
    algorithm: Callable[[], Algorithm] = Scaffold
    resumed: str | None = ""


def another_layer(model: Any, run: Any) -> None:
    model.more.requires_grad_(True)
    model.body[3].requires_grad_(False)


def with_settings(model: Any, run: Any, **changed: Any) -> None:
    settings = run.fit_loop.settings = copy(run.fit_loop.settings)
    vars(settings).update(changed)


def groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)


def scheduled(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


CHANGES = {
    "fewer clients": Change(r"client list is 6, .* is 5\.", then=partial(data, SIZES[:5])),
    "more clients, no states": Change("client list is 6, .* is 7", then=partial(data, (*SIZES, 4)), algorithm=FedAvg),
    "one other id of many": Change(
        r"client list is 20 long, from number 19 on \['hospital 019'\], .* from number 19 on \['clinic'\]",
        first=partial(named, NAMES),
        then=partial(named, [*NAMES[:-1], "clinic"]),
    ),
    "other sizes": Change(
        "other numbers of examples per client, and what its clients keep belongs to their data",
        then=partial(data, (13, 8, 21, 6, 16, 9)),
    ),
    "frozen": Change(
        "155 trainable parameters, the model has 107",
        lambda model, run: model.body[0].weight.requires_grad_(False),
        resumed="a parameter group that doesn't match",
    ),
    "another layer": Change("other trained parameters: as many numbers, but other names", another_layer),
    "another layer, no states": Change("other trained parameters", another_layer, algorithm=FedAvg),
    "double": Change("parameters are torch.float32, .* torch.float64", lambda model, run: model.double()),
    "method": Change("method is 'Scaffold', .* 'FedProx'", partial(with_settings, algorithm=FedProx(0.1))),
    "options": Change(
        r"method options is {'mu': 0.1.* {'mu': 0.7",
        lambda model, run: setattr(run.fit_loop.settings.algorithm, "mu", 0.7),
        algorithm=partial(FedProx, 0.1),
    ),
    "compression": Change("compression is None, .* TopK", partial(with_settings, compression=TopK(0.5))),
    "server optimizer": Change(
        "server_optimizer is SGD, .* FedAdam", partial(with_settings, server_optimizer=partial(FedAdam, lr=0.1))
    ),
    "optimizer": Change(
        "local optimizer.* SGD.* Adam", lambda model, run: setattr(model, "build", partial(torch.optim.Adam, lr=0.01))
    ),
    "groups": Change(
        r"parameters per group of the local optimizer: \[6\]\. This fit's: \[1, 5\]",
        lambda model, run: setattr(model, "build", groups),
        resumed="a different number of parameter groups",
    ),
    "schedules": Change(
        r"schedules: none\. This fit's: StepLR",
        lambda model, run: setattr(model, "build", scheduled),
        resumed=None,
    ),
}


def options_of(change: Change) -> dict[str, Any]:
    return {"algorithm": change.algorithm(), "limit_val_batches": 0, "num_sanity_val_steps": 0}


@cache
def straight_to_the_end(first: Callable[[], FederatedDataModule], algorithm: Callable[[], Algorithm]) -> Tensor:
    """Return the parameters after three rounds in one fit."""
    model = seeded(Changing)
    trainer(**options_of(Change("", first=first, algorithm=algorithm)), max_rounds=3).fit(model, first())
    return parameters(model)


@pytest.mark.parametrize("name", CHANGES)
def test_second_fit_and_resume_reject_a_changed_run(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    model = seeded(Changing)
    run = trainer(**options_of(change), max_rounds=2)
    run.fit(model, change.first())
    run.save_checkpoint(tmp_path / "run.ckpt")
    kept = model.state_dict(), model.build, run.fit_loop.settings, [p.requires_grad for p in model.parameters()]
    before = {key: value.clone() for key, value in kept[0].items()}
    mu = getattr(run.fit_loop.settings.algorithm, "mu", None)
    run.max_rounds = 3
    change.edit(model, run)
    with pytest.raises(FederatedError, match=rf"^The earlier fit.*{change.message}") as refusal:
        run.fit(model, change.then())
    assert "checkpoint" not in str(refusal.value)
    assert "of the earlier fit to continue it, or make a new FederatedTrainer" in str(refusal.value)
    model.float()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model is as it was"
    model.build, run.fit_loop.settings = kept[1:3]
    for p, requires_grad in zip(model.parameters(), kept[3], strict=True):
        p.requires_grad_(requires_grad)
    if mu is not None:
        run.fit_loop.settings.algorithm.mu = mu
    run.fit(model, change.first())
    assert torch.equal(parameters(model), straight_to_the_end(change.first, change.algorithm))
    if change.resumed is not None:
        again, model = trainer(**options_of(change), max_rounds=3), seeded(Changing)
        change.edit(model, again)
        with pytest.raises(FederatedError, match=rf"^The checkpoint.*{change.resumed or change.message}"):
            again.fit(model, change.then(), ckpt_path=tmp_path / "run.ckpt")


def test_another_model_is_rejected_and_not_modified() -> None:
    run, model, other = trainer(max_rounds=2), seeded(), Net()
    run.fit(model, data())
    before = parameters(other).clone()
    run.max_rounds = 3
    with pytest.raises(FederatedError, match="already run 2 rounds on another model. Make a new FederatedTrainer"):
        run.fit(other, data())
    assert torch.equal(parameters(other), before)


def shrunk(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5)


WARNINGS: dict[str, tuple[str, Callable[[Any], None], Callable[[], FederatedDataModule]]] = {
    "sizes": (
        r"The earlier fit ran with other numbers of examples per client\. The run continues with this fit's",
        lambda model: None,
        partial(data, (13, 8, 21, 6, 16, 9)),
    ),
    "batch size": (
        r"The earlier fit ran with batch_size=4 \(this fit has 5\)",
        lambda model: None,
        partial(data, batch_size=5),
    ),
    "rate": (
        r"The local optimizer continues with the earlier fit's lr=0.1 \(this fit has 0.3\)",
        lambda model: setattr(model, "build", partial(torch.optim.SGD, lr=0.3)),
        data,
    ),
    "weights": (
        "The model's parameters have changed .* continues from the server's own after 2 rounds",
        shrunk,
        data,
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_second_fit_warns_about_accepted_changes(name: str) -> None:
    message, edit, then = WARNINGS[name]
    run, model = trainer(algorithm=FedAvg(), max_rounds=2), seeded(Changing)
    run.fit(model, data())
    run.max_rounds = 3
    edit(model)
    with pytest.warns(UserWarning, match=message):
        run.fit(model, then())


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": FedDyn(0.1, evaluate="mean")},  # its module holds a model other than x
        {"algorithm": Scaffold(), "personal": ["head.*"], "precision": "64-true"},
        {"algorithm": Scaffold(), "asynchronous": FedBuff(2, 4), "clients_per_round": None},
        {"algorithm": FedAvg(), "server_optimizer": partial(FedAdam, lr=0.1)},
    ],
    ids=["FedDyn", "personal", "FedBuff", "FedAdam"],
)
def test_second_fit_with_more_rounds_has_identical_bits(options: Any, recwarn: pytest.WarningsRecorder) -> None:
    straight, model = seeded(), seeded()
    trainer(**options, max_rounds=4).fit(straight, data())
    run = trainer(**options, max_rounds=2)
    run.fit(model, data())
    run.max_rounds = 4
    run.fit(model, data())
    assert torch.equal(parameters(model), parameters(straight))
    assert not [w for w in recwarn if "earlier fit" in str(w.message)]


class FailsOnce(FederatedCallback):
    """Fails in one hook of the first round."""

    def __init__(self, hook: str) -> None:
        self.is_due = True
        setattr(self, hook, self._fail)

    def _fail(self, *_: Any) -> None:
        if self.is_due:
            self.is_due = False
            raise KeyError("stop here")


@pytest.mark.parametrize(("hook", "warns"), [("on_client_end", False), ("on_round_end", True)])
def test_fit_after_an_error_as_a_round_ended_warns(hook: str, warns: bool, recwarn: pytest.WarningsRecorder) -> None:
    """A schedule that follows the validation loss, say, has not stepped in that round."""
    run, model = trainer(max_rounds=2, callbacks=FailsOnce(hook)), seeded()
    with pytest.raises(KeyError, match="stop here"):
        run.fit(model, data())
    run.fit(model, data())
    found = [str(w.message) for w in recwarn if "does not continue exactly" in str(w.message)]
    assert [text.partition(":")[2][:66] for text in found] == (
        [" this trainer's earlier fit ended with an error while round 0 ended"[:66]] if warns else []
    )


def test_client_ids_changed_in_place_are_rejected() -> None:
    names = list(NAMES[:6])
    source = FederatedDataModule(clients=dict(zip(names, clients(SIZES), strict=True)), batch_size=4)
    source.client_ids = names
    run, model = trainer(algorithm=Scaffold(), max_rounds=1), seeded()
    run.fit(model, source)
    run.max_rounds = 2
    names[0], names[1] = names[1], names[0]
    with pytest.raises(FederatedError, match="earlier fit's client list"):
        run.fit(model, source)


@pytest.mark.thorough
def test_all_processes_reject_when_one_keeps_no_state(tmp_path: Path) -> None:
    def work() -> str:
        two = {"strategy": "clients", "devices": 2}
        run, model = trainer(algorithm=Scaffold(), max_rounds=1, sampler=lambda seed, round: [0], **two), seeded()
        run.fit(model, data())
        run.max_rounds = 2
        with pytest.raises(FederatedError) as refusal:
            run.fit(model, data((13, 8, 21, 6, 16, 9)))
        return str(refusal.value)

    outcomes = in_processes(work, tmp_path)
    assert not any(outcome.error for outcome in outcomes), outcomes[0].trace + outcomes[1].trace
    assert all("what its clients keep belongs to their data" in outcome.value for outcome in outcomes)
