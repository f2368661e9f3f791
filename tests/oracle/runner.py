"""Runs cases with the real trainer, and collects the server's state after every round."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed import FederatedCallback, FederatedTrainer

from .cases import Case
from .methods import Setup
from .problem import build_module, data_of


class Recorder(FederatedCallback):
    """Records the server parameters and the case's states after every round.

    Args:
        setup: The case's requirements.
    """

    def __init__(self, setup: Setup) -> None:
        self.places, self.is_shown, self.own = setup.states, setup.is_shown, setup.own
        self.parameters: dict[int, Tensor] = {}
        self.personal: dict[int, Tensor] = {}
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_round_end(self, trainer: Any, pl_module: pl.LightningModule, round_report: Any) -> None:
        """Copy the parameters and states of the module and the server."""
        shown = torch.nn.utils.parameters_to_vector(pl_module.parameters())
        flat = shown if self.is_shown else trainer.fit_loop.state.x
        if trainer.fit_loop.settings.has_own_models:
            flat = torch.nn.utils.parameters_to_vector(pl_module.parameters())  # personal parts are those of x^0
            models = own_models(trainer, pl_module)
            self.personal[round_report.round] = read_state(trainer, "clients", self.own) if self.own else models
        self.parameters[round_report.round] = flat.detach().clone()
        states = {
            name: models if place[0] == "own" else read_state(trainer, *place) for name, place in self.places.items()
        }
        server = {f"server {name}": value for name, value in trainer.fit_loop.server.items()}
        self.states[round_report.round] = {k: v.detach().clone() for k, v in {**server, **states}.items()}


def own_models(trainer: Any, module: pl.LightningModule) -> Tensor:
    """Return the personal model of every client [N, P], in the order of the module's parameters."""
    loop, models, count = trainer.fit_loop, {}, trainer.datamodule.num_clients
    for client_id in range(trainer.global_rank, count, trainer.world_size):
        with loop.showing_client_model(client_id):
            models[client_id] = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    models = {client_id: model for part in loop.gather(models) for client_id, model in part.items()}
    return torch.stack([models[client_id] for client_id in range(count)])


def read_state(trainer: Any, where: str, name: str) -> Tensor:
    """Return a state after the last completed round: the server's, its optimizer's, or all clients' [N, P]."""
    state = trainer.fit_loop.state
    if where == "computed" and name == "avg":  # FedDyn's x is the cohort's mean model plus the mean d_i
        return state.x - trainer.fit_loop.server["d"]
    if where == "computed" and name == "h_clients":  # a client of Scaffnew updates h_i when it gets the new x
        h_i, scale, y_i = (read_state(trainer, "clients", part) for part in ("h_i", "scale", "y_i"))
        return h_i + scale * (state.x - y_i)
    if where == "shown":
        return state.evaluation_x()
    if where == "server":
        return trainer.fit_loop.server[name]
    if where == "clients":
        count = trainer.datamodule.num_clients
        own = {i: state.client_state(i)[name] for i in range(trainer.global_rank, count, trainer.world_size)}
        own = {i: value for part in trainer.fit_loop.gather(own) for i, value in part.items()}
        return torch.stack([own[i] for i in range(count)])
    optimizer = state.step.optimizer
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return torch.cat([optimizer.state[p][name].flatten() for p in parameters])


@dataclass(frozen=True)
class Result:
    """The server's parameters and states after every round.

    Attributes:
        parameters: [R, P].
        states: The states that the case stores, by its names, and the whole server state as "server <name>".
        personal: The clients' personal models [R, N, P], if any.
    """

    parameters: Tensor
    states: dict[str, Tensor]
    personal: Tensor | None


@dataclass(frozen=True)
class Variant:
    """One way to run a case. All must give the same numbers.

    Attributes:
        uneven_chunks: Full passes come in unequal batches.
        decay_in_optimizer: The l2 term is the optimizer's ``weight_decay`` instead of a part of the loss.
        engine: The engine.
        processes: The number of processes.
    """

    uneven_chunks: bool = False
    decay_in_optimizer: bool = False
    engine: str = "sequential"
    processes: int = 1


def run(case: Case, setup: Setup, variant: Variant = Variant()) -> Result:
    """Run all rounds of a case."""
    recorder = _fit(case, setup, variant, case.n_rounds)[0]
    return _result(recorder, range(case.n_rounds))


def run_resumed(case: Case, setup: Setup, checkpoint: Path) -> Result:
    """Run half of a case's rounds, then resume with a new trainer, module and data from a checkpoint."""
    half = case.n_rounds // 2
    recorder, trainer = _fit(case, setup, Variant(), half)
    trainer.save_checkpoint(checkpoint)
    resumed, _ = _fit(case, setup, Variant(), case.n_rounds, checkpoint)
    assert sorted(resumed.parameters) == list(range(half, case.n_rounds)), "rounds are repeated or left out"
    resumed.parameters |= recorder.parameters
    resumed.states |= recorder.states
    resumed.personal |= recorder.personal
    return _result(resumed, range(case.n_rounds))


def _fit(
    case: Case, setup: Setup, variant: Variant, max_rounds: int, checkpoint: Path | None = None
) -> tuple[Recorder, FederatedTrainer]:
    recorder = Recorder(setup)
    trainer = FederatedTrainer(
        algorithm=setup.algorithm(),
        max_rounds=max_rounds,
        **({} if "asynchronous" in setup.arguments else {"sampler": _sampler(case.cohort)}),
        callbacks=[recorder],
        seed=0,
        engine=variant.engine,
        accelerator="cpu",
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"strategy": "clients", "devices": variant.processes} if variant.processes > 1 else {}),
        **({"gradient_sampler": _sampler(case.grad_cohort)} if "grad_cohort" in case.arrays else {}),
        **setup.arguments,
    )
    module = build_module(case, variant.decay_in_optimizer, at_start=checkpoint is None)
    trainer.fit(module, data_of(case, variant.uneven_chunks), ckpt_path=checkpoint)
    return recorder, trainer


def _sampler(cohort: Callable[[int], list[int]]) -> Callable[[int, int], list[int]]:
    def sampler(seed: int, round: int) -> list[int]:
        return cohort(round)

    return sampler


def _result(recorder: Recorder, rounds: range) -> Result:
    assert sorted(recorder.parameters) == list(rounds), f"rounds {sorted(recorder.parameters)} ended, not {rounds}"
    names = recorder.states[0]
    return Result(
        torch.stack([recorder.parameters[r] for r in rounds]),
        {name: torch.stack([recorder.states[r][name] for r in rounds]) for name in names},
        torch.stack([recorder.personal[r] for r in rounds]) if recorder.personal else None,
    )
