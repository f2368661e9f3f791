"""The settings of a federated run, checked when the trainer is made."""

from dataclasses import dataclass

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import BUFFER_MODES
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Weighting
from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.sampling import Sampler, UniformSampler
from lightning_fed.server.server import resolve_weighting
from lightning_fed.server.step import ServerOptimizerFactory, ServerSchedulerFactory

__all__ = ["ENGINES", "Settings"]

ENGINES = ("sequential", "vectorized", "auto")


@dataclass(frozen=True, slots=True)
class Settings:
    """How rounds are run; see :class:`lightning_fed.FederatedTrainer` for the arguments' meaning."""

    algorithm: Algorithm
    local_epochs: int | None
    local_steps: int | None
    server_optimizer: ServerOptimizerFactory
    server_lr_scheduler: ServerSchedulerFactory | None
    heterogeneity: SystemsHeterogeneity | None
    sampler: Sampler
    gradient_sampler: Sampler
    weighting: Weighting
    engine: str
    chunk_size: int | None
    seed: int
    seed_is_given: bool
    buffers: str
    keeps_solver: bool
    clips_corrected: bool

    def steps(self, num_batches: int, accumulated: int) -> int:
        """Return the optimizer steps asked of a client.

        Args:
            num_batches: Batches in a whole local epoch.
            accumulated: Batches per optimizer step; an epoch's last step may have fewer.
        """
        if not self.algorithm.local_work or num_batches == 0:
            return 0
        if self.local_epochs is not None:
            return -(-num_batches // accumulated) * self.local_epochs
        return self.local_steps or 0


def cut(steps: int, num_batches: int, accumulated: int) -> tuple[int, ...]:
    """Return the batches of each local epoch that make so many optimizer steps; the last epoch may be cut short."""
    if steps == 0:
        return ()
    whole, rest = divmod(steps, -(-num_batches // accumulated))
    return (num_batches,) * whole + ((min(num_batches, rest * accumulated),) if rest else ())


def make_settings(
    algorithm: Algorithm,
    clients_per_round: int | float | None,
    local_epochs: int | None,
    local_steps: int | None,
    server_optimizer: ServerOptimizerFactory,
    server_lr_scheduler: ServerSchedulerFactory | None,
    heterogeneity: SystemsHeterogeneity | None,
    sampler: Sampler | None,
    gradient_sampler: Sampler | None,
    weighting: Weighting | None,
    engine: str,
    chunk_size: int | None,
    seed: int,
    seed_is_given: bool,
    buffers: str,
    local_optimizer_state: str,
    gradient_clip_on: str,
) -> Settings:
    """Check the arguments of a trainer and return them as settings.

    Raises:
        FederatedError: Naming the argument, what was found and what is allowed.
    """
    if not isinstance(algorithm, Algorithm):
        made = f"; write {algorithm.__name__}()" if isinstance(algorithm, type) else ""
        raise FederatedError(f"algorithm must be an Algorithm such as FedAvg(), found {algorithm!r}{made}.")
    if engine not in ENGINES:
        raise FederatedError(f"engine must be one of {ENGINES}, found {engine!r}.")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise FederatedError(f"chunk_size must be an int >= 1, or None to choose by itself, found {chunk_size!r}.")
    if chunk_size is not None and engine == "sequential":
        raise FederatedError(
            f"chunk_size={chunk_size} is of no use to engine='sequential', which runs one client at a time. Leave it"
            " unset."
        )
    for name, chosen, allowed in (
        ("buffers", buffers, BUFFER_MODES),
        ("local_optimizer_state", local_optimizer_state, ("reset", "keep")),
        ("gradient_clip_on", gradient_clip_on, ("gradient", "corrected")),
    ):
        if chosen not in allowed:
            raise FederatedError(f"{name} must be one of {allowed}, found {chosen!r}.")
    if local_optimizer_state == "keep" and algorithm.uses_solver_state:
        raise FederatedError(
            f"local_optimizer_state='keep' does not go with {algorithm!r}, which loads the server's statistics into the"
            " local optimizer before every step. Leave it at 'reset'."
        )
    _check_local_work(algorithm, local_epochs, local_steps)
    if sampler is not None and clients_per_round is not None:
        raise FederatedError(
            f"Both sampler={sampler!r} and clients_per_round={clients_per_round!r} were given: the sampler decides how"
            " many clients take part. Leave clients_per_round unset."
        )
    for name, value in (
        ("sampler", sampler),
        ("gradient_sampler", gradient_sampler),
        ("server_optimizer", server_optimizer),
        ("server_lr_scheduler", server_lr_scheduler),
        ("heterogeneity", heterogeneity),
    ):
        if value is not None and not callable(value):
            raise FederatedError(f"{name} must be callable, found {value!r}.")
    if heterogeneity is not None and not algorithm.local_work:
        raise FederatedError(
            f"heterogeneity={heterogeneity!r} does not apply to {type(algorithm).__name__}, whose clients take no local"
            " steps. Leave it unset."
        )
    sampler = sampler or UniformSampler(1.0 if clients_per_round is None else clients_per_round)
    return Settings(
        algorithm=algorithm,
        local_epochs=local_epochs,
        local_steps=local_steps,
        server_optimizer=server_optimizer,
        server_lr_scheduler=server_lr_scheduler,
        heterogeneity=heterogeneity,
        sampler=sampler,
        gradient_sampler=gradient_sampler or sampler,
        weighting=resolve_weighting(algorithm, weighting),
        engine=engine,
        chunk_size=chunk_size,
        seed=seed,
        seed_is_given=seed_is_given,
        buffers=buffers,
        keeps_solver=local_optimizer_state == "keep",
        clips_corrected=gradient_clip_on == "corrected",
    )


def _check_local_work(algorithm: Algorithm, local_epochs: int | None, local_steps: int | None) -> None:
    name = type(algorithm).__name__
    for argument, value in (("local_epochs", local_epochs), ("local_steps", local_steps)):
        if value is None:
            continue
        if not algorithm.local_work:
            raise FederatedError(
                f"{argument}={value!r} does not apply to {name}, whose clients take no local steps. Leave it unset."
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FederatedError(f"{argument} must be an int >= 1, found {value!r}.")
    if local_epochs is not None and local_steps is not None:
        raise FederatedError(
            f"Pass local_epochs or local_steps, not both; found local_epochs={local_epochs} and"
            f" local_steps={local_steps}."
        )
    if algorithm.local_work and local_epochs is None and local_steps is None:
        raise FederatedError(
            f"{name} needs local work: pass local_epochs (passes over a client's data) or local_steps (optimizer"
            " steps)."
        )
