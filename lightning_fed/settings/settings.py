"""The settings of a federated run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT, Origin
from lightning_fed.core.types import Weighting
from lightning_fed.server.aggregation.base import Aggregator
from lightning_fed.server.aggregation.compression import Compressor
from lightning_fed.server.aggregation.privacy import DifferentialPrivacy
from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.sampling import Sampler
from lightning_fed.server.step import ServerOptimizerFactory, ServerSchedulerFactory

__all__ = ["Settings", "cut"]


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
