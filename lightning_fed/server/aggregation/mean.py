"""Weighted means of client messages, summed in float64."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fed.core.devices import accumulation_dtype
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State, Vector, Weighting
from lightning_fed.server.participation import Participant, no_weight, raw_weight

__all__ = ["Aggregation", "Exchange"]

_ROWS = 128  # clients whose messages are converted at once
_BLOCK = 2**16  # numbers that are converted at once on a CPU
_ROUNDING = 1e-9  # by which weights that sum to one may miss it


class Exchange(Protocol):
    """The processes that share the clients of a round."""

    rank: int  # this process, from 0
    size: int

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all processes."""
        ...

    def columns(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's share of the columns of everybody's rows, in the order of processes.

        Args:
            rows: This process's rows [n, P].
            counts: How many rows each process has.
        """
        ...


class Aggregation:
    """Sums of the messages of a cohort, each weighted as the method declared.

    Args:
        reduces: How each message is averaged; see ``Algorithm.reduces``.
        weighting: What "weighting" stands for in this run.
        cohort: The participants with the steps planned for them. Those with ``steps == 0`` in a method with local
            work have weight zero.
        population: The number of clients, N.
        local_work: Whether the method has local work.

    Attributes:
        models: The weighted sum [P] of the models y that have been added, None if there are none; after :meth:`compute`
            that of their changes y - x.
        models_weight: The sum of their weights.
    """

    needs_clients: bool = True
    """Whether a round in which nobody took part changes nothing."""

    is_one_by_one: bool = False
    """Whether clients are added one at a time, as it may refuse a client, and without their parameters."""

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
        self._totals = {rule: sum(raw.values()) for rule, raw in self._raw.items()}
        for total in self._totals.values():
            if self._members and total <= 0:
                raise no_weight([p.client_id for p in self._members.values()])
        self._given = dict.fromkeys(self._rules, 0.0)
        self._added: list[int] = []
        self.models_weight = 0.0
        self._sums: State = {}
        self.models: Tensor | None = None

    def weights(self, indices: Iterable[int], rule: str) -> list[float]:
        """Return clients' weights under a rule; zero for those left out. They sum to one by the steps planned."""
        if rule == "population":
            return [1.0 / self.population for _ in indices]
        raw, total = self._raw[rule], self._totals[rule]
        return [raw[index] / total if index in raw else 0.0 for index in indices]

    def _note_steps(self, steps: Mapping[int, int]) -> None:
        """Let weightings that look at the steps that clients take go by these, where they are others than planned."""
        for index, count in steps.items():
            if self._steps.get(index) == count:
                continue
            self._steps[index] = count
            if index in self._members:
                for rule, weighs in self._rules.items():
                    self._raw[rule][index] = raw_weight(weighs, self._members[index], count)

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Add the messages of clients; how many are added at once changes the sums by rounding in float64 only.

        Args:
            steps: The local steps that each client took, by its stored index, in the order of the rows. A weighting
                that looks at steps uses these.
            send: Their messages, stacked [S, ...].
            models: Their parameters y [S, P] where the message "delta" is ``y - x`` itself; they are summed instead.
        """
        self._check_names(send)
        self._note_steps(steps)
        self._added += steps
        weights = {rule: self.weights(steps, rule) for rule in {*self._given, *self.reduces.values()}}
        for rule in self._given:
            self._given[rule] += sum(weights[rule])
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
        """Return what other processes need before the sums are exchanged: numbers and shapes."""
        return {
            "steps": {index: self._steps[index] for index in self._added},
            "given": dict(self._given),
            "models_weight": self.models_weight,
            "shapes": {name: tuple(total.shape) for name, total in self._sums.items()},
            "has_models": self.models is not None,
        }

    def merge(self, partials: Sequence[Mapping[str, Any]], ranks: Exchange, x: Vector) -> None:
        """Combine the sums of all processes, given each one's :meth:`partial` and the server parameters [P]."""
        for partial in partials:
            self._note_steps(partial["steps"])
        self._given = {rule: sum(partial["given"][rule] for partial in partials) for rule in self._given}
        self.models_weight = sum(partial["models_weight"] for partial in partials)
        options: dict[str, Any] = {"dtype": accumulation_dtype(x.device), "device": x.device}
        for name, shape in sorted({item for partial in partials for item in partial["shapes"].items()}):
            self._sums.setdefault(name, torch.zeros(shape, **options))
        if any(partial["has_models"] for partial in partials) and self.models is None:
            self.models = torch.zeros(x.shape, **options)
        models = [] if self.models is None else [self.models]
        ranks.sum([self._sums[name] for name in sorted(self._sums)] + models)

    def compute(self, x: Vector) -> tuple[State, Vector | None]:
        """Return the averages, and the mean of the client models itself where "delta" is their change; once a round.

        Args:
            x: The server parameters [P] at the start of the round.
        """
        if self._members and self._given.get("weighting", 1.0) <= 0:
            raise no_weight([member.client_id for member in self._members.values()])
        # clients that took fewer steps than planned, or none at all, may have left the weights short of one
        scale = {
            rule: 1.0 if abs(given - 1.0) < _ROUNDING or given == 0 else 1.0 / given
            for rule, given in self._given.items()
        }
        factors = {name: scale.get(self.reduces[name], 1.0) for name in self._sums}
        means = {name: value if factors[name] == 1.0 else value * factors[name] for name, value in self._sums.items()}
        mean_model = None
        if self.models is not None:  # in place: for large models new memory costs more than the arithmetic
            is_whole, factor = abs(self.models_weight - 1.0) < _ROUNDING, scale[self.reduces["delta"]]
            if is_whole:
                mean_model = self.models.to(x.dtype, copy=True)
            moved = _add(self.models, x[None], [-1.0 if is_whole else -self.models_weight])
            if factor != 1.0:
                moved = moved * factor
            if "delta" in means:  # of clients that sent another change than that of their model
                means["delta"], mean_model = means["delta"] + moved, None
            else:
                means["delta"] = moved
                mean_model = (moved + x).to(x.dtype) if mean_model is None else mean_model
        return {name: value.to(x.dtype) for name, value in means.items()}, mean_model


def _add(total: Tensor | None, rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Add rows [S, ...] times their weights to a sum."""
    dtype = accumulation_dtype(rows.device)
    found = torch.zeros(rows.shape[1:], dtype=dtype, device=rows.device) if total is None else total
    rows = rows.detach()
    if len(rows) == 1:
        value, weight = rows[0], weights[0]
        if found.device.type != "cpu" or found.dtype == value.dtype or found.numel() <= _BLOCK:
            return found.add_(value, alpha=weight)
        # numbers of another type are converted first, all of them, which takes new memory of twice the message's size
        for block, part in zip(found.view(-1).split(_BLOCK), value.reshape(-1).split(_BLOCK), strict=True):
            block.add_(part, alpha=weight)
        return found
    w = torch.tensor(weights, dtype=dtype, device=rows.device)
    for some, of_some in zip(rows.split(_ROWS), w.split(_ROWS), strict=True):
        flat = some.reshape(len(some), -1)
        columns = max(1, _BLOCK // len(some) if flat.device.type == "cpu" else flat.shape[1])
        for block, part in zip(found.view(-1).split(columns), flat.split(columns, dim=1), strict=True):
            block.addmv_(part.to(w.dtype).t(), of_some)
    return found
