"""A run over sites has the bits of the simulation, for every method."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedNova, FedSpeed, PFedMe
from lightning_fed.core.rounds import RoundReport
from lightning_fed.server import (
    QSGD,
    CoordinateMedian,
    Krum,
    LabelFlipAttack,
    NoiseAttack,
    OortSampler,
    PowerOfChoiceSampler,
    SystemsHeterogeneity,
    TopK,
    UpdateNormSampler,
)
from tests.deploy.site_models import Net, model
from tests.deploy.wire import METHODS, SIZES, Wire, make_trainer, parameters, simulated
from tests.helpers.selection import few
from tests.helpers.training import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
NAMES = {
    "ServerOnly, FedAvg, FedProx, FedNova": ("ServerOnly", "FedAvg", "FedProx", "FedNova"),
    "FedExP": ("FedExP",),
    "FedProx with adaptive mu": ("FedProx adaptive",),
    "FedDANE": ("FedDane", "FedDane own"),
    "SCAFFOLD, option i": ("Scaffold i",),
    "SCAFFOLD, option ii, with plain SGD": ("Scaffold ii",),
    "SCAFFOLD from first gradients, in the first round": ("Scaffold ii gradient",),
    "FedSAM, FedSpeed": ("FedSAM", "FedSpeed"),
    "FedRep, Ditto, APFL, pFedMe": ("FedRep", "Ditto", "APFL", "pFedMe"),
    "FedProxVR": ("FedProxVR svrg", "FedProxVR sarah"),
    "FedCM, MoFedSAM with plain SGD": ("FedCM", "MoFedSAM"),
    "FedDyn": ("FedDyn",),
    "Mime with SGD": ("Mime",),
    "C-Mime with SGDm": ("C-Mime",),
    "MimeLite with Adam": ("MimeLite Adam",),
    "MimeMVR": ("MimeMVR",),
}


PRECISIONS = ["32-true", "64-true"]
RUNS = [pytest.param(method, p, id=f"{method}-{p}") for method in METHODS for p in PRECISIONS]
FIRST_OF_ROWS = [f"{methods[0]}-{PRECISIONS[n % 2]}" for n, methods in enumerate(NAMES.values())]


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().split("| method | up | down |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: numbers for name, *numbers in cells}


def test_table_lists_every_method() -> None:
    assert rows().keys() == NAMES.keys()
    assert {name for names in NAMES.values() for name in names} == set(METHODS)


def logged_by(trainer: FederatedTrainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "round/seconds"}


def check_bytes(row: str, method: str, wire: Wire, report: RoundReport, x: torch.Tensor) -> None:
    """Check the number of vectors sent in the first round against the documentation's table."""
    up, down, _ = rows()[row]
    vectors = x.nbytes * len(report.clients)
    assert (wire.up[0] // vectors, wire.down[0] // vectors) == (int(up), int(down)), method
    loss = 8 * len(SIZES) if method == "FedProx adaptive" else 0  # the header has the loss
    assert wire.up[0] + loss == report.bytes_up


def assert_same_run(make: Any, folder: Path, make_model: Any = model, row: str | None = None) -> None:
    make = partial(make, max_rounds=3)  # the third lowers the rates, and every client takes part twice
    expected = simulated(make, make_model)
    wire, module = Wire(folder, make, make_model), make_model()
    fitted, reports = wire.run(module)
    if row is not None:
        check_bytes(row, make.args[0], wire, reports[0], fitted.fit_loop.state.x)
    assert [report.round for report in reports] == list(range(3))
    assert torch.equal(parameters(module), parameters(expected.lightning_module))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), expected.lightning_module.buffers(), strict=True))
    state, other = fitted.fit_loop.state, expected.fit_loop.state
    assert state.state.keys() == other.state.keys()
    assert all(torch.equal(state.state[name], other.state[name]) for name in state.state)
    known, wanted = logged_by(fitted), logged_by(expected)
    sends_no_change = isinstance(expected.fit_loop.settings.algorithm, (FedNova, FedSpeed, PFedMe))
    false = getattr(make.keywords.get("attack"), "changes_messages", False)
    if "compression" in make.keywords or false or sends_no_change:
        del wanted["client/drift"]
    assert known == pytest.approx(wanted, rel=1e-12, nan_ok=True)
    assert (state.bytes_up, state.bytes_down) == (other.bytes_up, other.bytes_down)


@pytest.mark.parametrize(("method", "precision"), few(RUNS, FIRST_OF_ROWS))
def test_rounds_over_sites_match_simulation_bits_and_table_bytes(method: str, precision: Any, tmp_path: Path) -> None:
    (row,) = (row for row, names in NAMES.items() if method in names)
    assert_same_run(partial(make_trainer, method, precision=precision), tmp_path, row=row)


class Normalised(Net):
    """A network whose clients change buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


def normalised() -> Normalised:
    torch.manual_seed(0)
    return Normalised()


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["Scaffold ii", "FedCM"])
def test_server_computations_are_rounded_as_on_the_site(method: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, method, precision="bf16-true"), tmp_path)


OPTIONS: dict[str, dict[str, Any]] = {
    "uniform weights of all clients": {"weighting": "uniform", "clients_per_round": 1.0},
    "weights by steps of partial work": {
        "weighting": "steps",
        "heterogeneity": SystemsHeterogeneity(stragglers=0.5),
    },
    "the local optimizer's state is kept, with personal parameters": {
        "local_optimizer_state": "keep",
        "personal": ["net.3.*"],
    },
    "robust, over accumulated local steps": {
        "aggregator": CoordinateMedian(),
        "local_epochs": None,
        "local_steps": 3,
        "accumulate_grad_batches": 2,
    },
    "sparse with feedback": {"compression": TopK(0.3)},
    "the highest fresh losses": {"clients_per_round": None, "sampler": PowerOfChoiceSampler(2, 3)},
    "by utility": {"clients_per_round": None, "sampler": OortSampler(2, exploration=0.5)},
    "by update norms": {"clients_per_round": None, "sampler": UpdateNormSampler(2)},
    "quantised and clipped": {"compression": QSGD(4), "gradient_clip_val": 0.1},
    "attacked": {"aggregator": Krum(0), "attack": NoiseAttack(0.5, 0.1)},
    "labels flipped": {"attack": LabelFlipAttack([0, 2], CLASSES)},
}


THOROUGH = (
    *("by utility", "by update norms", "quantised and clipped", "labels flipped", "sparse with feedback"),
    *("robust, over accumulated local steps", "uniform weights of all clients"),
)
FEW_OPTIONS = [name for name in OPTIONS if name not in THOROUGH]


@pytest.mark.parametrize("option", few(OPTIONS, FEW_OPTIONS))
def test_round_options_match_the_simulation(option: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "FedProx", **OPTIONS[option]), tmp_path)


class Warming(Net):
    """A network whose rate changes from one local step to the next."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 10) * 0.98**t)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


def warming() -> Warming:
    torch.manual_seed(0)
    return Warming()


@pytest.mark.parametrize("mode", ["continue", "total", pytest.param("restart", marks=pytest.mark.thorough)])
def test_local_step_schedules_match_the_simulation(mode: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "Scaffold ii", local_schedule=mode), tmp_path, warming)


class OwnSteps(Net):
    """A network that steps two optimizers itself, one of them only after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if (batch_idx + 1) % (number + 1) == 0:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, weight_decay=0.01)
        return first, torch.optim.Adam(self.net[3].parameters(), lr=0.01)


class Stepped(OwnSteps):
    """The same with a schedule, which no site would step."""

    def configure_optimizers(self) -> Any:
        first, second = super().configure_optimizers()
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]


def own_steps(kind: type[OwnSteps] = OwnSteps) -> OwnSteps:
    torch.manual_seed(0)
    return kind()


def test_manual_optimizer_steps_match_simulation_but_reject_schedules(tmp_path: Path) -> None:
    options: dict[str, Any] = {"local_optimizer_state": "keep", "local_epochs": None, "local_steps": 4}
    assert_same_run(partial(make_trainer, "FedCM", **options), tmp_path, own_steps)
    stepped = partial(own_steps, Stepped)
    with pytest.raises(FederatedError, match="steps its schedules itself.* Return optimizers without schedules"):
        Wire(tmp_path / "stepped", partial(make_trainer, "FedCM", **options), stepped).run(stepped())


class OwnSettings(FederatedCallback):
    """Gives each client its own rate and its own factor of the loss."""

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        pl_module.factor = 1.0 + client_id
        trainer.optimizers[0].param_groups[0]["lr"] /= 1 + round + client_id


class Scaled(Net):
    """A network whose loss has a factor."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.factor * super().training_step(batch, batch_idx)


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


@pytest.mark.thorough
def test_per_client_settings_match_the_simulation(tmp_path: Path) -> None:
    def make(max_rounds: int) -> FederatedTrainer:
        return make_trainer("Scaffold ii", callbacks=[OwnSettings()], max_rounds=max_rounds)

    assert_same_run(make, tmp_path, scaled)


class Followed(Net):
    """A network with a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)


def followed() -> Followed:
    torch.manual_seed(0)
    return Followed()


def test_parameters_as_buffers_match_the_simulation(tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "FedAvg", as_buffers=["teacher.*"]), tmp_path, followed)


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_buffers_match_the_simulation(buffers: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, "Scaffold ii", buffers=buffers), tmp_path, normalised)


class Cooling(Net):
    """A network whose loss has a temperature that falls from round to round."""

    def on_train_epoch_start(self) -> None:
        self.temperature = 0.5**self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) / self.temperature


def cooling() -> Cooling:
    torch.manual_seed(0)
    return Cooling()


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["Mime", "FedProx adaptive"])
def test_epoch_hooks_are_called_on_sites(method: str, tmp_path: Path) -> None:
    assert_same_run(partial(make_trainer, method), tmp_path, cooling)
