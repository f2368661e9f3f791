"""Samplers that learn from reports: both engines, processes, resume, one copy for each run, and what is refused."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import ClientError, FederatedDataModule, FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedAvg, FedDane, FedExP, FedProx, Mime, Scaffold
from lightning_fed.server import (
    ClientClock,
    CoordinateMedian,
    FedBuff,
    OortSampler,
    PowerOfChoiceSampler,
    SystemsHeterogeneity,
    UniformSampler,
    UpdateNormSampler,
)
from lightning_fed.server.participation import Population
from tests.helpers.engines import SIZES, Ordinary, Record, assert_close, run, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import QUIET, clients, data, parameters, same, trainer


class Turns:
    """A user's sampler: the client that has taken part least often, by its reports."""

    def __init__(self, state: Any = None) -> None:
        self.times: dict[Any, Any] = {} if state is None else state

    def __call__(self, seed: int, round: int, population: Sequence[Any]) -> list[Any]:
        return sorted(population, key=lambda i: (float(self.times.get(i, 0)), i))[:2]

    def update(self, round: int, reports: Mapping[Any, Any]) -> None:
        for client_id, report in reports.items():
            self.times[client_id] = self.times.get(client_id, 0) + report.steps

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.times = state_dict["times"]


CLOCK = ClientClock(3.0, slow_share=0.4, spread=0.3)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "fresh losses": partial(PowerOfChoiceSampler, 2, 4),
    "last losses": partial(PowerOfChoiceSampler, 2, 4, losses="last"),
    "Oort": partial(OortSampler, 3, exploration=0.4, clock=CLOCK, pacer_step=2.0, window=1),
    "update norms": partial(UpdateNormSampler, 2),
    "a user's": Turns,
}
FOUR: dict[str, Any] = {"clients_per_round": None, "max_rounds": 4}


def cohorts(record: Record) -> list[Any]:
    return [report.cohort for report in record.rounds]


def ran(name: str, engine: str = "sequential", **options: Any) -> tuple[FederatedTrainer, Record]:
    record = Record()
    options = {"sampler": SAMPLERS[name](), **options} if name else options
    return run(engine, callbacks=[record], **{**FOUR, **options}), record


def learned(t: FederatedTrainer) -> dict[str, Any]:
    sampler: Any = t.fit_loop.settings.sampler
    return sampler.state_dict()


class Fails(Ordinary):
    """Fails on the data of one client."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if bool((batch[0] > 90).any()):
            raise RuntimeError("these examples are bad")
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss


def spoiled() -> Any:
    parts = clients(SIZES)
    parts[3].tensors[0][0] = 99.0
    return FederatedDataModule(parts, batch_size=4)


# ------------------------------------------------------------------ the contract


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLERS)
def test_engines_draw_the_same_cohorts_and_a_resumed_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    whole, record = ran(name)
    at_once, other = ran(name, "vectorized")
    assert cohorts(other) == cohorts(record)
    assert_close(state_of(whole), state_of(at_once))
    for engine, wanted in (("sequential", whole), ("vectorized", at_once)):
        half, _ = ran(name, engine, max_rounds=2)
        path = tmp_path / f"{engine}.ckpt"
        half.save_checkpoint(path)
        torch.load(path, weights_only=True)
        resumed, rest = ran(name, engine, ckpt_path=path)
        assert cohorts(rest) == cohorts(record)[2:]
        assert same(state_of(resumed), state_of(wanted))
        assert same(learned(resumed), learned(wanted))


def of_all(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        t, record = ran(name, strategy="clients", devices=2)
        found[name] = {"cohorts": cohorts(record), "learned": learned(t), "state": state_of(t)}
    return found


@pytest.mark.thorough
def test_all_processes_draw_the_cohorts_of_one(tmp_path: Path) -> None:
    outcomes = in_processes(partial(of_all, list(SAMPLERS)), tmp_path)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    first, second = (outcome.value for outcome in outcomes)
    for name in SAMPLERS:
        alone, record = ran(name)
        for part in (first[name], second[name]):
            assert part["cohorts"] == cohorts(record), name
            assert_close(state_of(alone), part["state"])
        assert same(first[name]["learned"], second[name]["learned"])


def of_split_batches() -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    t, record = ran("Oort", sampler=OortSampler(2, clock="reports", pacer_step=1e-4), **options)
    _, fresh = ran("fresh losses", **options)
    with pytest.raises(ClientError) as caught:
        ran("", make=Fails, datamodule=spoiled, sampler=PowerOfChoiceSampler(2, 6), **options)
    return {
        "by time": (cohorts(record), learned(t)),
        "fresh losses": cohorts(fresh),
        "failed": "client 3" in str(caught.value).lower(),
    }


@pytest.mark.thorough
def test_processes_that_split_batches_draw_the_same_cohorts_and_end_together(tmp_path: Path) -> None:
    first, second = in_processes(of_split_batches, tmp_path)
    assert not first.error, first.trace
    assert first.value == second.value
    assert first.value["fresh losses"] == cohorts(ran("fresh losses")[1])
    assert first.value["failed"]


@pytest.mark.parametrize("method", few([Scaffold(), FedDane(0.1), Mime(), FedProx(0.1, adaptive=True)], []), ids=repr)
def test_fresh_losses_go_with_every_kind_of_method(method: Any) -> None:
    whole, record = ran("fresh losses", algorithm=method)
    at_once, other = ran("fresh losses", "vectorized", algorithm=method)
    assert cohorts(other) == cohorts(record)
    assert_close(state_of(whole), state_of(at_once))


# ------------------------------------------------------------------ what a round makes of it


def test_the_clients_of_the_highest_loss_at_the_server_model_are_chosen_and_measuring_is_in_the_bytes() -> None:
    losses, asked = list[dict[Any, float]](), list[list[Any]]()
    sampler = PowerOfChoiceSampler(2, 4)

    class Looks(Record):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            loop = trainer.fit_loop
            asked.append(sampler.needs_losses_of(0, loop.round, loop.population))
            losses.append(loop.training_losses(asked[-1]))

    record = Looks()
    fitted = run("sequential", sampler=sampler, callbacks=[record], **FOUR)
    x = fitted.fit_loop.state.x.nbytes
    for report, of_round in zip(record.rounds, losses, strict=True):
        assert set(report.cohort) == set(sorted(of_round, key=lambda i: -of_round[i])[:2])
        assert (report.bytes_up, report.bytes_down) == (2 * x + 4 * 8, 4 * x)
    plain = Record()
    run("sequential", sampler=lambda seed, round: record.rounds[round].cohort, callbacks=[plain], **FOUR)
    assert all(torch.equal(a, b) for a, b in zip(plain.x, record.x, strict=True))  # measuring leaves no trace


def test_a_candidate_whose_loss_cannot_be_computed_stops_the_run_or_is_dropped_by_name() -> None:
    options = {"make": Fails, "datamodule": spoiled, "sampler": PowerOfChoiceSampler(2, 6), "max_rounds": 2}
    with pytest.raises(ClientError, match="[Cc]lient 3.*its loss for the sampler.*these examples are bad"):
        ran("fresh losses", **options)
    _, record = ran("fresh losses", on_client_error="drop", **options)
    for report in record.rounds:
        assert len(report.cohort) == 2
        assert "these examples are bad" in report.failed[3]


def with_nan(*places: int) -> FederatedDataModule:
    parts = clients(SIZES)
    for place in places:
        parts[place].tensors[0][0] = float("nan")
    return FederatedDataModule(parts, batch_size=4)


@pytest.mark.parametrize("engine", few(["sequential", "vectorized"], ["sequential"]))
def test_a_candidate_whose_loss_is_not_finite_has_failed(engine: str) -> None:
    options: dict[str, Any] = {"datamodule": partial(with_nan, 3), "sampler": PowerOfChoiceSampler(2, 6)}
    with pytest.raises(ClientError, match="Client 3 has the loss nan at the server model of round 0.*look at its data"):
        ran("fresh losses", engine, **options)
    _, record = ran("fresh losses", engine, on_client_error="drop", **options)
    assert all(len(report.cohort) == 2 and 3 in report.failed for report in record.rounds)
    options["datamodule"] = partial(with_nan, 0, 1, 2, 3)
    with pytest.raises(ClientError, match="4 of 6 clients failed in round 0, more than max_failed_share=0.5 allows"):
        ran("fresh losses", engine, on_client_error="drop", **options)


class OnDemand(FederatedDataModule):
    """Builds clients on demand, and one of them cannot be built."""

    client_ids = range(len(SIZES))

    def client_dataset(self, client_id: Any) -> Any:
        if client_id == 3:
            raise OSError("the disk is gone")
        return clients(SIZES)[client_id]


def test_a_candidate_that_cannot_be_built_has_failed() -> None:
    sampler = PowerOfChoiceSampler(2, 6, weights=dict.fromkeys(range(len(SIZES)), 1.0))
    options: dict[str, Any] = {"datamodule": partial(OnDemand, batch_size=4), "sampler": sampler, "max_rounds": 1}
    with pytest.raises(ClientError, match="Client 3 failed when .*: OSError: the disk is gone"):
        ran("fresh losses", **options)
    _, record = ran("fresh losses", on_client_error="drop", **options)
    assert len(record.rounds[0].cohort) == 2
    assert "the disk is gone" in record.rounds[0].failed[3]


def test_the_step_is_the_sum_of_changes_by_share_over_probability() -> None:
    _, record = ran("update norms", max_rounds=3)
    torch.manual_seed(3)
    x, sampler = parameters(Ordinary()).double(), UpdateNormSampler(2)
    population = Population(range(len(SIZES)), SIZES.__getitem__, SIZES)
    ends = iter(zip(record.reports, record.models, strict=True))
    for number, report in enumerate(record.rounds):
        p = sampler.probabilities(number, population)
        share = {i: SIZES[int(i)] / sum(SIZES) / float(p[int(i)]) for i in report.cohort}
        assert dict(report.weights) == pytest.approx(share, rel=1e-12)
        step = torch.zeros_like(x)
        for own, y in (next(ends) for _ in report.cohort):
            step += share[own.client_id] * (y - x)
        torch.testing.assert_close(record.x[number], x + step, rtol=1e-12, atol=1e-12)
        x = record.x[number]
        sampler.update(number, report.clients)


# ------------------------------------------------------------------ one state for each run


@pytest.mark.thorough
def test_each_run_learns_by_itself_and_a_second_fit_goes_on() -> None:
    sampler = OortSampler(2)
    whole, record = ran("Oort", sampler=sampler)
    assert sampler.state_dict() == OortSampler(2).state_dict()
    _, again = ran("Oort", sampler=sampler)
    assert cohorts(again) == cohorts(record)
    torch.manual_seed(3)
    twice = trainer(sampler=sampler, callbacks=[rest := Record()], **{"max_rounds": 2, "precision": "64-true"})
    module, own = whole.lightning_module.__class__(), data(SIZES)
    twice.fit(module, own)
    twice.max_rounds = 4
    twice.fit(module, own)
    assert cohorts(rest) == cohorts(record)
    assert same(state_of(twice), state_of(whole))


def test_a_state_given_at_the_start_is_that_of_every_run(tmp_path: Path) -> None:
    fitted, record = ran("a user's", sampler=Turns({0: 99, 1: 99}), max_rounds=1)
    ran("", sampler=UniformSampler(2), max_rounds=1)[0].save_checkpoint(tmp_path / "other.ckpt")
    fitted.max_rounds = 2
    with pytest.warns(UserWarning, match="nothing that a sampler has learned: Turns begins as in a new run"):
        fitted.fit(Ordinary(), data(SIZES), ckpt_path=tmp_path / "other.ckpt")
    assert cohorts(record) == [(2, 3)] * 2
    noted = fitted.fit_loop.run_state.state_dict()["sampler"]["state"]
    fitted.fit_loop.settings.sampler.times.clear()  # type: ignore[attr-defined]
    assert noted["times"].keys() == {0, 1, 2, 3}, "what a checkpoint holds is a copy"


def test_a_checkpoint_of_another_sampler_is_told_of(tmp_path: Path) -> None:
    for name, told in (("last losses", "what PowerOfChoiceSampler has learned"), ("uniform", "nothing that a sampler")):
        half, _ = ran("Oort", max_rounds=1, sampler=SAMPLERS.get(name, partial(UniformSampler, 2))())
        half.save_checkpoint(tmp_path / "half.ckpt")
        with pytest.warns(UserWarning, match=f"The checkpoint holds {told}.*: OortSampler begins as in a new run"):
            ran("Oort", ckpt_path=tmp_path / "half.ckpt", max_rounds=2)


def test_what_was_learned_and_does_not_fit_is_refused(tmp_path: Path) -> None:
    half, _ = ran("last losses", max_rounds=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    saved["loops"]["fit_loop"]["state_dict"]["sampler"]["state"] = {"losses": {0: "high"}}
    torch.save(saved, tmp_path / "bad.ckpt")
    with pytest.raises(FederatedError, match=r"bad.ckpt does not fit this run: restoring what the sampler has learned"):
        ran("last losses", ckpt_path=tmp_path / "bad.ckpt")


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": type("Half", (), {"update": print, "__call__": print})()}, "has no method state_dict"),
        (
            {"sampler": UniformSampler(2), "gradient_sampler": OortSampler(2), "algorithm": FedDane(0.1)},
            r"gradient_sampler=OortSampler\(2, .* learns from reports, which only clients that train send",
        ),
        (
            {"sampler": OortSampler(2), "asynchronous": FedBuff(2, 3)},
            r"sampler=OortSampler\(2, .* cannot be combined with asynchronous=FedBuff",
        ),
        *(
            (
                {"sampler": UpdateNormSampler(2), **options},
                rf"sampler=UpdateNormSampler\(2, .*cannot be combined with {message}",
            )
            for options, message in (
                ({"algorithm": Scaffold()}, "Scaffold.*Use a method such as FedAvg"),
                ({"algorithm": FedExP()}, "FedExP"),
                ({"algorithm": Mime()}, "Mime"),
                ({"weighting": "steps"}, "weighting='steps', which is unknown for clients outside"),
                ({"aggregator": CoordinateMedian()}, "aggregator=CoordinateMedian.*Leave it unset"),
                ({"heterogeneity": SystemsHeterogeneity(0.5)}, "heterogeneity=.*Leave it unset"),
                ({"on_client_error": "drop"}, "on_client_error='drop'.*Leave it at 'raise'"),
            )
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        FederatedTrainer(**{**QUIET, "local_epochs": 1, **options})


class Asks(Turns):
    """Asks for losses, in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def needs_losses_of(self, seed: int, round: int, population: Sequence[Any]) -> Any:
        return self.form

    def __call__(self, seed: int, round: int, population: Sequence[Any], losses: Any = ()) -> list[Any]:
        return list(losses)


def test_ids_to_measure_come_in_any_sequence() -> None:
    for form in (np.array([1, 4]), torch.tensor([1, 4]), (1, 4)):
        assert cohorts(ran("a user's", sampler=Asks(form), max_rounds=1)[1]) == [(1, 4)]
    with pytest.raises(FederatedError, match="sampler's needs_losses_of must return a list of client ids, found None"):
        ran("a user's", sampler=Asks(None), max_rounds=1)


def test_a_sampler_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(FederatedError, match="learns from reports, .* ended in TypeError: .*define __deepcopy__"):
        FederatedTrainer(**QUIET, local_epochs=1, sampler=Turns({"open": (i for i in ())}))


def test_a_state_that_checkpoints_cannot_hold_is_refused_in_the_first_round() -> None:
    with pytest.raises(FederatedError, match=r"Turns.state_dict\(\) holds .*Path, which does not load without running"):
        ran("a user's", sampler=Turns({"x": Path("a")}), max_rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        FederatedTrainer(**QUIET, algorithm=FedAvg(), local_epochs=1, sampler=SAMPLERS["Oort"]())
