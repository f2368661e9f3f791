"""The local step: gradient, second gradient, correction. Written once, for one client."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.seeds import capture_random_state
from lightning_fed.core.types import State
from lightning_fed.engines.base import per_parameter
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.chunk_work import ChunkWork
from lightning_fed.engines.vectorized.clients import Clients
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.optim import looks_ahead, overrides

__all__ = ["Given", "LocalStep", "Taken"]

Gradient: TypeAlias = Callable[
    [Sequence[Tensor], Sequence[Tensor], Any, int], tuple[Sequence[Tensor | None], Tensor, dict[str, Tensor]]
]
"""From a point, the tensors of a batch, what puts it together and its index to gradients, loss and logged values."""


class Given(NamedTuple):
    """What a local step of one client starts from; of several clients, with a dimension more.

    Attributes:
        y: Its parameters, one tensor each.
        leaves: The tensors of its batch.
        parts: The parts of the gradient at the anchor on this batch, if they are kept.
        own: What corrections read that is its own.
        local: Its states of this round.
        point: The parameters at the anchor, the same for all clients; none if the method has no anchor.
    """

    y: Sequence[Tensor]
    leaves: Sequence[Tensor]
    parts: Sequence[Tensor]
    own: Sequence[Tensor]
    local: State
    point: Sequence[Tensor]


class Taken(NamedTuple):
    """What a local step comes to, before parameters move.

    Attributes:
        directions: One tensor per parameter.
        local: The states of this round after the step, once per parameter; none if they stay as they are.
        loss: The loss.
        values: What was logged, by name.
    """

    directions: list[Tensor]
    local: list[State]
    loss: Tensor
    values: dict[str, Tensor]


class LocalStep:
    """The local step of the clients of a chunk.

    Args:
        module: The module's step.
        work: The clients' work.

    Attributes:
        shared: What corrections read that is the same for all clients.
        own: What they read that is each client's own, stacked.
        local: The clients' states of this round, stacked.
    """

    def __init__(self, module: ModuleStep, work: ChunkWork) -> None:
        self.module, self.work, self.algorithm = module, work, work.algorithm
        self.advances, self.looks_ahead = overrides(self.algorithm, "advance"), looks_ahead(self.algorithm)
        self._reads = self.advances or overrides(self.algorithm, "correct")
        self.shared = work.step_inputs.shared if self._reads else []
        self.own = work.step_inputs.own if self._reads else []
        self.local = work.local if self._reads else {}

    def __call__(
        self,
        gradient: Gradient,
        given: Given,
        spec: Any,
        batch_idx: int,
        shared: Sequence[Tensor],
        assemble: Callable[..., list[Tensor]] | None = None,
        draw_again: Callable[[], None] | None = None,
    ) -> Taken:
        """Take a step of one client, as a function of tensors.

        Args:
            gradient: Takes gradients of the module's loss.
            given: What the step starts from.
            spec: What puts the batch together.
            batch_idx: Its index in the local epoch.
            shared: What corrections read that is the same for all clients.
            assemble: Puts the parts of a gradient at the anchor together, given the batch, if they are kept.
            draw_again: Lets random layers draw what they drew before.
        """
        decay, clip = self.work.decay, self.work.clip
        clips = _keep if clip is None else clip
        own_clip, corrected_clip = (_keep, clips) if clip is not None and clip.corrected else (clips, _keep)
        found, loss, values = gradient(given.y, given.leaves, spec, batch_idx)
        g = _with_decay(own_clip(_whole(found, given.y)), given.y, decay)
        if not self._reads:
            return Taken(corrected_clip(self._moving(g)), [], loss, values)
        whole = self.work.step_inputs.whole(shared, given.own, given.local)
        steps, point = per_parameter(whole, self.work.shared_layout), given.point
        if self.looks_ahead:
            layout, n = self.work.shared_layout, len(steps)
            at = self.algorithm.second_gradient_at(layout.joined(g[:n]), layout.joined(given.y[:n]), whole)
            point = layout.views(at)
        if point:
            point = [*point, *given.y[len(point) :]]  # personal parameters come last
            if draw_again is not None:
                draw_again()
            if assemble is not None:
                found = assemble(*given.leaves, *given.parts)
            else:
                found, _, _ = gradient(point, given.leaves, spec, batch_idx)
            anchor_grads = _with_decay(_whole(found, point), point, decay)
            for step, anchor_grad in zip(steps, anchor_grads, strict=False):
                step.anchor_grad = anchor_grad
        each = list(zip(g, given.y, steps, strict=False))
        v = [self.algorithm.correct(*one) for one in each]
        local = [self.algorithm.advance(*one) for one in each] if self.advances else []
        return Taken(corrected_clip(self._moving([*v, *g[len(v) :]])), local, loss, values)

    def _moving(self, directions: list[Tensor]) -> list[Tensor]:
        """Return directions, zero for parameters that are to stay where they are."""
        trains, shared = self.algorithm.trains, self.module.flat.num_shared
        if trains == "all":
            return directions
        stays = slice(0, shared) if trains == "personal" else slice(shared, None)
        directions[stays] = map(torch.zeros_like, directions[stays])
        return directions

    def untraced(self, clients: Clients, group: BatchGroup) -> Taken:
        """Take a step of some clients on their batches, as PyTorch runs it.

        Args:
            clients: The clients.
            group: Their batches.
        """
        module, work = self.module, self.work
        gradient: Gradient = module.own_gradient if clients.is_one else module.gradient
        point, draw_again = self.point(self.shared), None
        point_dim = None
        if (point or self.looks_ahead) and module.is_random:
            draw_again = capture_random_state(work.y.device)
            if point and not clients.is_one:  # as many draws, in the same order, as at the clients' own parameters
                point, point_dim = [v.expand(clients.count, *v.shape) for v in point], 0
        local = dict(zip(self.local, clients.of(list(self.local.values())), strict=True))
        given = Given(clients.views, group.leaves, (), clients.of(self.own), local, point)

        def take(given: Given) -> Taken:
            return self(gradient, given, group.spec, group.batch_idx, self.shared, None, draw_again)

        with torch.no_grad(), module.drawing_nothing():
            taken: Taken = clients.each(take, (Given(0, 0, 0, 0, 0, point_dim),))(given)  # type: ignore[arg-type]
        return taken

    def point(self, shared: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters at the anchor, out of what corrections read; nothing if the method has none."""
        name = self.algorithm.anchor_at
        return [] if name is None or not self._reads else self.work.step_inputs.point(shared, name)


def _keep(g: list[Tensor]) -> list[Tensor]:
    return g


def _whole(grads: Sequence[Tensor | None], at: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, zero for parameters that the loss does not depend on."""
    return [torch.zeros_like(v) if g is None else g for g, v in zip(grads, at, strict=True)]


def _with_decay(grads: Sequence[Tensor], at: Sequence[Tensor], decay: Sequence[float]) -> list[Tensor]:
    """Return gradients with that of coupled weight decay, which is part of the loss."""
    return [g.add(v, alpha=d) if d else g for g, v, d in zip(grads, at, decay, strict=True)]
