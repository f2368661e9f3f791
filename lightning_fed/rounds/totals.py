"""Sums over the clients of a round, each with ``update``, ``merge`` and ``compute``; ``RoundTotals`` has all."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import BufferMean
from lightning_fed.core.devices import accumulation, are_equal, numbers_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply
from lightning_fed.server.aggregation.lora import ProductSums
from lightning_fed.server.aggregation.mean import FULL_GRAD, Aggregation, Collectives
from lightning_fed.server.optimal_sampling import OptimalClientSampling
from lightning_fed.server.participation import Participant
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings

_BLOCK = 2**16  # elements processed in one block

Failed: TypeAlias = Callable[[ClientError], None]
"""Records a failed client, or raises its error."""


class RoundTotals:
    """All sums of one round.

    ``update`` adds a reply. With several processes, each sends its ``partial`` to the others at the end of a phase, and
    ``merge`` combines them. Sums of vectors use the :class:`Collectives`. ``compute`` returns the results.
    """

    def __init__(
        self,
        server: Server,
        settings: Settings,
        members: Mapping[int, Participant],
        gradient_members: Mapping[int, Participant],
        population: int,
    ) -> None:
        algorithm = self.algorithm = server.algorithm
        self.server, self.members, self.gradient_members = server, members, gradient_members
        rules = algorithm.reduces
        self._rule = rules.get("delta", "weighting" if "weighting" in rules.values() else "examples")
        make = Aggregation if settings.aggregator is None else settings.aggregator.of_round
        draws = isinstance(settings.aggregator, OptimalClientSampling)
        own: dict[str, Any] = {"seed": server.seed, "round": server.round} if draws else {}
        who = list(members.values())
        self._messages = make(algorithm.reduces, settings.weighting, who, population, algorithm.local_work, **own)
        if gradient_members:
            reduces = {FULL_GRAD + point: algorithm.full_grad_mean for point in algorithm.full_grad_at}
            self._gradients = make(reduces, settings.weighting, list(gradient_members.values()), population, False)
        self._readers = algorithm.full_grad_readers(server.round) if algorithm.full_grad_at else "nobody"
        self._loss, self._loss_examples = 0.0, 0  # sums over the population
        self._buffers = State() if settings.buffers == "server" else server.buffers  # the averaged buffers
        self._mean_buffers = BufferMean()
        self.moved_buffers = set[str]()  # names of buffers that a client changed; only these are sent
        self._drift, self.traffic = Drift(self._messages), Traffic(algorithm, server.x)
        self.products = None if server.lora is None else ProductSums(server.lora.pairs)
        self._lacks_changes = False  # if some clients omit their changes, the drift would cover only the others
        self._examples = self._own_examples = 0  # examples in local epochs, and in inner solves
        self.norms: dict[str, dict[ClientId, float | Tensor]] = {}  # full-batch gradient norms of this phase, by point
        self.reports: dict[int, ClientReport] = {}  # by stored index
        self.is_invalid = False  # whether a rejected client's work is in other sums, such as logged values

    # ------------------------------------------------------------------ update

    def update(self, reply: Reply, rows: Sequence[int], failed: Failed, state: State) -> list[ClientId]:
        """Add rows of a reply in the order of the sum, without failed clients; return the clients that count.

        ``failed`` records clients that the aggregation rejects. ``state`` is the server state that clients read.
        """
        self.traffic.server |= reply.server_read
        self.traffic.cohort_grad |= reply.cohort_grad_read
        ids = self.server.ids
        for point, norms in reply.norms.items():
            known = self.norms.setdefault(point, {})
            known.update({ids[index]: norm for index, norm in norms.items() if index not in reply.failed})
        if reply.phase == TRAIN:
            return self._update_messages(reply, rows, failed, state)
        if reply.phase == GRADIENTS:
            return self._update_gradients(reply, rows, failed)
        self._loss += reply.loss
        self._loss_examples += reply.loss_examples
        return [ids[reply.clients[row]] for row in rows]

    def _update_gradients(self, reply: Reply, rows: Sequence[int], failed: Failed) -> list[ClientId]:
        members, counted = self.gradient_members, list[ClientId]()
        for some in _together(self._gradients, [row for row in rows if reply.clients[row] in members]):
            who = [members[reply.clients[row]] for row in some]
            send = {FULL_GRAD + point: _rows(some, value) for point, value in reply.send.items()}
            try:
                self._gradients.update({member.index: member.steps for member in who}, send)
            except ClientError as error:
                failed(error)
                continue
            counted += [member.client_id for member in who]
        return counted

    def _update_messages(self, reply: Reply, rows: Sequence[int], failed: Failed, state: State) -> list[ClientId]:
        reports, send, sending, refused = reply.reports, reply.send, rows, set[int]()
        if reply.implied or self.algorithm.aside:
            send = self._averaged(reply, state)
        if self.algorithm.local_work:  # a client without steps has no weight
            sending = [row for row in rows if reports[row].steps]
        for some in _together(self._messages, sending):
            try:
                self._add(reply, send, some)
            except ClientError as error:
                failed(error)
                refused.update(some)
        self.is_invalid |= bool(refused)
        counted = []
        for row in rows:
            if row not in refused:
                self.reports[reply.clients[row]] = reports[row]
                self._examples += reply.examples[row]
                self._own_examples += sum(reply.own_examples[row : row + 1])
                counted.append(reports[row].client_id)
        return counted

    def _averaged(self, reply: Reply, state: State) -> State:
        """Return the messages to average; compute implied ones that were not sent."""
        send = reply.send
        if not send.keys() >= set(reply.implied):
            try:
                send = {**send, **self.algorithm.implied(send, state)}
            except KeyError as error:
                raise FederatedError(
                    f"A reply leaves out {sorted(reply.implied)}, and also {error}, which"
                    f" {type(self.algorithm).__name__} needs to compute it. Send one of them."
                ) from error
        return {name: value for name, value in send.items() if name not in self.algorithm.aside}

    def _add(self, reply: Reply, messages: State, rows: Sequence[int]) -> None:
        """Add the messages of some rows, and the other parts of their reply."""
        steps = {reply.clients[row]: reply.reports[row].steps for row in rows}
        send = {name: _rows(rows, value) for name, value in messages.items()}
        models = None
        if reply.models is not None and not self._messages.is_one_by_one:
            models = _rows(rows, reply.models)
        self._messages.update(steps, send, models)
        self.traffic.update(reply, rows)
        for row in rows if self._buffers and reply.buffers else ():
            own, member = reply.buffers[row], self.members[reply.clients[row]]
            if own:
                self._mean_buffers.update(own, member.size, member.index, member.count)
            names = own.keys() - self.moved_buffers
            pairs = [(own[name].to(self._buffers[name].device), self._buffers[name]) for name in names]
            self.moved_buffers |= {name for name, same in zip(names, are_equal(pairs), strict=True) if not same}
        if reply.changes is not None:
            is_summed = models is not None and self._rule != "population"
            changes, weights = _rows(rows, reply.changes), self._messages.weights(steps, self._rule)
            self._drift.update(changes, weights, is_summed)
            if self.products is not None:
                self.products.update(changes, weights)
        else:
            self._lacks_changes = True

    # ------------------------------------------------------------------ merge

    def partial(self, phase: str) -> dict[str, Any]:
        """Return this process's part of a phase for the other processes, without sums of vectors."""
        if phase == LOSS:
            return {"loss": self._loss, "loss_examples": self._loss_examples, "norms": {}}
        if phase == GRADIENTS:
            return {"gradients": self._gradients.partial(), "norms": self.norms}
        return {
            "messages": self._messages.partial(),
            "buffers": self._mean_buffers,
            "moved_buffers": self.moved_buffers,
            "drift": self._drift.weight,
            "products": None if self.products is None else self.products.partial(),
            "traffic": self.traffic,
            "examples": self._examples,
            "own_examples": self._own_examples,
            "norms": self.norms,
            "reports": self.reports,
            "is_invalid": self.is_invalid,
        }

    def merge(self, phase: str, partials: Sequence[Mapping[str, Any]], ranks: Collectives) -> None:
        """Combine every process's :meth:`partial` of the phase."""
        x, parts = self.server.x, dict[str, list[Any]]()
        for partial in partials:
            for name, value in partial.items():
                parts.setdefault(name, []).append(value)
        norms, self.norms = parts["norms"], {}
        for point in self.algorithm.full_grad_at:
            self.norms[point] = {i: norm for own in norms for i, norm in own.get(point, {}).items()}
        if phase == LOSS:
            self._loss, self._loss_examples = sum(parts["loss"]), sum(parts["loss_examples"])
        elif phase == GRADIENTS:
            self._gradients.merge(parts["gradients"], ranks, x)
        else:
            self._drift.merge(parts["drift"], ranks, x)  # first: it reads this process's own sum of models
            self._messages.merge(parts["messages"], ranks, x)
            if self.products is not None:
                self.products.merge(parts["products"], ranks)
            self._mean_buffers.merge(parts["buffers"])
            self.moved_buffers = {name for own in parts["moved_buffers"] for name in own}
            self.traffic.merge(parts["traffic"])
            self._examples, self._own_examples = sum(parts["examples"]), sum(parts["own_examples"])
            self.reports = {index: report for own in parts["reports"] for index, report in own.items()}
            self.is_invalid = any(parts["is_invalid"])

    # ------------------------------------------------------------------ compute

    def norms_at(self, point: str) -> dict[ClientId, float]:
        """Return the norms of full-batch gradients at a point, by client."""
        norms = self.norms.get(point, {})
        read = iter(numbers_of([norm for norm in norms.values() if isinstance(norm, Tensor)]))
        return {i: next(read) if isinstance(norm, Tensor) else norm for i, norm in norms.items()}

    def mean_loss(self) -> Tensor:
        """Return the mean loss of the population at x."""
        x = self.server.x
        return torch.tensor(self._loss / self._loss_examples, device=x.device, dtype=x.dtype)

    def mean_gradients(self) -> State:
        """Return the mean full-batch gradients [P] by point."""
        means, _ = self._gradients.compute(self.server.x)
        return {name.removeprefix(FULL_GRAD): value for name, value in means.items()}

    def compute(self, done: Sequence[ClientId]) -> tuple[State, Vector | None, State, float]:
        """Return the server step's averaged messages, mean model and new buffers, and the drift of the counted clients.

        The messages are empty without participants. The mean model [P] is None unless the message "delta" is the
        change of the models. The drift is nan without clients, or if a change is unknown.
        """
        x, means, models = self.server.x, State(), None
        if done or not self._messages.needs_clients:
            means, models = self._messages.compute(x)
            self.traffic.senders = self._messages.senders
        drift = self._drift.compute() if done and not self._lacks_changes else math.nan
        buffers = self.server.buffers
        if self.moved_buffers:  # the other buffers keep their bits
            found = self._mean_buffers.compute(self._buffers)
            buffers = {name: found[name] if name in self.moved_buffers else old for name, old in self._buffers.items()}
        return means, models, buffers, drift

    def weights(self, done: Sequence[ClientId]) -> dict[ClientId, float]:
        """Return the weights of counted clients in the mean change; they sum to one unless the mean is an estimate."""
        found = self._messages.weights(self.members, self._rule)
        weights = dict(zip(map(attrgetter("client_id"), self.members.values()), found, strict=True))
        whole = 1.0 if self._messages.is_estimate else sum(map(weights.__getitem__, done))
        return {i: weights[i] / whole for i in done}

    def gradients_computed(self) -> int:
        """Return the number of per-example gradients computed, including full-batch and second gradients."""
        algorithm, full = self.algorithm, 0
        if self._readers != "nobody":
            takers = dict(self.gradient_members)
            if self._readers != "cohort":
                takers |= {index: who for index, who in self.members.items() if index in self.reports}
            full = len(algorithm.full_grad_at) * sum(who.size for who in takers.values())
        per_batch = 1 if algorithm.anchor_at is None and not algorithm.looks_ahead else 2
        return per_batch * self._examples + self._own_examples + full


def _together(aggregation: Aggregation, rows: Sequence[int]) -> list[Sequence[int]]:
    """Group the rows of a reply to add: all at once, or one by one if the aggregation may reject a client."""
    if not rows:
        return []
    return [[row] for row in rows] if aggregation.is_one_by_one else [sorted(rows)]


def _rows(rows: Sequence[int], stacked: Tensor) -> Tensor:
    """Return some rows of a stack, given in ascending order; adjacent rows are a view."""
    if len(rows) == len(stacked):
        return stacked
    return stacked[rows[0] : rows[-1] + 1] if rows[-1] - rows[0] < len(rows) else stacked[rows]


def _blocks(vector: Tensor) -> Sequence[Tensor]:
    """Split a vector [P] into blocks whose intermediate results fit a CPU's cache; no split on other devices."""
    return vector.split(_BLOCK) if vector.device.type == "cpu" else [vector]


class Traffic:
    """The bytes sent in a round: the entries of the server state that clients read, and the messages used.

    ``senders`` are the clients that send their messages, or None if all that train do. If it is set, every client also
    sends the norm of its update, and receives its probability of sending.
    """

    def __init__(self, algorithm: Algorithm, x: Tensor) -> None:
        self._vector = x.nbytes
        self._points = set(algorithm.full_grad_at) - {"x"}
        self._messages = dict[int, int]()  # bytes by client
        self.server, self.cohort_grad = set[str](), set[str]()  # the entries and mean gradients that clients read
        self.gradients = set[str]()  # the mean gradients that the server reads
        self.clients, self.gradient_clients = set[int](), set[int]()  # those that train, and that send gradients
        self.senders: Collection[int] | None = None

    @property
    def involved(self) -> set[int]:
        """The clients that receive x, by stored index."""
        return self.clients | self.gradient_clients

    def update(self, reply: Reply, rows: Sequence[int]) -> None:
        """Add the messages of some rows of equal size; a tensor sent under two names counts once."""
        clients = tuple(map(reply.clients.__getitem__, rows))
        if reply.message_bytes is not None:  # compressed messages come one client at a time
            self._messages |= dict.fromkeys(clients, reply.message_bytes)
            return
        once: dict[int | str, int] = {}
        for name, value in reply.send.items():
            if name not in reply.implied:
                own = value[rows[0]]
                once[own.data_ptr() if own.numel() > 1 else name] = own.nbytes
        self._messages |= dict.fromkeys(clients, sum(once.values()))

    def merge(self, parts: Sequence["Traffic"]) -> None:
        """Combine the parts of all processes."""
        self._messages = {index: size for part in parts for index, size in part._messages.items()}
        self.server = {name for part in parts for name in part.server}
        self.cohort_grad = {name for part in parts for name in part.cohort_grad}

    def compute(
        self,
        state: State,
        buffers_up: int,
        buffers_down: int,
        completed: int,
        refused: int,
        everyone: int,
        measured: Collection[int],
    ) -> tuple[int, int]:
        """Return the bytes up and down.

        Args:
            state: The server state of the round.
            buffers_up: The bytes of buffers that a client changed, which each client sends.
            buffers_down: The bytes of buffers that differ from the initial ones, which each client receives.
            completed: The number of clients that replied.
            refused: The number of clients whose messages arrived but were not used.
            everyone: The number of clients that evaluate the population's loss.
            measured: The clients that evaluated their loss for the sampler, by stored index.
        """
        involved = self.involved
        once, then = self._vector, len(self.cohort_grad) * self._vector + buffers_down
        for name, value in state.items():
            if name in self._points:
                once += value.nbytes
            elif name in self.server:
                then += value.nbytes
        down = len(involved) * once + len(self.clients) * then
        down += max(everyone - len(involved), len(set(measured) - involved)) * self._vector
        gradients = len(self.gradient_clients) * len(self.gradients | self.cohort_grad) * self._vector
        if self.senders is None:
            messages = sum(self._messages.values())
            messages += messages // max(1, completed) * refused
        else:  # a client refused for its norm does not send
            messages = sum([self._messages[index] for index in self.senders]) + 8 * (completed + refused)
            down += 8 * (completed + refused)
        return messages + gradients + (completed + refused) * buffers_up + (everyone + len(measured)) * 8, down


class Drift:
    """The distance of the clients' changes d_i from their weighted mean, as a weighted root mean square.

    It sums squared differences from a reference, the first client's change. Squares of the changes would cancel for
    similar clients: in float32, a drift below a thousandth of the changes would be only rounding.

    Args:
        messages: The aggregation. Its sum of models, if any, is reused in place of a second sum.

    Attributes:
        weight: The sum of the weights of this process's clients; after :meth:`merge`, of all clients.
    """

    def __init__(self, messages: Aggregation) -> None:
        self._messages = messages
        self._reference: Tensor | None = None  # [P]; this process's mean after centering
        self._own: Tensor | None = None  # the weighted sum [P] of differences that the aggregation does not have
        self._memory: Tensor | None = None  # reused: allocating large differences costs more than the arithmetic
        self._norms: list[Tensor] = []  # norms of the differences
        self._weights: list[Sequence[float]] = []  # weights of their clients
        self._squares = self.weight = 0.0
        self._is_merged = False

    def update(self, deltas: Tensor, weights: Sequence[float], is_summed: bool) -> None:
        """Add several clients' changes [S, P]; ``is_summed`` if the aggregation sums models with these weights."""
        if self._reference is None:
            self._reference = deltas[0].clone()
        several = max(1, _BLOCK // len(self._reference))  # clients whose differences are computed at once
        for start in range(0, len(deltas), several):
            some = deltas[start : start + several]
            if self._memory is None or len(self._memory) < len(some):
                self._memory = torch.empty_like(some)
            differences = torch.sub(some, self._reference, out=self._memory[: len(some)])
            self._norms.append(torch.linalg.vector_norm(differences, dim=1))
            if not is_summed:
                own = differences.new_tensor(weights[start : start + several]) @ differences
                self._own = own if self._own is None else self._own.add_(own)
        self._weights.append(weights)
        self.weight += sum(weights)

    def _center(self, changes: Iterable[Tensor] | None, moves: bool) -> None:
        """Center the squared differences at this process's mean, given blocks of the aggregation's sum.

        With ``moves``, that mean becomes the reference, as :meth:`merge` needs.
        """
        numbers = iter(torch.cat(self._norms).tolist() if self._norms else [])
        for weights in self._weights:
            squares = 0.0
            for weight, norm in zip(weights, numbers, strict=False):
                squares += weight * norm**2
            self._squares += squares
        if self._reference is None or self.weight == 0:
            return
        references = _blocks(self._reference)
        nothing = [None] * len(references)
        owns: Iterable[Tensor | None] = nothing if self._own is None else _blocks(self._own)
        for r, change, own in zip(references, changes or nothing, owns, strict=True):
            if change is None:
                offset = torch.zeros(r.shape, **accumulation(r.device))
            else:
                offset = change.sub(r.to(change.device), alpha=self._messages.models_weight)
            if own is not None:
                offset += own.to(offset.device)
            self._squares -= float(offset @ offset) / self.weight
            if moves:
                r.copy_(r.to(offset.device).add_(offset, alpha=1 / self.weight))

    def merge(self, weights: Sequence[float], ranks: Collectives, x: Tensor) -> None:
        """Combine the parts of all processes, given each one's :attr:`weight`."""
        models, changes = self._messages.models, None
        if models is not None:
            blocks, models_weight = zip(_blocks(models), _blocks(x), strict=True), self._messages.models_weight
            changes = (y.sub(x_.to(y.device), alpha=models_weight) for y, x_ in blocks)
        self._center(changes, moves=True)
        total = sum(weights)
        mine = torch.zeros_like(x) if self._reference is None else self._reference
        mean = mine * (self.weight / total if total else 0.0)
        ranks.sum([mean])
        squares = self._squares + self.weight * float(torch.linalg.vector_norm(mine - mean)) ** 2
        sums = torch.tensor([squares], **accumulation(x.device))
        ranks.sum([sums])
        self._squares, self.weight, self._is_merged = float(sums), total, True

    def compute(self) -> float:
        """Return the drift after the aggregation has computed the mean change; nan if there are no clients."""
        if not self._is_merged:
            changes = self._messages.models
            self._center(None if changes is None else _blocks(changes), moves=False)
            self._is_merged = True
        return math.sqrt(max(0.0, self._squares / self.weight)) if self.weight else math.nan
