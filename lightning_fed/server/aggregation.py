"""Weighted means of client messages, summed in float64."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State, Vector, Weighting

__all__ = ["Aggregation", "Participant", "accumulation_dtype", "weights_of"]

_NAMES = ("examples", "uniform", "steps")


@dataclass(frozen=True, slots=True)
class Participant:
    """One member of a cohort.

    Attributes:
        client_id: The id.
        index: The stored index.
        size: The number of training examples, n_i.
        count: How often it was drawn: it is trained once and counts so many times in a mean.
        steps: The local steps planned for it.
    """

    client_id: ClientId
    index: int
    size: int
    count: int = 1
    steps: int = 0


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over clients: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def weights_of(weighting: Weighting, cohort: Sequence[Participant]) -> list[float]:
    """Return the normalised weights of a cohort.

    Args:
        weighting: "examples" (n_i), "uniform", "steps" (K_i), or a function of (client_id, size, steps).
        cohort: The participants.

    Raises:
        FederatedError: If the name is unknown, or a weight is negative or not finite, or all are zero.
    """
    if callable(weighting):
        raw = [float(weighting(p.client_id, p.size, p.steps)) * p.count for p in cohort]
    elif weighting in _NAMES:
        raw = [float({"examples": p.size, "uniform": 1, "steps": p.steps}[weighting] * p.count) for p in cohort]
    else:
        raise FederatedError(
            f"weighting must be one of {_NAMES} or a function of (client_id, size, steps), found {weighting!r}."
        )
    total = sum(raw)
    if any(not math.isfinite(w) or w < 0 for w in raw) or total <= 0:
        found = {p.client_id: w for p, w in zip(cohort, raw, strict=True)}
        raise FederatedError(f"weighting must give finite weights >= 0 that are not all zero, found {found}.")
    return [w / total for w in raw]


class Aggregation:
    """Sums of the messages of a cohort, each weighted as the method declared.

    Args:
        reduces: How each message is averaged; see ``Algorithm.reduces``.
        weighting: What "weighting" stands for in this run.
        cohort: The participants with the steps planned for them. Those with ``steps == 0`` in a method with local
            work have weight zero.
        population: The number of clients, N.
        local_work: Whether the method has local work.
    """

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
        self._weighting = weighting
        self._members = {p.index: p for p in cohort}
        active = [p for p in cohort if p.steps > 0 or not local_work]
        self._weights = {
            rule: dict(zip((p.index for p in active), weights_of(rule_of, active), strict=True)) if active else {}
            for rule, rule_of in {"weighting": weighting, "examples": "examples", "uniform": "uniform"}.items()
            if rule in {*reduces.values(), "examples"}
        }
        self._given = dict.fromkeys(self._weights, 0.0)
        self._sums: State = {}
        self._models: Tensor | None = None
        self._has_other_delta = False

    def weight(self, index: int, rule: str) -> float:
        """Return a client's normalised weight under a rule; zero for those left out."""
        if rule == "population":
            return 1.0 / self.population
        return self._weights[rule].get(index, 0.0)

    def add(self, index: int, steps: int, send: State, delta: Vector, y: Vector) -> None:
        """Add one client's messages.

        Args:
            index: The client's stored index.
            steps: The local steps it took; a weighting that looks at steps goes by these.
            send: Its messages.
            delta: The engine's own ``y - x``; where ``send["delta"]`` is this very tensor, ``y`` is summed instead.
            y: The client's parameters [P].

        Raises:
            FederatedError: If the messages are not those that the method declared.
        """
        if send.keys() != self.reduces.keys():
            raise FederatedError(
                f"finish() sent the messages {sorted(send)}, but `reduces` declares {sorted(self.reduces)}: declare how"
                " each message is averaged, and send each of them."
            )
        self._reweigh(index, steps)
        for rule in self._given:
            self._given[rule] += self._weights[rule].get(index, 0.0)
        for name, value in send.items():
            w = self.weight(index, self.reduces[name])
            if name == "delta" and value is delta and self.reduces[name] != "population":
                self._models = _add(self._models, y, w)
            else:
                self._has_other_delta |= name == "delta"
                self._sums[name] = _add(self._sums.get(name), value, w)

    def _reweigh(self, index: int, steps: int) -> None:
        """Go by the steps that a client took where they are not those that were planned."""
        planned, weights = self._members[index], self._weights.get("weighting", {})
        if planned.steps == steps or index not in weights or self._weighting in ("examples", "uniform"):
            return
        if self._weighting == "steps":
            weights[index] *= steps / planned.steps
        elif callable(self._weighting):
            before = float(self._weighting(planned.client_id, planned.size, planned.steps))
            after = float(self._weighting(planned.client_id, planned.size, steps))
            weights[index] *= after / before if before else 0.0

    def mean(self, x: Vector) -> tuple[State, Vector | None]:
        """Return the averages, and the mean of the client models itself where "delta" is their change.

        Args:
            x: The server parameters [P] at the start of the round.
        """
        # clients that took fewer steps than planned, or none at all, may have left the weights short of one
        scale = {
            rule: 1.0 if abs(given - 1.0) < 1e-9 or given == 0 else 1.0 / given for rule, given in self._given.items()
        }
        means = {name: value * scale.get(self.reduces[name], 1.0) for name, value in self._sums.items()}
        models = None
        if self._models is not None:
            models = self._models * scale[self.reduces["delta"]]
            delta = models - x
            means["delta"] = means["delta"] + delta if self._has_other_delta else delta
        cast = {name: value.to(x.dtype) for name, value in means.items()}
        return cast, None if models is None or self._has_other_delta else models.to(x.dtype)


def _add(total: Tensor | None, value: Tensor, weight: float) -> Tensor:
    if total is None:
        return value.detach().to(accumulation_dtype(value.device)) * weight
    return total.add_(value.detach(), alpha=weight)
