"""A site trusts no server: it does what its own trainer would do, and refuses everything else by name."""

import logging
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.callbacks import PersonalizedAccuracy
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite, Message
from lightning_fed.deploy.facts import facts_of, optimizer_facts
from lightning_fed.deploy.message import check_numbers
from lightning_fed.server import BernoulliSampler, DifferentialPrivacy
from tests.deploy.site_models import Net, model
from tests.deploy.wire import SIZES, make_data, make_trainer, parameters

CLIENT, RUN, OTHER = 2, "0123456789abcdef", "fedcba9876543210"
MAKE = partial(make_trainer, "FedAvg")
STEPS = 12  # client 2 has 22 examples in batches of 4, and two local epochs


def registration(make: Callable[[], Any] = MAKE, **header: Any) -> Message:
    facts = {**facts_of(make(), model()), **optimizer_facts_of(model())}
    at = {"format": 1, "run": RUN, "phase": "register", "round": 0, "attempt": 0, "client": CLIENT}
    return Message({**at, "facts": facts, "clients": [0, 1, 2, 3], **header})


def optimizer_facts_of(module: Net) -> dict[str, str]:
    made = module.configure_optimizers()
    config = SimpleNamespace(scheduler=made["lr_scheduler"], frequency=1)
    found = {"optimizers": [made["optimizer"]], "lr_scheduler_configs": [config], "lightning_module": module}
    return optimizer_facts(SimpleNamespace(**found))


def task(tensors: dict[str, Any] | None = None, **header: Any) -> Message:
    at = {"format": 1, "run": RUN, "phase": "train", "round": 0, "attempt": 0, "client": CLIENT}
    told: dict[str, Any] = {"size": SIZES[CLIENT], "batches": STEPS // 2}
    told |= {"steps": STEPS, "mean_examples": None, "first_step": 0, "plateaus": [], "state": 0}
    halved = max(0, header.get("round", 0)) // 2  # how often the schedule has halved the rate
    told |= {"of": "0" * 8, "fit": "a" * 8, "rates": f"[{0.1 * 0.5**halved}]"}
    return Message({**at, **told, **header}, {"x": parameters(model()), **(tensors or {})})


def measure(**header: Any) -> Message:
    return task(**{"phase": "measure", "what": "loss", "local_steps": 0, "own": False, **header})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FederatedSite]:
    with FederatedSite(make_trainer("FedAvg"), model(), make_data([CLIENT]), CLIENT, tmp_path / "site") as site:
        site.answer(registration())
        yield site


REFUSED: dict[str, tuple[Message, str]] = {
    "a run that is a path": (task(run="../../escape"), r"run is '\.\./\.\./escape', and a name of 16 hex digits"),
    "a run with a path behind it": (task(run=f"{RUN}/../../escape"), "16 hex digits"),
    "a run in capitals": (task(run="ABCDEF0123456789"), "16 hex digits"),
    "a negative round": (task(round=-5), "its round is -5, and a whole number from 0 to"),
    "a round that is true": (task(round=True), "its round is True"),
    "a round up to which schedules would step for hours": (task(round=2**20 + 1), "round is 1048577, .* to 1048576"),
    "an attempt of many digits": (task(attempt=10**400), "its attempt is 1000"),
    "a phase that is no name": (task(phase=5), "its phase is 5, and a name is expected"),
    "another phase": (task(phase="bogus"), r"asks for 'bogus', which FedAvg does not need: .* 'train', 'measure'"),
    "gradients that the method does not take": (task(phase="gradients"), "'gradients', which FedAvg does not need"),
    "a loss that the method does not ask for": (task(phase="loss"), "'loss', which FedAvg does not need"),
    "more steps than planned": (task(steps=STEPS + 1), f"steps is {STEPS + 1}, .* from 0 to {STEPS}"),
    "steps that are no number": (task(steps="12"), "steps is '12'"),
    "a state of the future": (task(state=1), "state is 1"),
    "no state": (task(state=None), "state is None"),
    "a fit that is a path": (task(fit="../../aa"), r"fit is '\.\./\.\./aa', and a name of 8 hex digits"),
    "a state of no fit": (task(of=None), "of is None, and a name of 8 hex digits"),
    "a mean that is infinite": (task(mean_examples=float("inf")), "mean_examples is inf"),
    "a schedule that is not there": (task(plateaus=[{"best": 0.0}]), "the state of the schedules of this site's"),
    "a mean of many digits": (task(mean_examples=10**400), "mean_examples is 1000"),
    "a number of schedules": (task(plateaus=1.5), "plateaus is 1.5, and the state of the schedules of this site's"),
    "other rates": (task(rates="[0.2]"), r"with the learning rates \[0.1\], and the server says '\[0.2\]'. Give both"),
    "another size": (task(size=23), "has size=22 here, and the server plans with size=23: its data"),
    "another number of batches": (task(batches=None), "has batches=6 here, and the server plans with batches=None: "),
    "rates that are no text": (task(rates=[0.1]), "its rates is a list, and a text is expected"),
    "schedules that are none": (task(plateaus=None), "plateaus is None, and the state of the schedules of this site's"),
    "a step of a schedule that does not count the run's": (task(first_step=1), "first_step is 1, .* from 0 to 0"),
    "long fine-tuning": (measure(what="val", local_steps=2000), f"local_steps is 2000, .* from 0 to {STEPS}"),
    "an unknown measure": (measure(what="examples"), "what is 'examples', and 'loss', 'val' or 'train' is expected"),
    "another model": (task({"x": torch.zeros(3)}), r"has 'x' of shape \[3\], where \[83\] is expected"),
    "another precision": (task({"x": parameters(model()).double()}), "of torch.float64, where torch.float32"),
    "a buffer that is not there": (task({"buffers.own": torch.zeros(1)}), "'buffers.own', where .'x'. are"),
    "a registration without facts": (registration(facts=None), "does not contain the server's settings"),
    "nested facts": (registration(facts={"method": ["FedAvg"]}), "does not contain the server's settings"),
    "a registration without clients": (registration(clients=None), "give a sequence of ints or strs"),
}  # fmt: skip


def test_server_cannot_write_to_a_site_log(site: FederatedSite, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FederatedError, match="is not valid: its a\nb is 5"):
        site.answer(registration(words={"a\nb": 5}))
    assert r"its a\nb is 5" in caplog.messages[-1]


def test_initial_gradients_are_rejected_after_the_first_round(tmp_path: Path) -> None:
    make = partial(make_trainer, "Scaffold ii gradient")
    with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / "site") as site:
        site.answer(registration(make))
        c = {"server.c": torch.zeros_like(parameters(model()))}
        assert "x" in site.answer(task(c, phase="gradients")).header["norms"]
        with pytest.raises(FederatedError, match="asks for 'gradients', which Scaffold does not need"):
            site.answer(task(c, phase="gradients", round=1))


@pytest.mark.parametrize("name", REFUSED)
def test_tasks_that_the_site_trainer_would_not_run_are_rejected(site: FederatedSite, name: str, tmp_path: Path) -> None:
    message, words = REFUSED[name]
    with pytest.raises(FederatedError, match=words):
        site.answer(message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]
    assert site.answer(task()).header["report"]["steps"] == STEPS  # and the site continues


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
names = ("format", "run", "phase", "round", "attempt", "client", "steps", "mean_examples", "plateaus", "state", "what",
         "size", "batches", "rates", "first_step", "local_steps", "own", "facts", "clients")  # fmt: skip


@pytest.fixture(scope="module")
def one_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FederatedSite]:
    folder = tmp_path_factory.mktemp("site")
    with FederatedSite(make_trainer("FedAvg"), model(), make_data([CLIENT]), CLIENT, folder) as site:
        site.answer(registration())
        yield site


@given(
    st.sampled_from([registration(), task(), measure()]), st.dictionaries(st.sampled_from(names), values, max_size=3)
)
def test_arbitrary_message_is_either_answered_or_rejected(
    one_site: FederatedSite, message: Message, changed: dict[str, Any]
) -> None:
    message = Message({**message.header, **changed}, message.tensors)
    try:
        arrived = Message.from_bytes(message.to_bytes())
        one_site.answer(arrived)
    except FederatedError:
        pass


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({"local_epochs": None, "local_steps": 5}, [15], [14, 16]),  # every round takes 5 steps
        ({"local_epochs": 2}, [0, 15, 3 * 2**20], [-1, 3 * 2**20 + 1]),
    ],
)
def test_schedule_step_must_be_reachable_in_the_round(
    options: dict[str, Any], right: list[int], wrong: list[int]
) -> None:
    trainer = make_trainer("FedAvg", local_schedule="total", **options)
    for step in right:
        check_numbers(task(round=3, first_step=step), STEPS, trainer)
    for step in wrong:
        with pytest.raises(FederatedError, match=f"first_step is {step}"):
            check_numbers(task(round=3, first_step=step), STEPS, trainer)


def test_kept_state_survives_an_invalid_round(tmp_path: Path) -> None:
    make = partial(make_trainer, "Scaffold ii")
    c = {"server.c": torch.zeros_like(parameters(model()))}
    with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / "site") as site:
        site.answer(registration(make))
        site.answer(task(c))
        kept = sorted((tmp_path / "site").rglob("*.state"))
        with pytest.raises(FederatedError, match="round is -5"):
            site.answer(task(c, round=-5))
        assert sorted((tmp_path / "site").rglob("*.state")) == kept


class Normed(Net):
    """The network with a buffer that training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(8))


@pytest.mark.parametrize("personal", [[], ["net.4.*"]])
def test_run_with_other_clients_starts_from_the_initial_module(personal: list[str], tmp_path: Path) -> None:
    make = partial(make_trainer, "FedAvg", personal=personal, buffers="average")
    x = {"x": (first := normed()).net[0].weight.new_zeros(0)}

    def answer(site: FederatedSite, run: str, clients: list[int]) -> Message:
        facts = {**facts_of(make(), normed()), **optimizer_facts_of(normed())}
        site.answer(registration(run=run, clients=clients, facts=facts))
        x["x"] = site._clients.start.clone()  # type: ignore[union-attr]
        return site.answer(task(x, run=run))

    with FederatedSite(make(), first, make_data([CLIENT]), CLIENT, tmp_path / "one") as site:
        answer(site, RUN, [0, 1, 2, 3])
        second = answer(site, OTHER, [0, 1, 2, 3, 4])
    with FederatedSite(make(), normed(), make_data([CLIENT]), CLIENT, tmp_path / "other") as site:
        alone = answer(site, OTHER, [0, 1, 2, 3, 4])
    assert alone.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(value, second.tensors[name]) for name, value in alone.tensors.items())


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


def test_measurement_without_required_values_is_rejected(tmp_path: Path) -> None:
    make = partial(make_trainer, "FedExP")
    with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / "site") as site:
        site.answer(registration(make))
        with pytest.raises(FederatedError, match="Client 2 failed in its measure in round 1: KeyError"):
            site.answer(measure(own=True, round=1))


def test_measurement_of_another_round_between_phases_has_no_effect(tmp_path: Path) -> None:
    make, x, answers = partial(make_trainer, "Mime"), parameters(model()), list[Message]()
    for name in ("with", "without"):
        with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / name) as site:
            site.answer(registration(make))
            gradients = site.answer(task({"x": x}, phase="gradients", steps=None))
            if name == "with":
                site.answer(measure(round=3))  # a late copy: by then the schedule has other rates
            answers.append(site.answer(task({"x": x, "cohort_grad.x": gradients.tensors["send.x"]})))
    one, other = answers
    assert all(torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())


def test_two_servers_that_continue_one_run_do_not_share_states(tmp_path: Path) -> None:
    make, x = partial(make_trainer, "Scaffold ii"), parameters(model())

    def asked(fit: str, number: int, value: float) -> Message:
        state = {"state": number, "of": fit if number else "0" * 8}
        return task({"x": x + value, "server.c": torch.zeros_like(x)}, fit=fit, round=number, **state)

    answers = []
    for fits in ("ab", "a"):
        with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / fits) as site:
            site.answer(registration(make))
            for number in range(3):
                found = [site.answer(asked(8 * fit, number, 0.1 * number + (fit == "b"))) for fit in fits]
            answers.append(found[0])
    together, alone = answers
    assert all(torch.equal(value, together.tensors[name]) for name, value in alone.tensors.items())


def test_interleaved_runs_on_a_site_stay_independent(tmp_path: Path) -> None:
    make, x = partial(make_trainer, "Mime"), parameters(model())

    def phases(site: FederatedSite, run: str, value: float) -> Iterator[Message]:
        start = {"x": x + value}
        yield site.answer(registration(make, run=run))
        gradients = site.answer(task(start, run=run, phase="gradients", steps=None))
        yield gradients
        yield site.answer(task({**start, "cohort_grad.x": gradients.tensors["send.x"]}, run=run))

    runs = ((RUN, 0.0), (OTHER, 0.5))
    with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / "turns") as site:
        together = list(zip(*(phases(site, *run) for run in runs), strict=True))[-1]
    for run, found in zip(runs, together, strict=True):
        with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / run[0]) as site:
            *_, alone = phases(site, *run)
        assert alone.tensors.keys() == found.tensors.keys()
        assert all(torch.equal(value, found.tensors[name]) for name, value in alone.tensors.items())


def test_differential_privacy_blocks_measurements(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="differential privacy needs Opacus")

    def make() -> Any:
        privacy = DifferentialPrivacy(1.0, 1.0, delta=1e-3)
        return make_trainer(
            "FedAvg", server_optimizer=None, aggregator=privacy, sampler=BernoulliSampler(0.5), clients_per_round=None
        )

    with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path) as site:
        site.answer(registration(make))
        with pytest.raises(FederatedError, match="runs DifferentialPrivacy: measures are neither clipped nor noisy"):
            site.answer(measure())


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def test_measurement_steps_are_limited_by_the_site_callback(tmp_path: Path) -> None:
    def make() -> Any:
        return make_trainer(
            "FedAvg", callbacks=[PersonalizedAccuracy(local_steps=STEPS + 3, monitor="val_loss", mode="min")]
        )

    with FederatedSite(make(), Validated(), make_data([CLIENT], True), CLIENT, tmp_path) as site:
        site.answer(registration(make))
        found = site.answer(measure(what="val", local_steps=STEPS + 3))
        assert "val_loss" in found.header["measured"]
        with pytest.raises(FederatedError, match=f"local_steps is {STEPS + 4}"):
            site.answer(measure(what="val", local_steps=STEPS + 4))


def test_site_files_are_accessible_only_to_their_user(tmp_path: Path) -> None:
    make, folder = partial(make_trainer, "Scaffold ii"), tmp_path / "site"
    before = os.umask(0)
    try:
        with FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, folder) as site:
            site.answer(registration(make))
            site.answer(task({"server.c": torch.zeros_like(parameters(model()))}))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {"site", RUN, "agreed.json", ".lock"} <= modes.keys()
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


def test_every_answer_and_refusal_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = partial(make_trainer, "FedAvg", logger=True)
    with (
        caplog.at_level(logging.INFO, "lightning_fed.deploy.site"),
        FederatedSite(make(), model(), make_data([CLIENT]), CLIENT, tmp_path / "site") as site,
    ):
        site.answer(registration(make))
        site.answer(task())
        with pytest.raises(FederatedError):
            site.answer(task(phase="\x1b[31mbogus"))
    lines = [record.getMessage() for record in caplog.records if record.name == "lightning_fed.deploy.site"]
    assert lines[0] == f"round 0 'register' for client 2: 22 examples, run {RUN}"
    assert lines[1].startswith(f"round 0 'train' for client 2: 44 examples, {STEPS} steps, ")
    assert lines[1].endswith(" kB out")
    assert lines[2].startswith(r"round 0 '\x1b[31mbogus' for client 2 refused: ")
    assert not Path("lightning_logs").exists()
