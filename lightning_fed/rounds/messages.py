"""All that passes between the two halves of a round: a task for clients, and their replies. Plain data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_fed.core.errors import ClientError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import State, Vector

__all__ = ["GRADIENTS", "LOSS", "TRAIN", "Reply", "Task"]

GRADIENTS, LOSS, TRAIN = "gradients", "loss", "train"  # the phases of a round, in their order


@dataclass(frozen=True, slots=True)
class Task:
    """What the server asks of clients in one phase of a round; the same for all of them.

    Attributes:
        round: The round, from 0.
        phase: ``GRADIENTS``: full-batch gradients at the points that the method names, before any local work. ``LOSS``:
            the training loss at x. ``TRAIN``: local work.
        clients: Who is asked, by stored index, in the cohort's order.
        steps: The local steps asked of each of them, where some are; by stored index.
        x: The server parameters [P].
        server: The server state.
        cohort_grad: The cohort's mean full-batch gradients by point, once they are known.
        buffers: The server's buffers.
        mean_examples: The mean of n_i over the clients that have examples, where the method may ask for it, else nan.
    """

    round: int
    phase: str
    clients: Sequence[int]
    steps: Mapping[int, int]
    x: Vector
    server: State
    cohort_grad: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    mean_examples: float = math.nan


@dataclass(frozen=True, slots=True)
class Reply:
    """What S clients answer to a task; a client alone answers with S = 1.

    What clients keep is no part of it: it stays where they are. In a simulation the tensors are the engine's own, and
    valid until the next clients are asked.

    Attributes:
        round: The round.
        phase: The phase of the task.
        clients: Who answers, by stored index: first those of the rows, in their order.
        send: The messages [S, ...] by name; full-batch gradients by point.
        reports: What each did in its local work, in the order of the rows.
        models: The parameters y [S, P] that each ended with, where the message "delta" is ``y - x`` itself.
        changes: ``y - x`` [S, P], whatever the messages are; None where the sender does not tell.
        buffers: The module's buffers after each client's work; none where no client changes any.
        norms: Norms of the clients' own full-batch gradients, by point and stored index.
        examples: The examples that each went through in its local epochs.
        loss: The sum of the loss over :attr:`loss_examples` examples of all these clients.
        loss_examples: How many these are.
        message_bytes: What the messages come to on their way, where they are compressed.
        server_read: The entries of the server state that clients have read so far in the round.
        cohort_grad_read: The mean gradients that they have read so far.
        failed: Those of these clients that have no answer, and why, by stored index; their rows, if there are any, are
            of no use.
    """

    round: int
    phase: str
    clients: Sequence[int] = ()
    send: State = field(default_factory=dict)
    reports: Sequence[ClientReport] = ()
    models: Tensor | None = None
    changes: Tensor | None = None
    buffers: Sequence[State] = ()
    norms: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    examples: Sequence[int] = ()
    loss: float = 0.0
    loss_examples: int = 0
    message_bytes: int | None = None
    server_read: frozenset[str] = frozenset()
    cohort_grad_read: frozenset[str] = frozenset()
    failed: Mapping[int, ClientError] = field(default_factory=dict)
