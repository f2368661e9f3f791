"""Weighted means of client messages, summed in float64, and the base class of aggregators that replace them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import ArgumentsRepr
from lightning_fed.core.devices import accumulation, narrowed
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State, Vector, Weighting
from lightning_fed.server.participation import Participant, no_weight, raw_weight
from lightning_fed.server.sampling import Sampler

_ROWS = 128  # clients whose messages are converted in one block
_BLOCK = 2**16  # numbers converted in one block on a CPU
_BLOCK_ON_DEVICE = 2**24  # numbers converted in one block on a device: 128 MiB of float64
_ROUNDING = 1e-9  # tolerance for weights that should sum to one


class Collectives(Protocol):
    """Communication between the processes that share the clients of a round."""

    rank: int  # this process, from 0
    size: int

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype with their sums over all processes."""
        ...

    def columns(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's share of the columns of all rows, in the order of ranks.

        ``rows`` [n, P] belong to this process. ``counts`` has the number of rows of each process.
        """
        ...


class Aggregation:
    """Sums of the messages of a cohort, each weighted as the method declared in ``Algorithm.reduces``.

    ``weighting`` is the rule for "weighting" in this run. ``cohort`` has the participants with their planned steps.
    ``population`` is the number of clients N. With local work, participants with ``steps == 0`` have weight zero.
    """

    needs_clients: bool = True
    """Whether a round without clients changes nothing."""

    is_one_by_one: bool = False
    """Whether clients are added without their parameters and one at a time, since one may be rejected."""

    def __init__(
        self,
        reduces: Mapping[str, str],
        weighting: Weighting,
        cohort: Sequence[Participant],
        population: int,
        local_work: bool = True,
    ) -> None:
        self.reduces = reduces
        self.population = population
        self._members = {p.index: p for p in cohort if p.steps > 0 or not local_work}
        self._steps = {index: p.steps for index, p in self._members.items()}
        rules = {"weighting": weighting, "examples": "examples", "uniform": "uniform"}
        self._rules: dict[str, Weighting] = {k: rules[k] for k in rules if k in {*reduces.values(), "examples"}}
        self._raw = {
            rule: {index: raw_weight(weighs, p, p.steps) for index, p in self._members.items()}
            for rule, weighs in self._rules.items()
        }
        # whether the sum estimates the mean over all clients, with weights that need not sum to one
        self.is_estimate = bool(cohort) and cohort[0].share is not None  # all members have a share, or none
        self._totals = {rule: 1.0 if self.is_estimate else sum(raw.values()) for rule, raw in self._raw.items()}
        for total in self._totals.values():
            if self._members and total <= 0:
                raise no_weight([p.client_id for p in self._members.values()])
        self._weight_sums = dict.fromkeys(self._rules, 0.0)
        self._added: list[int] = []
        self.senders: Collection[int] | None = None  # stored indices, if not all trained clients send; known at the end
        self._sums: State = {}
        self.models: Tensor | None = None  # the weighted sum [P] of models y; after `compute`, of their changes y - x
        self.models_weight = 0.0

    @property
    def members(self) -> Collection[Participant]:
        """The participants whose messages are expected."""
        return self._members.values()

    def weights(self, indices: Iterable[int], rule: str) -> list[float]:
        """Return clients' weights under a rule, zero for clients left out; they sum to one over the planned steps."""
        if rule == "population":
            return [1.0 / self.population for _ in indices]
        raw, total = self._raw[rule], self._totals[rule]
        return [raw[index] / total if index in raw else 0.0 for index in indices]

    def _note_steps(self, steps: Mapping[int, int]) -> None:
        """Update weights that depend on steps if clients did not take the planned number of steps."""
        for index, count in steps.items():
            if self._steps.get(index) == count:
                continue
            self._steps[index] = count
            if index in self._members:
                for rule, weighs in self._rules.items():
                    self._raw[rule][index] = raw_weight(weighs, self._members[index], count)

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Add the messages of some clients [S, ...]; the grouping affects the sums only by float64 rounding.

        ``steps`` has each client's local steps by stored index, in the order of the rows. ``models`` has their
        parameters y [S, P] if the message "delta" equals ``y - x``, and is summed in its place.
        """
        self._check_names(send)
        self._note_steps(steps)
        self._added += steps
        weights = {rule: self.weights(steps, rule) for rule in {*self._weight_sums, *self.reduces.values()}}
        for rule in self._weight_sums:
            self._weight_sums[rule] += sum(weights[rule])
        for name, value in send.items():
            w = weights[self.reduces[name]]
            if name == "delta" and models is not None and self.reduces[name] != "population":
                self.models = _add(self.models, models, w)
                self.models_weight += sum(w)
            else:
                self._sums[name] = _add(self._sums.get(name), value, w)

    def _check_names(self, send: State) -> None:
        if send.keys() != self.reduces.keys():
            raise FederatedError(
                f"finish() sent the messages {sorted(send)}, but `reduces` declares {sorted(self.reduces)}: declare how"
                " each message is averaged, and send each of them."
            )

    def partial(self) -> dict[str, Any]:
        """Return the numbers and shapes that other processes need before the sums are exchanged."""
        return {
            "steps": {index: self._steps[index] for index in self._added},
            "given": dict(self._weight_sums),
            "models_weight": self.models_weight,
            "shapes": {name: tuple(total.shape) for name, total in self._sums.items()},
            "has_models": self.models is not None,
        }

    def merge(self, partials: Sequence[Mapping[str, Any]], ranks: Collectives, x: Vector) -> None:
        """Combine the sums of all processes, given their :meth:`partial` and the server parameters [P]."""
        for partial in partials:
            self._note_steps(partial["steps"])
        self._weight_sums = {rule: sum(partial["given"][rule] for partial in partials) for rule in self._weight_sums}
        self.models_weight = sum(partial["models_weight"] for partial in partials)
        options = accumulation(x.device)
        for name, shape in sorted({item for partial in partials for item in partial["shapes"].items()}):
            self._sums.setdefault(name, torch.zeros(shape, **options))
        if any(partial["has_models"] for partial in partials) and self.models is None:
            self.models = torch.zeros(x.shape, **options)
        models = [] if self.models is None else [self.models]
        ranks.sum([self._sums[name] for name in sorted(self._sums)] + models)

    def compute(self, x: Vector) -> tuple[State, Vector | None]:
        """Return the averages, and the mean client model if "delta" is the models' change; call it once a round.

        ``x`` is the server parameters [P] at the start of the round.
        """
        if self._members and self._weight_sums.get("weighting", 1.0) <= 0:
            raise no_weight([member.client_id for member in self._members.values()])
        # the weights sum to less than one if clients took fewer steps than planned
        scale = {
            rule: 1.0 if self.is_estimate or abs(given - 1.0) < _ROUNDING or given == 0 else 1.0 / given
            for rule, given in self._weight_sums.items()
        }
        factors = {name: scale.get(self.reduces[name], 1.0) for name in self._sums}
        means = {name: value if factors[name] == 1.0 else value * factors[name] for name, value in self._sums.items()}
        mean_model = None
        if self.models is not None:  # in place: for large models, allocation costs more than the arithmetic
            is_whole, factor = abs(self.models_weight - 1.0) < _ROUNDING, scale[self.reduces["delta"]]
            if is_whole:
                mean_model = self.models.to(x.dtype, copy=True).to(x.device)
            moved = _add(self.models, x[None], [-1.0 if is_whole else -self.models_weight])
            if factor != 1.0:
                moved = moved * factor
            if "delta" in means:  # some clients' "delta" is not their model's change
                means["delta"], mean_model = means["delta"] + moved, None
            else:
                means["delta"] = moved
                mean_model = narrowed(moved + x.to(moved.device), x) if mean_model is None else mean_model
        return {name: narrowed(value, x) for name, value in means.items()}, mean_model


def _add(total: Tensor | None, rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Add rows [S, ...] times their weights to a sum."""
    found = torch.zeros(rows.shape[1:], **accumulation(rows.device)) if total is None else total
    rows = rows.detach().to(found.device)
    if len(rows) == 1:
        value, weight = rows[0], weights[0]
        if found.device.type != "cpu" or found.dtype == value.dtype or found.numel() <= _BLOCK:
            return found.add_(value, alpha=weight)
        # in blocks: add_ would first convert the whole tensor, which allocates twice the message's size
        for block, part in zip(found.view(-1).split(_BLOCK), value.reshape(-1).split(_BLOCK), strict=True):
            block.add_(part, alpha=weight)
        return found
    w = torch.tensor(weights, dtype=found.dtype, device=found.device)
    block_size = _BLOCK if found.device.type == "cpu" else _BLOCK_ON_DEVICE
    for some, of_some in zip(rows.split(_ROWS), w.split(_ROWS), strict=True):
        flat = some.reshape(len(some), -1)
        columns = max(1, block_size // len(some))
        for block, part in zip(found.view(-1).split(columns), flat.split(columns, dim=1), strict=True):
            block.addmv_(part.to(w.dtype).t(), of_some)
    return found


FULL_GRAD = "full_grad_"
"""The prefix of message names for full-batch gradients; the name of their point follows."""


def averaged_points(algorithm: Algorithm, round: int | None = None) -> tuple[str, ...]:
    """Return the points of the full-batch gradients that clients send in ``round``, or in any round if it is None."""
    readers = algorithm.full_grad_for if round is None else algorithm.full_grad_readers(round)
    return algorithm.full_grad_at if readers in ("cohort", "both") else ()


class Aggregator(ArgumentsRepr, ABC):
    """A rule that combines the messages of a cohort into one; see ``robust`` and ``privacy``.

    It replaces the mean of every message that :attr:`Algorithm.reduces` declares, and of full-batch gradients.
    """

    weighted: bool = True
    """Whether clients may have unequal weights."""

    argument: str = "aggregator"
    """The trainer's argument for it."""

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> "Aggregator":
        """Return a copy of the aggregator for a run with these settings.

        Args:
            algorithm: The method.
            weighting: The ``weighting`` that the user set, or None.
            sampler: The client sampler.

        Raises:
            FederatedError: If these settings cannot be combined.
        """
        name = type(self).__name__
        if algorithm.population_loss:
            raise FederatedError(
                f"{self.argument}={self!r} cannot be combined with {algorithm!r}, which uses the mean of the losses"
                f" that all clients report: {name} does not replace that mean. Use the method without it, such as"
                " FedProx(mu=0.1)."
            )
        if not self.weighted and weighting not in (None, "uniform"):
            raise FederatedError(
                f"weighting={weighting!r} cannot be combined with {self.argument}={self!r}, which gives all clients"
                " the same weight. Leave weighting unset, or set weighting='uniform'."
            )
        if not self.weighted and "examples" in algorithm.reduces.values():
            raise FederatedError(
                f"{self.argument}={self!r} cannot be combined with {algorithm!r}, which averages messages by examples"
                f" ({dict(algorithm.reduces)}): {name} gives all clients the same weight."
            )
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints save; none by default."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], x: Vector) -> None:
        """Restore the state of a checkpoint.

        Args:
            state_dict: The result of :meth:`state_dict`; empty for a new run.
            x: The server parameters [P].
        """
        assert not state_dict

    @abstractmethod
    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that aggregates one cohort's messages; it takes the arguments of :class:`Aggregation`."""
