"""What is made ready before clients can work: the module, the population, the engine; in a fit, and without one."""

from collections.abc import Sequence

from lightning_fed._compat import rank_zero_warn
from lightning_fed._lightning import pl
from lightning_fed.checks import (
    check_algorithm_fits,
    check_buffers,
    check_optimizers,
    check_schedulers,
)
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule, check_ids
from lightning_fed.engines.autocast import check_lstm
from lightning_fed.engines.choice import make_engine
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.method_checks import check_method
from lightning_fed.rounds.client_work import ClientWork
from lightning_fed.rounds.local_plans import LocalPlans
from lightning_fed.rounds.own_solve import OwnSolve, prepared_for_own_solve
from lightning_fed.server.population import Population
from lightning_fed.server.sampling import check_count

__all__ = ["population_of", "prepare_clients", "prepare_module"]


def population_of(trainer: pl.Trainer, among: Sequence[ClientId] | None = None) -> Population:
    """Return the clients of the trainer's data module.

    Args:
        trainer: The trainer.
        among: The ids of all clients of the run, of which the data module has some; its own by default.

    Raises:
        FederatedError: If ids or sizes cannot be, or samplers draw more clients than there are.
    """
    data: FederatedDataModule = trainer.datamodule
    check_ids(data)
    if among is not None:
        return Population(among, data.client_size)
    population = Population(data.client_ids, data.client_size, data.known_sizes)
    if empty := population.empty:
        shown = ", ".join(repr(i) for i in empty[:5]) + (", ..." if len(empty) > 5 else "")
        rank_zero_warn(f"{len(empty)} of {len(data.client_ids)} clients are empty and never sampled: {shown}.")
    settings = trainer.fit_loop.settings
    for sampler in (settings.sampler, settings.gradient_sampler):
        check_count(sampler, len(population))
    return population


def prepare_module(trainer: pl.Trainer) -> PreparedModule:
    """Return the trainer's module, ready for an engine.

    Args:
        trainer: The trainer, whose strategy has set up module and optimizer.

    Raises:
        FederatedError: If optimizer, schedules, buffers or method cannot be federated, or do not go together.
    """
    settings, module = trainer.fit_loop.settings, trainer.lightning_module
    base = check_optimizers(trainer.optimizers, module)
    check_schedulers(trainer)
    check_algorithm_fits(settings.algorithm, base, module)
    prepared = PreparedModule(trainer, settings, base)
    check_buffers(settings, prepared.buffers)
    check_method(settings.algorithm)
    return prepared


def prepare_clients(
    prepared: PreparedModule, population: Population, engine: str, clients: Sequence[ClientId] | None = None
) -> ClientWork:
    """Return what answers for clients.

    Args:
        prepared: The module.
        population: The clients there are.
        engine: The engine's name.
        clients: Those whose data is here; all of them by default.

    Raises:
        FederatedError: If the engine, or this machine, cannot run the module.
    """
    settings = prepared.settings
    plans = LocalPlans(prepared.trainer, settings, population, clients)
    check_lstm(prepared.trainer, prepared.flat, plans.some())
    main, own_solve = make_engine(engine, settings.chunk_size, prepared, plans.some), None
    if prepared.algorithm.own_solve is not None:
        other = prepared_for_own_solve(prepared)
        own_solve = OwnSolve(make_engine(engine, settings.chunk_size, other, plans.some), settings)
    return ClientWork(main, plans, settings, own_solve)
