"""The settings of a federated run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_patterns
from lightning_fed.core.buffers import BUFFER_MODES
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT, Origin
from lightning_fed.core.types import Weighting
from lightning_fed.server.aggregation.base import Aggregator
from lightning_fed.server.aggregation.compression import Compressor
from lightning_fed.server.aggregation.privacy import DifferentialPrivacy
from lightning_fed.server.asynchronous.base import Asynchronous
from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.sampling import Sampler, UniformSampler
from lightning_fed.server.server import resolve_weighting
from lightning_fed.server.step import ServerOptimizerFactory, ServerSchedulerFactory

__all__ = ["ENGINES", "MAX_FAILED_SHARE", "MAX_UPDATE_RATIO", "Settings", "cut", "make_settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How rounds are run; see :class:`lightning_fed.FederatedTrainer` for the arguments' meaning."""

    algorithm: Algorithm
    personal: tuple[str, ...]
    local_epochs: int | None
    local_steps: int | None
    server_optimizer: ServerOptimizerFactory
    server_lr_scheduler: ServerSchedulerFactory | None
    heterogeneity: SystemsHeterogeneity | None
    sampler: Sampler
    gradient_sampler: Sampler
    weighting: Weighting
    aggregator: Aggregator | None
    compression: Compressor | None
    engine: str
    chunk_size: int | None
    seed: int
    seed_is_given: bool
    buffers: str
    keeps_solver: bool
    clips_corrected: bool
    client_states: str
    client_states_dir: str | None
    drops_failed: bool
    max_failed_share: float
    max_update_ratio: float | None

    def transport(self) -> dict[str, str]:
        """Return how messages are put together, as checkpoints note it."""
        noted = {"aggregator": repr(self.aggregator), "compression": repr(self.compression)}
        noted |= {"personal": repr(list(self.personal))} if self.personal else {}
        # the account of privacy rests on the sampler's probability
        return {**noted, "sampler": repr(self.sampler)} if self.is_private else noted

    def check_transport(self, saved: Mapping[str, str], origin: Origin = CHECKPOINT) -> None:
        """Refuse to go on with a run whose messages were put together in another way.

        Args:
            saved: The :meth:`transport` of that run.
            origin: What this run continues from.

        Raises:
            FederatedError: Naming the argument.
        """
        mine = self.transport()
        for name in sorted({*saved, *mine}):
            if (there := saved.get(name, "None")) != (here := mine.get(name, "None")) and name != "sampler":
                raise FederatedError(
                    f"{origin.name}'s {name} is {there}, {origin.this}'s is {here}. {origin.remedy(f'the {name}')}"
                )
            if there != here:
                raise FederatedError(
                    f"{origin.name}'s sampler is {there}, {origin.this}'s is {here}: the privacy spent so far is"
                    f" accounted for with its probability. {origin.remedy('the sampler')}"
                )

    def work(self) -> dict[str, str]:
        """Return who works in a round and how much, as checkpoints note it."""
        return {
            name: _named(value)
            for name, value in (
                ("local_epochs", self.local_epochs),
                ("local_steps", self.local_steps),
                ("sampler", self.sampler),
                ("heterogeneity", self.heterogeneity),
            )
        }

    @property
    def is_private(self) -> bool:
        """Whether noise hides what single clients send."""
        return isinstance(self.aggregator, DifferentialPrivacy)

    @property
    def clients_keep_state(self) -> bool:
        """Whether it is known that clients keep anything from round to round."""
        feeds_back = self.compression is not None and self.compression.error_feedback
        is_asked = self.keeps_solver or self.buffers == "local" or self.has_personal_parameters
        return self.algorithm.overrides("init_client") or is_asked or feeds_back

    @property
    def has_own_models(self) -> bool:
        """Whether clients have models of their own beside the server's."""
        return self.has_personal_parameters or self.algorithm.overrides("evaluate_client_at")

    @property
    def has_personal_parameters(self) -> bool:
        """Whether parameters or buffers stay with each client."""
        return bool(self.personal) or self.algorithm.overrides("personal_names")

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


def _named(value: Any) -> str:
    """Return a text that is the same in another process."""
    text = repr(value)
    return text if " at 0x" not in text else str(getattr(value, "__qualname__", type(value).__name__))


def cut(steps: int, num_batches: int, accumulated: int) -> tuple[int, ...]:
    """Return the batches of each local epoch that make so many optimizer steps; the last epoch may be cut short."""
    if steps == 0:
        return ()
    whole, rest = divmod(steps, -(-num_batches // accumulated))
    return (num_batches,) * whole + ((min(num_batches, rest * accumulated),) if rest else ())


ENGINES = ("sequential", "vectorized", "auto")
CLIENT_STATES = ("memory", "disk", "auto")
MAX_FAILED_SHARE = 0.5
MAX_UPDATE_RATIO = 1e6


def make_settings(
    algorithm: Algorithm,
    personal: Sequence[str],
    clients_per_round: int | float | None,
    local_epochs: int | None,
    local_steps: int | None,
    server_optimizer: ServerOptimizerFactory,
    server_lr_scheduler: ServerSchedulerFactory | None,
    heterogeneity: SystemsHeterogeneity | None,
    sampler: Sampler | None,
    gradient_sampler: Sampler | None,
    weighting: Weighting | None,
    aggregator: Aggregator | None,
    asynchronous: Asynchronous | None,
    compression: Compressor | None,
    engine: str,
    chunk_size: int | None,
    seed: int,
    seed_is_given: bool,
    buffers: str,
    local_optimizer_state: str,
    gradient_clip_on: str,
    client_states: str,
    client_states_dir: str | os.PathLike[str] | None,
    on_client_error: str,
    max_failed_share: float,
    max_update_ratio: float | None,
) -> Settings:
    """Check the arguments of a trainer and return them as settings.

    Raises:
        FederatedError: Naming the argument, what was found and what is allowed.
    """
    if not isinstance(algorithm, Algorithm):
        made = f"; write {algorithm.__name__}()" if isinstance(algorithm, type) else ""
        raise FederatedError(f"algorithm must be an Algorithm such as FedAvg(), found {algorithm!r}{made}.")
    personal = check_patterns("FederatedTrainer", personal)
    _check_engine(engine, chunk_size)
    for name, chosen, allowed in (
        ("buffers", buffers, BUFFER_MODES),
        ("local_optimizer_state", local_optimizer_state, ("reset", "keep")),
        ("gradient_clip_on", gradient_clip_on, ("gradient", "corrected")),
        ("on_client_error", on_client_error, ("raise", "drop")),
        ("client_states", client_states, CLIENT_STATES),
    ):
        if chosen not in allowed:
            raise FederatedError(f"{name} must be one of {allowed}, found {chosen!r}.")
    _check_solver(algorithm, local_optimizer_state)
    _check_local_work(algorithm, local_epochs, local_steps)
    _check_failures(on_client_error, max_failed_share, max_update_ratio)
    _check_callables(
        sampler=sampler,
        gradient_sampler=gradient_sampler,
        server_optimizer=server_optimizer,
        server_lr_scheduler=server_lr_scheduler,
        heterogeneity=heterogeneity,
    )
    _check_participation(algorithm, clients_per_round, sampler, gradient_sampler, heterogeneity)
    if asynchronous is not None:
        _check_asynchronous(
            asynchronous,
            clients_per_round=clients_per_round,
            sampler=sampler,
            aggregator=aggregator,
            heterogeneity=heterogeneity,
            on_client_error=None if on_client_error == "raise" else on_client_error,
        )
        aggregator = sampler = asynchronous
    sampler = sampler or UniformSampler(1.0 if clients_per_round is None else clients_per_round)
    weighting, given = resolve_weighting(algorithm, weighting), weighting
    if aggregator is not None:
        if not isinstance(aggregator, Aggregator):
            raise FederatedError(f"aggregator must be an Aggregator such as CoordinateMedian(), found {aggregator!r}.")
        aggregator = aggregator.for_run(algorithm, given, sampler)
        weighting = weighting if aggregator.weighted else "uniform"
        sampler = aggregator if isinstance(aggregator, Asynchronous) else sampler
        if isinstance(aggregator, DifferentialPrivacy):
            _check_private(aggregator, heterogeneity, on_client_error, compression)
    if compression is not None and not isinstance(compression, Compressor):
        raise FederatedError(f"compression must be a Compressor such as TopK(0.01), found {compression!r}.")
    return Settings(
        algorithm=algorithm,
        personal=personal,
        local_epochs=local_epochs,
        local_steps=local_steps,
        server_optimizer=server_optimizer,
        server_lr_scheduler=server_lr_scheduler,
        heterogeneity=heterogeneity,
        sampler=sampler,
        gradient_sampler=gradient_sampler or sampler,
        weighting=weighting,
        aggregator=aggregator,
        compression=compression,
        engine=engine,
        chunk_size=chunk_size,
        seed=seed,
        seed_is_given=seed_is_given,
        buffers=buffers,
        keeps_solver=local_optimizer_state == "keep",
        clips_corrected=gradient_clip_on == "corrected",
        client_states=client_states,
        client_states_dir=_folder(client_states, client_states_dir),
        drops_failed=on_client_error == "drop",
        max_failed_share=max_failed_share,
        max_update_ratio=max_update_ratio,
    )


def _check_engine(engine: str, chunk_size: int | None) -> None:
    if engine not in ENGINES:
        raise FederatedError(f"engine must be one of {ENGINES}, found {engine!r}.")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise FederatedError(f"chunk_size must be an int >= 1, or None to choose by itself, found {chunk_size!r}.")
    if chunk_size is not None and engine == "sequential":
        raise FederatedError(
            f"chunk_size={chunk_size} is of no use to engine='sequential', which runs one client at a time. Leave it"
            " unset."
        )


def _check_solver(algorithm: Algorithm, local_optimizer_state: str) -> None:
    if local_optimizer_state == "keep" and algorithm.uses_solver_state:
        raise FederatedError(
            f"local_optimizer_state='keep' does not go with {algorithm!r}, which loads the server's statistics into the"
            " local optimizer before every step. Leave it at 'reset'."
        )
    if local_optimizer_state == "keep" and not algorithm.local_work:
        raise FederatedError(
            f"local_optimizer_state='keep' does not apply to {type(algorithm).__name__}, whose clients take no local"
            " steps. Leave it at 'reset'."
        )


def _check_callables(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            found = f"an instance of {type(value).__name__}" if isinstance(value, Optimizer) else repr(value)
            hint = " Write functools.partial(FedAdam, lr=0.1), say." if name == "server_optimizer" else ""
            raise FederatedError(f"{name} must be callable, found {found}.{hint}")
        if isinstance(value, type) and not name.startswith("server_"):
            raise FederatedError(f"{name}={value.__name__} is a class: make one, as in {value.__name__}(...).")


def _check_participation(
    algorithm: Algorithm,
    clients_per_round: int | float | None,
    sampler: Sampler | None,
    gradient_sampler: Sampler | None,
    heterogeneity: SystemsHeterogeneity | None,
) -> None:
    if sampler is not None and clients_per_round is not None:
        raise FederatedError(
            f"Both sampler={sampler!r} and clients_per_round={clients_per_round!r} were given: the sampler decides how"
            " many clients take part. Leave clients_per_round unset."
        )
    if gradient_sampler is not None and not _has_gradient_cohort(algorithm):
        own = ", or choose grad_cohort='own'" if "grad_cohort" in algorithm.options() else ""
        raise FederatedError(
            f"gradient_sampler={gradient_sampler!r} does not apply to {algorithm!r}, which averages no gradients over a"
            f" cohort of their own. Leave it unset{own}."
        )
    if heterogeneity is not None and not algorithm.local_work:
        raise FederatedError(
            f"heterogeneity={heterogeneity!r} does not apply to {type(algorithm).__name__}, whose clients take no local"
            " steps. Leave it unset."
        )


def _has_gradient_cohort(algorithm: Algorithm) -> bool:
    return bool(algorithm.full_grad_at) and algorithm.full_grad_for != "client" and algorithm.grad_cohort == "own"


def _folder(client_states: str, folder: str | os.PathLike[str] | None) -> str | None:
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)) or not isinstance(os.fspath(folder), str) or not os.fspath(folder):
        raise FederatedError(f"client_states_dir must be the path of a folder, found {folder!r}.")
    if client_states == "memory":
        raise FederatedError(
            f"client_states_dir={os.fspath(folder)!r} is of no use to client_states='memory'. Leave it unset, or pass"
            " client_states='disk'."
        )
    return os.fspath(folder)


def _check_local_work(algorithm: Algorithm, local_epochs: int | None, local_steps: int | None) -> None:
    name = type(algorithm).__name__
    for argument, value in (("local_epochs", local_epochs), ("local_steps", local_steps)):
        if value is None:
            continue
        if not algorithm.local_work:
            raise FederatedError(
                f"{argument}={value!r} does not apply to {name}, whose clients take no local steps. Leave it unset."
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
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


def _check_asynchronous(asynchronous: Asynchronous, **others: Any) -> None:
    if not isinstance(asynchronous, Asynchronous):
        raise FederatedError(
            f"asynchronous must be an Asynchronous such as FedBuff(size=10, concurrency=100), found {asynchronous!r}."
        )
    for name, value in others.items():
        if value is not None:
            raise FederatedError(
                f"{name}={value!r} does not go with asynchronous={type(asynchronous).__name__}(...), which says who"
                " begins when, how long clients take and how their answers count. Leave it unset."
            )


def _check_private(
    aggregator: DifferentialPrivacy,
    heterogeneity: SystemsHeterogeneity | None,
    on_client_error: str,
    compression: Compressor | None,
) -> None:
    if compression is not None:
        raise FederatedError(
            f"compression={compression!r} does not go with aggregator={aggregator!r}: what compression leaves out of"
            " one round and sends in another is not bounded by the clipping. Leave it unset."
        )
    if heterogeneity is not None:
        raise FederatedError(
            f"heterogeneity={heterogeneity!r} does not go with aggregator={aggregator!r}, whose guarantee is for"
            " cohorts that the sampler's probability alone decides. Leave it unset."
        )
    if on_client_error == "drop":
        raise FederatedError(
            f"on_client_error='drop' does not go with aggregator={aggregator!r}: which clients are dropped depends on"
            " others in the cohort, and the guarantee is about the sum over those drawn. Leave it at 'raise'."
        )


def _check_failures(on_client_error: str, max_failed_share: float, max_update_ratio: float | None) -> None:
    if not _is_number(max_failed_share) or not 0 < max_failed_share <= 1:
        raise FederatedError(f"max_failed_share must be a share in (0, 1], found {max_failed_share!r}.")
    if max_failed_share != MAX_FAILED_SHARE and on_client_error != "drop":
        raise FederatedError(
            f"max_failed_share={max_failed_share} is of no use to on_client_error='raise', which stops the run at the"
            " first client that fails. Leave it unset, or pass on_client_error='drop'."
        )
    if max_update_ratio is not None and (not _is_number(max_update_ratio) or not max_update_ratio > 1):
        raise FederatedError(
            f"max_update_ratio must be a number > 1, or None for no limit, found {max_update_ratio!r}."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
