"""The clients' half of a round, wherever the clients are: with engines in this process, or elsewhere."""

# ruff: noqa: B027 - what only engines do, or only sites, does nothing by default

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

__all__ = ["ClientHalf"]


class ClientHalf(ABC):
    """Answers for clients, one or several at a time.

    It knows neither the server nor its optimizer. A round is::

        members = work.hello(drawn, round)
        work.begin(round, members)
        for task in ...:  # of each phase, from the server
            for clients in work.chunks(task, [member.index for member in members]):
                for reply in work.answer(task, clients, states):
                    ...  # its tensors are valid until the next one
        work.end()

    Attributes:
        trainer: The trainer.
        have_given_up: Whether the vectorized engine was left for the sequential one.
        may_restart: Whether the round can start again in another way, if the engine cannot run it as it does.
        measure_on_sites: Measures clients that are elsewhere, given the measure, local steps, clients and whether with
            their own models; None if they are here.
    """

    trainer: pl.Trainer
    have_given_up = False
    may_restart = False
    measure_on_sites: Callable[[str, int, Sequence[ClientId], bool], dict[ClientId, dict[str, float]]] | None = None

    @property
    @abstractmethod
    def engine_names(self) -> list[str]:
        """The engines at work: that of the clients, and that of the method's own solve if it has one."""

    @property
    def chunk_size(self) -> int | None:
        """How many clients the vectorized engine runs at once; None without one."""
        return None

    @property
    def split(self) -> BatchSplit:
        """The processes that split every batch of a client among them."""
        return BatchSplit()

    @abstractmethod
    def hello(
        self, drawn: Mapping[ClientId, int], round: int, failed: Callable[[ClientError], None] | None = None
    ) -> list[Participant]:
        """Return those of the clients drawn that can take part, with their sizes and the steps of their work.

        Args:
            drawn: How often each client was drawn.
            round: The round.
            failed: Records clients whose data cannot be made; by default their error is raised.
        """

    @abstractmethod
    def begin(self, round: int, members: Sequence[Participant], reads_later: bool = False) -> None:
        """Begin a round, or begin it again.

        Args:
            round: The round.
            members: The clients that are to train here, with the steps asked of them.
            reads_later: Whether reports may be incomplete until :meth:`end_training`.
        """

    @abstractmethod
    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        """Return the clients that are asked together, by stored index, of those that this half answers for."""

    @abstractmethod
    def answer(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        """Yield replies for some clients, by stored index; see :meth:`chunks`.

        Raises:
            ClientError: If a client fails and is not to be dropped, or if something fails that is no client's own
                fault.
            FederatedError: If the clients cannot be run or asked; see :meth:`restart_after`.
        """

    @abstractmethod
    def end_training(self) -> None:
        """Finish what is done once for all clients that were trained in this round."""

    @abstractmethod
    def savepoint(self) -> Callable[[], None]:
        """Return a function that takes back what clients log from here on."""

    @abstractmethod
    def end(self) -> None:
        """Release the round and its data: those of the next round need the memory."""

    def check_batches(self, sizes: Iterable[tuple[ClientId, int]]) -> None:
        """Refuse clients with a batch of one example that the module cannot train on, given ids and sizes."""

    def completed(self, report: RoundReport) -> None:
        """Take note of a completed round, before any checkpoint holds it."""

    def call_end_hooks(self, clients: Sequence[ClientId]) -> None:
        """Call ``on_client_end`` for the clients of the last reply whose answers count."""

    def restart_after(self, error: Exception) -> Restart | None:
        """Return how the round must start again after an error, None if it need not or cannot."""
        return None

    def restart(self, round: int, how: Restart) -> None:
        """Prepare to run the round at work in another way, once it begins again."""

    def give_up(self) -> None:
        """Continue with the sequential engine in place of the vectorized one."""
