"""The clients' half of a round, for clients that train in this process or elsewhere."""

# ruff: noqa: B027 - hooks that only engines or only sites need do nothing by default

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import ClientError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId
from lightning_fed.engines.base import Restart
from lightning_fed.rounds.messages import Reply, Task
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.participation import Participant
from lightning_fed.strategies.split import BatchSplit


class ClientHalf(ABC):
    """Answers tasks for clients, one or several at a time.

    It does not depend on the server or its optimizer. A round is::

        members = work.participants(drawn, round)
        work.begin(round, members)
        for task in ...:  # the server has one per phase
            for clients in work.chunks(task, [member.index for member in members]):
                for reply in work.answer(task, clients, states):
                    ...  # its tensors are valid until the next reply
        work.end()

    Attributes:
        trainer: The trainer.
        have_given_up: Whether the sequential engine has replaced the vectorized one.
        may_restart: Whether the round can restart in another way if the engine cannot run it.
        measure_on_sites: Measures remote clients, given the measure, local steps, clients and whether to use their
            personal models; None for local clients.
    """

    trainer: pl.Trainer
    have_given_up = False
    may_restart = False
    measure_on_sites: Callable[[str, int, Sequence[ClientId], bool], dict[ClientId, dict[str, float]]] | None = None

    @property
    @abstractmethod
    def engine_names(self) -> list[str]:
        """The names of the engines for the clients and, if the method has one, for the inner solve."""

    @property
    def chunk_size(self) -> int | None:
        """The number of clients that the vectorized engine runs at once; None without that engine."""
        return None

    @property
    def draws(self) -> bool | None:
        """Whether the last trial of a vectorized step drew random numbers; None without such a trial."""
        return None

    @property
    def split(self) -> BatchSplit:
        """The processes that split every batch of a client."""
        return BatchSplit()

    @abstractmethod
    def participants(
        self, drawn: Mapping[ClientId, int], round: int, failed: Callable[[ClientError], None] | None = None
    ) -> list[Participant]:
        """Return the drawn clients that can participate, with their sizes and steps.

        Args:
            drawn: How often each client was drawn.
            round: The round.
            failed: Records the error of a client whose data cannot be built. By default, the error is raised.
        """

    @abstractmethod
    def begin(self, round: int, members: Sequence[Participant], reads_later: bool = False) -> None:
        """Begin or restart a round.

        Args:
            round: The round.
            members: The clients that train here, with their requested steps.
            reads_later: Whether reports may be incomplete until :meth:`end_training`.
        """

    @abstractmethod
    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        """Return this half's clients by stored index, in groups that answer together."""

    @abstractmethod
    def answer(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        """Yield replies for some clients, by stored index; see :meth:`chunks`.

        Raises:
            ClientError: If a client fails and is not dropped, or an error is not a client's fault.
            FederatedError: If the clients cannot run or be reached; see :meth:`restart_after`.
        """

    @abstractmethod
    def end_training(self) -> None:
        """Finish the work that is done once per round, after all clients have trained."""

    @abstractmethod
    def savepoint(self) -> Callable[[], None]:
        """Return a function that undoes clients' logging after this call."""

    @abstractmethod
    def end(self) -> None:
        """Release the round and its data, because the next round needs the memory."""

    def check_batches(self, sizes: Iterable[tuple[ClientId, int]]) -> None:
        """Raise for clients with a batch of one example that the module cannot train on, given ids and sizes."""

    def completed(self, report: RoundReport) -> None:
        """Record a completed round, before any checkpoint contains it."""

    def call_end_hooks(self, clients: Sequence[ClientId]) -> None:
        """Call ``on_client_end`` for the clients of the last reply whose answers count."""

    def restart_after(self, error: Exception) -> Restart | None:
        """Return how to restart the round after an error, or None if it need not or cannot restart."""
        return None

    def restart(self, round: int, how: Restart) -> None:
        """Prepare the current round to restart in another way."""

    def give_up(self) -> None:
        """Replace the vectorized engine with the sequential one."""
